import asyncio
from typing import Any

import pytest

from myelin.lane import Lane, Pause
from myelin.run import InstalledProgram, Run
from myelin.runtime.graph import Phase, split
from myelin.runtime.step import StepShape, build_step


def made(phase: Phase = Phase.TRAIN, step: int = 0) -> Run:
    graph = build_step(StepShape((0, 1), 1, 1), phase)
    program = InstalledProgram(1, graph, split(graph, 2))

    def never(*_: Any) -> None:
        raise AssertionError("a lane asks nobody for anything")

    return Run(program, step, {}, never, never)


def filled(count: int, *, limit: int = 2, dependent: bool = True) -> tuple[Lane, list[Run]]:
    lane = Lane(limit=limit, dependent=dependent)
    runs = [made(step=step) for step in range(count)]
    for run in runs:
        lane.add(run)
    return lane, runs


async def test_runs_are_dispatched_in_order_and_no_more_than_the_limit_at_once() -> None:
    lane, (first, second, third) = filled(3)
    assert (lane.next(), lane.next(), lane.next()) == (first, second, None)
    lane.settle(first)
    assert (lane.next(), lane.next()) == (third, None)
    assert lane.all() == [second, third]


async def test_nothing_is_dispatched_while_a_failed_run_is_not_over_yet() -> None:
    lane, (first, second) = filled(2)
    lane.next()
    first.follow(ValueError("planted"))
    assert lane.next() is None
    lane.settle(first)
    assert lane.next() is second


async def test_a_torn_lane_dispatches_nothing() -> None:
    lane, _ = filled(1)
    lane.torn = ValueError("planted")
    assert lane.next() is None


async def test_a_pause_is_reached_after_all_before_it_and_holds_all_behind_it_until_its_end() -> (
    None
):
    lane, (first, second) = filled(2)
    pause, third = Pause(), made(step=2)
    lane.add(pause)
    lane.add(third)
    assert (lane.next(), lane.next(), lane.next()) == (first, second, None)
    lane.settle(second)
    assert lane.next() is None
    assert not pause.reached.is_set()
    lane.settle(first)
    assert lane.next() is None
    assert pause.reached.is_set()
    assert (lane.all(), lane.pauses()) == ([third], [pause])
    lane.end(pause)
    assert (lane.next(), lane.pauses()) == (third, [])


async def test_a_pause_that_is_given_up_early_holds_nothing() -> None:
    lane, (first, second) = filled(2, limit=1)
    pause, third = Pause(), made(step=2)
    lane.add(pause)
    lane.add(third)
    lane.next()
    lane.end(pause)
    assert not pause.reached.is_set()
    lane.settle(first)
    assert lane.next() is second
    lane.settle(second)
    assert lane.next() is third


async def test_a_pause_of_a_torn_lane_is_reached() -> None:
    lane, pause = Lane(limit=1, dependent=True), Pause()
    lane.torn = ValueError("planted")
    lane.add(pause)
    assert lane.next() is None
    assert pause.reached.is_set()


async def test_only_queued_runs_can_be_dropped_and_only_once() -> None:
    lane, (first, second) = filled(2)
    lane.next()
    assert not lane.drop(first)
    assert lane.drop(second)
    assert not lane.drop(second)
    assert lane.all() == [first]


async def test_settling_what_was_never_dispatched_changes_nothing() -> None:
    lane, (first,) = filled(1)
    lane.settle(first)
    lane.settle(made())
    assert lane.all() == [first]


@pytest.mark.parametrize("dispatched", [0, 1, 2, 3])
async def test_later_runs_hang_on_a_step_wherever_both_are(dispatched: int) -> None:
    lane, (first, second, third) = filled(3, limit=3)
    for _ in range(dispatched):
        lane.next()
    assert lane.after(first) == [second, third]
    assert lane.after(second) == [third]
    assert lane.after(third) == []


@pytest.mark.parametrize("phase", [Phase.EVALUATE, Phase.PREDICT, Phase.GRADIENTS])
async def test_nothing_hangs_on_a_run_that_commits_nothing(phase: Phase) -> None:
    lane = Lane(limit=1, dependent=True)
    evaluation, step = made(phase), made()
    lane.add(evaluation)
    lane.add(step)
    assert lane.after(evaluation) == []


async def test_nothing_hangs_on_anything_in_an_independent_lane() -> None:
    lane, runs = filled(3, dependent=False)
    lane.next()
    assert [lane.after(run) for run in runs] == [[], [], []]


async def test_nothing_hangs_on_a_run_that_is_not_in_the_lane() -> None:
    lane, _ = filled(2)
    assert lane.after(made()) == []


@pytest.mark.parametrize("limit", [0, -1])
def test_a_lane_without_room_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match=f"limit={limit}"):
        Lane(limit=limit, dependent=False)


async def test_a_value_can_be_awaited_by_many_of_whom_one_gives_up() -> None:
    run = made()
    patient, hasty = run.value(0), run.value(0)
    hasty.cancel()
    run.want(0).set_result("value")
    assert await patient == "value"
    assert await run.value(0) == "value"


async def test_a_failed_run_fails_its_values_also_those_that_are_asked_for_later() -> None:
    run = made()
    before = run.value(0)
    run.fail(ValueError("planted"))
    run.fail(KeyError("too late"))
    for value in (before, run.value(0), run.value(1), run.done):
        with pytest.raises(ValueError, match="planted"):
            await value


async def test_asyncio_tells_of_a_failed_run_that_nobody_looks_at(noise: list[str]) -> None:
    made().fail(ValueError("planted"))
    (told,) = noise
    assert "never retrieved" in told
    assert "planted" in told
    noise.clear()


async def test_nobody_need_look_at_what_follows_from_another_failure_or_at_values() -> None:
    run = made()
    run.value(0)
    run.follow(ValueError("planted"))
    run.value(1)
    del run
    await asyncio.sleep(0)
