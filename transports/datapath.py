"""What every data path promises: tensors in FIFO order over one channel per ordered pair of nodes.

A node is a worker (0, 1, ...) or the coordinator (`COORDINATOR`). A data path moves bytes and knows
nothing of ops or steps. The order is the contract: the n-th `receive` from a peer gets the n-th
`send` of that peer. Callers make both ends agree by announcing every send on the control bus first.
"""

import asyncio
import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Protocol

import msgspec
import torch

from myelin.errors import ChannelClosed, ChannelError, ChannelTimeout

COORDINATOR = -1

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
"""The dtypes that travel, by the name that `TensorSpec` uses."""

MAGIC = b"MYELIN\x00\x01"  # the last byte is the version of the header
HEADER = struct.Struct("<8sQIQ16s212s")  # magic, sequence, count, bytes, digest of specs, text


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape and dtype of a tensor under way; `dtype` is torch's name without "torch."."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def bytes_total(self) -> int:
        """Size of the tensor in bytes.

        Raises:
            ValueError: the spec, which another process may have sent, describes no tensor.
        """
        dtype = DTYPES.get(self.dtype)
        if dtype is None or min(self.shape, default=0) < 0:
            raise ValueError(
                f"{self} describes no tensor: sizes must be at least 0 and the dtype one of "
                f"{', '.join(DTYPES)}"
            )
        return math.prod(self.shape) * dtype.itemsize

    def empty(self) -> torch.Tensor:
        """Return a fresh tensor of this shape and dtype in CPU memory, with undefined content."""
        return torch.empty(self.shape, dtype=DTYPES[self.dtype])


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Describe a tensor as it is announced to its receiver.

    Raises:
        ValueError: the tensor is not a dense CPU tensor of one of `DTYPES`.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or dtype not in DTYPES:
        raise ValueError(
            f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} cannot travel: "
            f"make it a dense CPU tensor, for example with .to_dense() or .cpu()"
        )
    return TensorSpec(shape=tuple(tensor.shape), dtype=dtype)


def describe(specs: Iterable[TensorSpec]) -> str:
    """Put specs into words for an error, for example "float32[8, 256], int64[]"."""
    return ", ".join(map(str, specs)) or "no tensors"


def node_name(node: int) -> str:
    """Put a node into words for an error: "worker 1" or "the coordinator"."""
    return "the coordinator" if node == COORDINATOR else f"worker {node}"


class Direction(Enum):
    """Which way a message goes, seen from this end; the value is the word used in errors."""

    SEND = "to"
    RECEIVE = "from"


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """One end of one message under way: what it moves, its future, and how its errors read.

    A data path keeps it until the message is done or has failed, and so keeps the tensors alive.
    """

    direction: Direction
    peer: int
    label: str
    specs: tuple[TensorSpec, ...]
    tensors: tuple[torch.Tensor, ...]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Any]"

    def __str__(self) -> str:
        return f"{self.label!r} {self.direction.value} {node_name(self.peer)}"

    @property
    def bytes_total(self) -> int:
        """Size of the message in bytes; `ValueError` where a spec describes no tensor."""
        return sum(spec.bytes_total for spec in self.specs)

    def allocate(self) -> list[torch.Tensor]:
        """Return fresh tensors to receive into.

        Raises:
            ChannelError: there is no memory for them.
        """
        try:
            return [spec.empty() for spec in self.specs]
        except (RuntimeError, MemoryError) as error:
            text = f"no memory for {self}, {describe(self.specs)}: {error}"
            raise ChannelError(text, peer=self.peer) from None

    def finish(self, outcome: object) -> None:
        """Resolve the future on its own loop, unless it is done; from any thread.

        An exception as the outcome fails the future. A closed loop has nobody left to tell.
        """
        try:
            self.loop.call_soon_threadsafe(self._resolve, outcome)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def _resolve(self, outcome: object) -> None:
        if self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)

    def timed_out(self, timeout_s: float) -> ChannelTimeout:
        """Return the error for a peer that did not do its part in time."""
        missing = "taken" if self.direction is Direction.SEND else "delivered"
        return ChannelTimeout(
            f"{self} was not {missing} within {timeout_s:g} s: {node_name(self.peer)} is stopped, "
            f"hangs, or is slower than the data path's timeout allows",
            peer=self.peer,
        )

    def closed(self, reason: str) -> ChannelClosed:
        """Return the error for a channel that ended before the message was across."""
        return ChannelClosed(f"{self} did not get across: {reason}", peer=self.peer)

    def refused(self, announced: str, came: str) -> ChannelError:
        """Return the error for a message that is not what was announced."""
        return ChannelError(
            f"{self} was announced as {announced}, but what came is {came}: the ends of the "
            f"channel do not agree on the order of messages",
            peer=self.peer,
        )


