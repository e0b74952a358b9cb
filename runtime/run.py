"""One run of a program on one worker: carries out the scheduler's commands and feeds events back.

Owns the values of the run: a value is dropped when its last reader is over. Everything here happens
on the worker's event loop, except `_work`, which runs on a thread of the device. No policy: what
starts when is the scheduler's to say.
"""

import asyncio
import logging
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec

from myelin.errors import USER_ERRORS, ChannelError
from myelin.runtime.blackbox import BlackBox
from myelin.runtime.devices.port import Device, Outcome, Ticket
from myelin.runtime.executor import Executor, RunState
from myelin.runtime.graph import ARRIVALS, COORDINATOR, Kind, Op, Stream, readers
from myelin.runtime.jitter import Delays
from myelin.runtime.messages import (
    Cause,
    Failure,
    Purpose,
    RunDone,
    RunDrained,
    RunFailed,
    Start,
    ValueGone,
)
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
)


@dataclass(frozen=True, slots=True)
class Installed:
    """A program that a worker keeps, with what is computed once for all its runs."""

    schedule: Schedule
    executor: Executor
    trainer: int | None
    readers: list[int]

    @staticmethod
    def of(schedule: Schedule, executor: Executor, trainer: int | None) -> "Installed":
        """Prepare a program for running."""
        return Installed(schedule, executor, trainer, readers(schedule.program))


class Outside(Protocol):
    """What a run needs of its worker."""

    @property
    def device(self) -> Device:
        """Where ops run."""
        ...

    @property
    def delays(self) -> Delays:
        """Delays to inject."""
        ...

    @property
    def black_box(self) -> BlackBox | None:
        """Told what is running."""
        ...

    def report(self, message: RunDone | RunFailed | RunDrained | ValueGone) -> None:
        """Tell the coordinator."""
        ...

    def post(
        self, peer: int, value: Any, *, purpose: Purpose, key: tuple[int, int], label: str
    ) -> asyncio.Future[None]:
        """Announce a value to a peer and send its tensors."""
        ...

    def ended(self, run: int, *, updated: bool) -> None:
        """Be told that a run is over here, one way or the other."""
        ...


CANCELLED = Failure(Cause.CANCELLED, "RunCancelled", "the run was cancelled", "", kind="cancel")
log = logging.getLogger(__name__)
_TEXT = 1 << 16  # characters of an exception's text, and of its traceback, that are reported


class _Skipped(Exception):
    """An op was issued behind one that failed; it is not executed."""


