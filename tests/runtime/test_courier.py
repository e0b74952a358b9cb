"""The courier over the loopback path; a queue of announcements stands in for the control bus."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from myelin.errors import ChannelClosed, ChannelError
from myelin.runtime.courier import Courier
from myelin.runtime.jitter import Delays, Jitter
from myelin.runtime.messages import Announce, Purpose
from myelin.transports.datapath import DataPath, TensorSpec
from myelin.transports.loopback import LoopbackHub
from myelin.transports.packing import NoneValue, TensorAt, pack


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a courier delivered."""

    peer: int
    announcement: Announce
    value: Any
    error: BaseException | None


class Node:
    """One end: a courier, what it delivered, and the announcements that it has sent."""

    def __init__(self, hub: LoopbackHub, index: int, jitter: Jitter | None = None) -> None:
        self.index = index
        self.path: DataPath = hub.endpoint(index)
        self.announced: deque[tuple[int, Announce]] = deque()
        self.delivered: list[Delivery] = []
        self._news = asyncio.Event()
        self.courier = Courier(
            send=self._announce,
            path=self.path,
            deliver=self._deliver,
            delays=Delays(jitter, index),
        )

    def post(self, peer: "Node", value: Any, number: int = 0) -> "asyncio.Future[None]":
        key = (1, number)
        return self.courier.post(
            peer.index, value, purpose=Purpose.EDGE, key=key, label=f"send {number}"
        )

    def announce_to(self, peer: "Node") -> None:
        """Bring over what was announced so far, in order, as the bus does."""
        while self.announced:
            node, announcement = self.announced.popleft()
            assert node == peer.index
            peer.courier.announced(self.index, announcement)

    async def deliveries(self, count: int) -> list[Delivery]:
        while len(self.delivered) < count:
            self._news.clear()
            await self._news.wait()
        return self.delivered

    def _announce(self, peer: int, message: msgspec.Struct) -> None:
        assert isinstance(message, Announce)
        self.announced.append((peer, message))

    def _deliver(
        self, peer: int, message: Announce, value: Any, error: BaseException | None
    ) -> None:
        self.delivered.append(Delivery(peer, message, value, error))
        self._news.set()


@dataclass(frozen=True, slots=True)
class Pair:
    here: Node
    there: Node

    async def close(self) -> None:
        await self.here.path.close()
        await self.there.path.close()


def pair_of(jitter: Jitter | None = None) -> Pair:
    hub = LoopbackHub(timeout_s=60.0)
    return Pair(Node(hub, 0, jitter), Node(hub, 1, jitter))


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = pair_of()
    yield made
    await made.close()


async def test_a_tensor_comes_across_with_its_announcement(pair: Pair) -> None:
    sent = pair.here.post(pair.there, torch.arange(6.0).reshape(2, 3), number=4)
    assert [announcement for _, announcement in pair.here.announced] == [
        Announce(
            purpose=Purpose.EDGE,
            key=(1, 4),
            label="send 4",
            layout=TensorAt(0),
            specs=(TensorSpec((2, 3), "float32"),),
            forms=((),),
        )
    ]
    pair.here.announce_to(pair.there)
    (delivery,) = await pair.there.deliveries(1)
    await sent
    assert (delivery.peer, delivery.announcement.key, delivery.error) == (0, (1, 4), None)
    assert torch.equal(delivery.value, torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize(
    "value",
    [
        (torch.ones(2), torch.zeros(3, dtype=torch.int64)),
        {"x": torch.ones(2, 0), "mask": None, "positions": [torch.tensor(3), 4, "five"]},
        [torch.arange(4)[::2], (), {}],
    ],
)
async def test_nested_values_keep_their_shape(pair: Pair, value: Any) -> None:
    sent = pair.here.post(pair.there, value)
    pair.here.announce_to(pair.there)
    (delivery,) = await pair.there.deliveries(1)
    await sent
    layout, tensors = pack(value)
    layout_there, tensors_there = pack(delivery.value)
    assert layout_there == layout
    assert all(map(torch.equal, tensors, tensors_there))
    assert [t.dtype for t in tensors_there] == [t.dtype for t in tensors]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(6.0).reshape(2, 3).T,
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(24.0).reshape(4, 6)[:, ::2],
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)[1:, :, ::2],
        torch.arange(3.0).reshape(3, 1).expand(3, 4),
        torch.tensor(1.0).expand(3, 4),
        torch.ones(5, 1)[:, :1],
    ],
)
async def test_a_tensor_keeps_its_strides(pair: Pair, tensor: torch.Tensor) -> None:
    pair.here.post(pair.there, tensor, number=0)
    pair.here.announce_to(pair.there)
    (delivery,) = await pair.there.deliveries(1)
    assert torch.equal(delivery.value, tensor)
    assert delivery.value.stride() == tensor.stride()


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(0, 4), max_size=4).flatmap(
        lambda sizes: st.tuples(st.just(sizes), st.permutations(range(len(sizes))))
    )
)
def test_a_permuted_tensor_of_any_shape_arrives_with_its_values_and_strides(
    case: tuple[list[int], list[int]],
) -> None:
    sizes, order = case
    tensor = torch.arange(math.prod(sizes)).reshape(sizes).permute(order)

    async def travel() -> Tensor:
        pair = pair_of()
        sent = pair.here.post(pair.there, tensor)
        pair.here.announce_to(pair.there)
        (delivery,) = await pair.there.deliveries(1)
        await sent
        await pair.close()
        assert isinstance(delivery.value, Tensor)
        return delivery.value

    came = asyncio.run(travel())
    assert torch.equal(came, tensor)
    wide = [dimension for dimension in range(tensor.ndim) if tensor.shape[dimension] > 1]
    if tensor.numel():
        assert [came.stride(d) for d in wide] == [tensor.stride(d) for d in wide]


