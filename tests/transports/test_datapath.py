"""One conformance suite for every data path, and what only one of them must stand.

Far ends live in this process as a second object, and in a second process where one is killed.
"""

import asyncio
import gc
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
import torch
import uvloop

from myelin.errors import ChannelClosed, ChannelError, ChannelTimeout
from myelin.testing.channel_peer import command, floats
from myelin.testing.watching import until
from myelin.transports.datapath import COORDINATOR, DTYPES, DataPath, TensorSpec, spec_of
from myelin.transports.gloo import EAGER_BYTES, GlooPath
from myelin.transports.loopback import LoopbackHub

T = TypeVar("T")
MakePath = Callable[..., DataPath]
AnyFuture = asyncio.Future[Any]


async def within(awaitable: Awaitable[T], *, seconds: float = 30.0) -> T:
    """Await, but rather fail than hang."""
    async with asyncio.timeout(seconds):
        return await awaitable


@pytest.fixture(params=["loopback", "gloo"])
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[MakePath]:
    """Make one node's end; at the end of the test all are closed and no thread may be left."""
    before = set(threading.enumerate())
    paths: list[DataPath] = []
    hubs: dict[float, LoopbackHub] = {}

    def make(node: int, *, timeout_s: float = 30.0) -> DataPath:
        path: DataPath
        if request.param == "gloo":
            path = GlooPath(node, tmp_path, timeout_s=timeout_s)
        else:
            hub = hubs.setdefault(timeout_s, LoopbackHub(timeout_s=timeout_s))
            path = hub.endpoint(node)
        paths.append(path)
        return path

    yield make
    for path in paths:
        await within(path.close())
    assert set(threading.enumerate()) == before


async def move(
    sender: tuple[int, DataPath],
    receiver: tuple[int, DataPath],
    *tensors: torch.Tensor,
    label: str = "move",
) -> list[torch.Tensor]:
    """Send one message and return what came."""
    (source, source_path), (target, target_path) = sender, receiver
    sent = source_path.send(target, tensors, label=label)
    specs = [spec_of(tensor) for tensor in tensors]
    received = target_path.receive(source, specs, label=label)
    got, _ = await within(asyncio.gather(received, sent))
    return got


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [t.detach().resolve_conj().contiguous().view(-1) for t in (one, other)]
    return torch.equal(flat[0].view(torch.uint8), flat[1].view(torch.uint8))


def number(value: float) -> torch.Tensor:
    return torch.tensor([float(value)])


ONE = [TensorSpec(shape=(1,), dtype="float32")]


async def test_messages_of_both_directions_arrive_in_order(make: MakePath) -> None:
    a, b = make(0), make(1)
    count = 200
    sends = [a.send(1, [number(i)], label=f"there {i}") for i in range(count)]
    sends += [b.send(0, [number(-i)], label=f"back {i}") for i in range(count)]
    there = [b.receive(0, ONE, label=f"there {i}") for i in range(count)]
    back = [a.receive(1, ONE, label=f"back {i}") for i in range(count)]
    got = await within(asyncio.gather(*there, *back))
    await within(asyncio.gather(*sends))
    assert [tensors[0].item() for tensors in got] == [*range(count), *(-i for i in range(count))]


async def test_receives_may_be_posted_long_before_the_sends(make: MakePath) -> None:
    a, b = make(0), make(1)
    futures = [b.receive(0, ONE, label=f"{i}") for i in range(5)]
    for i in range(5):
        await within(a.send(1, [number(i)], label=f"{i}"))
    got = await within(asyncio.gather(*futures))
    assert [tensors[0].item() for tensors in got] == [0, 1, 2, 3, 4]


async def test_every_dtype_and_another_shape_in_each_message_come_out_bit_equal(
    make: MakePath,
) -> None:
    a, b = make(0), make(1)
    for index, name in enumerate(sorted(set(DTYPES) - {"complex32"})):
        raw = torch.arange(2 * 3 * (index + 1) * 16, dtype=torch.int64).to(torch.uint8)
        raw = raw % 2 if name == "bool" else raw
        sent = raw.view(DTYPES[name]).view(3, 2, -1)
        (got,) = await move((0, a), (1, b), sent)
        assert same_bits(got, sent), name
        assert got.is_contiguous()


