"""Ops and a model that misbehave on purpose, for tests of what becomes of a run and of its workers.

A gate is a path: who comes to it makes the file `PATH.here` and goes on when there is a file
`PATH.open`, or never. So a test knows that an op is running, and decides how long.
"""

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook

from myelin.models.losses import Loss
from myelin.testing.models import Failing, Modules, Where, mlp

_LOOK_EVERY_S = 0.002


def plus(*values: Any) -> Any:
    """Return the sum of the values."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def scaled(value: Any, factor: float) -> Any:
    """Return the product."""
    return value * factor


def nothing(*values: Any) -> None:
    """Return None."""


def echo(*values: Any) -> Any:
    """Return the arguments: one as it is, several as a tuple."""
    return values[0] if len(values) == 1 else values


def parts(value: torch.Tensor) -> dict[str, Any]:
    """Return a dict that has a tuple with a tensor, a number and None, and a text."""
    return {"both": (value, 2 * value), "number": 3, "text": "three", "none": None}


def joined(value: dict[str, Any]) -> torch.Tensor:
    """Return the sum of the tensors that `parts` returned."""
    first, second = value["both"]
    assert value["none"] is None
    assert value["text"] == "three"
    return first + second + value["number"]  # type: ignore[no-any-return]


def zeros(mebibytes: int) -> torch.Tensor:
    """Return as many bytes as asked for, the last of them 1."""
    made = torch.zeros(mebibytes << 20, dtype=torch.uint8)
    made[-1] = 1
    return made


def a_set(*values: Any) -> Any:
    """Return what cannot travel between workers."""
    return {1, 2}


def size(value: Any) -> int:
    """Return the length."""
    return len(value)


def fail(*values: Any) -> None:
    """Raise."""
    raise ValueError("planted")


def fail_if(value: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the value, or raise if it is above the limit."""
    if value.max() > limit:
        raise ValueError(f"planted: {value.max().item()} is above {limit}")
    return value


class ChannelClosed(Exception):
    """Is called like one of our own errors."""


def fail_like_us(*values: Any) -> None:
    """Raise an error that is called like one of ours."""
    raise ChannelClosed("planted")


def long_list(items: int) -> list[int]:
    """Return so many zeros."""
    return [0] * items


class Unspeakable(Exception):
    """Cannot be put into words."""

    def __str__(self) -> str:
        """Fail at it."""
        raise RuntimeError("no words")


def fail_unspeakably(*values: Any) -> None:
    """Raise what has no text."""
    raise Unspeakable


def fail_in_half_a_character(*values: Any) -> None:
    """Raise with a text that is not Unicode, as the names of some files are not."""
    raise ValueError("a file called \udcff")


def fail_at_length(characters: int) -> None:
    """Raise with a long text."""
    raise ValueError("begin" + "." * characters + "end")


def leave(*values: Any) -> None:
    """Ask the interpreter to end."""
    sys.exit(3)


def die(code: int) -> None:
    """End the process, which says why before."""
    print("cannot go on", file=sys.stderr, flush=True)
    os._exit(code)


def say(*lines: str) -> None:
    """Write the first line to stdout and the others to stderr."""
    print(lines[0])
    for line in lines[1:]:
        print(line, file=sys.stderr)


def kill(*values: Any) -> None:
    """Kill the own process."""
    os.kill(os.getpid(), signal.SIGKILL)


def break_loop(*values: Any) -> None:
    """Have a callback of the worker's event loop raise, as a bug of ours would."""

    def bug() -> None:
        raise RuntimeError("a planted bug")

    loops = [o for o in gc.get_objects() if isinstance(o, asyncio.AbstractEventLoop)]
    for loop in loops:
        if loop.is_running():
            loop.call_soon_threadsafe(bug)


@dataclass(frozen=True, slots=True)
class Gate:
    """A gate, as the test has it that opens it."""

    path: str

    @property
    def reached(self) -> bool:
        """Whether somebody has come to it."""
        return Path(f"{self.path}.here").exists()

    def open(self) -> None:
        """Let through who is there and who comes."""
        Path(f"{self.path}.open").touch()


def tensors_alive(*values: Any) -> int:
    """Return how many tensors this process has."""
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def pass_gate(path: str, value: Any = None) -> Any:
    """Return the value once the gate is open."""
    Path(f"{path}.here").touch()
    wait_for_file(f"{path}.open")
    return value


