from functools import partial

import pytest

from myelin.runtime.devices.port import Device, Outcome, Ticket
from myelin.runtime.devices.virtual import VirtualClock, VirtualDevice
from myelin.runtime.graph import Graph, Kind, Op, Phase, Stream
from myelin.runtime.step import StepShape, build_step
from myelin.testing.simulation import Conditions, durations, simulate

COMPUTE, COPY = Op(Kind.CALL, 0, Stream.COMPUTE), Op(Kind.CALL, 0, Stream.H2D)


class Bench:
    """A device on a clock, with a log of what it reported and when."""

    def __init__(self, **seconds: float) -> None:
        self.clock = VirtualClock()
        self.device: Device = VirtualDevice(self.clock, lambda op: seconds[op.stream.value])
        self.log: list[tuple[str, float, Outcome]] = []

    def launch(self, name: str, op: Op, *after: Ticket) -> Ticket:
        return self.device.launch(op, lambda: name, after=after, done=partial(self._done, name))

    def _done(self, name: str, outcome: Outcome) -> None:
        self.log.append((name, self.clock.now_s, outcome))

    def times(self) -> list[tuple[str, float, float]]:
        self.clock.run()
        assert all(now == outcome.ended_s for _, now, outcome in self.log)
        return [(name, outcome.started_s, outcome.ended_s) for name, _, outcome in self.log]


# The clock


def test_the_clock_calls_in_order_of_time_and_then_of_request() -> None:
    clock, called = VirtualClock(), list[tuple[str, float]]()
    for name, time_s in (("b", 2.0), ("a", 1.0), ("c", 2.0), ("now", 0.0)):
        clock.at(time_s, lambda name=name: called.append((name, clock.now_s)))  # type: ignore[misc]
    assert clock.run() == 2.0
    assert called == [("now", 0.0), ("a", 1.0), ("b", 2.0), ("c", 2.0)]


def test_what_is_asked_for_while_the_clock_runs_is_called_in_the_same_run() -> None:
    clock, called = VirtualClock(), list[float]()

    def again() -> None:
        called.append(clock.now_s)
        if len(called) < 3:
            clock.at(clock.now_s + 0.5, again)

    clock.at(1.0, again)
    assert clock.run() == 2.0
    assert called == [1.0, 1.5, 2.0]


def test_a_clock_with_nothing_to_do_stands_still() -> None:
    assert VirtualClock().run() == 0.0


def test_the_past_cannot_be_asked_for() -> None:
    clock = VirtualClock()
    clock.at(3.0, lambda: None)
    clock.run()
    with pytest.raises(ValueError, match=r"time 2\.5 is over: it is 3\.0"):
        clock.at(2.5, lambda: None)


# The device


def test_ops_of_one_stream_run_one_after_the_other() -> None:
    bench = Bench(compute=2.0)
    for name in ("first", "second", "third"):
        bench.launch(name, COMPUTE)
    assert bench.times() == [("first", 0.0, 2.0), ("second", 2.0, 4.0), ("third", 4.0, 6.0)]


def test_streams_run_side_by_side() -> None:
    bench = Bench(compute=2.0, h2d=0.5)
    bench.launch("work", COMPUTE)
    bench.launch("copy", COPY)
    assert bench.times() == [("copy", 0.0, 0.5), ("work", 0.0, 2.0)]


def test_an_op_waits_for_tickets_of_other_streams_and_so_does_what_is_behind_it() -> None:
    bench = Bench(compute=1.0, h2d=3.0)
    copied = bench.launch("copy", COPY)
    bench.launch("needs it", COMPUTE, copied)
    bench.launch("behind", COMPUTE)
    assert bench.times() == [("copy", 0.0, 3.0), ("needs it", 3.0, 4.0), ("behind", 4.0, 5.0)]


def test_an_op_starts_no_earlier_than_it_is_launched() -> None:
    bench = Bench(compute=1.0)
    bench.clock.at(5.0, lambda: (bench.launch("late", COMPUTE), None)[1])
    assert bench.times() == [("late", 5.0, 6.0)]