class ActiveRun:
    """The run that a worker is at."""

    def __init__(self, start: Start, installed: Installed, outside: Outside) -> None:
        self.run = start.run
        self._installed, self._outside = installed, outside
        program = installed.schedule.program
        self._ops: tuple[Op, ...] = program.ops
        self._scheduler = Scheduler(installed.schedule)
        self._state = RunState(program.phase, start.step, program.microbatches)
        self._values: list[Any] = [None] * len(self._ops)
        self._readers = installed.readers.copy()
        self._over = bytearray(len(self._ops))
        self._tickets: dict[int, Ticket] = {}
        self._watched = set(start.watch)
        self._failed = self._closed = False
        self._busy_s = 0.0

    @property
    def updated(self) -> bool:
        """Whether this run has changed weights on this worker."""
        return self._state.updated

    @property
    def committed(self) -> bool:
        """Whether the run can no longer be undone: its COMMIT, which is here, has started."""
        under_way = self._scheduler.under_way()
        return any(
            op.kind is Kind.COMMIT and (self._over[i] or i in under_way)
            for i, op in enumerate(self._ops)
        )

    def begin(self) -> None:
        """Start what needs nothing."""
        self._carry_out(self._scheduler.start())

    def expects(self, op: int) -> bool:
        """Whether `op` is one of this run's arrivals and has not come yet."""
        return 0 <= op < len(self._ops) and self._ops[op].kind in ARRIVALS and not self._over[op]

    def arrived(self, op: int, value: Any) -> None:
        """Take the message that the arrival op `op` stands for; see `expects`."""
        if self._closed:
            return
        self._values[op] = value
        self._over[op] = True
        self._handle(Arrived(op))

    def lost(self, op: int, error: BaseException) -> None:
        """Take note that the message for `op` will not come."""
        self._fail(op, error, Aborted())

    def abort(self) -> None:
        """End the run because of something elsewhere; reported once nothing is under way."""
        self._failed = True
        self._handle(Aborted())

    def cancel(self) -> None:
        """End the run as failed, for everybody, unless it is committed."""
        if self._closed or self.committed:
            return
        self._tell_failure(CANCELLED)
        self.abort()

    def watch(self, op: int) -> None:
        """Send the value of `op` to the coordinator as soon as it is there."""
        if not self._over[op]:
            self._watched.add(op)
        elif not self._readers[op]:
            self._outside.report(ValueGone(self.run, op))
        else:
            self._send_watched(op)

    def doing(self) -> str:
        """Name the ops that are under way, for reports."""
        return ", ".join(str(self._ops[op]) for op in self._scheduler.under_way())

    def _handle(self, event: Event) -> None:
        if not self._closed:
            self._carry_out(self._scheduler.handle(event))

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Launch():
                    self._launch(command)
                case Transmit():
                    self._transmit(command.op)
                case StepDone():
                    self._done()
                case Drained():
                    self._drained()

    def _launch(self, command: Launch) -> None:
        index = command.op
        self._tickets[index] = self._outside.device.launch(
            self._ops[index],
            partial(self._work, index),
            after=[self._tickets[other] for other in command.after],
            done=partial(self._completed, index),
        )

    def _work(self, index: int) -> Any:
        if self._failed:
            raise _Skipped
        op = self._ops[index]
        inputs = [self._values[i] for i in op.inputs]
        box = self._outside.black_box
        if box is not None:
            box.begin(self.run, index, op.stream)
        self._outside.delays.before_op()
        try:
            value = self._installed.executor.execute(op, self._state, inputs)
        except BaseException:
            self._failed = True  # here, so that what is issued behind this op is skipped
            raise
        finally:
            if box is not None:
                box.end(op.stream)
        self._values[index] = value
        return value

    def _completed(self, index: int, outcome: Outcome) -> None:
        if self._ops[index].stream is Stream.COMPUTE:
            self._busy_s += outcome.ended_s - outcome.started_s
        if outcome.error is not None:
            self._fail(index, outcome.error, Failed(index))
            return
        self._over[index] = True
        if index in self._watched:
            self._send_watched(index)
        self._release(index)
        self._handle(Finished(index))

    def _release(self, index: int) -> None:
        """Drop the values that `index` was the last to read, and its own if nobody reads it."""
        for read in self._ops[index].inputs:
            self._readers[read] -= 1
            if not self._readers[read]:
                self._values[read] = None
        if not self._readers[index]:
            self._values[index] = None

    def _transmit(self, index: int) -> None:
        op = self._ops[index]
        assert op.peer is not None
        assert op.target is not None
        value = self._values[op.inputs[0]] if op.inputs else None
        try:
            sent = self._outside.post(
                op.peer, value, purpose=Purpose.EDGE, key=(self.run, op.target), label=str(op)
            )
        except Exception as error:  # noqa: BLE001 - a value that cannot travel fails the op
            self._fail(index, error, Failed(index))
            return
        sent.add_done_callback(partial(self._sent, index))

    def _sent(self, index: int, sent: asyncio.Future[None]) -> None:
        if sent.cancelled():
            return
        error = sent.exception()
        if error is not None:
            self._fail(index, error, Failed(index))
            return
        self._over[index] = True
        self._release(index)
        self._handle(Finished(index))

    def _send_watched(self, index: int) -> None:
        self._watched.discard(index)
        op = self._ops[index]
        try:
            value = self._installed.executor.present(op, self._values[index])
            sent = self._outside.post(
                COORDINATOR, value, purpose=Purpose.VALUE, key=(self.run, index), label=str(op)
            )
        except Exception as error:  # noqa: BLE001 - a value that cannot travel fails the run
            self._tell_failure(failure_of_op(error, index, op, None))
            self.abort()
            return
        sent.add_done_callback(_forget)

    def _fail(self, index: int, error: BaseException, event: Event) -> None:
        self._failed = True
        if self._closed:
            return
        if not isinstance(error, _Skipped):
            failure = failure_of_op(error, index, self._ops[index], self._state.block)
            self._tell_failure(failure)
        self._handle(event)

    def _tell_failure(self, failure: Failure) -> None:
        self._outside.report(RunFailed(self.run, failure))

    def _done(self) -> None:
        self._close()
        self._outside.report(RunDone(self.run, self._state.outputs, self._busy_s))
        self._outside.ended(self.run, updated=self._state.updated)

    def _drained(self) -> None:
        self._close()
        torn = self._state.updated or not self._undo()
        self._outside.report(RunDrained(self.run, torn))
        self._outside.ended(self.run, updated=torn)

    def _undo(self) -> bool:
        """Undo what the run has left behind; return False if that was not possible."""
        try:
            self._installed.executor.discard(self._state)
        except Exception:
            log.exception("run %d could not be undone; its trainer cannot go on", self.run)
            return False
        return True

    def _close(self) -> None:
        self._closed = True
        self._values = [None] * len(self._ops)
        self._tickets.clear()


def _forget(sent: asyncio.Future[None]) -> None:
    """Look at the outcome, so that asyncio does not log what is noticed elsewhere."""
    if not sent.cancelled():
        sent.exception()


def failure_of_op(error: BaseException, index: int, op: Op, block: int | None) -> Failure:
    """Describe what the op with this index raised."""
    failure = failure_of(error, op.kind.value)
    if op.kind is Kind.CALL or block is not None:  # what the user's code raises is the user's own
        failure = msgspec.structs.replace(failure, cause=Cause.OP)
    return msgspec.structs.replace(
        failure,
        op=index,
        stage=op.stage,
        microbatch=op.microbatch,
        block=block,
    )


def failure_of(error: BaseException, kind: str) -> Failure:
    """Describe an exception so that it can be sent, even if it cannot be put into words."""
    told = traceback.TracebackException.from_exception(error)
    text, trace = _sendable(str(told)), _sendable("".join(told.format()))
    return Failure(_cause(error), type(error).__name__, text, trace, kind)


def _cause(error: BaseException) -> Cause:
    if isinstance(error, ChannelError):
        return Cause.CHANNEL
    return Cause.USER if type(error) in USER_ERRORS else Cause.OP


def _sendable(text: str) -> str:
    """Return a text that is Unicode and not too long; what is cut out is its middle."""
    if len(text) > _TEXT:
        half = _TEXT // 2
        text = f"{text[:half]}\n[{len(text) - _TEXT} characters left out]\n{text[-half:]}"
    return text.encode(errors="backslashreplace").decode()
