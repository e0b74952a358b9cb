"""Drives the real schedulers of all workers of a graph, without a process, a thread or a tensor.

Ops run on virtual devices and messages travel over a virtual FIFO network, all on one virtual
clock: durations, latency and seeded jitter decide what happens next, and the same seed gives the
same history. Every scheduler's invariants are checked after every event. As with real workers, what
was issued and not begun before a failure is skipped, and all other workers are told to abort.
`myelin.testing.exploration` has the same workers without a clock.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
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


class Planted(Exception):
    """An op was told to fail."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How one op went; times are seconds, and in `explore` the number of events so far.

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
    """Return the durations of a step whose stages are all alike; other ops take no time."""
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
        validate_every: a scheduler's invariants are checked after so many of its events; a check
            looks at every op, so programs of thousands of ops may not want one each time.
    """

    duration_s: Callable[[Op], float] = field(default_factory=durations)
    message_s: float = 0.0
    jitter: float = 0.0
    seed: int = 0
    run_ahead: int = 1
    validate_every: int = 1


def simulate(
    graph: Graph,
    workers: int,
    conditions: Conditions | None = None,
    *,
    fails: Callable[[Op], bool] = lambda op: False,
) -> History:
    """Run a graph once in virtual time; the same arguments give the same history.

    Args:
        graph: what to run.
        workers: on how many workers.
        conditions: how long things take; by default a forward takes 1 s, a backward 2 s, and a
            message no time.
        fails: asked of each op when its time on the device is over, whether it raises.

    Raises:
        ScheduleError: a scheduler broke an invariant.
        Stuck: not all workers ended.
    """
    machine = _Timed(split(graph, workers), conditions or Conditions(), fails)
    return machine.run()


class Machine(Protocol):
    """What carries out the commands of all workers; must not call back before it returns."""

    def now(self) -> float:
        """Return the time."""
        ...

    def launch(self, worker: "Shell", launch: Launch) -> None:
        """Queue an op on its stream; later the worker is told `finished` or `failed`."""
        ...

    def transmit(self, worker: "Shell", op: int) -> None:
        """Send a message; later the peer is told `arrived`, the worker `finished` or `failed`."""
        ...


class Shell:
    """A worker: events go to its scheduler, commands to the machine, and all of it into a log.

    Attributes:
        program: what it runs.
        scheduler: a real one.
        ending_since: when it was told of a failure, here or elsewhere, or None.
    """

    def __init__(
        self, program: Program, machine: Machine, *, run_ahead: int, validate_every: int = 1
    ) -> None:
        self.program = program
        self.scheduler = Scheduler(Schedule(program, run_ahead=run_ahead))
        self.ending_since: float | None = None
        self._handled: list[Handled] = []
        self._ran: dict[int, Ran] = {}
        self._issued: dict[int, float] = {}
        self._machine, self._validate_every = machine, validate_every

    def start(self) -> list[int]:
        """Begin the run, and return the ops whose messages come from the coordinator."""
        self._carry_out(None, self.scheduler.start())
        return [index for index, op in enumerate(self.program.ops) if op.kind is Kind.LOAD]

    def arrived(self, op: int) -> None:
        """Take the message that an op stands for."""
        if self.ending_since is None:
            now = self._machine.now()
            self._note(Ran(op, now, now, now))
        self._handle(Arrived(op))

    def finished(self, op: int, started: float | None = None) -> None:
        """Take note that an op is over that began at `started`, by default when it was issued."""
        issued = self._issued[op]
        self._note(Ran(op, issued, issued if started is None else started, self._machine.now()))
        self._handle(Finished(op))

    def failed(self, op: int) -> None:
        """Take note that an op raised, was skipped, or that its message got lost."""
        self._begin_ending()
        self._handle(Failed(op))

    def abort(self) -> None:
        """End the run early, if it is not over yet."""
        if not self.scheduler.over:
            self._begin_ending()
            self._handle(Aborted())

    def history(self, busy: float = 0.0) -> WorkerHistory:
        """Return the log.

        Raises:
            Stuck: the run is not over.
        """
        if not self.scheduler.over:
            left = [op for op in range(len(self.program.ops)) if op not in self._ran]
            stories = "\n".join(self.scheduler.story(op) for op in left[:10])
            raise Stuck(f"nothing can happen any more, and {len(left)} ops are left:\n{stories}")
        return WorkerHistory(self.program, tuple(self._handled), self._ran, busy)

    def target(self, op: int) -> tuple[int, int]:
        """Return the peer of a SEND, and the op there that waits for the message."""
        send = self.program.ops[op]
        assert send.peer is not None
        assert send.target is not None
        return send.peer, send.target

    def _begin_ending(self) -> None:
        if self.ending_since is None:
            self.ending_since = self._machine.now()

    def _note(self, ran: Ran) -> None:
        assert ran.op not in self._ran, f"ran twice: {self.scheduler.story(ran.op)}"
        self._ran[ran.op] = ran

    def _handle(self, event: Event) -> None:
        self._carry_out(event, self.scheduler.handle(event))

    def _carry_out(self, event: Event | None, commands: list[Command]) -> None:
        if not len(self._handled) % self._validate_every:
            self.scheduler.validate()
        now = self._machine.now()
        self._handled.append(Handled(now, event, tuple(commands)))
        for command in commands:
            match command:
                case Launch():
                    self._issued[command.op] = now
                    self._machine.launch(self, command)
                case Transmit():
                    self._issued[command.op] = now
                    self._machine.transmit(self, command.op)


class _Timed:
    """Virtual devices and a virtual network on one clock."""

    def __init__(
        self, programs: Split, conditions: Conditions, fails: Callable[[Op], bool]
    ) -> None:
        self._split, self._conditions, self._fails = programs, conditions, fails
        self._clock = VirtualClock()
        self._random = random.Random(conditions.seed)
        self._workers = {
            node: Shell(
                program,
                self,
                run_ahead=conditions.run_ahead,
                validate_every=conditions.validate_every,
            )
            for node, program in programs.programs.items()
        }
        self._devices = {node: self._device() for node in self._workers}
        self._busy = dict.fromkeys(self._workers, 0.0)
        self._tickets: dict[tuple[int, int], Ticket] = {}
        self._last_arrival: dict[tuple[int, int], float] = {}

    def run(self) -> History:
        for node, worker in self._workers.items():
            for op in worker.start():
                self._clock.at(self._arrival((COORDINATOR, node)), partial(worker.arrived, op))
        self._clock.run()
        histories = (worker.history(self._busy[node]) for node, worker in self._workers.items())
        return History(self._split, tuple(histories))

    def now(self) -> float:
        return self._clock.now_s

    def launch(self, worker: Shell, launch: Launch) -> None:
        node = worker.program.worker
        op = worker.program.ops[launch.op]
        self._tickets[node, launch.op] = self._devices[node].launch(
            op,
            partial(self._work, op),
            after=[self._tickets[node, earlier] for earlier in launch.after],
            done=partial(self._completed, worker, launch.op),
        )

    def transmit(self, worker: Shell, op: int) -> None:
        peer, target = worker.target(op)
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

    def _work(self, op: Op) -> None:
        if self._fails(op):
            raise Planted(str(op))

    def _completed(self, worker: Shell, op: int, outcome: Outcome) -> None:
        if worker.program.ops[op].stream is Stream.COMPUTE:
            self._busy[worker.program.worker] += outcome.ended_s - outcome.started_s
        since = worker.ending_since
        skipped = since is not None and outcome.started_s >= since
        if outcome.error is None and not skipped:
            worker.finished(op, outcome.started_s)
            return
        if since is None:
            for other in self._workers.values():
                self._clock.at(self.now() + self._conditions.message_s, other.abort)
        worker.failed(op)
