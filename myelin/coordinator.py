"""The coordinator: gives orders to workers, follows runs, and turns failures into one exception.

It is not in the path of any op: per run it sends one order to each worker and takes one report from
each. It owns no process and no socket (see `myelin.cluster`).
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from torch import Tensor

from myelin import failures
from myelin.errors import (
    ChannelError,
    ClusterError,
    FrameError,
    MyelinError,
    RunCancelled,
    RunError,
    TransportError,
    ValueReleased,
)
from myelin.lane import Lane, Pause
from myelin.requests import Requests
from myelin.run import InstalledProgram, Run, RunReport, look_at, resolve
from myelin.runtime import messages as m
from myelin.runtime.courier import Courier
from myelin.runtime.graph import Graph, split
from myelin.runtime.jitter import Delays
from myelin.transports.datapath import DataPath

log = logging.getLogger(__name__)

_SUSPICION_S = 2.0  # how long the end of a killed worker may take to become known to us
_LEFT = "the cluster was left while this was under way"
_TORN = (
    "some workers have updated their weights and others have not: the trainer cannot go on; load a "
    "checkpoint or build a new trainer"
)
_RELEASED = (
    "the value was released when its last reader was over; ask for it together with the run: name "
    "the op in `keep`, or call `.op(...)` of a step that was just started, with no `await` between"
)


class Coordinator:
    """Talks to `workers` workers over a bus and a data path that somebody else owns.

    Args:
        workers: how many there are; their nodes are 0 to workers - 1.
        send: sends a control message to a worker.
        path: the data path.
        doing: tells what a lost worker was last doing, as (run, op, block), or None.
    """

    def __init__(
        self,
        workers: int,
        *,
        send: Callable[[int, msgspec.Struct], None],
        path: DataPath,
        doing: Callable[[int], tuple[int, int, int | None] | None],
    ) -> None:
        self.workers, self._send, self._path, self._doing = workers, send, path, doing
        self._courier = Courier(
            send=send, path=path, deliver=self._deliver, delays=Delays(None, -1)
        )
        self._numbers = itertools.count(1)
        self.requests = Requests(send=self._ask, number=self.number)
        self._runs: dict[int, tuple[Run, Lane]] = {}
        self._lanes: list[Lane] = []
        self._outdated: list[InstalledProgram] = []  # to be discarded once no run needs them
        self._values: dict[tuple[int, int, int], asyncio.Future[Any]] = {}  # run, worker, local op
        self._broken: MyelinError | None = None
        self._left = False
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._suspicion: asyncio.TimerHandle | None = None
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            m.Done: self._answered,
            m.Described: self._answered,
            m.Built: self._answered,
            m.Refused: self._refused,
            m.RunDone: self._run_done,
            m.RunFailed: self._run_failed,
            m.RunDrained: self._run_drained,
            m.ValueGone: self._value_gone,
            m.PeerFault: self._peer_fault,
            m.Announce: self._courier.announced,
        }

    def receive(self, worker: int, message: msgspec.Struct) -> None:
        """Take one message from the bus."""
        handler = self._handlers.get(type(message))
        if handler is None:
            text = f"worker {worker} sent a {type(message).__name__}: that is not a worker's to say"
            self.lost(worker, FrameError(text, peer=worker, reason="unknown"))
            return
        handler(worker, message)

    @property
    def broken(self) -> MyelinError | None:
        """Why this cluster can no longer be used, or None."""
        return self._broken

    def number(self) -> int:
        """Return a number that was not given out before."""
        return next(self._numbers)

    # Orders

    async def assign(self, worker: int, trainer: int, weights: dict[str, Tensor]) -> None:
        """Have a worker overwrite weights of a trainer; the tensors must not change meanwhile.

        Raises:
            MyelinError: see `Requests.ask`.
        """
        self.check()
        order = m.Assign(self.number(), trainer)
        self._post(worker, weights, m.Purpose.REPLY, (order.request, 0), "weights")
        await self.requests.ask(worker, order)

    def _ask(self, worker: int, message: msgspec.Struct) -> None:
        self.check()
        self._send(worker, message)

    def tell(self, worker: int, message: msgspec.Struct) -> None:
        """Send an order that has no answer; a broken cluster takes none."""
        if self._broken is not None:
            return
        try:
            self._send(worker, message)
        except TransportError as error:
            self.lost(worker, error)

    def check(self) -> None:
        """Raise what broke this cluster, if anything did.

        Raises:
            ClusterError: with the reason; leave the `async with` block and start a new cluster.
        """
        if not self._loop.is_running() or threading.get_ident() != self._thread:
            raise ClusterError(
                "this cluster belongs to another event loop: use it in the one in which its `async "
                "with` block was entered, and while that runs"
            )
        if self._left:
            raise ClusterError("this cluster was left: use it inside its `async with` block")
        if self._broken is not None:
            raise ClusterError(
                f"this cluster cannot go on: {self._broken}; leave its `async with` block and "
                f"start a new one"
            ) from self._broken

    # Programs and runs

    def install(self, graph: Graph, *, trainer: int) -> InstalledProgram:
        """Cut a trainer's graph and send each worker its program; runs may follow at once."""
        program = InstalledProgram(self.number(), graph, split(graph, self.workers))
        for worker in program.participants:
            body = program.split.programs[worker]
            self.tell(worker, m.Install(self.number(), program.number, body, trainer))
        return program

    async def install_calls(
        self, graph: Graph, calls: Sequence[str], names: Sequence[str]
    ) -> InstalledProgram:
        """Cut a graph of calls and have every worker import what it is to call.

        Args:
            graph: the graph; its CALL ops have indices of `calls` as their slots.
            calls: import paths, or names of what the workers of this process know.
            names: what to call them in errors.

        Raises:
            GraphError: a worker cannot import something.
        """
        parts = split(graph, self.workers)
        program = InstalledProgram(self.number(), graph, parts, tuple(names))
        paths = tuple(calls)
        try:
            await self.requests.ask_all(
                lambda worker, number: m.Install(
                    number, program.number, parts.programs[worker], None, paths
                ),
                program.participants,
            )
        except BaseException:
            self.discard(program)  # others may have it
            raise
        return program

    def discard(self, program: InstalledProgram) -> None:
        """Have all workers forget a program once all runs of it are over."""
        self._outdated.append(program)
        self._tidy()

    def discard_trainer(self, trainer: int, workers: Iterable[int]) -> None:
        """Have workers forget a trainer, or what they have built of it."""
        for worker in workers:
            self.tell(worker, m.Discard(self.number(), trainer=trainer))

    def lane(self, *, limit: int, dependent: bool) -> Lane:
        """Make a queue of runs."""
        lane = Lane(limit=limit, dependent=dependent)
        self._lanes.append(lane)
        return lane

    def retire(self, lane: Lane) -> None:
        """Forget a queue to which no more runs will be added, once it is empty."""
        lane.retired = True
        self._tidy()

    def submit(
        self, lane: Lane, program: InstalledProgram, inputs: dict[int, Any], *, step: int
    ) -> Run:
        """Queue a run; it is dispatched in a later tick of the loop at the earliest.

        The tensors in `inputs` must not change until the run is over.
        """
        self.check()
        if lane.torn is not None:
            raise RunError(_TORN) from lane.torn
        run = Run(program, step, inputs, self._cancel, self._request_value)
        lane.add(run)
        asyncio.get_running_loop().call_soon(self._dispatch, lane)
        return run

    @asynccontextmanager
    async def pause(
        self, lane: Lane, *, after: Awaitable[Any] | None = None
    ) -> AsyncIterator[None]:
        """Run the block between the runs that are queued by now and those that come later.

        Args:
            lane: the queue.
            after: what of it is awaited first, so that its error is raised without delay.

        Raises:
            ClusterError: the cluster broke, or was left, before it came to that.
        """
        pause = Pause()
        lane.add(pause)
        try:
            self._dispatch(lane)
            self.check()
            if after is not None:
                await after
            await pause.reached.wait()
            self.check()
            yield
        finally:
            lane.end(pause)
            self._dispatch(lane)
            self._tidy()

    def _dispatch(self, lane: Lane) -> None:
        while self._broken is None and (run := lane.next()) is not None:
            run.number, run.began_s = self.number(), time.perf_counter()
            self._runs[run.number] = (run, lane)
            for place, value in run.values.items():
                self._values[(run.number, *place)] = value
            for worker in run.program.participants:
                watch = tuple(local for place, local in run.values if place == worker)
                self.tell(worker, m.Start(run.number, run.program.number, run.step, watch))
            self._load(run)

    def _load(self, run: Run) -> None:
        """Send a run its inputs; one that cannot travel ends the run."""
        for slot, worker, local in run.program.loads():
            key, label = (run.number, local), f"load slot={slot}"
            try:
                self._post(worker, run.inputs[slot], m.Purpose.EDGE, key, label)
            except Exception as error:  # noqa: BLE001 - whatever it is, somebody awaits the run
                text = f"input {slot} cannot be sent to worker {worker}: {error}"
                self._end(run, RunError(text))
                break
        run.inputs = {}

    def _post(
        self, worker: int, value: Any, purpose: m.Purpose, key: tuple[int, int], label: str
    ) -> None:
        sent = self._courier.post(worker, value, purpose=purpose, key=key, label=label)
        sent.add_done_callback(lambda sent: self._sent(worker, sent))

    def _sent(self, worker: int, sent: asyncio.Future[None]) -> None:
        error = None if sent.cancelled() else sent.exception()
        if isinstance(error, MyelinError):
            self._suspect(worker, error)

    def _request_value(self, run: Run, worker: int, local: int) -> None:
        if self._broken is not None:
            resolve(run.values[worker, local], None, self._broken)
            return
        self._values[run.number, worker, local] = run.values[worker, local]
        self.tell(worker, m.Watch(run.number, local))

    # Ends of runs

    def _cancel(self, run: Run) -> None:
        for lane in self._lanes:
            later = lane.after(run)
            if self._drop(run, lane, run.cancelled_error()):
                self._end_later(later, lane, "the run before it was cancelled")
                return
        if run.done.done():
            return
        if run.program.committer is not None:
            self.tell(run.program.committer, m.Cancel(run.number))
        else:
            self._end(run, run.cancelled_error())

    def _run_done(self, worker: int, message: m.RunDone) -> None:
        known = self._runs.get(message.run)
        if known is None:
            return
        run, lane = known
        run.reports[worker] = message
        if len(run.reports) == len(run.program.participants) and not run.done.done():
            run.done.set_result(_report(run, lane))
            self._settle(run, lane)

    def _run_failed(self, worker: int, message: m.RunFailed) -> None:
        known, called = self._runs.get(message.run), None
        if known is not None and message.failure.op is not None:
            program = known[0].program
            called = program.called(worker, program.op(worker, message.failure.op))
        error = failures.of_op(worker, message.failure, called)
        if message.failure.cause is m.Cause.CHANNEL:
            self._suspect(worker, error)
        elif known is not None:
            self._end(known[0], error)

    def _end(self, run: Run, error: MyelinError) -> None:
        """Fail a run for its caller at once, and have all workers drop it."""
        if run.done.done() or run.number not in self._runs:
            return
        lane = self._runs[run.number][1]
        if isinstance(error, RunCancelled):
            run.follow(error)
        else:
            run.fail(error)
        self._abort(run)
        self._end_later(lane.after(run), lane, f"the run before it failed: {error}")

    def _end_later(self, runs: Iterable[Run], lane: Lane, why: str) -> None:
        """End runs that build on one that has come to nothing."""
        reason = RunError(f"not run to its end, since {why}")
        for run in runs:
            if not self._drop(run, lane, reason) and not run.done.done():
                run.follow(reason)
                self._abort(run)

    def _abort(self, run: Run) -> None:
        for worker in run.program.participants:
            self.tell(worker, m.Abort(run.number))

    def _run_drained(self, worker: int, message: m.RunDrained) -> None:
        known = self._runs.get(message.run)
        if known is None:
            return
        run, lane = known
        run.torn |= message.updated
        run.drained.add(worker)
        if run.drained >= set(run.program.participants) and run.done.done():
            self._settle(run, lane)  # else the reason is not known yet, and the cluster at its end

    def _settle(self, run: Run, lane: Lane) -> None:
        self._runs.pop(run.number, None)
        lane.settle(run)
        run.settled.set()
        error = run.error
        if error is not None:
            for place in run.values:  # they failed with the run
                self._values.pop((run.number, *place), None)
        if error is not None and run.torn:
            lane.torn = error
            for queued in lane.all():
                self._drop(queued, lane, RunError(_TORN))
        self._dispatch(lane)
        self._tidy()

    def _drop(self, run: Run, lane: Lane, reason: BaseException) -> bool:
        """End a run that is still queued; return whether it was."""
        if not lane.drop(run):
            return False
        run.follow(reason)
        run.settled.set()
        self._tidy()
        return True

    def _tidy(self) -> None:
        """Forget queues and programs that nothing needs any more."""
        self._lanes = [lane for lane in self._lanes if not lane.retired or lane.all()]
        if not self._outdated:
            return
        needed = {run.program.number for lane in self._lanes for run in lane.all()}
        unused = [program for program in self._outdated if program.number not in needed]
        self._outdated = [program for program in self._outdated if program.number in needed]
        for program in unused:
            for worker in program.participants:
                self.tell(worker, m.Discard(self.number(), program=program.number))

    # Values and answers

    def _deliver(
        self, peer: int, message: m.Announce, value: Any, error: BaseException | None
    ) -> None:
        number, op = message.key
        if isinstance(error, ChannelError):
            self._suspect(peer, error)  # nothing will come through that channel any more
        if message.purpose is m.Purpose.REPLY:
            self.requests.answer(peer, number, value, error)
        else:
            resolve(self._values.pop((number, peer, op), None), value, error)

    def _value_gone(self, worker: int, message: m.ValueGone) -> None:
        waiting = self._values.pop((message.run, worker, message.op), None)
        resolve(waiting, None, ValueReleased(_RELEASED))

    def _answered(self, worker: int, message: m.Done | m.Described | m.Built) -> None:
        self.requests.answer(worker, message.request, message)

    def _refused(self, worker: int, message: m.Refused) -> None:
        error = failures.of_op(worker, message.failure)
        if not self.requests.answer(worker, message.request, None, error):
            self.lost(worker, error)  # an order that must not fail, such as an Install, has failed

    # Failures of nodes

    def _peer_fault(self, worker: int, message: m.PeerFault) -> None:
        text = f"worker {worker} got a bad frame: {message.text}"
        self.lost(worker, FrameError(text, peer=message.peer, reason=message.reason))

    def worker_ended(self, worker: int, how: str) -> None:
        """Take note that a worker is gone: every run ends with `WorkerLost`."""
        doing = self._doing(worker)
        error = failures.of_worker(worker, how, None)
        if doing is not None and doing[0] in self._runs:
            run, local, block = doing
            program = self._runs[run][0].program
            op = program.op(worker, local)
            called = program.called(worker, op)
            error = failures.of_worker(worker, how, op, block=block, called=called)
        self.lost(worker, error)

    def _suspect(self, worker: int, error: MyelinError) -> None:
        """End everything with `error` soon, unless it turns out meanwhile which worker is gone.

        Neighbours of a killed worker may notice before we do, and cannot tell what became of it.
        """
        if self._suspicion is None:
            loop = asyncio.get_running_loop()
            self._suspicion = loop.call_later(_SUSPICION_S, self.lost, worker, error)

    def lost(self, worker: int, error: MyelinError) -> None:
        """End everything with `error`: without this worker the cluster cannot go on."""
        if self._broken is not None:
            return
        log.warning("the cluster cannot go on: %s", error)  # in case nobody awaits anything
        self._break(error)
        self._path.drop(worker, str(error))

    def under_way(self) -> int:
        """Return how many runs are not over."""
        return sum(not run.done.done() for lane in self._lanes for run in lane.all())

    def close(self) -> None:
        """End what is not over, since the cluster is being left."""
        self._left = True
        if self._broken is None:
            self._break(ClusterError(_LEFT))

    def _break(self, error: MyelinError) -> None:
        self._broken = error
        if self._suspicion is not None:
            self._suspicion.cancel()
        for run in [run for lane in self._lanes for run in lane.all()]:
            run.follow(error)
            run.settled.set()
        for pause in [pause for lane in self._lanes for pause in lane.pauses()]:
            pause.reached.set()
        for waiting in self._values.values():
            resolve(waiting, None, error)
            look_at(waiting)  # whoever awaits it has it; nobody else needs a warning
        self.requests.fail(error)
        self._runs.clear()
        self._values.clear()


def _report(run: Run, lane: Lane) -> RunReport:
    began_s, lane.over_s = max(run.began_s, lane.over_s), time.perf_counter()
    outputs: dict[str, float] = {}
    for report in run.reports.values():
        outputs |= report.outputs
    busy_s = {worker: report.busy_s for worker, report in sorted(run.reports.items())}
    return RunReport(outputs, lane.over_s - began_s, busy_s)
