"""The nodes of a cluster, opened and closed: the coordinator's bus and data path, and the workers.

`ProcessMembers` are processes on this machine; `ThreadMembers` live in the calling process and grow
as plans ask for more workers. Both open the same bus and hand out the same `Coordinator`.
"""

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from myelin.coordinator import Coordinator
from myelin.errors import ClusterError, FrameError, HandshakeError, TransportError
from myelin.inprocess import InProcessWorker
from myelin.launch import LocalProcess
from myelin.run import look_at
from myelin.runtime import blackbox
from myelin.runtime import messages as m
from myelin.runtime.graph import COORDINATOR
from myelin.runtime.jitter import Jitter
from myelin.runtime.process import WorkerConfig, black_box_path
from myelin.transports.bus import Bus, Limits
from myelin.transports.datapath import DataPath
from myelin.transports.frames import Codec, Hello
from myelin.transports.gloo import GlooPath
from myelin.transports.loopback import LoopbackHub

_POLITE_EXIT_S = 2.0
_SOCKET_PATH_BYTES = 80


class Settings(msgspec.Struct, frozen=True):
    """How workers are started and watched; see `myelin.Cluster`."""

    workers: int
    threads: int | None
    hello_deadline_s: float
    silence_s: float
    data_timeout_s: float
    jitter: Jitter | None

    @property
    def heartbeat_s(self) -> float:
        """How often every node tells that it is alive: several times before it counts as silent."""
        return min(1.0, self.silence_s / 4)


class Members(Protocol):
    """The nodes of one cluster."""

    coordinator: Coordinator

    async def open(self) -> None:
        """Start what is needed; on an error everything is closed again."""
        ...

    async def ensure(self, workers: int) -> None:
        """Have at least so many workers.

        Raises:
            ClusterError: there are fewer, and no more can be had.
        """
        ...

    async def close(self) -> None:
        """End everything; returns within a few seconds unless a thread is inside a long op."""
        ...


class _Node:
    """The coordinator's own end: a bus, and the peers that it knows."""

    def __init__(
        self,
        *,
        inbox: str,
        context: "zmq.Context[zmq.Socket[bytes]]",
        settings: Settings,
        owner: Callable[[], Coordinator],
    ) -> None:
        self.peer = m.Peer(COORDINATOR, uuid.uuid4().hex[:12], inbox)
        self.peers: list[m.Peer] = []
        self._owner = owner
        self.bus = Bus(
            node=COORDINATOR,
            incarnation=self.peer.incarnation,
            address=inbox,
            codec=Codec(m.MESSAGES),
            context=context,
            on_message=lambda peer, message: owner().receive(peer, message),
            on_fault=self._fault,
            on_hello=self._judge,
            on_silence=lambda peer, silent_s: owner().worker_ended(
                peer,
                f"has been silent for {silent_s:.1f} s (stopped, or its machine is overloaded)",
            ),
            limits=Limits(settings.heartbeat_s, settings.silence_s),
        )

    def expect(self, inbox: str) -> m.Peer:
        """Make room for one more worker and return its identity."""
        peer = m.Peer(len(self.peers), uuid.uuid4().hex[:12], inbox)
        self.peers.append(peer)
        return peer

    async def greet(self, peer: m.Peer, deadline_s: float) -> None:
        """Wait for a worker's hello and answer it."""
        await self.bus.expect(peer.node, deadline_s)
        self.bus.connect(peer.node, peer.inbox)

    async def introduce(self) -> None:
        """Tell all workers of each other; only then may they be given work."""
        everybody = tuple(self.peers)
        await self._owner().requests.ask_all(
            lambda _worker, number: m.Peers(number, everybody), range(len(everybody))
        )

    def _judge(self, hello: Hello) -> str | None:
        """Admit who is expected; from then on, and not while it starts, its silence counts."""
        for peer in self.peers:
            if (peer.node, peer.incarnation) == (hello.node, hello.incarnation):
                return None
        return f"node {hello.node} is not a member of this cluster"

    def _fault(self, error: FrameError) -> None:
        if error.peer is not None and 0 <= error.peer < len(self.peers):
            self._owner().lost(error.peer, error)


