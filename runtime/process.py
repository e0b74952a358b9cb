"""The worker process: reads its configuration from stdin, serves the coordinator, and ends with it.

stdin stays open as long as the coordinator lives. When it closes, however the coordinator ended,
the worker stops by itself: politely through its event loop, and by force if that takes too long. It
also looks at its parent's id, since a child that the coordinator has forked keeps the pipe open.

What is raised on the event loop is a bug of ours, and nobody would answer for what it left undone:
the worker dies of it at once, and what it wrote last tells why.
"""

import asyncio
import atexit
import contextlib
import io
import math
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

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
from myelin.transports.bus import Bus, Limits
from myelin.transports.frames import Codec
from myelin.transports.gloo import GlooPath

_FORCED_EXIT_S = 3.0
_LOOK_EVERY_S = 1.0
_BROKEN = 70
_ORPHANED = 75
_own_index: int | None = None


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker process must know to start."""

    index: int
    incarnation: str
    inbox: str
    coordinator: Peer
    coordinator_pid: int
    directory: str
    threads: int
    sys_path: tuple[str, ...]
    jitter: Jitter | None
    hello_deadline_s: float
    heartbeat_s: float
    data_timeout_s: float


def black_box_path(directory: str, worker: int) -> Path:
    """Return where a worker keeps its black box."""
    return Path(directory) / f"w{worker}.doing"


def own_index() -> int | None:
    """Return the index of the worker that this process is, or None."""
    return _own_index


def main() -> None:
    """Serve until the coordinator says so or is gone."""
    global _own_index
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    _own_index = config.index
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle
    sys.path[:] = list(dict.fromkeys((*config.sys_path, *sys.path)))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a pipe would hold lines back until the end
    torch.set_num_threads(config.threads)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        orphaned = runner.run(_serve(config))
    if orphaned:
        _end_orphaned(config)
    atexit._run_exitfuncs()
    _end(0)


async def _serve(config: WorkerConfig) -> bool:
    """Run one worker; return whether it ended because the coordinator is gone."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_die)
    stop = asyncio.Event()
    orphaned = _watch_coordinator(config, lambda: loop.call_soon_threadsafe(stop.set))
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
        limits=Limits(config.heartbeat_s, silence_s=math.inf),  # the coordinator watches everybody
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
        await _met(bus, config.hello_deadline_s, stop)
        await stop.wait()
    finally:
        worker.close()
        await device.close()
        await path.close()
        await bus.close()
        context.destroy(linger=0)
    return orphaned.is_set()


async def _met(bus: Bus, deadline_s: float, stop: asyncio.Event) -> None:
    """Wait for the coordinator's hello, or until there is no use in it."""
    hello = asyncio.create_task(bus.expect(COORDINATOR, deadline_s), name="hello")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait((hello, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if hello.done():
        hello.result()
    hello.cancel()


def _watch_coordinator(config: WorkerConfig, stop: Callable[[], object]) -> threading.Event:
    """Set the event and call `stop` once the coordinator is gone; then end the process by force."""
    orphaned = threading.Event()

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.getppid() == config.coordinator_pid:
                readable, _, _ = select.select([0], [], [], _LOOK_EVERY_S)
                if readable and not os.read(0, 4096):
                    break
        orphaned.set()
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            stop()
        threading.Event().wait(_FORCED_EXIT_S)
        _end_orphaned(config)

    threading.Thread(target=watch, name="coordinator-watch", daemon=True).start()
    return orphaned


def _end_orphaned(config: WorkerConfig) -> NoReturn:
    """End at once, and remove what the coordinator cannot remove any more."""
    shutil.rmtree(config.directory, ignore_errors=True)
    _end(_ORPHANED)


def _die(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End the process if a callback raised; only say so if it is a task or a future."""
    loop.default_exception_handler(context)
    if "exception" in context and not context.keys() & {"future", "task"}:
        _end(_BROKEN)


def _end(code: int) -> NoReturn:
    """End at once: the interpreter would take a second or two to take torch apart."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)