async def test_a_form_that_does_not_fit_the_tensor_is_an_error(pair: Pair) -> None:
    pair.here.post(pair.there, torch.ones(2, 3).T, number=0)
    ((_, announcement),) = pair.here.announced
    wrong = msgspec.structs.replace(announcement, forms=(((3, 1), (3, 2)),))
    pair.there.courier.announced(0, wrong)
    (delivery,) = await pair.there.deliveries(1)
    assert "cannot take the form" in str(delivery.error)


async def test_a_tensor_that_stands_in_a_value_twice_travels_once_and_is_one_again(
    pair: Pair,
) -> None:
    one, other = torch.ones(2, 3).T, torch.zeros(3)
    pair.here.post(pair.there, {"a": one, "b": [other, one]})
    ((_, announcement),) = pair.here.announced
    assert len(announcement.specs) == 2
    pair.here.announce_to(pair.there)
    (delivery,) = await pair.there.deliveries(1)
    value = delivery.value
    assert value["a"] is value["b"][1]
    assert value["a"] is not value["b"][0]
    assert (value["a"].tolist(), value["b"][0].tolist()) == (one.tolist(), other.tolist())


async def test_an_expanded_tensor_travels_as_small_as_it_is(pair: Pair) -> None:
    pair.here.post(pair.there, torch.ones(1000, 1).expand(1000, 1000))
    ((_, announcement),) = pair.here.announced
    assert [spec.bytes_total for spec in announcement.specs] == [4000]


@pytest.mark.parametrize("places", [(0, 2), (0, 0), (1,), (-1, 0)])
async def test_places_that_do_not_belong_to_the_tensors_are_an_error(
    pair: Pair, places: tuple[int, ...]
) -> None:
    pair.here.post(pair.there, (torch.ones(1), torch.ones(2)))
    ((_, announcement),) = pair.here.announced
    pair.there.courier.announced(0, msgspec.structs.replace(announcement, places=places))
    (delivery,) = await pair.there.deliveries(1)
    assert isinstance(delivery.error, ValueError)


@pytest.mark.parametrize("value", [None, 3, "text", (), {"loss": 1.5, "wants": [True, False]}])
async def test_a_value_without_tensors_travels_in_its_announcement_alone(
    pair: Pair, value: Any
) -> None:
    sent = pair.here.post(pair.there, value)
    assert sent.done()
    pair.here.announce_to(pair.there)
    assert [(d.peer, d.value, d.error) for d in pair.there.delivered] == [(0, value, None)]


async def test_values_arrive_in_the_order_in_which_they_were_posted(pair: Pair) -> None:
    values = [torch.full((n,), float(n)) for n in range(1, 40)]
    sent = [pair.here.post(pair.there, value, number=n) for n, value in enumerate(values)]
    pair.here.announce_to(pair.there)
    deliveries = await pair.there.deliveries(len(values))
    await asyncio.gather(*sent)
    assert [d.announcement.key[1] for d in deliveries] == list(range(len(values)))
    assert all(torch.equal(d.value, v) for d, v in zip(deliveries, values, strict=True))


