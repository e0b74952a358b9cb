"""What holds for every step, every placement and every legal order of events."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myelin.errors import ScheduleError
from myelin.runtime.graph import ARRIVALS, Graph, Kind, Op, Phase, Program, Stream, edges, split
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
from myelin.testing.exploration import explore
from myelin.testing.simulation import Conditions, History, Ran, WorkerHistory, simulate

# What is tried


@dataclass(frozen=True, slots=True)
class Step:
    """A step on some workers; one of them may have nothing to do."""

    shape: StepShape
    phase: Phase
    workers: int
    run_ahead: int

    @property
    def graph(self) -> Graph:
        return build_step(self.shape, self.phase)


@dataclass(frozen=True, slots=True)
class Order:
    """Chooses among n possible events: the newest, the oldest, or any, so and so often."""

    seed: int
    newest: int  # percent
    oldest: int  # percent

    def chooser(self) -> Callable[[int], int]:
        numbers = random.Random(self.seed)

        def choose(n: int) -> int:
            percent = numbers.randrange(100)
            if percent < self.newest:
                return n - 1
            return 0 if percent < self.newest + self.oldest else numbers.randrange(n)

        return choose


orders = st.builds(
    Order, st.integers(0, 2**32), st.sampled_from([0, 30, 100]), st.sampled_from([0, 0, 60])
)
phases = st.sampled_from([Phase.TRAIN, Phase.GRADIENTS, Phase.EVALUATE, Phase.PREDICT])


@st.composite
def steps(
    draw: st.DrawFn,
    *,
    stages: int = 8,
    microbatches: int = 32,
    phases: st.SearchStrategy[Phase] = phases,
) -> Step:
    raw = draw(st.lists(st.integers(0, 7), min_size=1, max_size=stages))
    used = sorted(set(raw))  # workers are numbered without gaps, and stages are on any of them
    replicas = draw(st.sampled_from([1, 1, 2, 3]))
    count = draw(st.integers(1, max(1, microbatches // replicas)))
    pairs = [(owner, user) for user in range(len(raw)) for owner in range(user)]
    ties = draw(st.lists(st.sampled_from(pairs), max_size=3)) if pairs else []
    return Step(
        StepShape(
            placement=tuple(used.index(worker) for worker in raw),
            microbatches=count,
            limit=draw(st.integers(1, count + 1)),
            ties=tuple(ties),
            replicas=replicas,
            chunks=tuple(draw(st.integers(1, 3)) for _ in raw),
        ),
        draw(phases),
        workers=replicas * len(used) + draw(st.integers(0, 1)),
        run_ahead=draw(st.integers(1, 4)),
    )


@dataclass(frozen=True, slots=True)
class Calls:
    """A graph of a user's own ops, on any streams."""

    ops: tuple[Op, ...]
    workers: int
    run_ahead: int

    @property
    def graph(self) -> Graph:
        graph = Graph(Phase.CALLS)
        for op in self.ops:
            graph.add(op)
        return graph


@st.composite
def call_graphs(draw: st.DrawFn, *, ops: int = 25) -> Calls:
    workers = draw(st.integers(1, 3))
    streams = draw(st.sampled_from([(Stream.COMPUTE,), tuple(Stream)]))
    chosen: list[Op] = []
    for index in range(draw(st.integers(0, ops))):
        worker = draw(st.integers(0, workers - 1))
        if draw(st.integers(0, 9)) == 0:
            chosen.append(Op(Kind.LOAD, worker, Stream.COMM, peer=-1))
            continue
        earlier = st.lists(st.integers(0, index - 1), max_size=3) if index else st.just([])
        inputs, after = tuple(draw(earlier)), tuple(draw(earlier))
        stream = draw(st.sampled_from(streams))
        chosen.append(Op(Kind.CALL, worker, stream, inputs=inputs, after=after, slot=index))
    return Calls(tuple(chosen), workers, draw(st.integers(1, 3)))


# What must hold


