"""Brings values across: announces each on the control bus, then hands its tensors to the data path.

Both sides of a channel use it, workers and the coordinator, so the rule is in one place: the sender
announces in the order in which it sends, and the receiver posts receives in the order of the
announcements, at once, whatever became of the run meanwhile. So channels stay in step when runs end
early.

A value arrives as it was. A data path delivers contiguous tensors, so the announcement says how
each lay in memory (`myelin.runtime.strides`), and a tensor that stands in a value several times
travels once and is again one tensor.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

from myelin.runtime.jitter import Delays
from myelin.runtime.messages import Announce, Purpose
from myelin.runtime.strides import ahead_of, restored, travelling
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
        layout, parts = pack(value)
        tensors, places = _each_once(parts)
        aheads = tuple(map(ahead_of, tensors))
        parcels = [travelling(tensor.detach()) for tensor in tensors]
        tensors, forms = [tensor for tensor, _ in parcels], tuple(form for _, form in parcels)
        specs = tuple(spec_of(tensor) for tensor in tensors)
        aheads = aheads if any(aheads) else ()
        self._send(peer, Announce(purpose, key, label, layout, specs, forms, places, aheads))
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
                value = _put_together(announcement, [] if coming is None else coming.result())
            except (ValueError, RuntimeError) as bad:  # RuntimeError: there is no memory for it
                error = bad
        delay_s = self._delays.of_message_s()
        if delay_s:
            loop = asyncio.get_running_loop()
            loop.call_later(delay_s, self._deliver_to, peer, announcement, value, error)
        else:
            self._deliver_to(peer, announcement, value, error)


def _each_once(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """Return the different tensors, and for each place the index of its own; () if all differ."""
    indices: dict[int, int] = {}
    places = tuple(indices.setdefault(id(tensor), len(indices)) for tensor in tensors)
    if len(indices) == len(tensors):
        return tensors, ()
    return list({id(tensor): tensor for tensor in tensors}.values()), places


def _put_together(announcement: Announce, tensors: list[torch.Tensor]) -> Any:
    """Make the value of the tensors that came for it.

    Raises:
        ValueError: the announcement does not belong to these tensors.
    """
    aheads = announcement.aheads or (0,) * len(tensors)
    parcels = zip(tensors, announcement.forms, aheads, strict=True)
    own = [restored(*parcel) for parcel in parcels]
    places = announcement.places or range(len(own))
    if set(places) != set(range(len(own))):
        raise ValueError(f"places {places} do not belong to {len(own)} tensors")
    return unpack(announcement.layout, [own[place] for place in places])
