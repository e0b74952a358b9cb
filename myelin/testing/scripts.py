"""Small programs with a cluster, for tests that end them from outside.

    python -m myelin.testing.scripts NAME WORKERS GATE [stock]

Each prints one line of JSON, the ids of its worker processes, once there is something to end; what
it says later tells how it was left. `stock` runs it on asyncio's own loop.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch

import myelin
from myelin.testing import ops
from myelin.testing.watching import worker_ids

BATCH = (torch.ones(4, 4), torch.ones(4, 4))


def command(name: str, workers: int, gate: Path | str, *options: str) -> list[str]:
    """Return the command line that starts a program."""
    module = [sys.executable, "-m", "myelin.testing.scripts"]
    return [*module, name, str(workers), str(gate), *options]


def ready() -> None:
    """Say that the program may now be ended."""
    print(json.dumps(worker_ids()), flush=True)


def outlive(gate: str) -> None:
    """Fork a process that lives until the gate is open, and keeps none of our output open."""
    if not os.fork():
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(1, 2)
        ops.wait_for_file(gate)
        os._exit(0)


async def stepping(workers: int, gate: str) -> None:
    """Take one training step after the other."""
    async with myelin.Cluster(workers) as cluster:
        trainer = await cluster.trainer(
            myelin.Model("myelin.testing.models:mlp"),
            plan=myelin.Plan(pipeline=2, microbatches=2),
        )
        await trainer.step(BATCH)
        ready()
        try:
            while True:
                await trainer.step(BATCH)
        finally:
            print("leaving", flush=True)


async def idle(workers: int, gate: str) -> None:
    """Have workers and do nothing with them."""
    async with myelin.Cluster(workers):
        ready()
        await asyncio.Event().wait()


async def at_gate(workers: int, gate: str) -> None:
    """Run an op that waits at a gate."""
    async with myelin.Cluster(workers) as cluster, cluster.graph() as graph:
        op = graph.op(ops.pass_gate, gate, worker=max(workers, 1) - 1)
        run = await graph.run()
        await asyncio.to_thread(ops.wait_for_file, f"{gate}.here")
        ready()
        await run[op]


async def starting(workers: int, gate: str) -> None:
    """Start workers, and be ready before they are."""
    asyncio.get_running_loop().call_later(0.3, ready)
    async with myelin.Cluster(workers):
        await asyncio.Event().wait()


async def forked(workers: int, gate: str) -> None:
    """Fork a child that outlives this process; it holds copies of all pipes."""
    async with myelin.Cluster(workers):
        outlive(f"{gate}.open")
        ready()
        await asyncio.Event().wait()


async def deaf(workers: int, gate: str) -> None:
    """Handle SIGTERM as one likes."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    async with myelin.Cluster(workers):
        ready()
        await told.wait()
        print("handled", flush=True)


PROGRAMS: dict[str, Callable[[int, str], Coroutine[Any, Any, None]]] = {
    program.__name__: program for program in (stepping, idle, at_gate, starting, forked, deaf)
}


def main(name: str, workers: str, gate: str, loop: str = "usual") -> None:
    """Run one program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who started us may ignore it

    def program() -> Coroutine[Any, Any, None]:
        return PROGRAMS[name](int(workers), gate)

    if loop == "stock":
        asyncio.run(program())
    else:
        myelin.run(program)


if __name__ == "__main__":
    main(*sys.argv[1:])
