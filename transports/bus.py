"""The control bus: one node's sockets driven by its event loop; carries out, decides nothing.

A node has one inbox and one outbox per peer (`myelin.transports.sockets`). Every connection carries
frames one way, numbered from 0, the first of them a `Hello`. What an admitted peer sends is
delivered in order; everything else is counted, logged and handed to the owner, who alone decides
what to do. What a frame means is decided in `myelin.transports.reception`.

The sockets are plain ones, watched with `add_reader`. Their descriptors are edge-triggered, so a
reader takes messages until there are none. An outbox is never read and each socket has a descriptor
of its own: sending cannot use up the inbox's edge, so there is nothing to look for after a send.

libzmq tells of ended connections: a killed peer is seen in about a millisecond. It also ends the
connection of a peer that sends more than twice `max_frame_bytes`, and says no more than that. The
owner hears that the connection was lost and, once the peer is connected again, that frames are
missing.
"""

import asyncio
import contextlib
import functools
import importlib.metadata
import itertools
import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVarTuple

import msgspec
import zmq

from myelin.errors import BackpressureError, FrameError, TransportError
from myelin.transports.frames import PROTOCOL_VERSION, Codec, Goodbye, Heartbeat, Hello
from myelin.transports.peers import Claim, Gone, Presence
from myelin.transports.reception import (
    Answer,
    Deliver,
    Departed,
    Fault,
    Outcome,
    Reception,
    Settled,
)
from myelin.transports.sockets import Context, Inbox, Outbox

log = logging.getLogger(__name__)

_BURST = 64  # messages taken in one turn of the loop
_STALL_BURST = 4096  # messages taken at once before anybody is blamed
_Args = TypeVarTuple("_Args")


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a bus waits and how much it holds.

    Attributes:
        heartbeat_s: time between two heartbeats to each peer.
        silence_s: a peer that was not heard of for so long is reported.
        linger_s: how long ending the context may wait for frames sent just before `close`.
        high_water: frames that may wait in an outbox, and again in an inbox.
    """

    heartbeat_s: float = 1.0
    silence_s: float = 5.0
    linger_s: float = 0.5
    high_water: int = 4096

    def __post_init__(self) -> None:
        if not 0 < 2 * self.heartbeat_s <= self.silence_s:
            raise ValueError(f"{self}: silence_s must be two heartbeats or more, and these above 0")
        if self.linger_s < 0 or self.high_water < 1:
            raise ValueError(f"{self}: linger_s must be 0 or more and high_water 1 or more")


@dataclass(frozen=True, slots=True)
class Counters:
    """What a bus has done so far; `heard_at` is by the bus's clock."""

    frames_in: int
    frames_out: int
    bytes_in: int
    bytes_out: int
    connections_lost: int
    faults: Mapping[str, int]
    heard_at: Mapping[int, float]


_USUAL = Limits()


