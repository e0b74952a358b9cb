"""Small models of a user's own for tests, each with one property that could break a pipeline.

All are deterministic, and no two blocks of one model have the same shape. Reach them as
`Model("myelin.testing.models:mlp", width=4)`.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from myelin.models.losses import Loss

# B microbatch, T tokens, D width

Modules: TypeAlias = tuple[list[nn.Module], Loss]
Builders: TypeAlias = tuple[Sequence[Callable[[], nn.Module]], Loss]


def mlp(width: int = 4, depth: int = 3) -> Modules:
    """Return ready-made modules: x_BD -> y_BD, mean squared error."""
    blocks: list[nn.Module] = [
        nn.Sequential(nn.Linear(width + i, width + i + 1), nn.Tanh()) for i in range(depth - 1)
    ]
    return [*blocks, nn.Linear(width + depth - 1, width)], functional.mse_loss


def masked(width: int = 4, depth: int = 3) -> Builders:
    """Pass `{"x": x_BTD, "mask": bools_BT}` from block to block; the last returns y_BTD.

    The batch's input is such a dict too. Masked positions stay as they are.
    """
    inner = [partial(Masked, width, inside=width + 1 + i) for i in range(depth - 1)]
    return [*inner, partial(Unmasked, width, width + 7)], functional.mse_loss


def tuple_passing(width: int = 4, depth: int = 3) -> Builders:
    """Pass `(x_BD, places_B, scale)` between blocks: x_BD -> y_BD.

    The second is of whole numbers and the third needs no gradient and has no dimensions.
    """
    inner = [partial(Turn, width + i, width + i + 1) for i in range(max(depth - 2, 0))]
    last = partial(Gather, width + len(inner), width)
    return [partial(Number, width), *inner, last], functional.mse_loss


def mixed(width: int = 4) -> Modules:
    """Pass through a buffered, a parameterless, a frozen and a plain block: x_BD -> y_BD.

    Batch norm needs at least two samples in a microbatch.
    """
    frozen = nn.Linear(width + 1, width + 2).requires_grad_(False)
    normed = nn.Sequential(nn.Linear(width, width + 1), nn.BatchNorm1d(width + 1))
    return [normed, nn.Tanh(), frozen, nn.Linear(width + 2, width)], functional.mse_loss


def frozen_first(width: int = 4) -> Modules:
    """Begin with blocks that need no gradient at all: x_BD -> y_BD."""
    frozen = nn.Linear(width, width + 1).requires_grad_(False)
    trained = [nn.Linear(width + 1, width + 2), nn.Linear(width + 2, width)]
    return [frozen, nn.Tanh(), *trained], functional.mse_loss


def shared(width: int = 4) -> Modules:
    """Hold one parameter in the first and the last block, not declared as a tie: x_BD -> y_BD."""
    first, last = nn.Linear(width, width), nn.Linear(width, width, bias=False)
    last.weight = first.weight
    return [first, nn.Tanh(), last], functional.mse_loss


def dropping(width: int = 4, depth: int = 3, dropout: float = 0.5) -> Builders:
    """Draw random numbers in every block: x_BD -> y_BD."""
    sizes = [*range(width, width + depth), width]
    blocks = [partial(Dropping, *pair, dropout) for pair in pairwise(sizes)]
    return blocks, functional.mse_loss


def failing(
    where: str = "forward",
    block: int = 1,
    microbatch: int = 0,
    *,
    step: int = 0,
    microbatches: int = 1,
    width: int = 4,
    depth: int = 3,
) -> Modules:
    """Return `mlp` with a planted error, raised once: x_BD -> y_BD.

    The block counts its forwards, or its backwards, since it was built, evaluations included, and
    raises `RuntimeError("planted")` on number `step * microbatches + microbatch`, counted from 0.

    Args:
        where: "forward" or "backward".
        block: which block raises.
        microbatch: which microbatch of the step raises, where all steps before went through.
        step: which step raises.
        microbatches: how many microbatches a step has; matters only with `step`.
        width: the model's width.
        depth: number of blocks.
    """
    blocks, loss = mlp(width, depth)
    blocks[block] = Failing(blocks[block], Where(where), step * microbatches + microbatch)
    return blocks, loss


class Masked(nn.Module):
    """Changes `x` where the mask is set and passes the mask on."""

    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, inside)
        self.narrow = nn.Linear(inside, width)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Take and return `{"x": x_BTD, "mask": bools_BT}`."""
        change_BTD = self.narrow(torch.tanh(self.widen(batch["x"])))
        x_BTD = batch["x"] + change_BTD * batch["mask"].unsqueeze(-1)
        return {"x": x_BTD, "mask": batch["mask"]}


class Unmasked(Masked):
    """Like `Masked`, and returns `x` alone."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        """Take such a dict and return x_BTD."""
        return super().forward(batch)["x"]


class Number(nn.Module):
    """Begins the tuple: numbers the samples and carries the scale of the inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x_BD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return (x_BD, places_B, scale)."""
        places_B = torch.arange(x_BD.shape[0], device=x_BD.device)
        return self.linear(x_BD), places_B, x_BD.detach().abs().mean()


class Turn(nn.Module):
    """Changes `x` according to place and scale, and passes both on."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Take and return (x_BD, places_B, scale)."""
        x_BD, places_B, scale = parts
        odd_B1 = (places_B % 2).unsqueeze(-1)
        return torch.tanh(self.linear(x_BD)) + odd_B1 * scale, places_B, scale


class Gather(Turn):
    """Like `Turn`, and returns `x` alone."""

    def forward(self, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:  # type: ignore[override]
        """Take such a tuple and return x_BD."""
        return super().forward(parts)[0]


class Dropping(nn.Module):
    """A linear layer with dropout."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        """Return y_BD with some of it zero."""
        return self.dropout(self.linear(x_BD))  # type: ignore[no-any-return]


class Where(StrEnum):
    """The pass in which `Failing` raises."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Failing(nn.Module):
    """Wraps a block that returns a tensor and raises on one of its calls."""

    def __init__(self, inner: nn.Module, where: Where, call: int) -> None:
        super().__init__()
        self.inner = inner
        self.where = where
        self.call = call
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the block returns, or raise."""
        y: torch.Tensor = self.inner(x)
        if self.where is Where.BACKWARD:
            return _CountBackward.apply(y, self)  # type: ignore[no-any-return,no-untyped-call]
        self.count()
        return y

    def count(self) -> None:
        """Count one call, and raise if it is the one.

        Raises:
            RuntimeError: it is.
        """
        self.calls += 1
        if self.calls - 1 == self.call:
            raise RuntimeError("planted")


class _CountBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, failing: Failing) -> torch.Tensor:
        ctx.failing = failing
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.failing.count()
        return gradients[0], None
