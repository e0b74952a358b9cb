"""Buses over real sockets: `ipc` and `inproc`, on stock asyncio and on uvloop."""

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import msgpack
import msgspec
import pytest
import uvloop
import zmq

from myelin.errors import BackpressureError, FrameError, HandshakeError, TransportError
from myelin.transports.bus import Bus, Limits
from myelin.transports.frames import Codec, Heartbeat, Hello, Reject
from myelin.transports.peers import Gone

PATIENCE_S = 20.0  # only ever waited for when a test fails


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    number: int = 0
    data: bytes = b""


CODEC = Codec((Note,), max_frame_bytes=4000)
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    async def main(test: Coroutine[Any, Any, None]) -> None:
        loop, raised = asyncio.get_running_loop(), list[dict[str, Any]]()
        loop.set_exception_handler(lambda loop, report: raised.append(report))
        await asyncio.wait_for(test, PATIENCE_S)
        assert raised == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    def run(test: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main(test))

    return run


class Node:
    """A bus and all that its owner was told."""

    def __init__(self, net: "Net", number: int, incarnation: str = "a", **options: Any) -> None:
        self.messages: list[tuple[int, msgspec.Struct]] = []
        self.faults: list[FrameError] = []
        self.hellos: list[Hello] = []
        self.silent: list[int] = []
        self.gone: list[tuple[int, Gone]] = []
        self.objection: str | None = None
        self._told = asyncio.Event()
        usual: dict[str, Any] = {
            "node": number,
            "incarnation": incarnation,
            "address": net.address(f"{number}{incarnation}"),
            "codec": CODEC,
            "context": net.context,
            "on_message": lambda peer, message: self._tell(self.messages, (peer, message)),
            "on_fault": lambda error: self._tell(self.faults, error),
            "on_hello": self._judge,
            "on_silence": lambda peer, silent_s: self._tell(self.silent, peer),
            "on_gone": lambda peer, how: self._tell(self.gone, (peer, how)),
            "limits": Limits(heartbeat_s=60, silence_s=600, linger_s=0.1),
        }
        self.bus = Bus(**usual | options)

    def _judge(self, hello: Hello) -> str | None:
        self._tell(self.hellos, hello)
        return self.objection

    def _tell(self, told: list[Any], what: object) -> None:
        told.append(what)
        self._told.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something that the owner is told makes `condition` true."""
        while not condition():
            self._told.clear()
            await self._told.wait()

    def reasons(self) -> list[tuple[int | None, str]]:
        return [(error.peer, error.reason) for error in self.faults]


class Raw:
    """A peer that sends whatever it likes, and has an inbox of its own."""

    def __init__(self, net: "Net", target: Node, identity: bytes) -> None:
        self.address = net.address("raw-" + identity.hex())
        self.sequence = 0
        self._inbox = net.context.socket(zmq.ROUTER)
        self._inbox.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        self._inbox.bind(self.address)
        self._outbox = net.context.socket(zmq.DEALER)
        self._outbox.setsockopt(zmq.ROUTING_ID, identity)
        self._outbox.connect(target.bus.address)

    def send(self, message: msgspec.Struct, *, skip: int = 0) -> None:
        self.sequence += skip
        self.write(CODEC.encode(self.sequence, message))
        self.sequence += 1

    def write(self, *parts: bytes) -> None:
        self._outbox.send_multipart(parts)

    def read(self) -> msgspec.Struct:
        """Return the next message in the inbox; blocks, so it must be under way already."""
        _, frame = self._inbox.recv_multipart()
        return CODEC.decode(frame)[1]

    def hello(self, node: int = 1, incarnation: str = "a", **changes: Any) -> Hello:
        usual: dict[str, Any] = {
            "node": node,
            "incarnation": incarnation,
            "inbox": self.address,
            "protocol": 1,
            "torch": "2",
            "python": "3",
            "pid": 1,
        }
        return Hello(**usual | changes)

    def close(self) -> None:
        self._outbox.close(linger=0)
        self._inbox.close(linger=0)


class Net:
    """The nodes of one test, on one kind of transport."""

    def __init__(self, kind: str, directory: str) -> None:
        self.kind, self.directory = kind, directory
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.nodes: list[Node] = []
        self.raws: list[Raw] = []

    def address(self, name: str) -> str:
        return f"ipc://{self.directory}/{name}" if self.kind == "ipc" else f"inproc://{name}"

    async def node(self, number: int, incarnation: str = "a", **options: Any) -> Node:
        node = Node(self, number, incarnation, **options)
        self.nodes.append(node)
        await node.bus.start()
        return node

    async def pair(self, **options: Any) -> tuple[Node, Node]:
        """Return two nodes that have said hello to each other."""
        first, second = await self.node(0, **options), await self.node(1, **options)
        first.bus.connect(1, second.bus.address)
        second.bus.connect(0, first.bus.address)
        await asyncio.gather(first.bus.expect(1, PATIENCE_S), second.bus.expect(0, PATIENCE_S))
        return first, second

    def raw(self, target: Node, identity: bytes = b"1:a") -> Raw:
        raw = Raw(self, target, identity)
        self.raws.append(raw)
        return raw

    async def raw_peer(self, target: Node) -> Raw:
        """Return a raw peer that has said hello as node 1."""
        raw = self.raw(target)
        raw.send(raw.hello())
        await target.bus.expect(1, PATIENCE_S)
        return raw


@pytest.fixture(params=["ipc", "inproc"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.asynccontextmanager
async def network(kind: str) -> AsyncIterator[Net]:
    with tempfile.TemporaryDirectory(prefix="m-") as directory:
        net = Net(kind, directory)
        try:
            yield net
        finally:
            for raw in net.raws:
                raw.close()
            left = [name for name in os.listdir(directory) if not name.startswith("raw-")]
            assert len(left) <= len(net.nodes)
            for node in net.nodes:
                await node.bus.close()
            assert [name for name in os.listdir(directory) if not name.startswith("raw-")] == []
            net.context.destroy(linger=0)


@pytest.fixture
def threads() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


# Talking.


@pytest.mark.slow
def test_ten_thousand_messages_arrive_in_order(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            first, second = await net.pair(limits=Limits(60, 600, high_water=20_000))
            for number in range(10_000):
                first.bus.send(1, Note(number))
                if number % 999 == 0:
                    second.bus.send(0, Note(number))
                    await asyncio.sleep(0)
            await second.until(lambda: len(second.messages) == 10_000)
            assert second.messages == [(0, Note(number)) for number in range(10_000)]
            await first.until(lambda: len(first.messages) == 11)
            assert first.messages == [(1, Note(number)) for number in range(0, 10_000, 999)]
            assert first.reasons() == second.reasons() == []

    run(test())


def test_others_run_while_many_messages_wait(run: Run) -> None:
    async def test() -> None:
        async with network("inproc") as net:
            node = await net.node(0)
            raw = await net.raw_peer(node)
            for number in range(1000):
                raw.send(Note(number))
            turns = 0
            while len(node.messages) < 1000:
                await asyncio.sleep(0)
                turns += 1
            assert turns > 1000 / 64

    run(test())


def test_a_hello_says_who_and_where(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            first, second = await net.pair()
            hello = await first.bus.expect(1, PATIENCE_S)
            assert (hello.node, hello.incarnation, hello.pid) == (1, "a", os.getpid())
            assert hello.inbox == second.bus.address
            assert hello.protocol == 1
            assert hello.torch.startswith("2.")
            assert first.hellos == [hello]
            assert first.messages == second.messages == []

    run(test())


def test_a_hello_waits_for_who_listens_later(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            first = await net.node(0)
            first.bus.connect(1, net.address("1a"))
            first.bus.send(1, Note(7))
            second = await net.node(1)
            await second.bus.expect(0, PATIENCE_S)
            await second.until(lambda: bool(second.messages))
            assert second.messages == [(0, Note(7))]

    run(test())


def test_many_may_wait_for_one_hello(run: Run) -> None:
    async def test() -> None:
        async with network("inproc") as net:
            node = await net.node(0)
            waiting = [asyncio.ensure_future(node.bus.expect(1, PATIENCE_S)) for _ in range(3)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            raw = await net.raw_peer(node)
            assert await asyncio.gather(*waiting[1:]) == [raw.hello()] * 2
            assert waiting[0].cancelled()

    run(test())


def test_what_is_admitted_beforehand_needs_no_judgement(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            first, second = await net.node(0), await net.node(1)
            second.objection = "nobody"
            second.bus.admit(0, "a")
            second.bus.admit(0, "a")
            first.bus.connect(1, second.bus.address)
            first.bus.send(1, Note(1))
            await second.until(lambda: bool(second.messages))
            assert (await second.bus.expect(0, 0)).node == 0
            assert second.hellos == []
            with pytest.raises(TransportError, match="here as incarnation a"):
                second.bus.admit(0, "b")

    run(test())


# Not coming to talk.


def test_another_version_is_told_to_both_sides(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            node = await net.node(0)
            raw = net.raw(node)
            raw.send(raw.hello(protocol=9))
            with pytest.raises(HandshakeError, match=r"protocol version 9 .* version 1 is spoken"):
                await node.bus.expect(1, PATIENCE_S)
            assert node.reasons() == [(1, "version")]
            answer = raw.read()
            assert isinstance(answer, Reject)
            assert "version 9" in answer.reason
            assert "version 1" in answer.reason
            assert node.hellos == []

    run(test())


def test_a_frame_of_another_version_is_answered(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            node = await net.node(0)
            stranger = net.raw(node, b"2:z")
            body = {"type": "Hello", "node": 2, "inbox": stranger.address, "new": True}
            stranger.write(msgpack.packb([2, 0, body]))
            with pytest.raises(HandshakeError, match="node 2 speaks protocol version 2"):
                await node.bus.expect(2, PATIENCE_S)
            assert isinstance(stranger.read(), Reject)
            peer = await net.raw_peer(node)
            node.bus.connect(1, peer.address)
            assert isinstance(peer.read(), Hello)
            peer.write(msgpack.packb([2, 1, {"type": "Note"}]))
            await node.until(lambda: len(node.faults) == 2)
            assert node.reasons() == [(2, "version"), (1, "version")]
            assert isinstance(peer.read(), Reject)

    run(test())


def test_who_is_rejected_learns_why(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            first, second = await net.node(0), await net.node(1)
            second.objection = "torch 2.12 there, torch 2.13 here"
            waiting = asyncio.ensure_future(first.bus.expect(1, PATIENCE_S))
            first.bus.connect(1, second.bus.address)
            with pytest.raises(HandshakeError, match=r"node 1 rejected .* hello: torch 2.12 there"):
                await waiting
            with pytest.raises(HandshakeError, match=r"torch 2\.12 there"):
                await second.bus.expect(0, PATIENCE_S)
            assert first.reasons() == [(1, "malformed")]
            assert second.reasons() == []
            second.objection = None
            second.bus.forget(0)
            better = await net.node(0, "b")
            better.bus.connect(1, second.bus.address)
            assert (await second.bus.expect(0, PATIENCE_S)).incarnation == "b"

    run(test())


def test_a_rejection_goes_the_way_that_is_there(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            first, second = await net.node(0), await net.node(1)
            second.objection = "no"
            second.bus.connect(0, first.bus.address)
            await first.bus.expect(1, PATIENCE_S)
            first.bus.connect(1, second.bus.address)
            await first.until(lambda: bool(first.faults))
            assert first.reasons() == [(1, "malformed")]
            second.bus.send(0, Note(1))
            await first.until(lambda: bool(first.messages))

    run(test())


@pytest.mark.parametrize("inbox", ["tcp://127.0.0.1:9", "ipc:///none/x", "nonsense", "inproc://z"])
def test_an_answer_goes_nowhere_strange(run: Run, kind: str, inbox: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            node = await net.node(0)
            node.objection = "no"
            raw = net.raw(node)
            raw.send(raw.hello(inbox=inbox))
            with pytest.raises(HandshakeError, match="no"):
                await node.bus.expect(1, PATIENCE_S)

    run(test())


def test_a_hello_that_does_not_come_is_an_error_that_says_what_came(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            node = await net.node(0)
            with pytest.raises(
                HandshakeError, match=r"node 1 did not say .* heard from it: nothing"
            ):
                await node.bus.expect(1, 0)
            raw = net.raw(node)
            raw.write(b"\xc1")
            await node.until(lambda: bool(node.faults))
            with pytest.raises(HandshakeError, match=r"within 0 s; heard from it: 1 bytes that"):
                await node.bus.expect(1, 0)

    run(test())


def test_a_restarted_node_waits_until_the_old_one_is_forgotten(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            first, second = await net.pair()
            await second.bus.close()
            await first.until(lambda: bool(first.gone))
            early = await net.node(1, "b")
            early.bus.connect(0, first.bus.address)
            with pytest.raises(HandshakeError, match="node 1 is here as incarnation a"):
                await early.bus.expect(0, PATIENCE_S)
            first.bus.forget(1)
            again = await net.node(1, "c")
            again.bus.connect(0, first.bus.address)
            assert (await first.bus.expect(1, PATIENCE_S)).incarnation == "c"
            first.bus.connect(1, again.bus.address)
            assert (await again.bus.expect(0, PATIENCE_S)).incarnation == "a"

    run(test())


def test_a_judge_that_fails_rejects_and_is_reported() -> None:
    async def test() -> None:
        reports: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, report: reports.append(report))
        async with network("inproc") as net:

            def judge(hello: Hello) -> str | None:
                raise KeyError(hello.node)

            node = await net.node(0, on_hello=judge)
            raw = net.raw(node)
            raw.send(raw.hello())
            with pytest.raises(HandshakeError, match="failed to judge the hello: KeyError"):
                await node.bus.expect(1, PATIENCE_S)
        (report,) = reports
        assert isinstance(report["exception"], KeyError)

    asyncio.run(test())


# Bad frames.


def test_only_admitted_peers_are_heard(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            node = await net.node(0)
            peer = await net.raw_peer(node)
            for identity in (b"1:b", b"2:a", b"nonsense"):
                net.raw(node, identity).send(Note(666))
            await node.until(lambda: len(node.faults) == 3)
            assert node.reasons() == [(None, "stranger")] * 3
            peer.send(Note(1))
            await node.until(lambda: bool(node.messages))
            assert node.messages == [(1, Note(1))]
            assert node.bus.counters.faults == {"stranger": 3}

    run(test())


def test_replays_and_gaps_are_faults_and_the_rest_arrives(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            node = await net.node(0)
            raw = await net.raw_peer(node)
            raw.send(Note(1))
            raw.send(Note(1), skip=-1)
            raw.send(Note(2))
            raw.send(Note(3), skip=5)
            raw.send(Note(4))
            await node.until(lambda: len(node.messages) == 3)
            assert node.messages == [(1, Note(1)), (1, Note(2)), (1, Note(4))]
            assert node.reasons() == [(1, "replayed"), (1, "gap")]
            assert "5 frames of node 1 are missing" in str(node.faults[1])

    run(test())


def test_unreadable_frames_are_counted_logged_and_told(
    run: Run, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with network(kind) as net:
            node, other = await net.pair()
            raw = net.raw(node, b"5:x")
            raw.send(raw.hello(5, "x"))
            await node.bus.expect(5, PATIENCE_S)
            whole = CODEC.encode(1, Note())
            bad = [
                ((b"\xc1",), "malformed"),
                ((whole[:-2],), "malformed"),
                ((whole, b"more"), "malformed"),
                ((b"x" * 4001,), "oversized"),
                ((msgpack.packb([1, 1, {"type": "Secret"}]),), "unknown"),
            ]
            with caplog.at_level(logging.WARNING, "myelin.transports.bus"):
                for parts, _ in bad:
                    raw.write(*parts)
                await node.until(lambda: len(node.faults) == len(bad))
            assert node.reasons() == [(5, reason) for _, reason in bad]
            assert node.bus.counters.faults == {"malformed": 3, "oversized": 1, "unknown": 1}
            logged = [record.getMessage() for record in caplog.records]
            assert [text.split(" frame:")[0] for text in logged] == [
                f"node 0, {reason}" for _, reason in bad
            ]
            raw.send(Note(1), skip=len(bad))
            other.bus.send(0, Note(2))
            await node.until(lambda: len(node.messages) == 2)
            assert sorted(node.messages, key=repr) == [(1, Note(2)), (5, Note(1))]

    run(test())


def test_a_frame_too_long_even_to_read_is_told_as_a_loss_and_a_gap(run: Run) -> None:
    async def test() -> None:
        async with network("ipc") as net:
            node = await net.node(0)
            big = Codec((Note,), max_frame_bytes=100_000)
            peer = await net.node(1, codec=big, limits=Limits(0.005, 600, linger_s=0.1))
            peer.bus.connect(0, node.bus.address)
            peer.bus.admit(0, "a")  # so that it sends heartbeats
            await node.bus.expect(1, PATIENCE_S)
            peer.bus.send(0, Note(data=b"x" * 8001))
            await node.until(lambda: bool(node.gone))
            assert node.gone == [(1, Gone.CONNECTION_LOST)]
            assert node.bus.counters.connections_lost == 1
            await node.until(lambda: bool(node.faults))
            assert node.reasons() == [(1, "gap")]
            peer.bus.send(0, Note(3))
            await node.until(lambda: bool(node.messages))
            assert node.messages == [(1, Note(3))]

    run(test())


def test_too_long_a_message_is_refused_where_it_is_sent(run: Run) -> None:
    async def test() -> None:
        async with network("inproc") as net:
            first, second = await net.pair()
            with pytest.raises(
                FrameError, match=r"to node 1: Note of 4.* bytes, where 4000"
            ) as caught:
                first.bus.send(1, Note(data=b"x" * 4000))
            assert (caught.value.peer, caught.value.reason) == (1, "oversized")
            first.bus.send(1, Note(2))
            await second.until(lambda: bool(second.messages))
            assert second.reasons() == []

    run(test())


def test_a_connection_that_speaks_something_else_is_told(run: Run) -> None:
    async def test() -> None:
        async with network("ipc") as net:
            node = await net.node(0)
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(node.bus.address.removeprefix("ipc://"))
                stranger.send(b"\xff" * 100)
                await node.until(lambda: bool(node.faults))
            assert node.reasons() == [(None, "malformed")]
            assert "did not speak ZeroMQ's protocol" in str(node.faults[0])

    run(test())


def test_an_owner_that_raises_is_reported_and_stops_nothing() -> None:
    async def test() -> None:
        reports: list[dict[str, Any]] = []
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        loop.set_exception_handler(lambda loop, report: reports.append(report))

        def on_message(peer: int, message: msgspec.Struct) -> None:
            if message == Note(3):
                done.set()
            raise LookupError(message)

        def on_fault(error: FrameError) -> None:
            raise error

        async with network("inproc") as net:
            node = await net.node(0, on_message=on_message, on_fault=on_fault)
            raw = await net.raw_peer(node)
            raw.send(Note(1))
            raw.send(Note(2), skip=1)
            raw.send(Note(3))
            await asyncio.wait_for(done.wait(), PATIENCE_S)
        assert [type(report["exception"]) for report in reports] == [
            LookupError,
            FrameError,
            LookupError,
        ]
        assert "a callback of the bus of node 0 raised" in reports[0]["message"]

    asyncio.run(test())


# Being there.


def test_heartbeats_are_sent_and_not_delivered(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            raw_target = await net.node(0, limits=Limits(0.005, 600, linger_s=0.1))
            raw = await net.raw_peer(raw_target)
            raw_target.bus.connect(1, raw.address)
            assert isinstance(raw.read(), Hello)
            raw.send(Heartbeat())
            raw.send(Note(1))
            await raw_target.until(lambda: bool(raw_target.messages))
            assert raw_target.messages == [(1, Note(1))]
            for _ in range(3):
                assert await asyncio.to_thread(raw.read) == Heartbeat()

    run(test())


def test_each_silence_of_a_peer_is_told_once(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            node = await net.node(0, limits=Limits(0.005, 0.01, linger_s=0.1))
            raw = await net.raw_peer(node)
            await node.until(lambda: node.silent == [1])
            raw.send(Heartbeat())
            await node.until(lambda: node.silent == [1, 1])
            assert node.reasons() == []
            assert node.gone == []

    run(test())


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_nobody_is_blamed_for_a_stall_of_this_node(run: Run) -> None:
    async def test() -> None:
        async with network("inproc") as net:
            clock = Clock()
            limits = Limits(0.005, 0.05, linger_s=0.1)
            node = await net.node(0, limits=limits, clock=clock)
            raw = await net.raw_peer(node)
            node.bus.connect(1, raw.address)
            assert isinstance(raw.read(), Hello)

            async def beat() -> None:
                assert await asyncio.to_thread(raw.read) == Heartbeat()

            await beat()
            clock.now += 10_000  # the loop did nothing for so long
            await beat()
            await beat()
            assert node.silent == []
            for _ in range(20):  # but a silence while this node was awake counts
                clock.now += 0.005
                await beat()
            assert node.silent == [1]

    run(test())


def test_who_says_goodbye_is_gone_and_not_lost(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            first, second = await net.pair(limits=Limits(0.005, 0.01, linger_s=0.1))
            second.bus.send(0, Note(1))
            await second.bus.close()
            await first.until(lambda: bool(first.gone))
            assert first.messages == [(1, Note(1))]
            assert first.gone == [(1, Gone.GOODBYE)]
            sent = first.bus.counters.frames_out
            third = await net.node(3)  # long enough for a few beats of the first
            third.bus.connect(0, first.bus.address)
            await first.bus.expect(3, PATIENCE_S)
            await first.until(lambda: 3 in first.silent)
            assert first.bus.counters.frames_out == sent
            assert 1 not in first.silent[first.silent.index(3) :]
            assert first.bus.counters.connections_lost == 0

    run(test())


def test_a_peer_that_dies_is_told_at_once(run: Run) -> None:
    async def test() -> None:
        async with network("ipc") as net:
            node = await net.node(0)
            raw = await net.raw_peer(node)
            raw.send(Note(1))
            await node.until(lambda: bool(node.messages))
            raw.close()
            await node.until(lambda: bool(node.gone))
            assert node.gone == [(1, Gone.CONNECTION_LOST)]

    run(test())


def test_a_peer_that_takes_nothing_is_an_error_and_not_a_wait(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            node = await net.node(0, limits=Limits(0.005, 600, high_water=10))
            node.bus.connect(1, net.address("nobody"))
            node.bus.admit(1, "a")

            def send_for_ever() -> None:
                while True:
                    node.bus.send(1, Note())

            with pytest.raises(
                BackpressureError, match=r"node 1 at .* takes no more frames: 10 or"
            ):
                send_for_ever()
            assert node.bus.counters.frames_out == 10
            node.bus.forget(1)
            with pytest.raises(TransportError, match=r"connect\(1, ...\) comes first"):
                node.bus.send(1, Note())

    run(test())


def test_a_forgotten_peer_is_a_stranger(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            first, second = await net.pair()
            waiting = asyncio.ensure_future(first.bus.expect(9, PATIENCE_S))
            await asyncio.sleep(0)
            first.bus.forget(9)
            with pytest.raises(HandshakeError, match="node 9 was forgotten"):
                await waiting
            first.bus.forget(1)
            second.bus.send(0, Note())
            await first.until(lambda: bool(first.faults))
            assert first.reasons() == [(None, "stranger")]
            with pytest.raises(TransportError, match="another incarnation at a fresh address"):
                first.bus.connect(1, second.bus.address)

    run(test())


# Opening and closing.


@pytest.mark.usefixtures("threads")
def test_closing_leaves_nothing_behind(run: Run, kind: str) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with network(kind) as net:
            first, second = await net.pair()
            inbox = first.bus._inbox
            assert inbox is not None
            descriptors = (inbox.descriptor, inbox.monitor_descriptor)
            waiting = asyncio.ensure_future(first.bus.expect(7, PATIENCE_S))
            await asyncio.sleep(0)
            await first.bus.close()
            removed = [loop.remove_reader(descriptor) for descriptor in descriptors]
            assert not any(removed)
            with pytest.raises(HandshakeError, match="the bus of node 0 was closed"):
                await waiting
            await first.bus.close()
            await second.bus.close()
            assert os.listdir(net.directory) == []
            net.context.term()

    run(test())


def test_a_closed_bus_does_nothing_more(run: Run) -> None:
    async def test() -> None:
        async with network("inproc") as net:
            first, second = await net.pair()
            second.bus.send(0, Note())
            await first.bus.close()
            with pytest.raises(TransportError, match="the bus of node 0 is closed"):
                first.bus.send(1, Note())
            with pytest.raises(TransportError, match="the bus of node 0 is closed"):
                first.bus.connect(2, "inproc://2")
            with pytest.raises(TransportError, match="closed"):
                await first.bus.expect(1, 1)
            with pytest.raises(TransportError, match="cannot be started again"):
                await first.bus.start()
            await asyncio.sleep(0)
            assert first.messages == []

    run(test())


def test_a_bus_that_was_not_started_can_be_closed(run: Run) -> None:
    async def test() -> None:
        async with network("inproc") as net:
            node = Node(net, 0)
            with pytest.raises(TransportError, match="not started"):
                node.bus.connect(1, "inproc://1")
            await node.bus.close()
            started = await net.node(0)
            with pytest.raises(TransportError, match="cannot be started again"):
                await started.bus.start()

    run(test())


def test_a_bus_whose_address_is_taken_can_be_closed(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            await net.node(0)
            second = Node(net, 0)
            with pytest.raises(TransportError, match="cannot listen at"):
                await second.bus.start()
            await second.bus.close()

    run(test())


def test_peers_that_are_gone_or_never_came_delay_no_close(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            limits = Limits(heartbeat_s=0.005, silence_s=0.01, linger_s=600)
            node = await net.node(0, limits=limits)
            raw = await net.raw_peer(node)
            node.bus.connect(1, net.address("dead"))  # says hello, listens nowhere
            raw.close()
            await node.until(lambda: bool(node.silent or node.gone))
            node.bus.connect(2, net.address("never"))
            node.bus.forget(2)
            await node.bus.close()
            net.context.term()  # waits for what lingers

    run(test())


def test_what_was_sent_last_still_arrives(run: Run, kind: str) -> None:
    async def test() -> None:
        async with network(kind) as net:
            first, second = await net.pair()
            for number in range(500):
                first.bus.send(1, Note(number))
            await first.bus.close()
            await second.until(lambda: bool(second.gone))
            assert second.messages == [(0, Note(number)) for number in range(500)]
            assert second.gone == [(0, Gone.GOODBYE)]

    run(test())


def test_a_context_that_ends_too_early_is_logged_and_does_not_spin(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with network("inproc") as net:
            first, second = await net.pair()
            first.bus.send(1, Note())
            net.context.destroy(linger=0)
            second.bus._beat()
            second.bus._pump()
            second.bus._watch()
            assert "cannot read its inbox: was the context ended?" in caplog.text
            with pytest.raises(TransportError, match="cannot send to"):
                first.bus.send(1, Note())
            await first.bus.close()
            await second.bus.close()

    run(test())


def test_a_peer_is_connected_once(run: Run) -> None:
    async def test() -> None:
        async with network("inproc") as net:
            first, second = await net.pair()
            with pytest.raises(TransportError, match=r"connected already; forget\(1\) comes first"):
                first.bus.connect(1, second.bus.address)

    run(test())


def test_the_status_line_and_the_counters_tell_what_happened(run: Run) -> None:
    async def test() -> None:
        async with network("inproc") as net:
            first, second = await net.pair()
            first.bus.send(1, Note())
            await second.until(lambda: bool(second.messages))
            second.bus._pump()
            counters = second.bus.counters
            assert (counters.frames_in, counters.frames_out) == (2, 1)
            assert counters.bytes_in == first.bus.counters.bytes_out > 0
            assert set(counters.heard_at) == {0}
            assert counters.faults == {}
            assert repr(first.bus).startswith("<Bus of node 0 at inproc://0a: open, in 1, out 2, ")
            assert "peers: 1 heard 0." in repr(first.bus)
            await first.bus.close()
            assert "closed" in repr(first.bus)

    run(test())


@pytest.mark.parametrize(
    ("name", "value"),
    [("heartbeat_s", 0), ("heartbeat_s", 3), ("linger_s", -1), ("high_water", 0)],
)
def test_limits_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: value})  # type: ignore[arg-type]


async def test_a_node_needs_a_name_that_can_be_sent() -> None:
    async with network("inproc") as net:
        for number, incarnation in ((-5, "a"), (0, ""), (0, "a:b")):
            with pytest.raises(ValueError, match="use a node of -1"):
                Node(net, number, incarnation)