class ProcessMembers:
    """Worker processes on this machine, in a private directory for sockets and rendezvous files."""

    coordinator: Coordinator

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._processes: list[LocalProcess] = []
        self._exits: dict[int, asyncio.Future[str]] = {}
        self._closing = False
        self._cleanup = contextlib.AsyncExitStack()

    async def open(self) -> None:
        """See `Members`."""
        try:
            self._make_own_end()
            await self._node.bus.start()
            for _ in range(self._settings.workers):
                self._spawn()
            await asyncio.gather(*(self._greet(peer) for peer in self._node.peers))
            await self._node.introduce()
        except BaseException:
            await self.close()
            raise

    async def ensure(self, workers: int) -> None:
        """See `Members`."""
        if workers > len(self._processes):
            raise ClusterError(
                f"{workers} workers are needed and the cluster has {len(self._processes)}: start "
                f"it with Cluster(workers={workers}), or place more on each worker"
            )

    async def close(self) -> None:
        """See `Members`. Cancelled, it kills the workers and does the rest all the same."""
        await self._cleanup.aclose()

    def _make_own_end(self) -> None:
        settings, cleanup = self._settings, self._cleanup
        self._directory = _private_directory()
        cleanup.callback(self._remove_directory)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        cleanup.callback(self._context.destroy, linger=0)
        self._path: DataPath = GlooPath(
            COORDINATOR, self._directory, timeout_s=settings.data_timeout_s
        )
        self._node = _Node(
            inbox=f"ipc://{self._directory}/c",
            context=self._context,
            settings=settings,
            owner=lambda: self.coordinator,
        )
        cleanup.push_async_callback(self._node.bus.close)
        cleanup.push_async_callback(self._path.close)
        self.coordinator = Coordinator(
            settings.workers, send=self._node.bus.send, path=self._path, doing=self._doing
        )
        cleanup.push_async_callback(self._end_processes)

    def _remove_directory(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _end_processes(self) -> None:
        self._closing = True
        self._remove_directory()  # first: if we are killed here, workers that live would do it
        for process in self._processes:
            if not _told(self._node.bus, process.index, m.Shutdown()):
                process.kill()
        self.coordinator.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLITE_EXIT_S):
                    await self._all_exited()
        finally:
            for process in self._processes:
                process.kill()
            await self._all_exited()
            for process in self._processes:
                process.close()
                self._node.bus.forget(process.index)  # else closing would wait to say goodbye

    async def _all_exited(self) -> None:
        for process in self._processes:
            await process.exited.wait()

    def _spawn(self) -> None:
        settings, index = self._settings, len(self._processes)
        peer = self._node.expect(f"ipc://{self._directory}/w{index}")
        config = WorkerConfig(
            index=index,
            incarnation=peer.incarnation,
            inbox=peer.inbox,
            coordinator=self._node.peer,
            coordinator_pid=os.getpid(),
            directory=str(self._directory),
            threads=settings.threads or max(1, (os.cpu_count() or 1) // settings.workers),
            sys_path=tuple(str(Path(entry).resolve()) for entry in sys.path),
            jitter=settings.jitter,
            hello_deadline_s=settings.hello_deadline_s,
            heartbeat_s=settings.heartbeat_s,
            data_timeout_s=settings.data_timeout_s,
        )
        self._exits[index] = asyncio.get_running_loop().create_future()
        self._processes.append(LocalProcess(config, lambda how: self._ended(index, how)))

    async def _greet(self, peer: m.Peer) -> None:
        """Wait for a worker's hello, or for its early end."""
        hello = asyncio.ensure_future(self._node.greet(peer, self._settings.hello_deadline_s))
        try:
            await asyncio.wait((hello, self._exits[peer.node]), return_when="FIRST_COMPLETED")
            if not hello.done():
                raise HandshakeError(
                    f"worker {peer.node} {self._exits[peer.node].result()} before it said hello"
                )
            hello.result()
        finally:
            hello.cancel()
            await asyncio.wait((hello,))
            look_at(hello)

    def _ended(self, index: int, how: str) -> None:
        if not self._exits[index].done():
            self._exits[index].set_result(how)
        if not self._closing:
            self.coordinator.worker_ended(index, how)

    def _doing(self, worker: int) -> blackbox.Doing | None:
        return blackbox.read(black_box_path(str(self._directory), worker))


class ThreadMembers:
    """Workers inside the calling process, made when a plan first needs them."""

    coordinator: Coordinator

    def __init__(self, settings: Settings, local_calls: dict[str, Callable[..., Any]]) -> None:
        self._settings, self._local_calls = settings, local_calls
        self._workers: list[InProcessWorker] = []
        self._growing = asyncio.Lock()
        self._cleanup = contextlib.AsyncExitStack()

    async def open(self) -> None:
        """See `Members`."""
        try:
            self._make_own_end()
            await self._node.bus.start()
        except BaseException:
            await self.close()
            raise

    async def ensure(self, workers: int) -> None:
        """See `Members`."""
        if workers > self.coordinator.workers:  # which counts those that know each other
            await to_the_end(self._grow(workers))

    async def close(self) -> None:
        """See `Members`."""
        await self._cleanup.aclose()

    def _make_own_end(self) -> None:
        self._name = uuid.uuid4().hex[:12]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._cleanup.callback(self._context.destroy, linger=0)
        self._hub = LoopbackHub(timeout_s=self._settings.data_timeout_s)
        self._path: DataPath = self._hub.endpoint(COORDINATOR)
        self._node = _Node(
            inbox=f"inproc://{self._name}/c",
            context=self._context,
            settings=self._settings,
            owner=lambda: self.coordinator,
        )
        self._cleanup.push_async_callback(self._node.bus.close)
        self._cleanup.push_async_callback(self._path.close)
        self.coordinator = Coordinator(
            0, send=self._node.bus.send, path=self._path, doing=lambda _worker: None
        )
        self._cleanup.push_async_callback(self._end_workers)

    async def _end_workers(self) -> None:
        self.coordinator.close()
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            await worker.close()

    async def _grow(self, workers: int) -> None:
        async with self._growing:
            if workers <= self.coordinator.workers:
                return
            while len(self._workers) < workers:
                await self._add()
            await self._node.introduce()
            self.coordinator.workers = workers

    async def _add(self) -> None:
        peer = self._node.expect(f"inproc://{self._name}/w{len(self._workers)}")
        worker = InProcessWorker(
            peer,
            self._node.peer,
            context=self._context,
            hub=self._hub,
            threads=self._settings.threads,
            heartbeat_s=self._settings.heartbeat_s,
            jitter=self._settings.jitter,
            local_calls=self._local_calls,
        )
        self._workers.append(worker)
        await worker.start()
        await self._node.greet(peer, self._settings.hello_deadline_s)


async def to_the_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end even when the calling task is cancelled meanwhile."""
    task = asyncio.ensure_future(coroutine)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # noqa: BLE001 - raised below
            break
    task.result()
    if cancelled is not None:
        raise cancelled


def _told(bus: Bus, worker: int, message: msgspec.Struct) -> bool:
    """Send a message; return False if the worker was never met, or takes no more."""
    try:
        bus.send(worker, message)
    except TransportError:
        return False
    return True


def _private_directory() -> Path:
    """Make a directory that only we can enter, with a path short enough for socket files."""
    made = tempfile.mkdtemp(prefix="myelin-")
    if len(made.encode()) > _SOCKET_PATH_BYTES:
        shutil.rmtree(made)
        made = tempfile.mkdtemp(prefix="myelin-", dir="/tmp")
    return Path(made)
