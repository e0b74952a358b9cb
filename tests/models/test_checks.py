from typing import Any

import pytest
import torch

from myelin.errors import PlanError
from myelin.models.checks import (
    check_flag,
    check_number,
    check_seed,
    check_whole,
    shortened,
    shown,
)


@pytest.mark.parametrize("value", [2, 3, 9])
def test_a_whole_number_within_its_bounds_passes(value: int) -> None:
    check_whole("n", value, least=2, below=10)


@pytest.mark.parametrize("value", [1, 10, 2.0, True, "3", None, torch.tensor(3), [3]])
def test_what_is_no_whole_number_or_out_of_bounds_is_refused_with_all_that_is_needed(
    value: Any,
) -> None:
    with pytest.raises(PlanError) as caught:
        check_whole("n", value, least=2, below=10, instead=", or None", error=PlanError)
    expected = f"n={value!r}: use a whole number of at least 2 and below 10, or None"
    assert str(caught.value) == expected


def test_a_large_bound_is_written_as_a_power() -> None:
    with pytest.raises(ValueError, match=r"at least 0 and below 2\*\*63$"):
        check_whole("n", -1, least=0, below=2**63)


@pytest.mark.parametrize("value", [0, -5, 2**63 - 1, -(2**63)])
def test_a_seed_may_be_any_number_that_can_be_sent(value: int) -> None:
    check_seed(value)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 1.0, "1", None, False])
def test_what_is_no_seed_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"seed=.*use a whole number, from 0 to below 2\*\*63"):
        check_seed(value)


@pytest.mark.parametrize("value", [0, 0.5, 1])
def test_a_number_within_its_bounds_passes(value: float) -> None:
    check_number("x", value, least=0, above=-1, below=2)


@pytest.mark.parametrize("value", [-0.1, 2, float("nan"), float("inf"), True, "1", None])
def test_what_is_no_number_or_out_of_bounds_is_refused(value: Any) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is compared
        check_number("x", value, least=0, below=2)
    assert str(caught.value) == f"x={value!r}: use a number of at least 0 and below 2"


def test_without_bounds_any_finite_number_passes() -> None:
    check_number("x", -1e300)
    with pytest.raises(ValueError, match=r"x=inf: use a number$"):
        check_number("x", float("inf"))


@pytest.mark.parametrize("value", [0, 1, "no", None])
def test_what_is_neither_true_nor_false_is_refused(value: Any) -> None:
    check_flag("tied", True)
    check_flag("tied", False)
    with pytest.raises(ValueError, match=f"tied={value!r}: use True or False"):
        check_flag("tied", value)


def test_a_long_value_is_shown_in_one_short_line() -> None:
    assert shown("short") == "'short'"
    text = shown(torch.zeros(50, 50))
    assert len(text) == 80
    assert "\n" not in text


def test_a_long_path_keeps_both_ends() -> None:
    assert shortened("a b\nc") == "a b c"
    text = shortened("/start" + "x" * 200 + "/end")
    assert len(text) <= 80
    assert text.startswith("/start")
    assert text.endswith("/end")
