"""A worker: takes the coordinator's orders and its neighbours' messages, one run after another.

The shell around `ActiveRun`; it decides nothing about ops. Runs and requests stand in one queue and
are carried out in the order in which they came, so that weights collected after a step are the
weights after that step.
"""

import asyncio
import collections
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import msgspec

from myelin.errors import FrameError
from myelin.runtime import messages as m
from myelin.runtime.blackbox import BlackBox
from myelin.runtime.courier import Courier
from myelin.runtime.devices.port import Device, Outcome
from myelin.runtime.graph import COORDINATOR, Kind, Op
from myelin.runtime.holdings import Holdings, Request
from myelin.runtime.jitter import Delays
from myelin.runtime.mailbox import Mailbox
from myelin.runtime.run import CANCELLED, ActiveRun, failure_of
from myelin.transports.datapath import DataPath

_REMEMBERED_RUNS = 1024


class ControlBus(Protocol):
    """What a worker needs of its bus."""

    def admit(self, peer: int, incarnation: str) -> None:
        """Accept frames of this incarnation of `peer`."""
        ...

    def connect(self, peer: int, address: str) -> None:
        """Make the outbox to `peer`."""
        ...

    def send(self, peer: int, message: msgspec.Struct) -> None:
        """Send without blocking."""
        ...


