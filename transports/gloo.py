"""Moves tensors between processes over gloo; knows nothing of ops.

Every ordered pair of nodes is one channel: a gloo process group of two (rank 0 sends, rank 1
receives) in a thread of its own at either end, made at the channel's first use. The ends meet in
one file per channel in a directory that only this run may write to. There is no global process
group, and no thread polls except while it waits for its peer to appear.

gloo trusts its caller: a receive buffer of another size or dtype is filled in part or kills the
process. So every message starts with a header of fixed size (`pack_header`), and the receiver posts
the payload's buffers only after the header has matched what was announced. The receiver answers
with a verdict, and only then is the send done: gloo calls a send done when its last bytes are in
the socket, where closing would lose them. Everything goes under one tag: the order is the contract.

What ends a blocked wait, tried on torch 2.13:

- `abort()` and `shutdown()` of the process group: nothing happens, at neither end.
- Dropping the last reference at this end: nothing, the waiting `Work` holds the connection.
- The peer's process dies, or its last reference goes: raises at once, except in the wait for a
  message of which a part has already been read. gloo forgets to tell that one, so a large payload
  is followed by a trailer of one byte, and the trailer is what is waited for.
- A wait that times out closes the connection, and so ends *all* other waits of that process group
  at both ends. `Link.interrupt` does this on purpose: it waits a millisecond for a message that
  never comes. It works from any thread, and later calls on the group raise at once.
- Nothing but its own timeout ends the construction of a process group. So that is only started
  when both ends have written into the file that they are there, is given a second, and is tried
  again. A peer that dies in just this moment is not noticed here: that takes `drop`.
- Waits of `FileStore` end up to a second late, so the file is looked at in short steps instead.
"""

import asyncio
import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from myelin.errors import ChannelError
from myelin.transports.datapath import (
    HEADER,
    TensorSpec,
    Transfer,
    begin_receive,
    begin_send,
    check_header,
    describe,
    node_name,
    pack_header,
)
from myelin.transports.gloo_link import HANDSHAKE_S, Link, Work, device_of

logger = logging.getLogger(__name__)

EAGER_BYTES = 8 * 1024  # a payload up to this size travels in the same piece as its header
TAKEN, REFUSED = 1, 2
SENDER, RECEIVER = 0, 1
JOIN_S = 5.0  # how long `close` waits for threads that do not end


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes."""
    return tensor.view(-1).view(torch.uint8)


def _payload(tensor: torch.Tensor) -> torch.Tensor:
    return _as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


def _trailer() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8)


_open_channels: "weakref.WeakSet[_Channel]" = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """End what nobody has closed: a thread inside of gloo would abort the process at its end."""
    channels = list(_open_channels)
    for channel in channels:
        channel.interrupt()
    for channel in channels:
        channel.join(HANDSHAKE_S + 1.0)


class _Channel:
    """One end of one channel: a thread that carries the transfers of its queue in order.

    The first failure is the channel's end: what is queued behind it, or comes later, fails too.
    """

    rank: int
    verb: str

    def __init__(self, node: int, peer: int, link: Link, timeout_s: float) -> None:
        self.peer = peer
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._link = link
        self._timeout_s = timeout_s
        self._sequence = 0
        self._failure: str | None = None
        self._under_way: set[Transfer] = set()
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        name = f"myelin {self.verb} {node}/{peer}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _open_channels.add(self)

    def __repr__(self) -> str:
        state = self._failure or f"{self._sequence} messages across"
        return f"<{self._thread.name}: {state}>"

    def submit(self, transfer: Transfer) -> None:
        """Queue a transfer; on the loop."""
        self._under_way.add(transfer)
        transfer.future.add_done_callback(lambda _: self._under_way.discard(transfer))
        self._queue.put(transfer)

    def stop(self, reason: str) -> None:
        """Fail everything under way and let the thread end; on the loop."""
        self._failure = self._failure or reason
        for transfer in self._under_way:
            transfer.finish(transfer.closed(reason))
        self.interrupt()

    def interrupt(self) -> None:
        """Have the thread end soon; from any thread. What is under way is not told."""
        self._failure = self._failure or "the process ends"
        self._queue.put(None)
        self._link.interrupt()

    def join(self, timeout_s: float | None = None) -> bool:
        """Tell whether the thread has ended, once `ended` is done, or within the time given."""
        if timeout_s is None:
            timeout_s = 1.0 if self.ended.done() else 0.0
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (transfer := self._queue.get()) is not None:
                if self._failure is None:
                    self._attempt(transfer)
                else:
                    transfer.finish(transfer.closed(self._failure))
                del transfer  # its tensors are not ours to keep while we wait for the next
        finally:
            self._release()
            self._link.close()
            self.ended.set_result(None)

    def _attempt(self, transfer: Transfer) -> None:
        deadline = time.monotonic() + self._timeout_s
        try:
            if not self._link.connected:
                self._link.connect(deadline)
                self._prepare()
            self._carry(transfer, deadline)
            self._sequence += 1
        except Exception as error:  # noqa: BLE001 - whatever it was, the awaiting side must learn it
            failure = self._explain(transfer, error, deadline)
            self._failure = self._failure or f"an earlier message failed: {failure}"
            self._link.close()
            transfer.finish(failure)

    def _explain(self, transfer: Transfer, error: Exception, deadline: float) -> ChannelError:
        """Say what happened in words; without the traceback, whose frames hold the connection."""
        if isinstance(error, ChannelError):
            return error.with_traceback(None)
        if self._failure is not None:
            return transfer.closed(self._failure)
        if not isinstance(error, RuntimeError):  # not gloo's: a bug of ours
            return ChannelError(f"{transfer} failed: {error!r}", peer=self.peer)
        if time.monotonic() >= deadline:
            return transfer.timed_out(self._timeout_s)
        words = str(error).partition("] ")[2].partition(". ")[0] or str(error)
        return transfer.closed(
            f"{node_name(self.peer)} closed its end or its process died: {words}"
        )

    def _prepare(self) -> None:
        """Do what comes once, after connecting."""

    def _release(self) -> None:
        """Forget the work under way, which would keep the connection and gloo's threads alive."""

    def _carry(self, transfer: Transfer, deadline: float) -> None:
        """Move one message and finish its transfer, or raise."""
        raise NotImplementedError


