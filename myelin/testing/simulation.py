"""Drives the real schedulers of all workers of a graph, without a process, a thread or a tensor.

`simulate` runs ops on virtual devices and messages over a virtual FIFO network, all on one virtual
clock: durations, latency and seeded jitter decide what happens next. `explore` has no clock: at
every moment the caller chooses among all that can happen, and messages may overtake each other.
Both check every scheduler's invariants after every event. They behave as a worker's shell does:
what was issued and not begun before a failure is skipped, and all other workers are told to abort.
"""

import random
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from myelin.runtime.devices.port import Outcome, Ticket
from myelin.runtime.devices.virtual import VirtualClock, VirtualDevice
from myelin.runtime.graph import COORDINATOR, Graph, Kind, Op, Program, Split, Stream, split
from myelin.runtime.scheduler import (
    Aborted,
    Arrived,
    Command,
    Event,
    Failed,
    Finished,
    Launch,
    Schedule,
    Scheduler,
    Transmit,
)


class Stuck(AssertionError):
    """Nothing can happen any more, and some workers are not done."""


class Planted(Exception):  # noqa: N818 - stands for whatever a user's op may raise
    """An op was told to fail, or was skipped behind one that did."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How one op went; times are seconds in `simulate`, and numbers of events in `explore`.

    Attributes:
        op: its index in the worker's program.
        issued: when the scheduler ordered it, or when the message arrived that it stands for.
        started: when it was the turn of it on its device; for messages the same as `issued`.
        ended: when the scheduler was told that it is over.
    """

    op: int
    issued: float
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class Handled:
    """One event, None for the start, and what the scheduler answered."""

    at: float
    event: Event | None
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class WorkerHistory:
    """What happened on one worker.

    Attributes:
        program: what it ran.
        handled: all events, in order.
        ran: the ops that were not cut short, in the order in which they ended.
        busy: for how long its compute stream was busy; 0 in `explore`.
    """

    program: Program
    handled: tuple[Handled, ...]
    ran: dict[int, Ran]
    busy: float

    @property
    def commands(self) -> list[Command]:
        """All commands, in order."""
        return [command for handled in self.handled for command in handled.commands]

    def order(self, *kinds: Kind) -> list[Op]:
        """Return the ops of these kinds in the order in which they ended."""
        ops = (self.program.ops[index] for index in self.ran)
        return [op for op in ops if op.kind in kinds]


@dataclass(frozen=True, slots=True)
class History:
    """What happened on all workers."""

    split: Split
    workers: tuple[WorkerHistory, ...]

    @property
    def span(self) -> float:
        """When the last op ended."""
        return max((ran.ended for worker in self.workers for ran in worker.ran.values()), default=0)

    def ran(self, index: int) -> Ran | None:
        """Return how the op of this index in the graph went, or None if it did not or failed."""
        worker, local = self.split.place[index]
        return self.workers[worker].ran.get(local)