def check_everything_ran_once(history: History) -> None:
    for worker in history.workers:
        assert set(worker.ran) == set(range(len(worker.program.ops)))
        ordered = [c.op for c in worker.commands if isinstance(c, Launch | Transmit)]
        messages = {i for i, op in enumerate(worker.program.ops) if op.kind in ARRIVALS}
        assert len(ordered) == len(set(ordered))
        assert set(ordered) == set(worker.ran) - messages
        assert worker.commands[-1] == StepDone()
        assert worker.commands.count(StepDone()) == 1
        assert Drained() not in worker.commands


def check_inputs_came_first(graph: Graph, history: History) -> None:
    """Every op that ran began after its inputs had ended, on its own worker and elsewhere."""
    for worker in history.workers:
        for earlier, later in edges(worker.program):
            if later in worker.ran:
                assert worker.ran[earlier].ended <= worker.ran[later].started
    for index, op in enumerate(graph.ops):
        ran = history.ran(index)
        for earlier in (*op.inputs, *op.after) if ran else ():
            before = history.ran(earlier)
            assert before is not None
            assert ran is not None
            assert before.ended <= ran.started


def check_streams_do_one_op_at_a_time(history: History) -> None:
    for worker in history.workers:
        for stream in Stream:
            indices = [
                command.op
                for command in worker.commands
                if isinstance(command, Launch) and command.stream is stream
            ]
            went = [worker.ran[index] for index in indices if index in worker.ran]
            assert all(a.ended <= b.started for a, b in pairwise(went))


def spans_in_flight(step: Step, history: History, replica: int) -> list[tuple[float, float]]:
    """Return for each microbatch of a replica when its first op began and when it was retired."""
    graph, last = step.graph, step.shape.last
    trains = step.phase in (Phase.TRAIN, Phase.GRADIENTS)
    end = (Kind.BACKWARD, 0) if trains else (Kind.FORWARD, last)
    spans = []
    own = step.shape.microbatches
    for microbatch in range(replica * own, (replica + 1) * own):
        first = ran(history, graph, Kind.FORWARD, 0, microbatch)
        retired = ran(history, graph, *end, microbatch)
        spans.append((first.started, retired.ended))
    return spans


def ran(history: History, graph: Graph, kind: Kind, stage: int, microbatch: int) -> Ran:
    index = graph.find(kind, stage=stage, microbatch=microbatch)
    assert index is not None
    went = history.ran(index)
    assert went is not None
    return went


def most_at_once(spans: list[tuple[float, float]]) -> int:
    ends_first = sorted([(end, -1) for _, end in spans] + [(start, +1) for start, _ in spans])
    most = now = 0
    for _, change in ends_first:
        now += change
        most = max(most, now)
    return most


def check_microbatches_in_order(step: Step, history: History) -> None:
    for worker in history.workers:
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            for stage in range(step.shape.last + 1):
                order = [op.microbatch for op in worker.order(kind) if op.stage == stage]
                assert order == sorted(order, key=lambda m: -1 if m is None else m)


def check_no_weight_changes_before_all_backwards_are_over(step: Step, history: History) -> None:
    changes = [
        went.started
        for worker in history.workers
        for index, went in worker.ran.items()
        if worker.program.ops[index].kind in (Kind.UPDATE, Kind.REFRESH)
    ]
    ends = [
        went.ended
        for worker in history.workers
        for index, went in worker.ran.items()
        if worker.program.ops[index].kind is Kind.BACKWARD
    ]
    if changes:
        assert len(ends) == (step.shape.last + 1) * step.graph.microbatches
        assert max(ends) <= min(changes)


def check_step(step: Step, history: History) -> None:
    check_everything_ran_once(history)
    check_inputs_came_first(step.graph, history)
    check_streams_do_one_op_at_a_time(history)
    for replica in range(step.shape.replicas):
        assert most_at_once(spans_in_flight(step, history, replica)) <= step.shape.limit
    check_microbatches_in_order(step, history)
    check_no_weight_changes_before_all_backwards_are_over(step, history)


