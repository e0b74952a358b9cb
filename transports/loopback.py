"""Moves tensors between nodes that live in one process; has no threads of its own.

The nodes may run on different event loops in different threads. A message is across when a send
and a receive stand at the heads of one channel: whichever call completes the pair makes the copy,
on its own loop, and the futures are resolved on theirs. Copying 64 MiB stalls that loop for some
20 ms, which is the price for running without threads, and so repeatably.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from myelin.errors import ChannelError
from myelin.transports.datapath import (
    DataPath,
    Direction,
    TensorSpec,
    Transfer,
    begin_receive,
    begin_send,
    describe,
    node_name,
)


@dataclass(slots=True, eq=False)
class _Channel:
    """What waits between an ordered pair of nodes; its first failure is its end."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    sends: deque[Transfer] = field(default_factory=deque)
    receives: deque[Transfer] = field(default_factory=deque)
    failure: str | None = None

    def add(self, transfer: Transfer) -> None:
        with self.lock:
            if self.failure is not None:
                transfer.finish(transfer.closed(self.failure))
                return
            sending = transfer.direction is Direction.SEND
            (self.sends if sending else self.receives).append(transfer)
            while self.sends and self.receives:
                self._carry(self.sends.popleft(), self.receives.popleft())

    def fail(self, reason: str) -> None:
        with self.lock:
            self.failure = self.failure or reason
            for transfer in (*self.sends, *self.receives):
                transfer.finish(transfer.closed(self.failure))
            self.sends.clear()
            self.receives.clear()

    def expire(self, transfer: Transfer, timeout_s: float) -> None:
        """Give a transfer up, and its channel with it, unless it is already across."""
        with self.lock:
            waiting = self.sends if transfer.direction is Direction.SEND else self.receives
            if transfer in waiting:
                error = transfer.timed_out(timeout_s)
                transfer.finish(error)
                waiting.remove(transfer)
                self.fail(f"an earlier message failed: {error}")

    def _carry(self, send: Transfer, receive: Transfer) -> None:
        try:
            copies = _copies(send, receive)
        except ChannelError as error:
            receive.finish(error.with_traceback(None))
            expected = describe(receive.specs)
            refusal = f"{send} was refused by its receiver, which expected {expected}"
            send.finish(ChannelError(refusal, peer=send.peer))
            self.fail(f"an earlier message failed: {error}")
        else:
            receive.finish(copies)
            send.finish(None)


def _copies(send: Transfer, receive: Transfer) -> list[torch.Tensor]:
    if send.specs != receive.specs:
        came = f"{send.label!r} with {describe(send.specs)}"
        raise receive.refused(describe(receive.specs), came)
    copies = receive.allocate()
    with torch.no_grad():
        for copy, tensor in zip(copies, send.tensors, strict=True):
            copy.copy_(tensor)
    return copies


class LoopbackHub:
    """Connects the nodes of one process.

    Args:
        timeout_s: a message that its peer does not take or deliver within this time, counted from
            the call, fails with `ChannelTimeout` and ends its channel.
    """

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._closed: dict[int, str] = {}

    def endpoint(self, node: int) -> DataPath:
        """Return one node's end; ask once per node, a closed node stays closed."""
        return _Endpoint(self, node)

    def add(self, channel: tuple[int, int], transfer: Transfer) -> None:
        """Queue a transfer, and carry what can now be carried; on the transfer's loop."""
        timer = transfer.loop.call_later(self._timeout_s, self._expire, channel, transfer)
        transfer.future.add_done_callback(lambda _: timer.cancel())
        self._channel(channel).add(transfer)

    def drop(self, node: int, peer: int, reason: str) -> None:
        """End both channels between two nodes."""
        for channel in ((node, peer), (peer, node)):
            self._channel(channel).fail(reason)

    def close(self, node: int) -> None:
        """End all channels of a node, also those that are asked for later."""
        reason = f"{node_name(node)} closed its data path"
        with self._lock:
            self._closed[node] = reason
            channels = [channel for pair, channel in self._channels.items() if node in pair]
        for channel in channels:
            channel.fail(reason)

    def _expire(self, channel: tuple[int, int], transfer: Transfer) -> None:
        self._channel(channel).expire(transfer, self._timeout_s)

    def _channel(self, pair: tuple[int, int]) -> _Channel:
        with self._lock:
            if pair not in self._channels:
                closed = (self._closed[node] for node in pair if node in self._closed)
                self._channels[pair] = _Channel(failure=next(closed, None))
            return self._channels[pair]


class _Endpoint:
    """One node's end of the hub; see `DataPath`."""

    def __init__(self, hub: LoopbackHub, node: int) -> None:
        self._hub = hub
        self._node = node

    def __repr__(self) -> str:
        return f"<loopback of {node_name(self._node)}>"

    def send(
        self, peer: int, tensors: Sequence[torch.Tensor], *, label: str
    ) -> "asyncio.Future[Any]":
        return self._add((self._node, peer), begin_send(peer, tensors, label))

    def receive(
        self, peer: int, specs: Sequence[TensorSpec], *, label: str
    ) -> "asyncio.Future[Any]":
        return self._add((peer, self._node), begin_receive(peer, specs, label))

    def drop(self, peer: int, reason: str) -> None:
        self._hub.drop(self._node, peer, reason)

    async def close(self) -> None:
        self._hub.close(self._node)

    def _add(self, channel: tuple[int, int], transfer: Transfer) -> "asyncio.Future[Any]":
        if transfer.peer == self._node:
            raise ValueError(
                f"{node_name(transfer.peer)} has no channel to itself: hand the tensors over"
            )
        self._hub.add(channel, transfer)
        return transfer.future