def durations(*, forward_s: float = 1.0, backward_s: float = 2.0) -> Callable[[Op], float]:
    """Return durations for a step whose stages are all alike; other ops take no time."""
    by_kind = {Kind.FORWARD: forward_s, Kind.BACKWARD: backward_s}
    return lambda op: by_kind.get(op.kind, 0.0)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What `simulate` assumes of devices and network.

    Attributes:
        duration_s: of each op.
        message_s: how long a message takes.
        jitter: each of these times is multiplied by a number drawn from 1 - jitter to 1 + jitter.
        seed: of the jitter.
        run_ahead: see `Schedule`.
    """

    duration_s: Callable[[Op], float] = durations()
    message_s: float = 0.0
    jitter: float = 0.0
    seed: int = 0
    run_ahead: int = 1


def simulate(
    graph: Graph,
    workers: int,
    conditions: Conditions = Conditions(),  # noqa: B008 - frozen
    *,
    fails: Callable[[Op], bool] = lambda op: False,
) -> History:
    """Run a graph once in virtual time; the same arguments give the same history.

    Args:
        graph: what to run.
        workers: on how many workers.
        conditions: how long things take.
        fails: asked of each op when its time on the device is over, whether it raises.

    Raises:
        ScheduleError: a scheduler broke an invariant.
        Stuck: not all workers ended.
    """
    machine = _Timed(split(graph, workers), conditions, fails)
    return machine.run()


def explore(
    graph: Graph,
    workers: int,
    choose: Callable[[int], int],
    *,
    run_ahead: int = 1,
    mishaps: Collection[int] = (),
) -> History:
    """Run a graph once in an order that the caller chooses among all that are possible.

    Args:
        graph: what to run.
        workers: on how many workers.
        choose: given n, returns which of the n things that are possible happens, the oldest being 0.
        run_ahead: see `Schedule`.
        mishaps: numbers of events that are not to go well: an op fails that is running or under
            way to a peer, or a worker is told to abort; `choose` says which.

    Raises:
        ScheduleError: a scheduler broke an invariant.
        Stuck: not all workers ended.
    """
    machine = _Chosen(split(graph, workers), choose, run_ahead, mishaps)
    return machine.run()


class _Machine(Protocol):
    """What carries out the commands of all workers; must not call back before it returns."""

    def now(self) -> float: ...

    def launch(self, worker: "_Worker", launch: Launch) -> None: ...

    def transmit(self, worker: "_Worker", op: int) -> None: ...


class _Worker:
    """A worker's shell: hands events to its scheduler and commands to the machine; keeps the log."""

    def __init__(self, program: Program, run_ahead: int, machine: _Machine) -> None:
        self.program = program
        self.scheduler = Scheduler(Schedule(program, run_ahead=run_ahead))
        self.ending = False
        self.handled: list[Handled] = []
        self.ran: dict[int, Ran] = {}
        self._issued: dict[int, float] = {}
        self._machine = machine

    def start(self) -> None:
        self._carry_out(None, self.scheduler.start())

    def arrived(self, op: int) -> None:
        if not self.ending:
            now = self._machine.now()
            self._note(Ran(op, now, now, now))
        self._handle(Arrived(op))

    def finished(self, op: int, started: float | None = None) -> None:
        issued = self._issued[op]
        begun = issued if started is None else started
        self._note(Ran(op, issued, begun, self._machine.now()))
        self._handle(Finished(op))

    def failed(self, op: int) -> None:
        self.ending = True
        self._handle(Failed(op))

    def abort(self) -> None:
        if not self.scheduler.over:
            self.ending = True
            self._handle(Aborted())

    def history(self, busy: float = 0.0) -> WorkerHistory:
        return WorkerHistory(self.program, tuple(self.handled), self.ran, busy)

    def _note(self, ran: Ran) -> None:
        if ran.op in self.ran:
            raise AssertionError(f"ran twice: {self.scheduler.story(ran.op)}")
        self.ran[ran.op] = ran

    def _handle(self, event: Event) -> None:
        self._carry_out(event, self.scheduler.handle(event))

    def _carry_out(self, event: Event | None, commands: list[Command]) -> None:
        self.scheduler.validate()
        now = self._machine.now()
        self.handled.append(Handled(now, event, tuple(commands)))
        for command in commands:
            match command:
                case Launch():
                    self._issued[command.op] = now
                    self._machine.launch(self, command)
                case Transmit():
                    self._issued[command.op] = now
                    self._machine.transmit(self, command.op)


def _loads(worker: _Worker) -> list[int]:
    return [index for index, op in enumerate(worker.program.ops) if op.kind is Kind.LOAD]


def _check_all_over(workers: Collection[_Worker]) -> None:
    stuck = [worker for worker in workers if not worker.scheduler.over]
    stories = [
        worker.scheduler.story(op)
        for worker in stuck
        for op in range(len(worker.program.ops))
        if op not in worker.ran
    ]
    if stuck:
        raise Stuck("nothing can happen any more, but:\n" + "\n".join(stories[:10]))


def _ends_of(worker: _Worker, op: int) -> tuple[int, int]:
    """Return the peer of a SEND, and the op there that waits for the message."""
    send = worker.program.ops[op]
    assert send.peer is not None
    assert send.target is not None
    return send.peer, send.target


class _Timed:
    """Virtual devices and a virtual network on one clock."""

    def __init__(
        self, programs: Split, conditions: Conditions, fails: Callable[[Op], bool]
    ) -> None:
        self._split, self._conditions, self._fails = programs, conditions, fails
        self._clock = VirtualClock()
        self._random = random.Random(conditions.seed)
        self._workers = {
            node: _Worker(program, conditions.run_ahead, self)
            for node, program in programs.programs.items()
        }
        self._devices = {node: self._device() for node in self._workers}
        self._busy = dict.fromkeys(self._workers, 0.0)
        self._tickets: dict[tuple[int, int], Ticket] = {}
        self._last_arrival: dict[tuple[int, int], float] = {}

    def run(self) -> History:
        for node, worker in self._workers.items():
            worker.start()
            for op in _loads(worker):
                self._clock.at(
                    self._arrival((COORDINATOR, node)), partial(worker.arrived, op)
                )
        self._clock.run()
        _check_all_over(self._workers.values())
        histories = (worker.history(self._busy[node]) for node, worker in self._workers.items())
        return History(self._split, tuple(histories))

    def now(self) -> float:
        return self._clock.now_s

    def launch(self, worker: _Worker, launch: Launch) -> None:
        node = worker.program.worker
        op = worker.program.ops[launch.op]
        self._tickets[node, launch.op] = self._devices[node].launch(
            op,
            partial(self._work, worker, op),
            after=[self._tickets[node, earlier] for earlier in launch.after],
            done=partial(self._completed, worker, launch.op),
        )

    def transmit(self, worker: _Worker, op: int) -> None:
        peer, target = _ends_of(worker, op)
        arrival = self._arrival((worker.program.worker, peer))
        self._clock.at(arrival, partial(self._workers[peer].arrived, target))
        self._clock.at(arrival, partial(worker.finished, op))

    def _device(self) -> VirtualDevice:
        ahead = self._conditions.run_ahead
        return VirtualDevice(
            self._clock, lambda op: self._jittered(self._conditions.duration_s(op)), run_ahead=ahead
        )

    def _jittered(self, seconds: float) -> float:
        jitter = self._conditions.jitter
        return seconds * self._random.uniform(1 - jitter, 1 + jitter) if jitter else seconds

    def _arrival(self, channel: tuple[int, int]) -> float:
        """Return when a message sent now arrives: not before the one that was sent before it."""
        arrival = self.now() + self._jittered(self._conditions.message_s)
        self._last_arrival[channel] = max(arrival, self._last_arrival.get(channel, 0.0))
        return self._last_arrival[channel]

    def _work(self, worker: _Worker, op: Op) -> None:
        if worker.ending or self._fails(op):
            raise Planted(str(op))

    def _completed(self, worker: _Worker, op: int, outcome: Outcome) -> None:
        node = worker.program.worker
        if worker.program.ops[op].stream is Stream.COMPUTE:
            self._busy[node] += outcome.ended_s - outcome.started_s
        if outcome.error is None:
            worker.finished(op, outcome.started_s)
            return
        if not worker.ending:
            for other in self._workers.values():
                self._clock.at(self.now() + self._conditions.message_s, other.abort)
        worker.failed(op)


