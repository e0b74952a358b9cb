"""The figures shown while a training runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.command.meter import WINDOW, Meter, Smoothed
from myelin.trainer import StepResult


def result(
    index: int = 0,
    *,
    loss: float = 1.0,
    tokens: int = 100,
    elapsed_s: float = 1.0,
    busy: float = 0.5,
) -> StepResult:
    shares = {0: busy, 1: busy / 2}
    return StepResult(index, loss, tokens, elapsed_s, 1 - 0.75 * busy, shares)


def test_nothing_is_known_before_the_first_step() -> None:
    status = Meter(steps=10, limit_s=None).status(0.5)
    assert (status.steps, status.loss, status.validation) == (0, None, None)
    assert (status.tokens_per_s, status.busy, status.left_s, status.share) == (0.0, {}, None, 0.0)
    assert status.elapsed_s == 0.5


def test_rates_are_tokens_by_the_time_from_step_to_step() -> None:
    meter = Meter(steps=None, limit_s=None)
    meter.step(result(tokens=100), 2.0)
    meter.step(result(tokens=300), 4.0)
    assert meter.status(4.0).tokens_per_s == 100.0


def test_time_of_validation_slows_no_rate() -> None:
    meter = Meter(steps=None, limit_s=None)
    meter.step(result(tokens=100), 1.0)
    meter.validated(2.5, 9.0)
    meter.step(result(tokens=100), 10.0)
    status = meter.status(10.0)
    assert status.tokens_per_s == 100.0
    assert (status.validation, status.validated) == (2.5, 1)


def test_rates_forget_what_is_long_past() -> None:
    meter = Meter(steps=None, limit_s=None)
    meter.step(result(tokens=1_000_000), 1.0)
    for index in range(WINDOW):
        meter.step(result(tokens=50), 2.0 + index)
    assert meter.status(100.0).tokens_per_s == 50.0


def test_busy_shares_weigh_each_step_by_its_time() -> None:
    meter = Meter(steps=None, limit_s=None)
    meter.step(result(elapsed_s=3.0, busy=1.0), 3.0)
    meter.step(result(elapsed_s=1.0, busy=0.0), 4.0)
    assert meter.status(4.0).busy == {0: 0.75, 1: 0.375}


def test_the_time_left_is_that_of_the_limit_reached_first() -> None:
    meter = Meter(steps=10, limit_s=60.0)
    assert meter.status(0.0).left_s == 60.0
    meter.step(result(), 2.0)
    status = meter.status(2.0)
    assert (status.left_s, status.share) == (18.0, 0.1)
    for index in range(2):
        meter.step(result(), 22.0 + 20 * index)
    status = meter.status(54.0)
    assert status.left_s == 6.0
    assert status.share == 0.9


def test_the_time_left_is_never_negative() -> None:
    status = Meter(steps=None, limit_s=10.0).status(11.0)
    assert (status.left_s, status.share) == (0.0, 1.0)


def test_without_a_limit_no_end_is_foretold() -> None:
    meter = Meter(steps=None, limit_s=None)
    meter.step(result(), 1.0)
    assert meter.status(1.0).left_s is None


def test_a_smoothed_loss_begins_with_the_first_one() -> None:
    meter = Meter(steps=None, limit_s=None)
    meter.step(result(loss=5.5), 1.0)
    assert meter.status(1.0).loss == pytest.approx(5.5)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=50))
def test_a_smoothed_value_stays_among_the_values(values: list[float]) -> None:
    smoothed = Smoothed()
    for count, value in enumerate(values, start=1):
        mean = smoothed.add(value)
        assert min(values[:count]) - 1e-9 <= mean <= max(values[:count]) + 1e-9


@given(st.floats(-100, 100), st.integers(1, 60))
def test_a_constant_smoothed_is_that_constant(value: float, count: int) -> None:
    smoothed = Smoothed()
    assert [smoothed.add(value) for _ in range(count)] == pytest.approx([value] * count)
