"""Brings values across: announces each on the control bus, then hands its tensors to the data path.

Both sides of a channel use it, workers and the coordinator, so the rule is in one place: the sender
announces in the order in which it sends, and the receiver posts receives in the order of the
announcements, at once, whatever became of the run meanwhile. So channels stay in step when runs end
early.

A data path delivers contiguous tensors. A dense tensor whose dimensions lie in memory in another
order travels in that order and is turned back, since the last bits of some sums depend on it.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from myelin.runtime.jitter import Delays
from myelin.runtime.messages import Announce, Purpose
from myelin.transports.datapath import DataPath, spec_of
from myelin.transports.packing import pack, unpack

Deliver = Callable[[int, Announce, Any, BaseException | None], None]


class Courier:
    """One node's way to bring values to others and to take what others bring.

    Args:
        send: sends a control message to a peer.
        path: the data path.
        deliver: told of every value that came: from whom, its announcement, the value, or why it
            did not come.
        delays: delays to inject between arrival and delivery.
    """

    def __init__(
        self,
        *,
        send: Callable[[int, msgspec.Struct], None],
        path: DataPath,
        deliver: Deliver,
        delays: Delays,
    ) -> None:
        self._send, self._path, self._deliver_to, self._delays = send, path, deliver, delays

    def post(
        self, peer: int, value: Any, *, purpose: Purpose, key: tuple[int, int], label: str
    ) -> asyncio.Future[None]:
        """Announce a value to a peer and send its tensors.

        Returns:
            Done when the peer has taken the tensors; until then they must not change.

        Raises:
            TypeError, ValueError: the value holds something that cannot travel; nothing was sent.
        """
        layout, tensors = pack(value)
        orders = tuple(_memory_order(tensor) for tensor in tensors)
        tensors = [
            tensor.detach().permute(order) if order else tensor.detach()
            for tensor, order in zip(tensors, orders, strict=True)
        ]
        specs = tuple(spec_of(tensor) for tensor in tensors)
        self._send(peer, Announce(purpose, key, label, layout, specs, orders))
        if tensors:
            return self._path.send(peer, tensors, label=label)
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sent.set_result(None)
        return sent

    def announced(self, peer: int, announcement: Announce) -> None:
        """Post the receive for what a peer has announced."""
        if not announcement.specs:
            self._came(peer, announcement, None)
            return
        coming = self._path.receive(peer, announcement.specs, label=announcement.label)
        coming.add_done_callback(partial(self._came, peer, announcement))

    def _came(
        self, peer: int, announcement: Announce, coming: asyncio.Future[list[Any]] | None
    ) -> None:
        if coming is not None and coming.cancelled():
            return
        error = None if coming is None else coming.exception()
        value = None
        if error is None:
            try:
                tensors = [] if coming is None else coming.result()
                value = unpack(announcement.layout, _turned_back(tensors, announcement.orders))
            except ValueError as bad:
                error = bad
        delay_s = self._delays.of_message_s()
        if delay_s:
            loop = asyncio.get_running_loop()
            loop.call_later(delay_s, self._deliver_to, peer, announcement, value, error)
        else:
            self._deliver_to(peer, announcement, value, error)


def _memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions as they lie in memory, outermost first; () if as usual or not dense."""
    if tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dimension: -strides[dimension]))
    return order if tensor.permute(order).is_contiguous() else ()


def _turned_back(
    tensors: Sequence[torch.Tensor], orders: Sequence[tuple[int, ...]]
) -> list[torch.Tensor]:
    """Give tensors their dimensions' own order back.

    Raises:
        ValueError: the orders do not belong to these tensors.
    """
    turned = []
    for tensor, order in zip(tensors, orders, strict=True):
        if order and sorted(order) != list(range(tensor.ndim)):
            raise ValueError(f"{order} is no order of the {tensor.ndim} dimensions of a tensor")
        turned.append(
            tensor.permute([order.index(d) for d in range(tensor.ndim)]) if order else tensor
        )
    return turned