async def test_nobody_keeps_what_came_across(make: MakePath) -> None:
    a, b = make(0), make(1)
    sent, (got,) = torch.ones(3), await move((0, a), (1, b), torch.ones(3))
    await move((0, a), (1, b), sent)  # a message later each thread waits for the next
    kept = [weakref.ref(sent), weakref.ref(got)]
    del sent, got
    gc.collect()
    await within(until(lambda: [ref() for ref in kept] == [None, None]))


async def test_several_tensors_travel_in_one_message(make: MakePath) -> None:
    a, b = make(0), make(1)
    sent = [
        torch.randn(3, 5),
        torch.arange(7).to(torch.uint16),
        torch.tensor([True, False]),
        torch.randn(64, 300, dtype=torch.float64),
    ]
    got = await move((0, a), (1, b), *sent)
    assert [same_bits(*pair) for pair in zip(got, sent, strict=True)] == [True] * 4


async def test_tensors_without_elements_and_without_dimensions_travel(make: MakePath) -> None:
    a, b = make(0), make(1)
    sent = [torch.empty(0), torch.tensor(3.5), torch.empty(4, 0, 2, dtype=torch.int32)]
    got = await move((0, a), (1, b), *sent)
    assert [tuple(tensor.shape) for tensor in got] == [(0,), (), (4, 0, 2)]
    assert got[1].item() == 3.5
    assert await move((0, a), (1, b), torch.empty(0, 9)) != []
    assert await move((0, a), (1, b)) == []


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[::2, 1::3],
        lambda x: x[:1].expand(1000, -1),
        lambda x: x.to(torch.complex64).conj(),
        lambda x: torch.nn.Parameter(x).t(),
        lambda x: (torch.nn.Parameter(x) * 2)[1:],
    ],
    ids=["transposed", "strided", "expanded", "conjugated", "parameter", "part of a graph"],
)
async def test_views_arrive_as_contiguous_tensors(
    make: MakePath, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    a, b = make(0), make(1)
    sent = view(torch.randn(12, 10))
    (got,) = await move((0, a), (1, b), sent)
    assert same_bits(got, sent)
    assert got.is_contiguous()
    assert not got.requires_grad
    assert got.requires_grad_().is_leaf


@pytest.mark.parametrize("extra", [-1, 0, 1])
async def test_sizes_around_the_eager_limit_arrive_whole(make: MakePath, extra: int) -> None:
    a, b = make(0), make(1)
    sent = torch.arange(EAGER_BYTES + extra, dtype=torch.int64).to(torch.uint8)
    for _ in range(2):
        got = await move((0, a), (1, b), sent[:100], sent[100:])
        assert torch.equal(torch.cat(got), sent)


@pytest.mark.slow
async def test_a_tensor_of_64_mib_arrives_whole(make: MakePath) -> None:
    a, b = make(0), make(1)
    sent = torch.arange(64 * 2**20 // 8)
    for _ in range(2):
        (got,) = await move((0, a), (1, b), sent)
        assert torch.equal(got, sent)


async def test_what_is_received_is_a_copy(make: MakePath) -> None:
    a, b = make(0), make(1)
    sent = torch.zeros(1000)
    (got,) = await move((0, a), (1, b), sent)
    got += 1
    assert sent.sum().item() == 0
    sent -= 1
    assert got.sum().item() == 1000


async def test_the_sender_need_not_keep_the_tensor_alive(make: MakePath) -> None:
    a, b = make(0), make(1)
    sent = a.send(1, [torch.full((50_000,), 7.0)], label="orphan")
    gc.collect()
    junk = [torch.full((50_000,), 9.0) for _ in range(10)]
    (got,) = await within(b.receive(0, [floats(50_000)], label="orphan"))
    await within(sent)
    assert got.eq(7.0).all()
    assert len(junk) == 10


async def test_a_send_is_not_done_before_the_peer_has_taken_it(make: MakePath) -> None:
    a, b = make(0), make(1)
    await move((0, a), (1, b), number(0))
    sent = a.send(1, [number(1)], label="early")
    await move((1, b), (0, a), number(2), label="meanwhile the other way")
    assert not sent.done()
    await within(b.receive(0, ONE, label="early"))
    await within(sent)


async def test_a_cancelled_future_does_not_recall_its_message(make: MakePath) -> None:
    a, b = make(0), make(1)
    a.send(1, [number(1)], label="cancelled").cancel()
    cancelled = b.receive(0, ONE, label="cancelled too")
    cancelled.cancel()
    (got,) = await move((0, a), (1, b), number(2))
    assert got.item() == 2


async def test_channels_of_three_nodes_do_not_mix(make: MakePath) -> None:
    nodes = {node: make(node) for node in (COORDINATOR, 0, 1)}
    pairs = [(s, r) for s in nodes for r in nodes if s != r]
    sends = [
        nodes[s].send(r, [number(100 * s + 10 * r + i)], label="mix")
        for i in range(3)
        for s, r in pairs
    ]
    receives = [nodes[r].receive(s, ONE, label="mix") for s, r in reversed(pairs) for _ in range(3)]
    got = await within(asyncio.gather(*receives))
    await within(asyncio.gather(*sends))
    expected = [100 * s + 10 * r + i for s, r in reversed(pairs) for i in range(3)]
    assert [tensors[0].item() for tensors in got] == expected


async def test_a_receive_fails_when_the_sender_closes_first(make: MakePath) -> None:
    a, b = make(0), make(1)
    await move((0, a), (1, b), number(0))
    pending = b.receive(0, ONE, label="backward stage=1 microbatch=2")
    await within(a.close())
    with pytest.raises(ChannelClosed, match=r"backward stage=1 microbatch=2.* worker 0") as caught:
        await within(pending)
    assert caught.value.peer == 0
    with pytest.raises(ChannelClosed, match=r"the next one.* worker 0"):
        await within(b.receive(0, ONE, label="the next one"))


async def test_a_send_fails_when_the_receiver_closes_first(make: MakePath) -> None:
    a, b = make(0), make(COORDINATOR)
    await move((0, a), (COORDINATOR, b), number(0))
    pending = [a.send(COORDINATOR, [torch.zeros(size)], label="loss") for size in (1, 100_000)]
    await within(b.close())
    for future in pending:
        with pytest.raises(ChannelClosed, match="'loss' to the coordinator"):
            await within(future)


async def test_a_message_that_was_taken_counts_even_if_both_ends_close_at_once(
    make: MakePath,
) -> None:
    for node in range(0, 20, 2):
        a, b = make(node), make(node + 1)
        sent = a.send(node + 1, [torch.ones(100_000)], label="last words")
        (got,) = await within(b.receive(node, [floats(100_000)], label="last words"))
        await within(b.close())
        await within(sent)
        await within(a.close())
        assert got.sum().item() == 100_000


async def test_drop_fails_what_is_under_way_and_what_comes_later(make: MakePath) -> None:
    a, b, c = make(0), make(1), make(2)
    await move((0, a), (1, b), number(0))
    pending: list[AnyFuture] = [
        a.send(1, [number(1)], label="one"),
        a.receive(1, ONE, label="two"),
    ]
    a.drop(1, "worker 1 was killed by signal 9")
    later: list[AnyFuture] = [
        a.send(1, [number(1)], label="three"),
        a.receive(1, ONE, label="four"),
    ]
    for future, label in zip([*pending, *later], ["one", "two", "three", "four"], strict=True):
        with pytest.raises(ChannelClosed, match=f"'{label}' .* worker 1 .*killed by signal 9"):
            await within(future, seconds=5)
    (got,) = await move((0, a), (2, c), number(5))
    assert got.item() == 5


async def test_drop_fails_at_once_what_waits_for_a_peer_that_never_came(make: MakePath) -> None:
    a = make(0)
    pending: list[AnyFuture] = [
        a.send(7, [number(1)], label="x"),
        a.receive(7, ONE, label="x"),
    ]
    a.drop(7, "worker 7 was never started")
    for future in pending:
        with pytest.raises(ChannelClosed, match="never started"):
            await within(future, seconds=5)


@pytest.mark.slow
@pytest.mark.parametrize("met", [False, True], ids=["never there", "there but idle"])
async def test_a_timeout_names_the_peer_and_the_op(make: MakePath, met: bool) -> None:
    a, b = make(0, timeout_s=1), make(COORDINATOR, timeout_s=1)
    if met:
        await move((0, a), (COORDINATOR, b), number(0))
        await move((COORDINATOR, b), (0, a), number(0))
    send = a.send(COORDINATOR, [number(1)], label="forward stage=0 microbatch=3")
    receive = a.receive(COORDINATOR, ONE, label="load microbatch=4")
    with pytest.raises(ChannelTimeout, match="'forward stage=0 microbatch=3' to the coordinator"):
        await within(send, seconds=10)
    with pytest.raises(ChannelTimeout, match=r"'load microbatch=4' from the .* within 1 s"):
        await within(receive, seconds=10)
    with pytest.raises(ChannelClosed, match=r"'next' .* an earlier message failed: 'forward stage"):
        await within(a.send(COORDINATOR, [number(1)], label="next"))


@pytest.mark.parametrize(
    "announced",
    [
        [TensorSpec(shape=(3,), dtype="float32")],
        [TensorSpec(shape=(40_000,), dtype="float32")],
        [TensorSpec(shape=(2, 2), dtype="float32")],
        [TensorSpec(shape=(4,), dtype="int32")],
        [TensorSpec(shape=(4,), dtype="float32")] * 2,
        [],
        [TensorSpec(shape=(-4,), dtype="float32")],
        [TensorSpec(shape=(4,), dtype="Tensor")],
        [TensorSpec(shape=(2**50, 2**50), dtype="float64")],
    ],
    ids=str,
)
async def test_a_wrong_announcement_fails_both_ends_and_only_this_channel(
    make: MakePath, announced: list[TensorSpec]
) -> None:
    a, b = make(0), make(1)
    sent = a.send(1, [torch.zeros(4)], label="forward stage=0 microbatch=0")
    with pytest.raises(ChannelError, match=r"'other' from worker 0 was announced as") as caught:
        await within(b.receive(0, announced, label="other"))
    assert "'forward stage=0 microbatch=0' with float32[4]" in str(caught.value)
    with pytest.raises(
        ChannelError, match="'forward stage=0 microbatch=0' to worker 1 was refused"
    ):
        await within(sent)
    with pytest.raises(ChannelClosed, match="an earlier message failed"):
        await within(b.receive(0, ONE, label="later"))
    (got,) = await move((1, b), (0, a), number(3))
    assert got.item() == 3


async def test_close_fails_what_is_under_way_and_what_comes_later(make: MakePath) -> None:
    a = make(0)
    pending: list[AnyFuture] = [
        a.send(1, [number(1)], label="one"),
        a.receive(1, ONE, label="two"),
    ]
    await within(a.close())
    await within(a.close())
    later: list[AnyFuture] = [
        a.send(1, [number(1)], label="three"),
        a.receive(3, ONE, label="four"),
    ]
    for future in [*pending, *later]:
        with pytest.raises(ChannelClosed, match="worker 0 closed its data path"):
            await within(future)


async def test_a_node_has_no_channel_to_itself(make: MakePath) -> None:
    a = make(0)
    with pytest.raises(ValueError, match="worker 0 has no channel to itself"):
        a.send(0, [number(1)], label="self")
    with pytest.raises(ValueError, match="worker 0 has no channel to itself"):
        a.receive(0, ONE, label="self")


@pytest.mark.parametrize(
    "tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"]
)
async def test_a_tensor_that_cannot_travel_is_refused_at_once(
    make: MakePath, tensor: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match="cannot travel: make it a dense CPU tensor"):
        make(0).send(1, [tensor], label="odd")


# What only the loopback must do.


def test_loopback_connects_event_loops_in_different_threads() -> None:
    hub = LoopbackHub()
    seen: dict[int, list[float]] = {}

    async def talk(node: int) -> None:
        path = hub.endpoint(node)
        sends = [path.send(1 - node, [number(i)], label="s") for i in range(200)]
        got = [await within(path.receive(1 - node, ONE, label="r")) for _ in range(200)]
        await within(asyncio.gather(*sends))
        seen[node] = [tensors[0].item() for tensors in got]

    threads = [threading.Thread(target=asyncio.run, args=(talk(node),)) for node in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert seen == {0: list(range(200)), 1: list(range(200))}


# What only gloo must stand.


@pytest.mark.slow
async def test_gloo_stands_closing_and_dropping_at_any_moment(tmp_path: Path) -> None:
    for seed in range(20):
        random = Random(seed)
        directory = tmp_path / str(seed)
        directory.mkdir()
        a, b = GlooPath(0, directory), GlooPath(1, directory)
        size = random.choice([1, 1_000, 1_000_000])
        futures: list[AnyFuture] = []
        for _ in range(3):
            futures.append(a.send(1, [torch.zeros(size)], label="there"))
            futures.append(b.receive(0, [floats(size)], label="there"))
            futures.append(b.send(0, [torch.zeros(size)], label="back"))
            futures.append(a.receive(1, [floats(size)], label="back"))
        await within(futures[random.randrange(3)]) if random.random() < 0.8 else None
        for _ in range(random.randrange(30)):  # some turns of the loop later
            await asyncio.sleep(0)
        if random.random() < 0.5:
            a.drop(1, f"seed {seed}")
        await within(asyncio.gather(a.close(), b.close()), seconds=4)
        outcomes = await within(asyncio.gather(*futures, return_exceptions=True), seconds=4)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert {type(failure) for failure in failures} <= {ChannelClosed}, f"seed {seed}"
        assert gloo_threads() == [], f"seed {seed}"


def gloo_threads() -> list[str]:
    """Names of the threads that gloo itself has started in this process."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except FileNotFoundError:  # it has just ended
            continue
    return sorted(name for name in names if "gloo" in name)


async def test_gloo_leaves_no_thread_of_its_own_or_of_the_library(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    assert gloo_threads() == []
    a, b = GlooPath(0, tmp_path), GlooPath(1, tmp_path)
    await move((0, a), (1, b), number(0))
    pending: list[AnyFuture] = [
        a.send(1, [number(1)], label="s"),
        a.receive(1, ONE, label="r"),
        a.send(2, [number(1)], label="s"),
        b.receive(2, ONE, label="r"),
    ]
    assert gloo_threads() != []
    await within(asyncio.gather(a.close(), b.close()), seconds=5)
    outcomes = await within(asyncio.gather(*pending, return_exceptions=True))
    assert [type(outcome) for outcome in outcomes] == [ChannelClosed] * 4
    assert set(threading.enumerate()) == threads
    assert gloo_threads() == []


def test_gloo_works_on_uvloop(tmp_path: Path) -> None:
    async def main() -> float:
        a, b = GlooPath(0, tmp_path), GlooPath(1, tmp_path)
        (got,) = await move((0, a), (1, b), number(4))
        await within(asyncio.gather(a.close(), b.close()))
        return got.item()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == 4


def test_gloo_survives_that_its_loop_was_closed(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    path = GlooPath(0, tmp_path)

    async def start() -> None:
        path.receive(1, ONE, label="nobody waits")

    asyncio.run(start())
    asyncio.run(path.close())
    assert set(threading.enumerate()) == before


async def test_gloo_refuses_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no directory"):
        GlooPath(0, tmp_path / "missing")


async def test_gloo_refuses_an_interface_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"interface_host='203\.0\.113\.9' is no interface"):
        GlooPath(0, tmp_path, interface_host="203.0.113.9")


@contextmanager
def peer_process(directory: Path, *steps: str) -> Iterator[subprocess.Popen[str]]:
    """Run worker 1 in a process of its own, talking to worker 0."""
    arguments = command(str(directory), 1, 0, steps)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
async def path(tmp_path: Path) -> AsyncIterator[GlooPath]:
    """Worker 0, here."""
    path = GlooPath(0, tmp_path, timeout_s=30)
    yield path
    await within(path.close())


@pytest.mark.slow
@pytest.mark.processes
async def test_gloo_moves_messages_between_processes(path: GlooPath, tmp_path: Path) -> None:
    with peer_process(tmp_path, "echo:5:50", "echo:300000:3") as process:
        for size, times in ((5, 50), (300_000, 3)):
            for i in range(times):
                sent = torch.full((size,), float(i))
                future = path.send(1, [sent], label="ping")
                (got,) = await within(path.receive(1, [floats(size)], label="pong"))
                await within(future)
                assert torch.equal(got, sent)
        assert await asyncio.to_thread(process.wait, 30) == 0


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("size", [1, 1_000_000])
async def test_gloo_tells_within_seconds_that_the_peer_was_killed(
    path: GlooPath, tmp_path: Path, size: int
) -> None:
    with peer_process(tmp_path, "echo:5:1", "hang") as process:
        sent = path.send(1, [torch.zeros(5)], label="ping")
        await within(path.receive(1, [floats(5)], label="pong"))
        await within(sent)
        pending = [
            path.receive(1, [floats(size)], label="backward stage=0 microbatch=1"),
            path.receive(1, [floats(size)], label="backward stage=0 microbatch=2"),
        ]
        process.kill()
        started = time.monotonic()
        for future in pending:
            with pytest.raises(ChannelClosed, match=r"'backward stage=0 .* from worker 1"):
                await within(future, seconds=5)
        with pytest.raises(ChannelClosed, match="'forward' to worker 1"):
            await within(path.send(1, [torch.zeros(size)], label="forward"), seconds=5)
        assert time.monotonic() - started < 5


@pytest.mark.slow
@pytest.mark.processes
async def test_gloo_tells_that_the_peer_was_killed_in_the_middle_of_large_messages(
    path: GlooPath, tmp_path: Path
) -> None:
    size = 4_000_000
    with peer_process(tmp_path, f"echo:{size}:1000") as process:
        first = path.send(1, [torch.zeros(size)], label="forward 0")
        back = [path.receive(1, [floats(size)], label=f"backward {i}") for i in range(5)]
        sends = [path.send(1, [torch.zeros(size)], label=f"forward {i}") for i in range(1, 5)]
        await within(asyncio.gather(first, back[0]))
        process.kill()
        outcomes = await within(asyncio.gather(*sends, *back, return_exceptions=True), seconds=5)
        assert [type(outcomes[3]), type(outcomes[8])] == [ChannelClosed, ChannelClosed]


@pytest.mark.slow
@pytest.mark.processes
async def test_gloo_times_out_on_a_stopped_peer_and_still_closes(tmp_path: Path) -> None:
    path = GlooPath(0, tmp_path, timeout_s=1.0)
    with peer_process(tmp_path, "say:ready", "receive:5", "send:5", "hang") as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
        first = path.send(1, [torch.zeros(5)], label="first")
        await within(path.receive(1, [floats(5)], label="ready"))
        await within(first)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ChannelTimeout, match="'forward' to worker 1 was not taken within 1 s"):
            await within(path.send(1, [torch.zeros(5)], label="forward"), seconds=5)
        pending = path.receive(1, [floats(5)], label="backward")
        before = time.monotonic()
        await within(path.close(), seconds=5)
        assert time.monotonic() - before < 2
        with pytest.raises(ChannelClosed, match="'backward' from worker 1"):
            await within(pending)
        assert [thread for thread in threading.enumerate() if "myelin" in thread.name] == []


@pytest.mark.slow
@pytest.mark.processes
async def test_gloo_lets_a_process_exit_that_never_closed(path: GlooPath, tmp_path: Path) -> None:
    with peer_process(tmp_path, "send:1", "leave") as process:
        await within(path.receive(1, ONE, label="hello"))
        assert await asyncio.to_thread(process.wait, 30) == 0
