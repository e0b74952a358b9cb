from collections.abc import Callable
from itertools import combinations

import pytest

from myelin.errors import ScheduleError
from myelin.runtime.graph import Graph, Kind, Op, Phase, Program, Stream, split
from myelin.runtime.scheduler import (
    Aborted,
    Arrived,
    Command,
    Drained,
    Event,
    Failed,
    Finished,
    Launch,
    Schedule,
    Scheduler,
    StepDone,
    Transmit,
    priority,
)
from myelin.runtime.step import StepShape, build_step

ENDINGS = [Failed, Finished]


class Told:
    """A scheduler that is checked after every event, and talks of ops by name."""

    def __init__(self, program: Program, *, run_ahead: int = 1) -> None:
        self.program = program
        self.scheduler = Scheduler(Schedule(program, run_ahead=run_ahead))
        self._names = [str(op) for op in program.ops]

    def start(self) -> list[str]:
        return self._said(self.scheduler.start())

    def arrived(self, name: str) -> list[str]:
        return self.handle(Arrived, name)

    def finished(self, name: str) -> list[str]:
        return self.handle(Finished, name)

    def failed(self, name: str) -> list[str]:
        return self.handle(Failed, name)

    def aborted(self) -> list[str]:
        return self._said(self.scheduler.handle(Aborted()))

    def handle(self, event: Callable[[int], Event], name: str) -> list[str]:
        return self._said(self.scheduler.handle(event(self._names.index(name))))

    def _said(self, commands: list[Command]) -> list[str]:
        self.scheduler.validate()
        return [
            self._names[command.op]
            if isinstance(command, Launch | Transmit)
            else type(command).__name__
            for command in commands
        ]


def step(
    worker: int,
    *placement: int,
    microbatches: int,
    limit: int = 99,
    phase: Phase = Phase.GRADIENTS,
    run_ahead: int = 1,
) -> Told:
    """One worker's scheduler of a step; short names, as "F0.2" for stage 0, microbatch 2."""
    graph = build_step(StepShape(placement, microbatches, limit), phase)
    program = split(graph, max(placement) + 1).programs[worker]
    told = Told(program, run_ahead=run_ahead)
    told._names = [short(op) for op in program.ops]
    assert len(set(told._names)) == len(told._names)
    return told


def short(op: Op) -> str:
    marks = ".".join(str(mark) for mark in (op.stage, op.microbatch) if mark is not None)
    name = op.kind.value if op.kind in {Kind.LOAD, Kind.RECEIVE, Kind.SEND} else op.kind.value[0]
    if op.kind is Kind.LOAD:
        return f"load {op.slot}"
    return f"{name} {marks}".strip() if len(name) > 1 else f"{name.upper()}{marks}"


def calls(*ops: Op) -> Program:
    graph = Graph(Phase.CALLS)
    for op in ops:
        graph.add(op)
    return split(graph, 1).programs[0]


def call(*inputs: int, slot: int, stream: Stream = Stream.COMPUTE) -> Op:
    return Op(Kind.CALL, 0, stream, inputs=inputs, slot=slot)


def test_an_op_starts_when_its_last_message_has_arrived() -> None:
    last = step(1, 0, 1, microbatches=1)
    assert last.start() == []
    assert last.arrived("receive 0.0") == []
    assert last.arrived("load 1") == ["F1.0"]


def test_what_an_op_returned_is_sent_once_it_is_over_and_not_before() -> None:
    first = step(0, 0, 1, microbatches=1)
    first.start()
    assert first.arrived("load 0") == ["F0.0"]
    assert first.finished("F0.0") == ["send 0.0"]
    assert first.arrived("receive 1.0") == ["B0.0"]


def test_backward_starts_before_an_older_forward() -> None:
    first = step(0, 0, 1, microbatches=3)
    first.start()
    first.arrived("load 0")
    first.finished("F0.0")  # starts F0.1, and F0.2 would be next
    assert first.arrived("receive 1.0") == []
    assert first.finished("F0.1") == ["send 0.1", "B0.0"]
    assert first.finished("B0.0") == ["F0.2"]