async def test_both_directions_work_at_once(pair: Pair) -> None:
    there = pair.here.post(pair.there, torch.tensor(1.0))
    here = pair.there.post(pair.here, torch.tensor(2.0))
    pair.here.announce_to(pair.there)
    pair.there.announce_to(pair.here)
    await asyncio.gather(here, there)
    assert (await pair.there.deliveries(1))[0].value == 1.0
    assert (await pair.here.deliveries(1))[0].value == 2.0


async def test_a_post_is_done_when_the_peer_has_taken_the_tensors_and_not_before(
    pair: Pair,
) -> None:
    value = torch.ones(3)
    sent = pair.here.post(pair.there, value)
    await asyncio.sleep(0)
    assert not sent.done()
    pair.here.announce_to(pair.there)
    await sent
    value.zero_()  # from now on it is the sender's own again
    (delivery,) = await pair.there.deliveries(1)
    assert torch.equal(delivery.value, torch.ones(3))


async def test_what_requires_grad_arrives_without_its_graph(pair: Pair) -> None:
    value = torch.ones(3, requires_grad=True) * 2
    sent = pair.here.post(pair.there, value)
    pair.here.announce_to(pair.there)
    (delivery,) = await pair.there.deliveries(1)
    await sent
    assert not delivery.value.requires_grad
    assert torch.equal(delivery.value, torch.full((3,), 2.0))
    assert value.requires_grad