class _Sender(_Channel):
    rank = SENDER
    verb = "send"

    def _prepare(self) -> None:
        self._verdict = torch.zeros(2, dtype=torch.int64)

    def _carry(self, transfer: Transfer, deadline: float) -> None:
        link = self._link
        try:
            pieces = self._pieces(transfer)
        except (RuntimeError, MemoryError) as error:
            raise ChannelError(f"{transfer} cannot be read: {error}", peer=self.peer) from None
        verdict_work = link.receive(_as_bytes(self._verdict))
        works = [link.send(piece) for piece in pieces]
        link.wait(verdict_work, deadline)
        if self._verdict.tolist() != [self._sequence, TAKEN]:
            raise ChannelError(
                f"{transfer} was refused as message {self._sequence}: the receiver expected "
                f"another message than {describe(transfer.specs)}",
                peer=self.peer,
            )
        for work in works:
            link.wait(work, deadline)
        transfer.finish(None)

    def _pieces(self, transfer: Transfer) -> list[torch.Tensor]:
        front = bytearray(pack_header(transfer, self._sequence))
        payload = [_payload(tensor) for tensor in transfer.tensors if tensor.numel()]
        if transfer.bytes_total <= EAGER_BYTES:
            for part in payload:
                front += part.numpy().data
            return [torch.frombuffer(front, dtype=torch.uint8)]
        return [torch.frombuffer(front, dtype=torch.uint8), *payload, _trailer()]


class _Receiver(_Channel):
    rank = RECEIVER
    verb = "receive"
    _front_work: Work | None = None

    def _prepare(self) -> None:
        self._front = torch.empty(HEADER.size + EAGER_BYTES, dtype=torch.uint8)
        self._front_bytes = self._front.numpy()
        self._answer = torch.empty(2, dtype=torch.int64)
        self._expect()

    def _expect(self) -> None:
        """Post the buffer of the next header, which then needs no round trip."""
        self._front_work = self._link.receive(self._front)

    def _release(self) -> None:
        self._front_work = None

    def _carry(self, transfer: Transfer, deadline: float) -> None:
        assert self._front_work is not None
        self._link.wait(self._front_work, deadline)
        try:
            bytes_total = self._check(transfer)
            tensors = transfer.allocate()
        except ChannelError:
            self._tell(REFUSED, deadline)
            raise
        parts = [_as_bytes(tensor) for tensor in tensors if tensor.numel()]
        if bytes_total <= EAGER_BYTES:
            self._split(parts)
        else:
            self._receive(parts, deadline)
        self._expect()
        self._tell(TAKEN, deadline)  # before `finish`, after which the owner may close this end
        transfer.finish(tensors)

    def _check(self, transfer: Transfer) -> int:
        return check_header(self._front_bytes[: HEADER.size].tobytes(), transfer, self._sequence)

    def _split(self, parts: list[torch.Tensor]) -> None:
        offset = HEADER.size
        for part in parts:
            part.numpy()[:] = self._front_bytes[offset : offset + part.numel()]
            offset += part.numel()

    def _receive(self, parts: list[torch.Tensor], deadline: float) -> None:
        works = [self._link.receive(part) for part in (*parts, _trailer())]
        for work in reversed(works):  # the trailer first: only that wait can be interrupted
            self._link.wait(work, deadline)

    def _tell(self, verdict: int, deadline: float) -> None:
        self._answer.copy_(torch.tensor([self._sequence, verdict]))
        self._link.wait(self._link.send(_as_bytes(self._answer)), deadline)


