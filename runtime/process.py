"""The worker process: reads its configuration from stdin, serves the coordinator, and ends with it.

stdin stays open as long as the coordinator lives. When it closes, however the coordinator ended,
the worker stops by itself: politely through its event loop, and by force if that takes too long.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import msgspec
import torch
import zmq

from myelin.runtime.blackbox import BlackBox
from myelin.runtime.devices.cpu import CpuDevice
from myelin.runtime.event_loop import new_event_loop
from myelin.runtime.graph import COORDINATOR
from myelin.runtime.jitter import Delays, Jitter
from myelin.runtime.messages import MESSAGES, Peer
from myelin.runtime.worker import Worker
from myelin.transports.bus import Bus
from myelin.transports.frames import Codec
from myelin.transports.gloo import GlooPath

_FORCED_EXIT_S = 3.0
_ORPHANED = 75


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker process must know to start."""

    index: int
    incarnation: str
    inbox: str
    coordinator: Peer
    directory: str
    threads: int
    sys_path: tuple[str, ...]
    jitter: Jitter | None
    hello_deadline_s: float
    data_timeout_s: float


def black_box_path(directory: str, worker: int) -> Path:
    """Return where a worker keeps its black box."""
    return Path(directory) / f"w{worker}.doing"


def main() -> None:
    """Serve until the coordinator says so or is gone."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle
    sys.path[:] = list(dict.fromkeys((*config.sys_path, *sys.path)))
    torch.set_num_threads(config.threads)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        orphaned = runner.run(_serve(config))
    if orphaned:
        shutil.rmtree(config.directory, ignore_errors=True)
        os._exit(_ORPHANED)


async def _serve(config: WorkerConfig) -> bool:
    """Run one worker; return whether it ended because the coordinator is gone."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    orphaned = _watch_stdin(loop, stop)
    device = CpuDevice(f"worker-{config.index}", threads=config.threads)
    path = GlooPath(config.index, config.directory, timeout_s=config.data_timeout_s)
    context = zmq.Context()
    bus = Bus(
        node=config.index,
        incarnation=config.incarnation,
        address=config.inbox,
        codec=Codec(MESSAGES),
        context=context,
        on_message=lambda peer, message: worker.receive(peer, message),
        on_fault=lambda error: worker.fault(error),
        on_hello=lambda hello: f"worker {config.index} does not expect node {hello.node}",
    )
    worker = Worker(
        config.index,
        bus=bus,
        path=path,
        device=device,
        delays=Delays(config.jitter, config.index),
        local_calls={},
        on_shutdown=stop.set,
        black_box=BlackBox(black_box_path(config.directory, config.index)),
    )
    try:
        await bus.start()
        bus.admit(COORDINATOR, config.coordinator.incarnation)
        bus.connect(COORDINATOR, config.coordinator.inbox)
        await bus.expect(COORDINATOR, config.hello_deadline_s)
        await stop.wait()
    finally:
        await device.close()
        await path.close()
        await bus.close()
        context.destroy(linger=0)
    return orphaned.is_set()


def _watch_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> threading.Event:
    """Set `stop` and the returned event when stdin closes; by force if that does not help."""
    orphaned = threading.Event()

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        orphaned.set()
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(stop.set)
        threading.Event().wait(_FORCED_EXIT_S)
        os._exit(_ORPHANED)

    threading.Thread(target=watch, name="coordinator-watch", daemon=True).start()
    return orphaned
