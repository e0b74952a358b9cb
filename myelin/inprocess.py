"""Workers inside the calling process: the same worker, bus and device, with threads for processes.

For debuggers and notebooks. Tensors go over the loopback path, control messages over the real bus
on `inproc` sockets.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
import zmq

from myelin.runtime.devices.cpu import CpuDevice
from myelin.runtime.graph import COORDINATOR
from myelin.runtime.jitter import Delays, Jitter
from myelin.runtime.messages import MESSAGES, Peer
from myelin.runtime.worker import Worker
from myelin.transports.bus import Bus, Limits
from myelin.transports.frames import Codec, Hello
from myelin.transports.loopback import LoopbackHub


class InProcessWorker:
    """One worker on the caller's event loop.

    Args:
        own: its node, incarnation and inbox.
        coordinator: whom it serves.
        context: shared by all nodes of this process.
        hub: shared by all nodes of this process.
        threads: intra-op threads, or None for as many as the calling thread has.
        heartbeat_s: how often to tell the coordinator that this worker is alive.
        jitter: delays to inject.
        local_calls: callables without an import path, by name; may grow later.
    """

    def __init__(
        self,
        own: Peer,
        coordinator: Peer,
        *,
        context: "zmq.Context[zmq.Socket[bytes]]",
        hub: LoopbackHub,
        threads: int | None,
        heartbeat_s: float,
        jitter: Jitter | None,
        local_calls: Mapping[str, Callable[..., Any]],
    ) -> None:
        self._coordinator = coordinator
        threads = torch.get_num_threads() if threads is None else threads  # a thread has its own
        self._device = CpuDevice(f"worker-{own.node}", threads=threads)
        self._path = hub.endpoint(own.node)
        self._stopped = asyncio.Event()
        self._bus = Bus(
            node=own.node,
            incarnation=own.incarnation,
            address=own.inbox,
            codec=Codec(MESSAGES),
            context=context,
            on_message=self._receive,
            on_fault=lambda error: self._worker.fault(error),
            on_hello=_refuse,
            limits=Limits(heartbeat_s, silence_s=math.inf),  # the coordinator watches everybody
        )
        self._worker = Worker(
            own.node,
            bus=self._bus,
            path=self._path,
            device=self._device,
            delays=Delays(jitter, own.node),
            local_calls=local_calls,
            on_shutdown=self._stopped.set,
        )

    async def start(self) -> None:
        """Open the inbox and say hello to the coordinator."""
        await self._bus.start()
        self._bus.admit(COORDINATOR, self._coordinator.incarnation)
        self._bus.connect(COORDINATOR, self._coordinator.inbox)

    def stop(self) -> None:
        """Start nothing new."""
        self._worker.close()

    async def close(self) -> None:
        """End the worker's threads and sockets; waits for an op that is running."""
        self.stop()
        await self._device.close()
        await self._path.close()
        await self._bus.close()

    def _receive(self, peer: int, message: msgspec.Struct) -> None:
        self._worker.receive(peer, message)


def _refuse(hello: Hello) -> str:
    return f"node {hello.node} is not expected here"