@lru_cache(maxsize=1024)
def _digest(specs: tuple[TensorSpec, ...]) -> bytes:
    return hashlib.blake2b(describe(specs).encode(), digest_size=16).digest()


def pack_header(transfer: Transfer, sequence: int) -> bytes:
    """Say in `HEADER.size` bytes what the payload is; the text, cut to fit, is for errors."""
    specs = transfer.specs
    text = f"{transfer.label!r} with {describe(specs)}".encode()
    return HEADER.pack(MAGIC, sequence, len(specs), transfer.bytes_total, _digest(specs), text)


def check_header(raw: bytes, transfer: Transfer, sequence: int) -> int:
    """Compare the header of a message with what was announced; return the payload's bytes.

    Raises:
        ChannelError: they differ; the text has both.
    """
    magic, number, count, bytes_total, digest, text = HEADER.unpack(raw)
    specs = transfer.specs
    if (magic, number, count, digest) == (MAGIC, sequence, len(specs), _digest(specs)):
        return int(bytes_total)
    words = text.rstrip(b"\x00").decode(errors="ignore")
    came = f"message {number}, {words} ({count} tensors, {bytes_total} bytes)"
    raise transfer.refused(
        f"message {sequence} with {describe(specs)}",
        came if magic == MAGIC else f"no header: {raw[:16]!r}",
    )


def begin_send(peer: int, tensors: Sequence[torch.Tensor], label: str) -> Transfer:
    """Start keeping track of a send on the running loop.

    Raises:
        ValueError: one of the tensors cannot travel.
    """
    loop = asyncio.get_running_loop()
    specs = tuple(map(spec_of, tensors))
    return Transfer(Direction.SEND, peer, label, specs, tuple(tensors), loop, loop.create_future())


def begin_receive(peer: int, specs: Sequence[TensorSpec], label: str) -> Transfer:
    """Start keeping track of a receive on the running loop."""
    loop = asyncio.get_running_loop()
    return Transfer(Direction.RECEIVE, peer, label, tuple(specs), (), loop, loop.create_future())


class DataPath(Protocol):
    """One node's end of all its channels. All methods are called from the node's event loop."""

    def send(
        self, peer: int, tensors: Sequence[torch.Tensor], *, label: str
    ) -> asyncio.Future[None]:
        """Send tensors to `peer` as one message; never blocks.

        The tensors may be non-contiguous or empty. Until the future is done they belong to the
        data path: do not write into them. Cancelling the future does not recall the message.

        Args:
            peer: the receiving node.
            tensors: what to send, in order.
            label: names the op in errors, for example "forward stage=0 microbatch=3".

        Returns:
            Done when the peer has taken the message. Fails with `ChannelTimeout` or
            `ChannelClosed`, whose text names the peer and `label`.
        """
        ...

    def receive(
        self, peer: int, specs: Sequence[TensorSpec], *, label: str
    ) -> asyncio.Future[list[torch.Tensor]]:
        """Post the next receive from `peer`, which must have announced exactly these specs.

        Returns:
            The received tensors, contiguous and fresh: they belong to the caller. Fails like
            `send`.
        """
        ...

    def drop(self, peer: int, reason: str) -> None:
        """Fail what is under way with `peer`, and later calls, with `ChannelClosed(reason)`."""
        ...

    async def close(self) -> None:
        """Fail what is under way with `ChannelClosed`, end all threads, free all sockets.

        Safe to call twice. Returns within a few seconds also when a peer hangs.
        """
        ...
