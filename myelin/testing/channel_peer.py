"""A process at the far end of gloo channels, for tests and benchmarks: it follows a script.

    python -m myelin.testing.channel_peer DIRECTORY NODE PEER STEP...

The steps are carried out in order: `receive:FLOAT32S` and `send:FLOAT32S` move one message of that
many float32 (a sent message counts up from 0), `echo:FLOAT32S:TIMES` returns as many messages,
`say:WORD` prints a line, `hang` receives a message that never comes, and `leave` exits at once
with a receive still blocked and nothing closed. What the test does not end ends by itself with
the first failure, at the latest when `TIMEOUT_S` has passed.
"""

import asyncio
import sys
from collections.abc import Sequence

import torch

from myelin.transports.datapath import TensorSpec
from myelin.transports.gloo import GlooPath

TIMEOUT_S = 60.0


def command(directory: str, node: int, peer: int, steps: Sequence[str]) -> list[str]:
    """Return the command line that starts a peer process."""
    module = [sys.executable, "-m", "myelin.testing.channel_peer"]
    return [*module, directory, str(node), str(peer), *steps]


def floats(count: int) -> TensorSpec:
    """Describe the tensor of one message."""
    return TensorSpec(shape=(count,), dtype="float32")


async def follow(path: GlooPath, peer: int, step: str) -> None:
    """Carry out one step of the script."""
    match step.split(":"):
        case ["send", count]:
            await path.send(peer, [torch.arange(int(count), dtype=torch.float32)], label=step)
        case ["receive", count]:
            await path.receive(peer, [floats(int(count))], label=step)
        case ["echo", count, times]:
            for _ in range(int(times)):
                tensors = await path.receive(peer, [floats(int(count))], label=step)
                await path.send(peer, tensors, label=step)
        case ["say", word]:
            print(word, flush=True)
        case ["hang"]:
            await path.receive(peer, [floats(1)], label=step)
        case ["leave"]:
            path.receive(peer, [floats(1)], label=step)
            raise SystemExit(0)
        case _:
            raise ValueError(f"no such step: {step!r}")


async def main(directory: str, node: str, peer: str, *steps: str) -> None:
    """Follow the script, then close."""
    path = GlooPath(int(node), directory, timeout_s=TIMEOUT_S)
    for step in steps:
        await follow(path, int(peer), step)
    await path.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(*sys.argv[1:]))