class GlooPath:
    """One node's end of its channels to other processes; see `DataPath`.

    A message that its peer does not take or deliver within `timeout_s`, counted from when it is
    the first in its channel, fails with `ChannelTimeout` and ends the channel.

    Args:
        node: the node at this end.
        directory: the same for all nodes of a run, private to it, on a file system that all of
            them see. Used by one `GlooPath` per node; whoever made it removes it.
        timeout_s: see above.
        interface_host: name or address of the network interface to listen on.

    Raises:
        ValueError: there is no such directory or interface.
    """

    def __init__(
        self,
        node: int,
        directory: str | os.PathLike[str],
        *,
        timeout_s: float = 60.0,
        interface_host: str = "127.0.0.1",
    ) -> None:
        self._node = node
        self._directory = Path(directory)
        if not self._directory.is_dir():
            raise ValueError(f"{directory} is no directory: make one that only this run may use")
        self._timeout_s = timeout_s
        self._interface_host = interface_host
        device_of(interface_host)  # rather fail here than in a channel
        self._channels: dict[tuple[type[_Channel], int], _Channel] = {}
        self._dropped: dict[int, str] = {}
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._channels)} channels"
        return f"<GlooPath of {node_name(self._node)}: {state}>"

    def send(
        self, peer: int, tensors: Sequence[torch.Tensor], *, label: str
    ) -> "asyncio.Future[None]":
        """See `DataPath.send`.

        Raises:
            ValueError: a tensor cannot travel, or `peer` is this node.
        """
        return self._submit(_Sender, begin_send(peer, tensors, label))

    def receive(
        self, peer: int, specs: Sequence[TensorSpec], *, label: str
    ) -> "asyncio.Future[list[torch.Tensor]]":
        """See `DataPath.receive`."""
        return self._submit(_Receiver, begin_receive(peer, specs, label))

    def drop(self, peer: int, reason: str) -> None:
        """See `DataPath.drop`."""
        self._dropped.setdefault(peer, reason)
        for channel in self._channels.values():
            if channel.peer == peer:
                channel.stop(reason)

    async def close(self) -> None:
        """See `DataPath.close`; a thread that does not end is left behind with an error."""
        self._closed = True
        channels = list(self._channels.values())
        for channel in channels:
            channel.stop(f"{node_name(self._node)} closed its data path")
        if channels:
            ended = [asyncio.wrap_future(channel.ended) for channel in channels]
            await asyncio.wait(ended, timeout=JOIN_S)
        for channel in channels:
            if not channel.join():
                logger.error("%r: the thread of %r does not end", self, channel)

    def _submit(self, kind: "type[_Channel]", transfer: Transfer) -> "asyncio.Future[Any]":
        reason = self._refusal(transfer.peer)
        if reason is None:
            self._channel(kind, transfer.peer).submit(transfer)
        else:
            transfer.finish(transfer.closed(reason))
        return transfer.future

    def _refusal(self, peer: int) -> str | None:
        if self._closed:
            return f"{node_name(self._node)} closed its data path"
        return self._dropped.get(peer)

    def _channel(self, kind: "type[_Channel]", peer: int) -> _Channel:
        channel = self._channels.get((kind, peer))
        if channel is None:
            channel = kind(self._node, peer, self._link(kind, peer), self._timeout_s)
            self._channels[kind, peer] = channel
        return channel

    def _link(self, kind: "type[_Channel]", peer: int) -> Link:
        if peer == self._node:
            raise ValueError(f"{node_name(peer)} has no channel to itself: hand the tensors over")
        sender, receiver = (self._node, peer) if kind is _Sender else (peer, self._node)
        file = self._directory / f"channel.{sender}.{receiver}"
        return Link(file, rank=kind.rank, interface_host=self._interface_host)