def test_the_lower_microbatch_goes_first_among_stages_of_one_worker() -> None:
    both = step(0, 0, 1, 0, microbatches=2, limit=2, phase=Phase.PREDICT)
    both.start()
    both.arrived("load 0")
    assert both.arrived("receive 1.0") == []
    assert both.finished("F0.0") == ["send 0.0", "F2.0"]
    assert both.finished("F2.0") == ["F0.1"]


def test_the_later_stage_goes_first_within_a_microbatch() -> None:
    forward, backward = Kind.FORWARD, Kind.BACKWARD
    ops = [
        Op(forward, 0, stage=0, microbatch=1),
        Op(forward, 0, stage=2, microbatch=0),
        Op(forward, 0, stage=3, microbatch=0),
        Op(backward, 0, stage=0, microbatch=2),
        Op(backward, 0, stage=1, microbatch=2),
        Op(Kind.UPDATE, 0, stage=0),
    ]
    ordered = sorted(range(len(ops)), key=lambda index: priority(ops[index], index))
    assert ordered == [5, 4, 3, 2, 1, 0]


def test_ops_without_marks_go_in_the_order_of_the_program() -> None:
    told = Told(calls(*(call(slot=slot) for slot in range(3))))
    assert told.start() == ["call call=0"]
    assert told.finished("call call=0") == ["call call=1"]
    assert told.finished("call call=1") == ["call call=2"]
    assert told.finished("call call=2") == ["StepDone"]


def forwards_before_the_first_backward(stages: int, limit: int) -> int:
    """Count the microbatches that the first stage starts while no gradient comes back."""
    first = step(0, *range(stages), microbatches=20, limit=limit)
    first.start()
    running = first.arrived("load 0")
    started = 0
    while running and running[-1].startswith("F"):
        started += 1
        running = first.finished(running[-1])
    return started


@pytest.mark.parametrize("stages", [2, 4])
def test_no_more_microbatches_than_the_limit_are_started(stages: int) -> None:
    for limit in (1, stages, 2 * stages):
        assert forwards_before_the_first_backward(stages, limit) == limit


def test_with_the_papers_limit_the_first_stage_waits_where_the_default_goes_on() -> None:
    for limit, goes_on in ((2, ["send 0.1"]), (4, ["send 0.1", "F0.2"])):
        first = step(0, 0, 1, microbatches=4, limit=limit)
        first.start()
        first.arrived("load 0")
        assert first.finished("F0.0") == ["send 0.0", "F0.1"]
        assert first.finished("F0.1") == goes_on


def test_a_retired_microbatch_lets_the_next_one_in() -> None:
    first = step(0, 0, 1, microbatches=2, limit=1)
    first.start()
    first.arrived("load 0")
    assert first.finished("F0.0") == ["send 0.0"]
    assert first.finished("send 0.0") == []
    assert first.arrived("receive 1.0") == ["B0.0"]
    assert first.finished("B0.0") == ["F0.1"]


def test_one_stage_on_one_worker_runs_a_whole_training_step_alone() -> None:
    alone = step(0, 0, microbatches=2, phase=Phase.TRAIN)
    assert alone.start() == []
    assert alone.arrived("load 0") == []
    assert alone.arrived("load 1") == ["F0.0"]
    assert alone.finished("F0.0") == ["B0.0"]
    assert alone.finished("B0.0") == ["F0.1"]
    assert alone.finished("F0.1") == ["B0.1"]
    assert alone.finished("B0.1") == ["N0"]
    assert alone.finished("N0") == ["C0"]
    assert alone.finished("C0") == ["U0"]
    assert alone.finished("U0") == ["StepDone"]
    assert alone.scheduler.over