def test_a_ticket_is_completed_when_its_op_has_ended() -> None:
    bench = Bench(compute=1.0)
    ticket = bench.launch("work", COMPUTE)
    seen: list[bool] = []
    for time_s in (0.5, 1.5):
        bench.clock.at(time_s, lambda: seen.append(ticket.completed))
    bench.clock.run()
    assert seen == [False, True]


def test_the_outcome_has_the_value_or_the_error() -> None:
    bench = Bench(compute=1.0)
    error = ValueError("planted")

    def fail() -> None:
        raise error

    bench.launch("fine", COMPUTE)
    bench.device.launch(COMPUTE, fail, after=(), done=partial(bench._done, "bad"))
    bench.clock.run()
    assert [outcome for _, _, outcome in bench.log] == [
        Outcome("fine", None, 0.0, 1.0),
        Outcome(None, error, 1.0, 2.0),
    ]


def test_work_is_called_when_its_op_ends_and_not_when_it_is_launched() -> None:
    bench, called = Bench(compute=2.0), list[float]()
    bench.device.launch(
        COMPUTE,
        lambda: called.append(bench.clock.now_s),
        after=(),
        done=partial(bench._done, "work"),
    )
    assert called == []
    bench.clock.run()
    assert called == [2.0]


async def test_the_device_adds_up_its_busy_time_and_closes_twice() -> None:
    clock = VirtualClock()
    device = VirtualDevice(clock, lambda op: 1.5, run_ahead=3)
    for op in (COMPUTE, COMPUTE, COPY):
        device.launch(op, lambda: None, after=(), done=lambda outcome: None)
    clock.run()
    assert device.busy_s == 4.5
    assert device.run_ahead == 3
    await device.close()
    await device.close()


# What placement and depth buy


def train(placement: tuple[int, ...], *, limit: int) -> Graph:
    return build_step(StepShape(placement, microbatches=8, limit=limit), Phase.TRAIN)


def test_two_stages_reach_the_bound_of_one_forward_one_backward() -> None:
    """The last stage idles for one forward at the start, and for one backward at the end.

    A forward takes 1 s and a backward 2 s: 8 * 3 + 1 + 2 = 27 s, where 8 * 3 = 24 s are work.
    """
    history = simulate(train((0, 1), limit=4), 2)
    assert [worker.busy for worker in history.workers] == [24.0, 24.0]
    assert history.span == 27.0
    assert history.span / 24.0 == 1.125 == (8 + 1) / 8


def test_four_stages_on_two_workers_in_turn_halve_the_bubble() -> None:
    """Worker 1 now idles for a forward and a backward of half the size.

    A stage has half the blocks, so a forward takes 0.5 s and a backward 1 s: 24 + 0.5 + 1 = 25.5 s.
    """
    halves = Conditions(duration_s=durations(forward_s=0.5, backward_s=1.0))
    history = simulate(train((0, 1, 0, 1), limit=8), 2, halves)
    assert [worker.busy for worker in history.workers] == [24.0, 24.0]
    assert history.span == 25.5
    assert history.span / 24.0 == 1.0625 == (2 * 8 + 1) / (2 * 8)


def test_one_microbatch_at_a_time_is_no_pipeline() -> None:
    assert simulate(train((0, 1), limit=1), 2).span == 8 * (1 + 1 + 2 + 2)


def test_under_jitter_a_deeper_limit_wins_over_the_papers() -> None:
    """With slow messages the papers' limit leaves the first stage waiting for its turn."""

    def mean_span(limit: int) -> float:
        graph = train((0, 1, 2, 3), limit=limit)
        spans = [
            simulate(graph, 4, Conditions(message_s=0.1, jitter=0.15, seed=seed)).span
            for seed in range(20)
        ]
        return sum(spans) / len(spans)

    assert mean_span(8) < 0.97 * mean_span(4)