class Stranger:
    """No value that can travel."""


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"x": torch.ones(2), "y": Stranger()}, TypeError),
        (2**70, ValueError),
        (torch.ones(2).to_sparse(), ValueError),
    ],
)
async def test_a_value_that_cannot_travel_is_refused_before_anything_is_sent(
    pair: Pair, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        pair.here.post(pair.there, value)
    assert not pair.here.announced
    sent = pair.here.post(pair.there, torch.ones(1))
    pair.here.announce_to(pair.there)
    (delivery,) = await pair.there.deliveries(1)
    await sent
    assert torch.equal(delivery.value, torch.ones(1))


async def test_receives_are_posted_in_announced_order_whatever_becomes_of_the_values(
    pair: Pair,
) -> None:
    """A value that nobody wants any more must be taken, or the channel would be out of step."""
    posts = [pair.here.post(pair.there, torch.full((n + 1,), n), number=n) for n in range(3)]
    pair.here.announce_to(pair.there)
    await asyncio.gather(*posts)
    deliveries = await pair.there.deliveries(3)
    assert [delivery.value.tolist() for delivery in deliveries] == [[0], [1, 1], [2, 2, 2]]


async def test_values_with_and_without_tensors_may_overtake_each_other_but_tensors_may_not(
    pair: Pair,
) -> None:
    sent = [
        pair.here.post(pair.there, value, number=number)
        for number, value in enumerate([torch.ones(1), None, torch.ones(2), "text"])
    ]
    pair.here.announce_to(pair.there)
    deliveries = await pair.there.deliveries(4)
    await asyncio.gather(*sent)
    order = [delivery.announcement.key[1] for delivery in deliveries]
    assert [number for number in order if number in (0, 2)] == [0, 2]
    assert sorted(order) == [0, 1, 2, 3]


async def test_a_channel_that_ends_is_delivered_as_an_error_with_the_announcement(
    pair: Pair,
) -> None:
    sent = pair.here.post(pair.there, torch.ones(1), number=7)
    _, announcement = pair.here.announced.popleft()
    pair.there.path.drop(0, "worker 0 is gone")
    pair.there.courier.announced(0, announcement)
    (delivery,) = await pair.there.deliveries(1)
    assert isinstance(delivery.error, ChannelClosed)
    assert "worker 0 is gone" in str(delivery.error)
    assert (delivery.announcement.key, delivery.value) == ((1, 7), None)
    with pytest.raises(ChannelClosed):
        await sent


async def test_tensors_that_differ_from_their_announcement_are_an_error_at_both_ends(
    pair: Pair,
) -> None:
    sent = pair.here.post(pair.there, torch.ones(2))
    _, announcement = pair.here.announced.popleft()
    wrong = msgspec.structs.replace(announcement, specs=(TensorSpec((3,), "float32"),))
    pair.there.courier.announced(0, wrong)
    (delivery,) = await pair.there.deliveries(1)
    assert isinstance(delivery.error, ChannelError)
    with pytest.raises(ChannelError, match="refused by its receiver"):
        await sent


@pytest.mark.parametrize("layout", [TensorAt(1), NoneValue()])
async def test_a_layout_that_does_not_fit_the_tensors_is_delivered_as_an_error(
    pair: Pair, layout: TensorAt | NoneValue
) -> None:
    sent = pair.here.post(pair.there, torch.ones(2))
    _, announcement = pair.here.announced.popleft()
    pair.there.courier.announced(0, msgspec.structs.replace(announcement, layout=layout))
    (delivery,) = await pair.there.deliveries(1)
    await sent
    assert isinstance(delivery.error, ValueError)
    assert delivery.value is None


async def test_a_layout_that_asks_for_tensors_that_were_not_announced_is_an_error(
    pair: Pair,
) -> None:
    pair.there.courier.announced(0, Announce(Purpose.EDGE, (1, 0), "send", TensorAt(0), (), ()))
    (delivery,) = pair.there.delivered
    assert isinstance(delivery.error, ValueError)


class FakePath:
    """A data path that keeps what it is given; its receives are cancelled, as when a loop ends."""

    def __init__(self) -> None:
        self.sent: list[Sequence[Tensor]] = []

    def send(self, peer: int, tensors: Sequence[Tensor], *, label: str) -> "asyncio.Future[None]":
        self.sent.append(tensors)
        return asyncio.get_running_loop().create_future()

    def receive(
        self, peer: int, specs: Sequence[TensorSpec], *, label: str
    ) -> "asyncio.Future[list[Tensor]]":
        coming: asyncio.Future[list[Tensor]] = asyncio.get_running_loop().create_future()
        coming.cancel()
        return coming

    def drop(self, peer: int, reason: str) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


async def test_the_path_gets_the_tensors_themselves_without_their_graph() -> None:
    path = FakePath()
    courier = Courier(
        send=lambda peer, message: None,
        path=path,
        deliver=lambda *delivery: None,
        delays=Delays(None, 0),
    )
    value = torch.ones(3, requires_grad=True) * 2
    courier.post(1, value, purpose=Purpose.EDGE, key=(1, 0), label="send")
    ((tensor,),) = path.sent
    assert tensor.data_ptr() == value.data_ptr()
    assert not tensor.requires_grad


async def test_a_value_whose_receive_was_cancelled_is_not_delivered_and_nothing_is_logged() -> None:
    delivered: list[object] = []
    logged: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    courier = Courier(
        send=lambda peer, message: None,
        path=FakePath(),
        deliver=lambda *delivery: delivered.append(delivery),
        delays=Delays(None, 0),
    )
    specs = (TensorSpec((1,), "float32"),)
    courier.announced(1, Announce(Purpose.EDGE, (1, 0), "send", TensorAt(0), specs, ((),)))
    for _ in range(3):
        await asyncio.sleep(0)
    assert delivered == logged == []


# Injected delays


async def test_delayed_values_all_arrive_and_some_overtake_others() -> None:
    pair = pair_of(Jitter(seed=5, message_s=0.02))
    numbers = list(range(20))
    sent = [pair.here.post(pair.there, torch.tensor(n), number=n) for n in numbers]
    pair.here.announce_to(pair.there)
    deliveries = await pair.there.deliveries(len(numbers))
    await asyncio.gather(*sent)
    order = [delivery.announcement.key[1] for delivery in deliveries]
    assert sorted(order) == numbers
    assert order != numbers
    assert all(int(d.value) == d.announcement.key[1] for d in deliveries)
    await pair.close()


def test_delays_are_the_same_for_the_same_seed_and_worker_and_differ_otherwise() -> None:
    def some(seed: int, worker: int) -> list[float]:
        delays = Delays(Jitter(seed=seed, message_s=0.5), worker)
        return [delays.of_message_s() for _ in range(10)]

    assert some(1, 0) == some(1, 0)
    assert some(1, 0) != some(1, 1)
    assert some(1, 0) != some(2, 0)
    assert all(0 <= delay <= 0.5 for delay in some(1, 0))


@pytest.mark.parametrize("jitter", [None, Jitter(), Jitter(seed=3, op_s=1e-4)])
def test_messages_are_not_delayed_unless_it_is_asked_for(jitter: Jitter | None) -> None:
    delays = Delays(jitter, 0)
    assert [delays.of_message_s() for _ in range(3)] == [0.0, 0.0, 0.0]
    delays.before_op()


def test_a_description_of_jitter_crosses_the_bus() -> None:
    jitter = Jitter(seed=1, op_s=0.5, message_s=0.25)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(jitter), type=Jitter) == jitter