# Steps


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(steps(), orders)
def test_every_step_is_right_in_every_order_of_events(step: Step, order: Order) -> None:
    history = explore(step.graph, step.workers, order.chooser(), run_ahead=step.run_ahead)
    check_step(step, history)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(steps(stages=4, microbatches=4), st.data())
def test_a_small_step_is_right_in_whatever_order_events_are_drawn(
    step: Step, data: st.DataObject
) -> None:
    history = explore(
        step.graph,
        step.workers,
        lambda n: data.draw(st.integers(0, n - 1)) if n > 1 else 0,
        run_ahead=step.run_ahead,
    )
    check_step(step, history)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(steps(), st.integers(0, 2**32), st.sampled_from([0.0, 0.15, 0.9]))
def test_every_step_is_right_on_jittery_devices_and_slow_networks(
    step: Step, seed: int, jitter: float
) -> None:
    conditions = Conditions(message_s=0.7, jitter=jitter, seed=seed, run_ahead=step.run_ahead)
    history = simulate(step.graph, step.workers, conditions)
    check_step(step, history)


# Graphs of one's own


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(call_graphs(), orders)
def test_every_graph_of_calls_is_right_in_every_order_of_events(calls: Calls, order: Order) -> None:
    history = explore(calls.graph, calls.workers, order.chooser(), run_ahead=calls.run_ahead)
    check_everything_ran_once(history)
    check_inputs_came_first(calls.graph, history)
    check_streams_do_one_op_at_a_time(history)


# The choice itself, against a scheduler that counts nothing and looks at everything each time


class Slow:
    """Decides as `Scheduler` should, from the definition alone."""

    def __init__(self, program: Program, run_ahead: int) -> None:
        self.program, self.run_ahead = program, run_ahead
        self.over: set[int] = set()
        self.issued: set[int] = set()

    def told(self, event: Event | None) -> set[int]:
        """Take an event and return the ops that must now be launched or sent."""
        if isinstance(event, Arrived | Finished):
            self.over.add(event.op)
        before = set(self.issued)
        self._send()
        progress = True
        while progress:
            progress = any(list(map(self._fill, Stream)))  # all of them, in this order
        return self.issued - before

    def _send(self) -> None:
        self.issued |= {i for i in self._ready() if self.program.ops[i].kind is Kind.SEND}

    def _fill(self, stream: Stream) -> bool:
        """Launch on one stream, the most urgent first, until it is full; return whether any was."""
        ops = self.program.ops
        launched = False
        while sum(self._on_device(i, stream) for i in self.issued - self.over) < self.run_ahead:
            ready = [i for i in self._ready() if self._on_device(i, stream)]
            if not ready:
                break
            self.issued.add(min(ready, key=lambda i: priority(ops[i], i)))
            launched = True
        return launched

    def _on_device(self, index: int, stream: Stream | None = None) -> bool:
        op = self.program.ops[index]
        message = op.kind in ARRIVALS or op.kind is Kind.SEND
        return not message and stream in (None, op.stream)

    def _ready(self) -> list[int]:
        return [
            index
            for index, op in enumerate(self.program.ops)
            if op.kind not in ARRIVALS
            and index not in self.issued
            and all(self._met(earlier, index) for earlier in (*op.inputs, *op.after))
        ]

    def _met(self, earlier: int, later: int) -> bool:
        if earlier in self.over:
            return True
        return earlier in self.issued and self._on_device(earlier) and self._on_device(later)


def check_decisions(worker: WorkerHistory, run_ahead: int) -> None:
    slow = Slow(worker.program, run_ahead)
    for handled in worker.handled:
        ordered = [c.op for c in handled.commands if isinstance(c, Launch | Transmit)]
        assert set(ordered) == slow.told(handled.event)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(steps(stages=4, microbatches=4), orders)