def wait_for_file(path: str) -> None:
    """Return once the file exists."""
    while not Path(path).exists():
        time.sleep(_LOOK_EVERY_S)


def gated(
    gate: str, block: int, where: str, call: int = 0, depth: int = 3, width: int = 4
) -> Modules:
    """Return `mlp` in which one block comes to a gate on one of its calls: x_BD -> y_BD.

    Args:
        gate: the gate's path.
        block: which block.
        where: "forward" or "backward".
        call: on which call, counted from 0 since the model was built.
        depth: number of blocks.
        width: the model's width.
    """
    blocks, loss = mlp(width, depth)
    blocks[block] = Gated(blocks[block], gate, Where(where), call)
    return blocks, loss


class Gated(Failing):
    """Wraps a block that returns a tensor and comes to a gate, where `Failing` raises."""

    def __init__(self, inner: nn.Module, gate: str, where: Where, call: int) -> None:
        super().__init__(inner, where, call)
        self.gate = gate

    def count(self) -> None:
        """Count one call, and come to the gate if it is the one."""
        self.calls += 1
        if self.calls - 1 == self.call:
            pass_gate(self.gate)


def gated_update(gate: str) -> Modules:
    """Return `mlp`; the next optimizer step of this process comes to a gate."""
    _before_next_update(partial(pass_gate, gate))
    return mlp()


def torn_update(path: str) -> Modules:
    """Return `mlp`; of the next optimizer steps of all processes the first one raises."""

    def fail_once() -> None:
        with suppress(FileExistsError), open(path, "x"):
            raise RuntimeError("planted")

    _before_next_update(fail_once)
    return mlp()


def _before_next_update(call: Callable[[], object]) -> None:
    calls = [call]

    def hook(*_: Any) -> None:  # stays where it is: other threads may be going through all hooks
        with suppress(IndexError):
            calls.pop()()

    register_optimizer_step_pre_hook(hook)


def unbuildable(block: int) -> tuple[list[Callable[[], nn.Module]], Loss]:
    """Return builders of which one raises, though not on the meta device."""

    def build(index: int) -> nn.Module:
        made = nn.Linear(4, 4)
        if index == block and made.weight.device.type != "meta":
            raise ValueError("planted")
        return made

    return [partial(build, index) for index in range(3)], functional.mse_loss


def flawed(block: int, width: int = 4, depth: int = 3) -> Modules:
    """Return blocks of which one has a parameter with a gradient of NaN: x_BD -> y_BD.

    The loss is finite, and so are the gradients of all other blocks.
    """
    blocks, loss = mlp(width, depth)
    blocks[block] = Flawed(blocks[block])
    return blocks, loss


class Flawed(nn.Module):
    """Wraps a block; its own parameter adds 0, whose derivative is not defined."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.flaw = inner, nn.Parameter(torch.zeros(()))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        """Return what the block returns."""
        y_BD: torch.Tensor = self.inner(x_BD)
        return y_BD + 0 * self.flaw.abs().sqrt()


def poisonable(width: int = 4, depth: int = 3) -> Modules:
    """Return blocks that raise when their batch says so: `{"x": x_BD, "poison": codes_B}` -> y_BD.

    The code 1 + b has block b raise in its forward, -(1 + b) in its backward, 0 nowhere.
    """
    blocks, loss = mlp(width, depth)
    return [Poisonable(inner, index, depth) for index, inner in enumerate(blocks)], loss


class Poisonable(nn.Module):
    """Wraps a block that returns a tensor, and raises if the batch says so."""

    def __init__(self, inner: nn.Module, index: int, depth: int) -> None:
        super().__init__()
        self.inner, self.index, self.last = inner, index, index == depth - 1

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        """Take `{"x": x_BD, "poison": codes_B}` and return the like; the last block y_BD alone.

        Raises:
            RuntimeError: the poison is for this block.
        """
        poison = batch["poison"]
        if (poison == 1 + self.index).any():
            raise RuntimeError("planted")
        y_BD = self.inner(batch["x"])
        if (poison == -1 - self.index).any():
            y_BD = _RaiseInBackward.apply(y_BD)  # type: ignore[no-untyped-call]
        return y_BD if self.last else {"x": y_BD, "poison": poison}


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("planted")


def no_model(message: str) -> Modules:
    """Raise instead of returning a model."""
    raise ValueError(message)
