"""Decides which op of a worker starts next; does no I/O, reads no clock, touches no tensor.

The shell (`myelin.runtime.run`) feeds events in and carries the returned commands out. One
`Scheduler` lives for one run of a program; what can be known beforehand is in the `Schedule`, made
once per program.

Theory of operation. Every op counts the inputs that it still waits for. A dependency between two
ops of the same device is met when the earlier one has been *issued*, since the device keeps the
order (within a stream by itself, across streams by the events named in `Launch.after`); every other
dependency is met when the earlier op has *finished*. An op that waits for nothing goes into the
heap of its stream, and leaves it in order of priority as soon as fewer than `run_ahead` ops of that
stream are issued and not finished.

Source: the loop of arXiv 2110.13005, Alg. 2. Departures: when both are ready a backward goes before
a forward, where the paper takes arrival order; sends are ops of their own.
"""

import enum
from heapq import heappop, heappush

import msgspec

from myelin.errors import ScheduleError
from myelin.runtime.graph import ARRIVALS, Kind, Op, Program, Stream, edges


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """The message that `op` (a RECEIVE or a LOAD) stands for is here."""

    op: int


class Finished(msgspec.Struct, frozen=True, gc=False):
    """A launched op is over on its device, or a transmitted message has been taken."""

    op: int


class Failed(msgspec.Struct, frozen=True, gc=False):
    """A launched op raised, or a message could not be delivered; the run ends."""

    op: int


class Aborted(msgspec.Struct, frozen=True, gc=False):
    """The run is to end because of something outside this worker."""


class Launch(msgspec.Struct, frozen=True, gc=False):
    """Issue `op` on `stream`, behind the events of the ops `after` on other streams."""

    op: int
    stream: Stream
    after: tuple[int, ...] = ()


class Transmit(msgspec.Struct, frozen=True, gc=False):
    """Announce and send the message that `op` (a SEND) stands for."""

    op: int


class StepDone(msgspec.Struct, frozen=True, gc=False):
    """Every op of the program is over."""


class Drained(msgspec.Struct, frozen=True, gc=False):
    """The run was ended early and nothing of it is under way any more on this worker."""


Event = Arrived | Finished | Failed | Aborted
Command = Launch | Transmit | StepDone | Drained

_URGENCY = {
    Kind.TIE_GRADIENT: 0,
    Kind.FLATTEN: 0,
    Kind.REDUCE: 0,
    Kind.UNFLATTEN: 0,
    Kind.NORM: 0,
    Kind.COMMIT: 0,
    Kind.UPDATE: 0,
    Kind.REFRESH: 0,
    Kind.BACKWARD: 1,
    Kind.FORWARD: 2,
    Kind.CALL: 2,
}
_STREAMS = tuple(Stream)
_STEP_DONE, _DRAINED = StepDone(), Drained()


class _State(enum.IntEnum):
    WAITING = 0
    READY = 1
    UNDER_WAY = 2
    OVER = 3


_WAITING, _READY, _UNDER_WAY, _OVER = (int(state) for state in _State)


def priority(op: Op, index: int) -> tuple[int, int, int, int]:
    """Return the key by which ready ops of one stream are ordered, the smallest first.

    Backwards go before forwards: they free memory and feed the critical path. Then the lower
    microbatch, then the later stage, then the order of the program.
    """
    microbatch = -1 if op.microbatch is None else op.microbatch
    return _URGENCY.get(op.kind, 0), microbatch, -(op.stage or 0), index


class Schedule:
    """What every run of a program shares: dependency counts, successors, priorities, commands.

    Args:
        program: the worker's ops.
        run_ahead: how many ops a stream may have issued and not finished. 1 decides at the last
            moment, with all that is known; a device whose launches must be hidden needs more.
    """

    def __init__(self, program: Program, *, run_ahead: int = 1) -> None:
        if run_ahead < 1:
            raise ValueError(f"run_ahead={run_ahead}: a stream needs room for at least one op")
        self.program, self.run_ahead = program, run_ahead
        ops = program.ops
        self.waits = [0] * len(ops)
        on_issue: list[list[int]] = [[] for _ in ops]
        on_finish: list[list[int]] = [[] for _ in ops]
        behind: list[list[int]] = [[] for _ in ops]
        for earlier, later in edges(program):
            if ops[later].kind in ARRIVALS:
                raise ValueError(f"op {later} ({ops[later]}) waits for a message and for ops too")
            self.waits[later] += 1
            if _on_device(ops[earlier]) and _on_device(ops[later]):
                on_issue[earlier].append(later)
                if ops[earlier].stream is not ops[later].stream:
                    behind[later].append(earlier)
            else:
                on_finish[earlier].append(later)
        for index, op in enumerate(ops):
            self.waits[index] += op.kind in ARRIVALS  # waits for its own message
        self.on_issue, self.on_finish = [tuple(s) for s in on_issue], [tuple(s) for s in on_finish]
        self.op_of_rank = sorted(range(len(ops)), key=lambda i: priority(ops[i], i))
        self.rank = [0] * len(ops)
        for rank, index in enumerate(self.op_of_rank):
            self.rank[index] = rank
        self.stream = [_STREAMS.index(op.stream) if _on_device(op) else None for op in ops]
        self.command: list[Command] = [
            Launch(i, op.stream, tuple(behind[i])) if _on_device(op) else Transmit(i)
            for i, op in enumerate(ops)
        ]


def _on_device(op: Op) -> bool:
    return op.kind not in ARRIVALS and op.kind is not Kind.SEND


