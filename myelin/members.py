"""The nodes of a cluster, opened and closed: the coordinator's bus and data path, and the workers.

`ProcessMembers` are processes on this machine; `ThreadMembers` live in the calling process and grow
as plans ask for more workers. Both open the same bus and hand out the same `Coordinator`.
"""

import asyncio
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from myelin.coordinator import Coordinator
from myelin.errors import ClusterError, FrameError, HandshakeError, TransportError
from myelin.inprocess import InProcessWorker
from myelin.launch import LocalProcess
from myelin.runtime import blackbox
from myelin.runtime import messages as m
from myelin.runtime.graph import COORDINATOR
from myelin.runtime.jitter import Jitter
from myelin.runtime.process import WorkerConfig, black_box_path
from myelin.transports.bus import Bus, Limits
from myelin.transports.datapath import DataPath
from myelin.transports.frames import Codec
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
        silence_s: float,
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
            on_hello=lambda hello: f"node {hello.node} is not a member of this cluster",
            on_silence=lambda peer, silent_s: owner().worker_ended(
                peer,
                f"has been silent for {silent_s:.1f} s (stopped, or its machine is overloaded)",
            ),
            limits=Limits(heartbeat_s=min(1.0, silence_s / 4), silence_s=silence_s),
        )

    def expect(self, inbox: str) -> m.Peer:
        """Make room for one more worker and return its identity."""
        peer = m.Peer(len(self.peers), uuid.uuid4().hex[:12], inbox)
        self.peers.append(peer)
        self.bus.admit(peer.node, peer.incarnation)
        return peer

    async def greet(self, peer: m.Peer, deadline_s: float) -> None:
        """Wait for a worker's hello and answer it."""
        await self.bus.expect(peer.node, deadline_s)
        self.bus.connect(peer.node, peer.inbox)

    async def introduce(self) -> None:
        """Tell all workers of each other; only then may they be given work."""
        everybody = tuple(self.peers)
        await self._owner().request_all(
            lambda _worker, number: m.Peers(number, everybody), range(len(everybody))
        )

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

    async def open(self) -> None:
        """See `Members`."""
        settings = self._settings
        self._directory = _private_directory()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._path: DataPath = GlooPath(
            COORDINATOR, self._directory, timeout_s=settings.data_timeout_s
        )
        self._node = _Node(
            inbox=f"ipc://{self._directory}/c",
            context=self._context,
            silence_s=settings.silence_s,
            owner=lambda: self.coordinator,
        )
        self.coordinator = Coordinator(
            settings.workers, send=self._node.bus.send, path=self._path, doing=self._doing
        )
        try:
            await self._node.bus.start()
            for _ in range(settings.workers):
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
                f"the plan needs {workers} workers and the cluster has {len(self._processes)}: "
                f"start it with Cluster(workers={workers}), or place several stages on a worker"
            )

    async def close(self) -> None:
        """See `Members`."""
        self._closing = True
        for process in self._processes:
            if not process.exited.is_set():
                _tell_quietly(self._node.bus, process.index, m.Shutdown())
        self.coordinator.close()
        for process in self._processes:
            await _exited(process)
        for process in self._processes:
            process.close()
        await self._path.close()
        await self._node.bus.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _spawn(self) -> None:
        settings, index = self._settings, len(self._processes)
        peer = self._node.expect(f"ipc://{self._directory}/w{index}")
        config = WorkerConfig(
            index=index,
            incarnation=peer.incarnation,
            inbox=peer.inbox,
            coordinator=self._node.peer,
            directory=str(self._directory),
            threads=settings.threads or max(1, (os.cpu_count() or 1) // settings.workers),
            sys_path=tuple(str(Path(entry).resolve()) for entry in sys.path),
            jitter=settings.jitter,
            hello_deadline_s=settings.hello_deadline_s,
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

    async def open(self) -> None:
        """See `Members`."""
        self._name = uuid.uuid4().hex[:12]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._hub = LoopbackHub()
        self._path: DataPath = self._hub.endpoint(COORDINATOR)
        self._node = _Node(
            inbox=f"inproc://{self._name}/c",
            context=self._context,
            silence_s=self._settings.silence_s,
            owner=lambda: self.coordinator,
        )
        self.coordinator = Coordinator(
            0, send=self._node.bus.send, path=self._path, doing=lambda _worker: None
        )
        await self._node.bus.start()

    async def ensure(self, workers: int) -> None:
        """See `Members`."""
        if workers <= len(self._workers):
            return
        while len(self._workers) < workers:
            await self._add()
        self.coordinator.workers = workers
        await self._node.introduce()

    async def close(self) -> None:
        """See `Members`."""
        self.coordinator.close()
        for worker in self._workers:
            await worker.close()
        await self._path.close()
        await self._node.bus.close()
        self._context.destroy(linger=0)

    async def _add(self) -> None:
        peer = self._node.expect(f"inproc://{self._name}/w{len(self._workers)}")
        worker = InProcessWorker(
            peer,
            self._node.peer,
            context=self._context,
            hub=self._hub,
            threads=self._settings.threads,
            jitter=self._settings.jitter,
            local_calls=self._local_calls,
        )
        self._workers.append(worker)
        await worker.start()
        await self._node.greet(peer, self._settings.hello_deadline_s)


async def _exited(process: LocalProcess) -> None:
    try:
        async with asyncio.timeout(_POLITE_EXIT_S):
            await process.exited.wait()
    except TimeoutError:
        process.kill()
        await process.exited.wait()


def _tell_quietly(bus: Bus, worker: int, message: msgspec.Struct) -> None:
    try:
        bus.send(worker, message)
    except TransportError:
        return  # it is gone, or was never there: it is going to be killed


def _private_directory() -> Path:
    """Make a directory that only we can enter, with a path short enough for socket files."""
    made = tempfile.mkdtemp(prefix="myelin-")
    if len(made.encode()) > _SOCKET_PATH_BYTES:
        shutil.rmtree(made)
        made = tempfile.mkdtemp(prefix="myelin-", dir="/tmp")
    return Path(made)