def test_one_microbatch_passes_through_two_workers_and_both_are_done_once_updated() -> None:
    shape = StepShape((0, 1), microbatches=1, limit=1)
    programs = split(build_step(shape, Phase.TRAIN), 2).programs
    first, last = Told(programs[0]), Told(programs[1])
    first.start()
    last.start()
    assert first.arrived("load stage=0") == ["forward stage=0 microbatch=0"]
    assert first.finished("forward stage=0 microbatch=0") == ["send stage=0 microbatch=0"]
    assert first.finished("send stage=0 microbatch=0") == []
    assert last.arrived("receive stage=0 microbatch=0") == []
    assert last.arrived("load stage=1") == ["forward stage=1 microbatch=0"]
    assert last.finished("forward stage=1 microbatch=0") == ["backward stage=1 microbatch=0"]
    assert last.finished("backward stage=1 microbatch=0") == [
        "send stage=1 microbatch=0",
        "norm stage=1",
    ]
    assert last.finished("send stage=1 microbatch=0") == []
    assert last.finished("norm stage=1") == ["send stage=1"]
    assert last.finished("send stage=1") == []
    assert first.arrived("receive stage=1 microbatch=0") == ["backward stage=0 microbatch=0"]
    assert first.finished("backward stage=0 microbatch=0") == ["norm stage=0"]
    assert first.arrived("receive stage=1") == []
    assert first.finished("norm stage=0") == ["commit stage=0"]
    assert first.finished("commit stage=0") == ["send stage=0", "update stage=0"]
    assert last.arrived("receive stage=0") == ["update stage=1"]
    assert last.finished("update stage=1") == ["StepDone"]
    assert first.finished("send stage=0") == []
    assert first.finished("update stage=0") == ["StepDone"]


def test_the_last_stage_turns_around_before_it_takes_the_next_microbatch() -> None:
    last = step(1, 0, 1, microbatches=2)
    last.start()
    last.arrived("load 1")
    assert last.arrived("receive 0.0") == ["F1.0"]
    assert last.arrived("receive 0.1") == []
    assert last.finished("F1.0") == ["B1.0"]
    assert last.finished("B1.0") == ["send 1.0", "F1.1"]


def test_a_microbatch_that_overtakes_another_waits_for_it() -> None:
    last = step(1, 0, 1, microbatches=2)
    last.start()
    last.arrived("load 1")
    assert last.arrived("receive 0.1") == []
    assert last.arrived("receive 0.0") == ["F1.0"]


def test_an_empty_program_is_done_when_it_starts() -> None:
    told = Told(Program(3, Phase.CALLS, 1, ()))
    assert not told.program.ops
    assert told.start() == ["StepDone"]
    assert told.scheduler.over


def test_a_schedule_serves_one_run_after_another() -> None:
    schedule = Schedule(calls(call(slot=0), call(0, slot=1)))
    for _ in range(3):
        scheduler = Scheduler(schedule)
        assert scheduler.start() == [Launch(0, Stream.COMPUTE)]
        assert scheduler.handle(Finished(0)) == [Launch(1, Stream.COMPUTE)]
        assert scheduler.handle(Finished(1)) == [StepDone()]


# Running ahead


def test_a_device_that_runs_ahead_gets_ops_whose_inputs_are_issued_and_not_over() -> None:
    told = Told(calls(call(slot=0), call(0, slot=1), call(1, slot=2)), run_ahead=2)
    assert told.start() == ["call call=0", "call call=1"]
    assert told.finished("call call=0") == ["call call=2"]
    assert told.finished("call call=1") == []
    assert told.finished("call call=2") == ["StepDone"]


def test_a_value_is_sent_when_it_is_there_however_far_the_device_runs_ahead() -> None:
    first = step(0, 0, 1, microbatches=3, run_ahead=3)
    first.start()
    assert first.arrived("load 0") == ["F0.0", "F0.1", "F0.2"]
    assert first.finished("F0.0") == ["send 0.0"]
    assert first.finished("F0.1") == ["send 0.1"]