class Scheduler:
    """One run of a program. Call `start` once, then `handle` for every event."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._waits = schedule.waits.copy()
        self._state = bytearray(len(schedule.waits))
        self._ready: list[list[int]] = [[] for _ in _STREAMS]
        self._issued = [0] * len(_STREAMS)
        self._remaining = len(schedule.waits)
        self._under_way = 0
        self._ending = False
        self._told_drained = False

    @property
    def over(self) -> bool:
        """Whether the run is done, or ended early with nothing under way."""
        return not self._remaining or self._told_drained

    def start(self) -> list[Command]:
        """Return what may start at once."""
        commands: list[Command] = []
        for op, count in enumerate(self._schedule.waits):
            if not count:
                self._make_ready(op, commands)
        self._start_next(commands)
        if not self._remaining:
            commands.append(_STEP_DONE)
        return commands

    def handle(self, event: Event) -> list[Command]:
        """Take one event and return what the worker must now do, in order.

        After `Failed` or `Aborted` nothing new starts; messages that still arrive are ignored, and
        `Drained` is returned once all that was under way is over.

        Raises:
            ScheduleError: the event is impossible; for example an op finishes that was not started.
        """
        kind = type(event)
        if kind is Finished:
            return self._finish(event.op)  # type: ignore[union-attr]
        if kind is Arrived:
            return self._arrive(event.op)  # type: ignore[union-attr]
        if kind is Failed:
            self._end(event.op)  # type: ignore[union-attr]
        self._ending = True
        return self._drained()

    def _arrive(self, op: int) -> list[Command]:
        if self._state[op] != _WAITING or self._schedule.program.ops[op].kind not in ARRIVALS:
            raise ScheduleError(
                f"a message arrived twice, or for an op that takes none: {self.story(op)}"
            )
        if self._ending:
            return []
        commands: list[Command] = []
        self._waits[op] -= 1
        if not self._waits[op]:
            self._state[op] = _OVER
            self._release(op, commands)
        return commands

    def _finish(self, op: int) -> list[Command]:
        self._end(op)
        if self._ending:
            return self._drained()
        commands: list[Command] = []
        self._release(op, commands)
        return commands

    def _end(self, op: int) -> None:
        if self._state[op] != _UNDER_WAY:
            raise ScheduleError(f"an op ended that is not under way: {self.story(op)}")
        self._state[op] = _OVER
        self._under_way -= 1
        stream = self._schedule.stream[op]
        if stream is not None:
            self._issued[stream] -= 1

    def _release(self, op: int, commands: list[Command]) -> None:
        """Count `op` as over and start what waited for it."""
        self._remaining -= 1
        waits = self._waits
        for later in self._schedule.on_finish[op]:
            waits[later] -= 1
            if not waits[later]:
                self._make_ready(later, commands)
        self._start_next(commands)
        if not self._remaining:
            commands.append(_STEP_DONE)

    def _make_ready(self, op: int, commands: list[Command]) -> None:
        stream = self._schedule.stream[op]
        if stream is not None:
            self._state[op] = _READY
            heappush(self._ready[stream], self._schedule.rank[op])
            return
        self._state[op] = _UNDER_WAY  # a SEND: an arrival always waits for its own message
        self._under_way += 1
        commands.append(self._schedule.command[op])

    def _start_next(self, commands: list[Command]) -> None:
        schedule, room = self._schedule, self._schedule.run_ahead
        progress = True
        while progress:
            progress = False
            for stream, ready in enumerate(self._ready):
                while ready and self._issued[stream] < room:
                    op = schedule.op_of_rank[heappop(ready)]
                    self._state[op] = _UNDER_WAY
                    self._under_way += 1
                    self._issued[stream] += 1
                    commands.append(schedule.command[op])
                    for later in schedule.on_issue[op]:
                        self._waits[later] -= 1
                        if not self._waits[later]:
                            self._make_ready(later, commands)
                    progress = True

    def _drained(self) -> list[Command]:
        if self._under_way or self._told_drained:
            return []
        self._told_drained = True
        return [_DRAINED]

    def waiting_for(self, op: int) -> list[int]:
        """Return the ops that `op` still waits for; for reports, not for deciding."""
        inputs = dict.fromkeys(
            (*self._schedule.program.ops[op].inputs, *self._schedule.program.ops[op].after)
        )
        return [i for i in inputs if self._state[i] != _OVER]

    def under_way(self) -> list[int]:
        """Return the ops that are issued and not over."""
        return [op for op, state in enumerate(self._state) if state == _UNDER_WAY]

    def story(self, op: int) -> str:
        """Tell what is known of one op, for an error message."""
        described = self._schedule.program.ops[op]
        state = _State(self._state[op]).name.lower()
        return (
            f"op {op} ({described}) of worker {self._schedule.program.worker} is {state}, "
            f"waits for {self.waiting_for(op)}, run {'ending' if self._ending else 'going on'}"
        )

    def validate(self) -> None:
        """Check the invariants; tests call this after every event.

        Raises:
            ScheduleError: one of them is broken.
        """
        issued = [0] * len(_STREAMS)
        for op, state in enumerate(self._state):
            stream = self._schedule.stream[op]
            if state == _UNDER_WAY and stream is not None:
                issued[stream] += 1
            if self._waits[op] < 0 or (state == _READY and self._waits[op]):
                raise ScheduleError(f"wrong count of inputs: {self.story(op)}")
        over = self._state.count(_OVER)
        if issued != self._issued or max(issued) > self._schedule.run_ahead:
            raise ScheduleError(f"issued per stream {self._issued}, counted {issued}")
        if not self._ending and over != len(self._state) - self._remaining:
            raise ScheduleError(
                f"{over} ops over, {self._remaining} remaining of {len(self._state)}"
            )
