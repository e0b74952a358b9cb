"""Handles of runs: what a caller awaits, and what a finished run reports."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from myelin.errors import RunCancelled
from myelin.runtime.graph import Graph, Kind, Op, Split


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a finished run reports.

    Attributes:
        outputs: small results of all workers, for example the loss.
        elapsed_s: seconds to the last worker's end, from the first order or, if that was later,
            from the end of the run before it in its queue: runs share out the time.
        busy_s: for each worker that took part, seconds its compute stream was busy.
    """

    outputs: dict[str, float]
    elapsed_s: float
    busy_s: dict[int, float]

    @property
    def idle_fraction(self) -> float:
        """Share of the workers' time during which their compute streams did nothing."""
        if not self.busy_s or not self.elapsed_s:
            return 0.0
        share = sum(self.busy_s.values()) / (len(self.busy_s) * self.elapsed_s)
        return max(0.0, 1.0 - share)


@dataclass(frozen=True, slots=True)
class InstalledProgram:
    """A program that all workers have, as the coordinator knows it.

    Attributes:
        number: its number on all workers.
        graph: the whole graph.
        split: how it was cut.
        names: what its CALL ops call, by slot, in words.
    """

    number: int
    graph: Graph
    split: Split
    names: tuple[str, ...] = ()

    @property
    def participants(self) -> tuple[int, ...]:
        """Workers that have at least one op."""
        return tuple(w for w, program in self.split.programs.items() if program.ops)

    @property
    def committer(self) -> int | None:
        """The worker that commits its runs, or None if they need no commit."""
        return next((op.worker for op in self.graph.ops if op.kind is Kind.COMMIT), None)

    def loads(self) -> list[tuple[int, int, int]]:
        """Return (slot, worker, local index) of every LOAD."""
        return [
            (op.slot, *self.split.place[index])
            for index, op in enumerate(self.graph.ops)
            if op.kind is Kind.LOAD
        ]

    def op(self, worker: int, local: int) -> Op | None:
        """Return one op by its place, if there is such a place."""
        ops = self.split.programs[worker].ops
        return ops[local] if 0 <= local < len(ops) else None

    def called(self, worker: int, op: Op | None) -> str | None:
        """Return the name of what a CALL calls, or of what made the value that a SEND sends."""
        if op is not None and op.kind is Kind.SEND and op.inputs:
            op = self.op(worker, op.inputs[0])
        return self.names[op.slot] if op is not None and op.kind is Kind.CALL else None


@dataclass(slots=True, eq=False)
class Run:
    """One run of a program: created queued, then in flight, then over.

    Attributes:
        number: its number, or 0 as long as it is queued.
        program: what runs.
        step: the trainer's step number.
        inputs: for each slot the value to load.
        done: its report; fails with the error that ended it.
        settled: set once no worker has anything of it under way.
    """

    program: InstalledProgram
    step: int
    inputs: dict[int, Any]
    request_cancel: Callable[["Run"], None]
    request_value: Callable[["Run", int, int], None]
    number: int = 0
    done: asyncio.Future[RunReport] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    began_s: float = 0.0
    error: BaseException | None = None  # looking at `done` would count as having seen it
    on_failure: Callable[[], None] = lambda: None  # called at once, before anybody is woken
    torn: bool = False
    reports: dict[int, Any] = field(default_factory=dict)
    drained: set[int] = field(default_factory=set)
    values: dict[tuple[int, int], asyncio.Future[Any]] = field(default_factory=dict)

    def cancel(self) -> None:
        """Ask for the run to be ended; `done` then fails with `RunCancelled`, if not too late."""
        self.request_cancel(self)

    def value(self, index: int) -> asyncio.Future[Any]:
        """Return the future value of the graph's op `index`; the value belongs to the caller.

        Each call returns a future of its own: cancelling one leaves the others alone. Ask before
        the run is dispatched, that is in the same tick of the event loop in which the run was
        submitted, or the value may be gone already.
        """
        return view(self.want(index))

    def want(self, index: int) -> asyncio.Future[Any]:
        """Ask for the value of the graph's op `index`; the future is shared by all who do."""
        place = self.program.split.place[index]
        known = self.values.get(place)
        if known is None:
            known = self.values[place] = asyncio.get_running_loop().create_future()
            if self.error is not None:
                known.set_exception(self.error)
                known.exception()
            elif self.number:
                self.request_value(self, *place)
        return known

    def fail(self, error: BaseException) -> None:
        """End `done` and all values with `error`; later calls change nothing."""
        if not self.done.done():
            self.error = error
            self.done.set_exception(error)
            self.on_failure()
        for value in self.values.values():
            if not value.done():
                value.set_exception(error)
                value.exception()  # `done` carries it; a value nobody awaits needs no warning

    def follow(self, error: BaseException) -> None:
        """Fail because of what somebody else is told of; nobody needs to look at this run."""
        if not self.done.done():
            self.fail(error)
            self.done.exception()

    def cancelled_error(self) -> RunCancelled:
        """Return the error of a run that was cancelled."""
        return RunCancelled(f"run {self.number or '(queued)'} was cancelled; no weight was changed")


def view(future: "asyncio.Future[Any]") -> "asyncio.Future[Any]":
    """Return a future with the same outcome for one caller, who may cancel it or forget it."""
    own = asyncio.shield(future)
    own.add_done_callback(look_at)
    return own


def look_at(future: "asyncio.Future[Any]") -> None:
    """Look at an outcome, so that asyncio does not warn that nobody did."""
    if not future.cancelled():
        future.exception()


def resolve(waiting: "asyncio.Future[Any] | None", value: Any, error: BaseException | None) -> None:
    """Give a future its outcome, if there is one that still waits."""
    if waiting is None or waiting.done():
        return
    if error is None:
        waiting.set_result(value)
    else:
        waiting.set_exception(error)