def test_what_starts_in_a_step_is_always_the_most_urgent_op_that_could(
    step: Step, order: Order
) -> None:
    history = explore(step.graph, step.workers, order.chooser(), run_ahead=step.run_ahead)
    for worker in history.workers:
        check_decisions(worker, step.run_ahead)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(call_graphs(), orders)
def test_what_starts_in_any_graph_is_always_the_most_urgent_op_that_could(
    calls: Calls, order: Order
) -> None:
    history = explore(calls.graph, calls.workers, order.chooser(), run_ahead=calls.run_ahead)
    for worker in history.workers:
        check_decisions(worker, calls.run_ahead)


# Failures


def check_nothing_started_after_a_failure(worker: WorkerHistory) -> None:
    cut = [i for i, handled in enumerate(worker.handled) if is_mishap(handled.event)]
    said = [command for handled in worker.handled[min(cut) :] for command in handled.commands]
    assert said == [Drained()]
    assert StepDone() not in worker.commands


def check_drained_when_nothing_is_under_way(worker: WorkerHistory) -> None:
    under_way, ending, drained = 0, False, False
    for handled in worker.handled:
        under_way -= isinstance(handled.event, Finished | Failed)
        under_way += sum(isinstance(command, Launch | Transmit) for command in handled.commands)
        ending = ending or is_mishap(handled.event)
        drained = drained or Drained() in handled.commands
        assert drained == (ending and not under_way)


def is_mishap(event: Event | None) -> bool:
    return isinstance(event, Failed | Aborted)


def check_ends(history: History) -> None:
    """Check that each worker either did all that it had to do, or ended early as it should."""
    for worker in history.workers:
        if any(is_mishap(handled.event) for handled in worker.handled):
            check_nothing_started_after_a_failure(worker)
            check_drained_when_nothing_is_under_way(worker)
        else:
            assert worker.commands[-1] == StepDone()
            assert set(worker.ran) == set(range(len(worker.program.ops)))


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(steps(stages=5, microbatches=6), orders, st.data())
def test_after_a_failure_at_any_moment_nothing_starts_and_every_worker_drains_once(
    step: Step, order: Order, data: st.DataObject
) -> None:
    undisturbed = explore(step.graph, step.workers, order.chooser(), run_ahead=step.run_ahead)
    moments = st.integers(0, int(undisturbed.span) - 1)
    mishaps = data.draw(st.frozensets(moments, min_size=1, max_size=3))
    history = explore(
        step.graph, step.workers, order.chooser(), run_ahead=step.run_ahead, mishaps=mishaps
    )
    check_ends(history)
    check_inputs_came_first(step.graph, history)
    check_no_weight_changes_before_all_backwards_are_over(step, history)
    assert any(Drained() in worker.commands for worker in history.workers)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(call_graphs(), orders, st.frozensets(st.integers(0, 60), min_size=1, max_size=3))
def test_after_a_failure_in_any_graph_nothing_starts_and_every_worker_drains_once(
    calls: Calls, order: Order, mishaps: frozenset[int]
) -> None:
    history = explore(
        calls.graph, calls.workers, order.chooser(), run_ahead=calls.run_ahead, mishaps=mishaps
    )
    check_ends(history)
    check_inputs_came_first(calls.graph, history)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(
    steps(stages=5, microbatches=6, phases=st.just(Phase.TRAIN)),
    st.sampled_from([Kind.FORWARD, Kind.BACKWARD, Kind.COMMIT]),
    st.data(),
)
def test_a_step_whose_forward_backward_or_commit_fails_changes_no_weight_anywhere(
    step: Step, kind: Kind, data: st.DataObject
) -> None:
    graph = step.graph
    victim = data.draw(st.sampled_from([op for op in graph.ops if op.kind is kind]))
    history = simulate(
        graph,
        step.workers,
        Conditions(message_s=0.3, jitter=0.5, run_ahead=step.run_ahead),
        fails=lambda op: str(op) == str(victim) and op.worker == victim.worker,
    )
    assert not any(worker.order(Kind.UPDATE, Kind.REFRESH) for worker in history.workers)
    assert any(Drained() in worker.commands for worker in history.workers)