class Worker:
    """One worker. All methods run on its event loop.

    Args:
        index: its number; it is also its node.
        bus: connected to the coordinator already; whoever made it hands messages to `receive`.
        path: the data path; closed by whoever made it.
        device: where ops run; closed by whoever made it.
        delays: delays to inject.
        local_calls: callables of the same process, by name.
        on_shutdown: called when the coordinator wants this worker to end.
        black_box: told what is running, where the worker is a process of its own.
    """

    def __init__(
        self,
        index: int,
        *,
        bus: ControlBus,
        path: DataPath,
        device: Device,
        delays: Delays,
        local_calls: Mapping[str, Callable[..., Any]],
        on_shutdown: Callable[[], None],
        black_box: BlackBox | None = None,
    ) -> None:
        self.index, self.device, self.delays = index, device, delays
        self.black_box = black_box
        self._bus = bus
        self._courier = Courier(send=self._send, path=path, deliver=self._deliver, delays=delays)
        self._holdings = Holdings(
            run_ahead=device.run_ahead, local_calls=local_calls, black_box=black_box
        )
        self._known = {index}  # nodes that need no introduction
        self._inboxes: dict[int, str] = {}  # peers to whom nothing was sent yet
        self._queue: collections.deque[m.Start | Request] = collections.deque()
        self._active: ActiveRun | None = None
        self._requesting = self._closed = False
        self._mailbox = Mailbox()
        self._updated: dict[int, bool] = {}  # runs that are over, the latest ones
        self._assigned: dict[int, asyncio.Future[Any]] = {}
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            m.Announce: self._announced,
            m.Peers: self._learn_peers,
            m.Abort: self._abort,
            m.Cancel: self._cancel,
            m.Watch: self._watch,
            m.Shutdown: lambda _peer, _message: on_shutdown(),
        }

    # What the bus tells

    def receive(self, peer: int, message: msgspec.Struct) -> None:
        """Take one message from the bus."""
        if peer != COORDINATOR and not isinstance(message, m.Announce):
            text = f"worker {peer} sent a {type(message).__name__}: that is not a worker's to say"
            self.fault(FrameError(text, peer=peer, reason="unknown"))
        elif not self._closed:
            self._handlers.get(type(message), self._enqueue)(peer, message)

    def close(self) -> None:
        """End what is under way and take nothing new; an op that is running runs to its end."""
        self._queue.clear()
        if self._active is not None:
            self._active.abort()
        self._closed = True

    def fault(self, error: FrameError) -> None:
        """Pass a bad frame on to the coordinator, which owns all peers; strangers only count."""
        if error.peer is not None:
            self._tell(m.PeerFault(error.peer, error.reason, str(error)))

    # What a run needs (the protocol `Outside`)

    def report(self, message: m.RunDone | m.RunFailed | m.RunDrained | m.ValueGone) -> None:
        """Tell the coordinator."""
        self._tell(message)

    def _tell(self, message: msgspec.Struct) -> None:
        if not self._closed:
            self._bus.send(COORDINATOR, message)

    def post(
        self, peer: int, value: Any, *, purpose: m.Purpose, key: tuple[int, int], label: str
    ) -> asyncio.Future[None]:
        """See `Courier.post`."""
        return self._courier.post(peer, value, purpose=purpose, key=key, label=label)

    def ended(self, run: int, *, updated: bool) -> None:
        """Take note that the active run is over; the next in the queue begins."""
        self._remember(run, updated=updated)
        self._mailbox.end(run)
        self._active = None
        asyncio.get_running_loop().call_soon(self._next)

    # The queue

    def _enqueue(self, _peer: int, message: Any) -> None:
        self._queue.append(message)
        self._next()

    def _next(self) -> None:
        while self._queue and self._active is None and not (self._requesting or self._closed):
            message = self._queue.popleft()
            if isinstance(message, m.Start):
                self._begin(message)
            else:
                self._request(message)

    def _begin(self, start: m.Start) -> None:
        installed = self._holdings.programs.get(start.program)
        if installed is None:
            text = f"program {start.program} is not on worker {self.index}: it was discarded"
            failure = m.Failure(m.Cause.OP, "KeyError", text, "", kind="start")
            self.report(m.RunFailed(start.run, failure))
            self._remember(start.run, updated=False)
            return
        self._active = run = ActiveRun(start, installed, self)
        run.begin()
        for op, value in self._mailbox.take(start.run):
            self._hand_on(run, op, value, None)

    def _request(self, message: Request) -> None:
        self._requesting = True
        if not isinstance(message, m.Assign):
            self._carry_out(message, None)
            return
        coming = self._assigned[message.request]
        coming.add_done_callback(partial(self._assign, message))

    def _assign(self, message: m.Assign, coming: asyncio.Future[Any]) -> None:
        del self._assigned[message.request]
        if coming.cancelled():
            return
        error = coming.exception()
        if error is None:
            self._carry_out(message, coming.result())
        else:
            self._answer(message, Outcome(None, error, 0.0, 0.0))

    def _carry_out(self, message: Request, value: Any) -> None:
        """Carry a request out on the compute thread, where nothing else runs meanwhile."""
        self.device.launch(
            Op(Kind.CALL, self.index),
            partial(self._holdings.carry_out, message, value),
            after=(),
            done=partial(self._answer, message),
        )

    def _answer(self, message: Request, outcome: Outcome) -> None:
        kind = type(message).__name__.lower()
        if outcome.error is not None:
            self._tell(m.Refused(message.request, failure_of(outcome.error, kind)))
        elif isinstance(outcome.value, msgspec.Struct):
            self._tell(outcome.value)
        else:
            self._reply(message.request, outcome.value, kind)
            return
        self._go_on()

    def _reply(self, request: int, value: Any, kind: str) -> None:
        try:
            sent = self.post(
                COORDINATOR, value, purpose=m.Purpose.REPLY, key=(request, 0), label=kind
            )
        except Exception as error:  # noqa: BLE001 - a value that cannot travel is the answer
            self._tell(m.Refused(request, failure_of(error, kind)))
            self._go_on()
        else:
            sent.add_done_callback(self._replied)  # until then the tensors must not change

    def _replied(self, sent: asyncio.Future[None]) -> None:
        if not sent.cancelled():
            sent.exception()  # the coordinator has noticed: it waits for the tensors
            self._go_on()

    def _go_on(self) -> None:
        self._requesting = False
        self._next()

    # Orders that do not wait in the queue

    def _learn_peers(self, _peer: int, message: m.Peers) -> None:
        for peer in message.peers:
            if peer.node not in self._known:  # the cluster may have grown since it last told
                self._known.add(peer.node)
                self._bus.admit(peer.node, peer.incarnation)
                self._inboxes[peer.node] = peer.inbox
        self._tell(m.Done(message.request))

    def _abort(self, _peer: int, message: m.Abort) -> None:
        run = message.run
        if self._active is not None and self._active.run == run:
            self._active.abort()
            return
        self._unqueue(run)
        self._tell(m.RunDrained(run, self._updated.get(run, False)))

    def _cancel(self, _peer: int, message: m.Cancel) -> None:
        if self._active is not None and self._active.run == message.run:
            self._active.cancel()
        elif message.run not in self._updated:
            self._unqueue(message.run)  # it must not begin before the order to abort it is here
            self._tell(m.RunFailed(message.run, CANCELLED))

    def _unqueue(self, run: int) -> None:
        """Take a run that has not begun out of the queue, if it is there."""
        for queued in self._queue:
            if isinstance(queued, m.Start) and queued.run == run:
                self._queue.remove(queued)
                self._mailbox.skip(run)
                self._remember(run, updated=False)
                return

    def _watch(self, _peer: int, message: m.Watch) -> None:
        if self._active is not None and self._active.run == message.run:
            self._active.watch(message.op)
            return
        for index, queued in enumerate(self._queue):
            if isinstance(queued, m.Start) and queued.run == message.run:
                watch = (*queued.watch, message.op)
                self._queue[index] = msgspec.structs.replace(queued, watch=watch)
                return
        self._tell(m.ValueGone(message.run, message.op))

    def _remember(self, run: int, *, updated: bool) -> None:
        self._updated[run] = updated
        if len(self._updated) > _REMEMBERED_RUNS:
            del self._updated[next(iter(self._updated))]

    # Messages of the data path

    def _announced(self, peer: int, message: m.Announce) -> None:
        if message.purpose is m.Purpose.REPLY:
            self._assigned[message.key[0]] = asyncio.get_running_loop().create_future()
        self._courier.announced(peer, message)

    def _deliver(
        self, _peer: int, message: m.Announce, value: Any, error: BaseException | None
    ) -> None:
        number, op = message.key
        if message.purpose is m.Purpose.REPLY:
            waiting = self._assigned[number]
            waiting.set_result(value) if error is None else waiting.set_exception(error)
        elif self._active is not None and self._active.run == number:
            self._hand_on(self._active, op, value, error)
        elif error is None:
            self._mailbox.hold(number, op, value)
        else:
            self._tell(m.RunFailed(number, failure_of(error, "receive")))

    def _hand_on(self, run: ActiveRun, op: int, value: Any, error: BaseException | None) -> None:
        if not run.expects(op):
            text = f"a message came for op {op} of run {run.run}, which expects none (any more)"
            self._tell(m.PeerFault(None, "unknown", text))
        elif error is None:
            run.arrived(op, value)
        else:
            run.lost(op, error)

    def _send(self, peer: int, message: msgspec.Struct) -> None:
        """Send, making the outbox at the first message to a peer."""
        if self._closed:
            return
        inbox = self._inboxes.pop(peer, None)
        if inbox is not None:
            self._bus.connect(peer, inbox)
        self._bus.send(peer, message)