@dataclass(frozen=True, slots=True, eq=False)
class _Possible:
    """Something that can happen next, and how it can go wrong, if it can."""

    happens: Callable[[], None]
    fails: Callable[[], None] | None = None


class _Chosen:
    """No clock: whatever is possible may happen next. Time is the number of events so far."""

    def __init__(
        self, programs: Split, choose: Callable[[int], int], run_ahead: int, mishaps: Collection[int]
    ) -> None:
        self._split, self._choose, self._mishaps = programs, choose, mishaps
        self._events = 0
        self._possible: list[_Possible] = []
        self._workers = {
            node: _Worker(program, run_ahead, self) for node, program in programs.programs.items()
        }
        self._lanes = {
            node: {stream: deque[Launch]() for stream in Stream} for node in self._workers
        }
        self._begun: dict[tuple[int, int], float] = {}
        self._completed: set[tuple[int, int]] = set()

    def run(self) -> History:
        for worker in self._workers.values():
            worker.start()
            self._possible += [_Possible(partial(worker.arrived, op)) for op in _loads(worker)]
        while self._possible:
            going_wrong = self._what_can_go_wrong() if self._events in self._mishaps else []
            if going_wrong:
                going_wrong[self._choose(len(going_wrong))]()
            else:
                self._possible.pop(self._choose(len(self._possible))).happens()
            self._events += 1
        _check_all_over(self._workers.values())
        return History(self._split, tuple(worker.history() for worker in self._workers.values()))

    def now(self) -> float:
        return float(self._events)

    def launch(self, worker: _Worker, launch: Launch) -> None:
        stream = worker.program.ops[launch.op].stream
        self._lanes[worker.program.worker][stream].append(launch)
        self._begin_heads(worker)

    def transmit(self, worker: _Worker, op: int) -> None:
        peer, target = _ends_of(worker, op)
        self._possible.append(_Possible(partial(self._workers[peer].arrived, target)))
        taken, lost = partial(worker.finished, op), partial(self._fail, worker, op)
        self._possible.append(_Possible(taken, lost))

    def _begin_heads(self, worker: _Worker) -> None:
        """Begin the first op of every stream of a worker that is not held back by another stream."""
        node = worker.program.worker
        for lane in self._lanes[node].values():
            if not lane or (node, lane[0].op) in self._begun:
                continue
            if all((node, earlier) in self._completed for earlier in lane[0].after):
                self._begun[node, lane[0].op] = self.now()
                skipped = worker.ending
                fail = partial(self._end, worker, lane, failed=True)
                end = fail if skipped else partial(self._end, worker, lane, failed=False)
                self._possible.append(_Possible(end, None if skipped else fail))

    def _end(self, worker: _Worker, lane: deque[Launch], *, failed: bool) -> None:
        op, node = lane.popleft().op, worker.program.worker
        self._completed.add((node, op))
        if failed:
            self._fail(worker, op)
        else:
            worker.finished(op, self._begun[node, op])
        self._begin_heads(worker)

    def _fail(self, worker: _Worker, op: int) -> None:
        if not worker.ending:
            self._abort_others(worker)
        worker.failed(op)

    def _abort_others(self, worker: _Worker) -> None:
        others = [other for other in self._workers.values() if other is not worker]
        self._possible += [_Possible(other.abort) for other in others]

    def _abort(self, worker: _Worker) -> None:
        self._abort_others(worker)
        worker.abort()

    def _what_can_go_wrong(self) -> list[Callable[[], None]]:
        failures = [
            partial(self._go_wrong, possible) for possible in self._possible if possible.fails
        ]
        going_on = [w for w in self._workers.values() if not (w.ending or w.scheduler.over)]
        return [*failures, *(partial(self._abort, worker) for worker in going_on)]

    def _go_wrong(self, possible: _Possible) -> None:
        self._possible.remove(possible)
        assert possible.fails is not None
        possible.fails()