# What cannot be


def impossible(worker: WorkerHistory, upto: int) -> list[Event]:
    """Return every event that cannot come after the first `upto` of a history."""
    over: set[int] = set()
    under_way: set[int] = set()
    for handled in worker.handled[:upto]:
        if isinstance(handled.event, Arrived | Finished):
            over.add(handled.event.op)
        under_way |= {c.op for c in handled.commands if isinstance(c, Launch | Transmit)}
    under_way -= over
    events: list[Event] = []
    for index, op in enumerate(worker.program.ops):
        if op.kind not in ARRIVALS or index in over:
            events.append(Arrived(index))
        if index not in under_way:
            events += [Finished(index), Failed(index)]
    return events


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(steps(stages=3, microbatches=3), orders, st.data())
def test_an_impossible_event_tells_the_story_of_its_op_and_changes_nothing(
    step: Step, order: Order, data: st.DataObject
) -> None:
    history = explore(step.graph, step.workers, order.chooser(), run_ahead=step.run_ahead)
    worker = data.draw(st.sampled_from([w for w in history.workers if w.program.ops]))
    upto = data.draw(st.integers(1, len(worker.handled)))
    scheduler = Scheduler(Schedule(worker.program, run_ahead=step.run_ahead))
    answers: list[tuple[Command, ...]] = [tuple(scheduler.start())]
    for place, handled in enumerate(worker.handled[1:], start=1):
        if place == upto:
            refuse_all(scheduler, worker, upto)
        assert handled.event is not None
        answers.append(tuple(scheduler.handle(handled.event)))
    if upto == len(worker.handled):
        refuse_all(scheduler, worker, upto)
    assert answers == [handled.commands for handled in worker.handled]


def refuse_all(scheduler: Scheduler, worker: WorkerHistory, upto: int) -> None:
    for event in impossible(worker, upto):
        assert not isinstance(event, Aborted)
        with pytest.raises(ScheduleError) as caught:
            scheduler.handle(event)
        scheduler.validate()
        told = f"op {event.op} ({worker.program.ops[event.op]}) of worker {worker.program.worker}"
        assert told in str(caught.value)
        assert "waits for" in str(caught.value)
        assert "run going on" in str(caught.value)


# The checks themselves


def test_the_checks_notice_a_scheduler_that_forgets_a_dependency() -> None:
    """One graph is run, and its history held against another, in which one op needs the other."""
    independent, dependent = Graph(Phase.CALLS), Graph(Phase.CALLS)
    for graph, inputs in ((independent, ()), (dependent, (0,))):
        graph.add(Op(Kind.CALL, 0, Stream.COMPUTE))
        graph.add(Op(Kind.CALL, 0, Stream.COMM, inputs=inputs))
    history = explore(independent, 1, lambda n: n - 1)
    check_inputs_came_first(independent, history)
    with pytest.raises(AssertionError):
        check_inputs_came_first(dependent, history)


def test_the_checks_count_microbatches_in_flight() -> None:
    assert most_at_once([(0, 2), (2, 4), (3, 5)]) == 2
    assert most_at_once([(0, 9), (1, 8), (2, 3), (3, 4)]) == 3
    assert most_at_once([]) == 0


def test_microbatches_overlap_where_the_limit_allows_it() -> None:
    shape = StepShape((0, 1), microbatches=8, limit=3)
    step = Step(shape, Phase.TRAIN, workers=2, run_ahead=1)
    assert most_at_once(spans_in_flight(step, simulate(step.graph, 2), 0)) > 1


def test_every_program_of_a_step_has_its_loads_and_receives_and_nothing_else_to_wait_for() -> None:
    shape = StepShape((0, 1, 0), microbatches=3, limit=2)
    for program in split(build_step(shape, Phase.TRAIN), 2).programs.values():
        waiting = [op for op in program.ops if not (*op.inputs, *op.after)]
        assert {op.kind for op in waiting} <= ARRIVALS