def test_an_op_is_issued_behind_the_ops_of_other_streams_that_it_needs() -> None:
    copy, other = Stream.H2D, Stream.D2H
    program = calls(
        call(slot=0, stream=copy),
        call(0, slot=1),
        call(0, 1, slot=2, stream=other),
        call(1, slot=3),
    )
    scheduler = Scheduler(Schedule(program, run_ahead=4))
    assert scheduler.start() == [
        Launch(0, copy),
        Launch(1, Stream.COMPUTE, after=(0,)),
        Launch(3, Stream.COMPUTE),
        Launch(2, other, after=(0, 1)),
    ]


def test_every_stream_has_room_of_its_own() -> None:
    streams = tuple(Stream)
    program = calls(*(call(slot=slot, stream=streams[slot // 2]) for slot in range(8)))
    told = Told(program)
    assert told.start() == ["call call=0", "call call=2", "call call=4", "call call=6"]
    assert told.finished("call call=4") == ["call call=5"]


@pytest.mark.parametrize("run_ahead", [0, -1])
def test_a_schedule_without_room_for_an_op_is_refused(run_ahead: int) -> None:
    with pytest.raises(ValueError, match=f"run_ahead={run_ahead}: a stream needs room"):
        Schedule(calls(), run_ahead=run_ahead)


# Ends before the end


def test_after_a_failure_nothing_starts_and_drained_is_said_once() -> None:
    first = step(0, 0, 1, microbatches=3)
    first.start()
    first.arrived("load 0")
    assert first.finished("F0.0") == ["send 0.0", "F0.1"]
    assert first.failed("F0.1") == []  # the send is under way
    assert first.arrived("receive 1.0") == []
    assert first.finished("send 0.0") == ["Drained"]
    assert first.arrived("receive 1.1") == []
    assert first.aborted() == []


def test_a_failure_with_nothing_else_under_way_drains_at_once() -> None:
    told = Told(calls(call(slot=0), call(0, slot=1)))
    told.start()
    assert told.failed("call call=0") == ["Drained"]


def test_what_was_issued_behind_a_failure_must_end_before_the_run_is_drained() -> None:
    told = Told(calls(call(slot=0), call(0, slot=1), call(1, slot=2)), run_ahead=2)
    told.start()
    assert told.failed("call call=0") == []
    assert told.failed("call call=1") == ["Drained"]


def test_an_abort_before_anything_has_started_drains_at_once() -> None:
    last = step(1, 0, 1, microbatches=2)
    last.start()
    assert last.aborted() == ["Drained"]
    assert last.aborted() == []
    assert last.arrived("load 1") == []
    assert last.arrived("receive 0.0") == []


def test_an_abort_lets_what_is_under_way_come_to_its_end() -> None:
    first = step(0, 0, 1, microbatches=2)
    first.start()
    first.arrived("load 0")
    assert first.aborted() == []
    assert first.aborted() == []
    assert first.finished("F0.0") == ["Drained"]


@pytest.mark.parametrize("drained", [False, True])
def test_a_run_is_over_when_it_is_drained_and_not_when_it_fails(drained: bool) -> None:
    told = Told(calls(call(slot=0), call(slot=1, stream=Stream.H2D)))
    told.start()
    told.failed("call call=0")
    if drained:
        told.finished("call call=1")
    assert told.scheduler.over is drained


# What cannot be


def story(told: Told, event: Event) -> str:
    with pytest.raises(ScheduleError) as caught:
        told.scheduler.handle(event)
    told.scheduler.validate()
    return str(caught.value)


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_op_cannot_end_before_it_has_started(ending: Callable[[int], Event]) -> None:
    last = step(1, 0, 1, microbatches=1)
    last.start()
    assert story(last, ending(2)) == (
        "an op ended that is not under way: op 2 (forward stage=1 microbatch=0) of worker 1 is "
        "waiting, waits for [1, 0], run going on"
    )


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_op_cannot_end_twice(ending: Callable[[int], Event]) -> None:
    told = Told(calls(call(slot=0), call(0, slot=1)))
    told.start()
    told.finished("call call=0")
    assert story(told, ending(0)) == (
        "an op ended that is not under way: op 0 (call call=0) of worker 0 is over, waits for [], "
        "run going on"
    )


def test_an_op_that_waits_for_room_on_its_stream_cannot_end() -> None:
    told = Told(calls(call(slot=0), call(slot=1)))
    told.start()
    assert "op 1 (call call=1) of worker 0 is ready" in story(told, Finished(1))


def test_a_message_cannot_arrive_twice() -> None:
    last = step(1, 0, 1, microbatches=1)
    last.start()
    last.arrived("receive 0.0")
    assert story(last, Arrived(1)) == (
        "a message arrived twice, or for an op that takes none: op 1 (receive stage=0 "
        "microbatch=0) of worker 1 is over, waits for [], run going on"
    )


def test_a_message_cannot_arrive_for_an_op_that_takes_none() -> None:
    last = step(1, 0, 1, microbatches=1)
    last.start()
    last.aborted()
    assert story(last, Arrived(2)) == (
        "a message arrived twice, or for an op that takes none: op 2 (forward stage=1 "
        "microbatch=0) of worker 1 is waiting, waits for [1, 0], run ending"
    )


def test_a_message_cannot_be_taken_that_was_not_sent() -> None:
    first = step(0, 0, 1, microbatches=1)
    first.start()
    assert "op 2 (send stage=0 microbatch=0) of worker 0 is waiting, waits for [1]" in story(
        first, Finished(2)
    )


def test_an_impossible_event_changes_nothing() -> None:
    told = Told(calls(call(slot=0), call(0, slot=1)))
    told.start()
    for event in (Finished(1), Failed(1), Arrived(0), Arrived(1)):
        story(told, event)
    assert told.finished("call call=0") == ["call call=1"]
    assert told.finished("call call=1") == ["StepDone"]


# What the tests rely on


def test_validate_notices_a_count_of_inputs_that_is_wrong() -> None:
    told = Told(calls(call(slot=0), call(0, slot=1)))
    told.scheduler._waits[1] = -1
    with pytest.raises(ScheduleError, match=r"wrong count of inputs: op 1 \(call call=1\)"):
        told.scheduler.validate()


def test_validate_notices_a_stream_with_more_ops_than_were_counted() -> None:
    told = Told(calls(call(slot=0)))
    told.start()
    told.scheduler._issued[0] = 0
    with pytest.raises(ScheduleError, match=r"issued per stream \[0, .*counted \[1, "):
        told.scheduler.validate()


def test_validate_notices_an_op_that_is_over_and_not_counted() -> None:
    told = Told(calls(call(slot=0), call(0, slot=1)))
    told.start()
    told.finished("call call=0")
    told.scheduler._remaining = 2
    with pytest.raises(ScheduleError, match="1 ops over, 2 remaining of 2"):
        told.scheduler.validate()


# What is told for reports


def test_ops_under_way_are_those_issued_and_not_over() -> None:
    first = step(0, 0, 1, microbatches=2)
    first.start()
    first.arrived("load 0")
    first.finished("F0.0")
    names = [short(first.program.ops[op]) for op in first.scheduler.under_way()]
    assert sorted(names) == ["F0.1", "send 0.0"]


def test_commands_are_equal_by_what_they_say() -> None:
    assert Launch(1, Stream.COMPUTE) == Launch(1, Stream.COMPUTE, after=())
    assert Launch(1, Stream.COMPUTE) != Launch(1, Stream.H2D)
    different: list[object] = [Transmit(1), Finished(1), Failed(1), StepDone(), Drained()]
    assert all(a != b for a, b in combinations(different, 2))


def test_an_arrival_that_waits_for_ops_is_refused() -> None:
    call = Op(Kind.CALL, worker=0)
    load = Op(Kind.LOAD, worker=0, peer=-1, after=(0,))
    with pytest.raises(ValueError, match="waits for a message and for ops"):
        Schedule(Program(0, Phase.CALLS, 1, (call, load)))