class Bus:
    """One node's end of the control bus. All is called from the loop that ran `start`.

    Callbacks run on that loop, between two frames, and must not block. What they raise goes to the
    loop's exception handler and stops nothing.

    Args:
        node: this node; -1 is the coordinator.
        incarnation: names this process among all that were ever this node.
        address: where to listen: `inproc://name`, or `ipc:///path` in a directory of mode 0700. An
            address is used once only.
        codec: the messages that may be sent and received.
        context: shared by all who talk over `inproc`; the caller ends it after `close`.
        on_message: called with a peer and a message of the codec's own set.
        on_fault: called with the error of each bad frame, and with a peer's rejection of this node.
        on_hello: asked about a node that is not admitted yet; returns None to admit it, or a reason
            to reject it, which the node is told.
        on_silence: called once with a peer and for how many seconds nothing was heard from it.
        on_gone: called when an admitted peer said goodbye or its connection was lost.
        limits: how long to wait and how much to hold.
        clock: seconds, never going backwards.
    """

    def __init__(
        self,
        *,
        node: int,
        incarnation: str,
        address: str,
        codec: Codec,
        context: Context,
        on_message: Callable[[int, msgspec.Struct], None],
        on_fault: Callable[[FrameError], None],
        on_hello: Callable[[Hello], str | None],
        on_silence: Callable[[int, float], None] = lambda peer, silent_s: None,
        on_gone: Callable[[int, Gone], None] = lambda peer, how: None,
        limits: Limits = _USUAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node, self.incarnation, self.address = node, incarnation, address
        self._identity = Claim(node, incarnation).identity()
        self._codec, self._context, self._limits, self._clock = codec, context, limits, clock
        self._on_message, self._on_fault, self._on_hello = on_message, on_fault, on_hello
        self._on_silence, self._on_gone = on_silence, on_gone
        self._reception = Reception(codec, silence_s=limits.silence_s, judge=self._judge)
        self._news = asyncio.Event()  # set, and replaced, when a handshake has come to its end
        self._rejections = itertools.count()
        self._outboxes: dict[int, Outbox] = {}
        self._used: set[str] = set()
        self._inbox: Inbox | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._beat_due = 0.0
        self._pump_is_due = self._closed = False
        self._faults: Counter[str] = Counter()
        self._frames_in = self._frames_out = self._bytes_in = self._bytes_out = self._lost = 0

    def __repr__(self) -> str:
        now = self._clock()
        state = "closed" if self._closed else "open" if self._inbox else "not started"
        peers = ", ".join(
            f"{peer.node} {peer.presence.name.lower()} {now - peer.heard_at:.1f} s ago"
            for peer in self._reception.roster.peers()
        )
        faults = " ".join(f"{reason}={count}" for reason, count in sorted(self._faults.items()))
        return (
            f"<Bus of node {self.node} at {self.address}: {state}, in {self._frames_in}, "
            f"out {self._frames_out}, peers: {peers or 'none'}, faults: {faults or 'none'}>"
        )

    @property
    def counters(self) -> Counters:
        """A snapshot of what was counted."""
        peers = self._reception.roster.peers()
        return Counters(
            frames_in=self._frames_in,
            frames_out=self._frames_out,
            bytes_in=self._bytes_in,
            bytes_out=self._bytes_out,
            connections_lost=self._lost,
            faults=MappingProxyType(dict(self._faults)),
            heard_at=MappingProxyType({peer.node: peer.heard_at for peer in peers}),
        )

    async def start(self) -> None:
        """Listen at the address and begin to send heartbeats.

        Raises:
            TransportError: the address cannot be used, or the bus was started before.
        """
        if self._closed or self._inbox is not None:
            raise TransportError(f"{self!r} cannot be started again; make a new one")
        self._inbox = Inbox(
            self._context,
            self.address,
            high_water=self._limits.high_water,
            max_bytes=2 * self._codec.max_frame_bytes,
        )
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._inbox.descriptor, self._pump)
        self._loop.add_reader(self._inbox.monitor_descriptor, self._watch)
        self._loop.call_soon(self._watch)  # takes messages too: only a socket found empty signals
        self._beat_later(self._loop)

    def connect(self, peer: int, address: str) -> None:
        """Open the way to a peer's inbox, which need not exist yet, and say hello.

        Raises:
            TransportError: the bus is not open, the peer is connected already, or the address is
                unusable or was used before.
        """
        self._open()
        if peer in self._outboxes:
            raise TransportError(f"node {peer} is connected already; forget({peer}) comes first")
        if address in self._used:
            raise TransportError(
                f"node {self.node} was connected to {address} before and has numbered its frames; "
                "who comes back does so as another incarnation at a fresh address"
            )
        self._used.add(address)
        self._outboxes[peer] = self._outbox(address, self._identity)
        self._reception.greeted(peer, address)
        self.send(peer, _hello(self.node, self.incarnation, self.address))

    def send(self, peer: int, message: msgspec.Struct) -> None:
        """Send a message to a connected peer; never blocks, and tells nothing of its arrival.

        Raises:
            BackpressureError: so many frames wait for the peer that no more fit.
            FrameError: the message makes too long a frame or none at all.
            TransportError: the peer is not connected, or the bus not open.
        """
        self._open()
        outbox = self._outboxes.get(peer)
        if outbox is None:
            raise TransportError(f"node {peer} is not connected; connect({peer}, ...) comes first")
        try:
            frame = self._codec.encode(outbox.sequence, message)
        except FrameError as error:
            raise FrameError(f"to node {peer}: {error}", peer=peer, reason=error.reason) from error
        if not outbox.send(frame):
            raise BackpressureError(
                f"node {peer} at {outbox.address} takes no more frames: {self._limits.high_water} "
                f"or more wait before frame {outbox.sequence}, a {type(message).__name__}; it is "
                "stopped, gone or far too slow"
            )
        self._frames_out += 1
        self._bytes_out += len(frame)

    def admit(self, peer: int, incarnation: str) -> None:
        """Accept the frames of this incarnation of a node from now on; twice is no harm.

        Raises:
            TransportError: another incarnation of the node is admitted.
            ValueError: no bus can be such a node or incarnation.
        """
        self._reception.roster.admit(Claim(peer, incarnation), self._clock())

    async def expect(self, peer: int, deadline_s: float) -> Hello:
        """Wait for a peer's hello, which may have come already; cancelling changes nothing.

        Raises:
            HandshakeError: no hello came within `deadline_s` seconds, or one side rejected the
                other.
            TransportError: the bus is not open.
        """
        self._open()
        handshake = self._reception.handshake(peer)
        try:
            async with asyncio.timeout(deadline_s):
                while (hello := handshake.result()) is None:
                    await self._news.wait()
        except TimeoutError:
            raise handshake.expired(deadline_s) from None
        return hello

    def forget(self, peer: int) -> None:
        """Drop all that concerns a node, also the frames that wait for it.

        What it still sends is a stranger's. The node can be met again as another incarnation.
        """
        self._reception.forget(peer)
        if (outbox := self._outboxes.pop(peer, None)) is not None:
            outbox.close(linger_s=0)
        self._wake()

    async def close(self) -> None:
        """Say goodbye and free sockets, timer and file; waits for nobody, and twice is fine.

        Frames sent just before still go out, for at most `linger_s` seconds, for which ending the
        context waits; those to peers that are gone or silent are dropped.
        """
        if self._closed:
            return
        self._closed = True
        for peer, outbox in self._outboxes.items():
            self._leave(peer, outbox)
        self._outboxes.clear()
        self._reception.close(f"the bus of node {self.node} was closed")
        self._wake()
        self._unwatch()
        if self._inbox is not None:
            self._inbox.close()

    # Reading.

    def _pump(self) -> None:
        self._pump_is_due = False
        self._drain(_BURST)

    def _drain(self, limit: int) -> None:
        """Take up to `limit` messages now, and what is left soon."""
        for _ in range(limit):
            if self._closed or self._inbox is None:
                return
            try:
                taken = self._inbox.take()
            except zmq.ZMQError:
                self._go_deaf()
                return
            if taken is None:
                return
            sender, parts = taken
            self._frames_in += 1
            self._bytes_in += sum(map(len, parts))
            self._carry_out(self._reception.take(sender, parts, self._clock()))
        if not self._pump_is_due:
            self._pump_is_due = True
            self._open().call_soon(self._pump)

    def _watch(self) -> None:
        """Take note of connections that have ended, after what came on them."""
        self._drain(_STALL_BURST)
        try:
            ended = self._inbox.ended() if self._inbox and not self._closed else []
        except zmq.ZMQError:
            self._go_deaf()
            return
        for sender in ended:
            if sender is None:
                text = f"a connection to {self.address} did not speak ZeroMQ's protocol"
                self._carry_out([Fault(FrameError(text, peer=None, reason="malformed"))])
            else:
                self._carry_out(self._reception.ended(sender))

    def _go_deaf(self) -> None:
        """Stop for good: the caller has ended the context, against the rule."""
        log.exception("node %d cannot read its inbox: was the context ended?", self.node)
        self._unwatch()

    def _unwatch(self) -> None:
        """Have the loop call no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None and self._inbox is not None:
            self._loop.remove_reader(self._inbox.descriptor)
            self._loop.remove_reader(self._inbox.monitor_descriptor)

    # Doing what the reception decided.

    def _carry_out(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case Deliver(node, message):
                    self._call(self._on_message, node, message)
                case Fault(error):
                    self._faults[error.reason] += 1
                    log.warning("node %d, %s frame: %s", self.node, error.reason, error)
                    self._call(self._on_fault, error)
                case Settled():
                    self._wake()
                case Answer():
                    self._answer(outcome)
                case Departed(node, how):
                    self._lost += how is Gone.CONNECTION_LOST
                    log.info("node %d: node %d is gone: %s", self.node, node, how.name)
                    self._call(self._on_gone, node, how)

    def _answer(self, answer: Answer) -> None:
        """Send a rejection, by the way there is or on a connection for this alone."""
        text = answer.reject.reason
        log.warning("node %d rejects node %d: %s", self.node, answer.node, text)
        outbox = self._outboxes.get(answer.node)
        try:
            if outbox is not None and outbox.address == answer.inbox:
                self.send(answer.node, answer.reject)
            elif answer.inbox is not None and _scheme(answer.inbox) == _scheme(self.address):
                name = b"%b:reject%d" % (self._identity, next(self._rejections))
                outbox = self._outbox(answer.inbox, name)
                try:
                    outbox.send(self._codec.encode(0, answer.reject))
                finally:
                    outbox.close(linger_s=self._limits.linger_s)
        except TransportError as error:
            log.warning("node %d cannot tell node %d that: %s", self.node, answer.node, error)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _judge(self, hello: Hello) -> str | None:
        try:
            return self._on_hello(hello)
        except Exception as error:  # noqa: BLE001 - the owner's error must not stop the bus
            self._report(error)
            return f"node {self.node} failed to judge the hello: {type(error).__name__}: {error}"

    def _call(self, callback: Callable[[*_Args], None], *args: *_Args) -> None:
        try:
            callback(*args)
        except Exception as error:  # noqa: BLE001 - the owner's error must not stop the bus
            self._report(error)

    def _report(self, error: Exception) -> None:
        message = f"a callback of the bus of node {self.node} raised"
        self._open().call_exception_handler({"message": message, "exception": error})

    # Being heard, and noticing who is not.

    def _beat(self) -> None:
        late_s = self._clock() - self._beat_due
        self._beat_later(self._open())
        for peer in self._reception.roster.peers():
            if peer.node in self._outboxes and peer.presence is not Presence.LEFT:
                with contextlib.suppress(TransportError):  # its silence will be noticed
                    self.send(peer.node, Heartbeat())
        self._drain(_STALL_BURST)  # nobody is blamed for what this node has not read yet
        now = self._clock()
        if late_s > self._limits.heartbeat_s:
            log.info("node %d: the loop was stalled for %.3f s", self.node, late_s)
            self._reception.roster.excuse(late_s, now)
        for node, silent_s in self._reception.roster.silent(now):
            log.warning("node %d has not heard node %d for %.1f s", self.node, node, silent_s)
            self._call(self._on_silence, node, silent_s)

    def _beat_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beat_due = self._clock() + self._limits.heartbeat_s
        self._timer = loop.call_later(self._limits.heartbeat_s, self._beat)

    # Sockets.

    def _open(self) -> asyncio.AbstractEventLoop:
        """Return the loop of an open bus.

        Raises:
            TransportError: the bus was not started, or is closed.
        """
        if self._closed or self._loop is None:
            state = "closed" if self._closed else "not started"
            raise TransportError(f"the bus of node {self.node} is {state}")
        return self._loop

    def _outbox(self, address: str, identity: bytes) -> Outbox:
        high_water = self._limits.high_water
        return Outbox(self._context, address, identity=identity, high_water=high_water)

    def _leave(self, peer: int, outbox: Outbox) -> None:
        """Say goodbye to a peer and close the way to it."""
        present = self._reception.roster.at(peer)
        listening = present is None or present.presence is Presence.HEARD
        with contextlib.suppress(TransportError):  # the context may have been ended already
            outbox.send(self._codec.encode(outbox.sequence, Goodbye()))
        outbox.close(linger_s=self._limits.linger_s if listening else 0)


def _hello(node: int, incarnation: str, inbox: str) -> Hello:
    return Hello(
        node=node,
        incarnation=incarnation,
        inbox=inbox,
        protocol=PROTOCOL_VERSION,
        torch=_torch_version(),
        python=platform.python_version(),
        pid=os.getpid(),
    )


@functools.cache
def _torch_version() -> str:
    return importlib.metadata.version("torch")  # to import torch for a hello would take seconds


def _scheme(address: str) -> str:
    return address.partition("://")[0]
