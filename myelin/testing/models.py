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

from myelin.models.losses import Loss, TokenCrossEntropy
from myelin.models.model import Parts, Tie

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


def inplace(width: int = 4) -> Modules:
    """Hold blocks that write into their input, each after one that does not mind: x_BD -> y_BD."""
    blocks: list[nn.Module] = [
        nn.ReLU(inplace=True),
        nn.Linear(width, width + 1),
        nn.Identity(),
        nn.ReLU(inplace=True),
        nn.Linear(width + 1, width + 2),
        Shift(),
        nn.Linear(width + 2, width),
    ]
    return blocks, functional.mse_loss


def skipping(width: int = 4) -> Modules:
    """Hand an input on unchanged, beside what is made of it: x_BD -> y_BD."""
    blocks = [
        nn.Linear(width, width + 1),
        Fork(width + 1, width + 2),
        nn.Identity(),
        Join(width + 2, width + 1),
        nn.Linear(width + 1, width),
    ]
    return blocks, functional.mse_loss


def repeated(width: int = 4, blocks: int = 4, owner: int = 0) -> Parts:
    """Use one weight, of block `owner`, in every block: x_BD -> y_BD."""
    ties = (Tie(owner, "linear.weight", i, "linear.weight") for i in range(blocks) if i != owner)
    return Parts((partial(Square, width),) * blocks, functional.mse_loss, tuple(ties))


def crossed(width: int = 4) -> Parts:
    """Share two weights of one shape in the first block with one later block each: x_BD -> y_BD."""
    first = partial(Pair, width)
    ties = (Tie(0, "one.weight", 1, "linear.weight"), Tie(0, "other.weight", 2, "linear.weight"))
    return Parts((first, partial(Square, width), partial(Square, width)), functional.mse_loss, ties)


def averaging(width: int = 4, call: int = -1) -> Modules:
    """Put another tensor in the place of a buffer at every forward: x_BD -> y_BD.

    The last block raises on its forward number `call`, counted from 0.
    """
    last = Failing(nn.Linear(width, width), Where.FORWARD, call)
    return [nn.Linear(width, width), Average(width), last], functional.mse_loss


def turned(width: int = 4, tokens: int = 64) -> Modules:
    """Hand on a tensor that is not contiguous: x_BTD -> y_BD."""
    blocks = [nn.Linear(width, width + 1), Turned(), Last(tokens), nn.Linear(width + 1, width)]
    return blocks, functional.mse_loss


def gapped(width: int = 4, inside: int = 512) -> Modules:
    """Hand on every second number, and add up, which expands the gradient: x_BTD -> y_BTD.

    Sums of so many numbers depend on where in memory they lie.
    """
    blocks = [
        nn.Linear(width, inside),
        Second(),
        Sum(),
        nn.Linear(1, width + 1),
        Sum(),
        nn.Linear(1, width),
    ]
    return blocks, functional.mse_loss


def summing(width: int = 4) -> Modules:
    """Begin with the sum of a tensor of any size: x_BTD -> y_BTW."""
    return [Sum(), nn.Linear(1, width)], functional.mse_loss


def standing_twice(width: int = 4) -> Modules:
    """Hold one module as the first and the last block: x_BD -> y_BD."""
    block = nn.Linear(width, width)
    return [block, nn.Tanh(), block], functional.mse_loss


def chunked(width: int = 4, inside: int = 128) -> Modules:
    """Hand on three parts of one tensor: x_BD -> y_BD."""
    blocks = [nn.Linear(width, 3 * inside), Thirds(), Mix(), nn.Linear(1, width)]
    return blocks, functional.mse_loss


def doubled(width: int = 4) -> Modules:
    """Hand one tensor on twice, use it three times, and write into one of the two: x_BD -> y_BD."""
    blocks = [nn.Linear(width, width + 1), Twice(), nn.Identity(), Weave(width + 1, width)]
    return blocks, functional.mse_loss


def noisy(width: int = 4) -> Modules:
    """Draw random numbers in evaluation mode too, in a block and in a hook: x_BD -> y_BD."""
    hooked = nn.Linear(width, width + 1)
    hooked.register_forward_hook(add_noise)
    return [hooked, nn.Tanh(), Noise(), nn.Linear(width + 1, width)], functional.mse_loss


def resting(width: int = 4) -> Modules:
    """Hold modules that the factory has put into evaluation mode, and others: x_BD -> y_BD."""
    norm, dropout = nn.BatchNorm1d(width), nn.Dropout()
    norm.running_mean = torch.arange(1.0, width + 1)
    middle = nn.Sequential(nn.Linear(width, width + 1), dropout, nn.BatchNorm1d(width + 1))
    norm.eval()
    dropout.eval()
    return [norm, middle, nn.Linear(width + 1, width)], functional.mse_loss


def carrying(width: int = 4) -> Modules:
    """Hand on a parameter, and a buffer that every forward changes: x_BD -> y_BD."""
    return [Carry(width), nn.Identity(), Apply(width, width + 1), nn.Linear(width + 1, width)], (
        functional.mse_loss
    )


def projected(width: int = 4) -> Modules:
    """Compare under random projections, which the factory draws for the loss: x_BD -> y_BD."""
    blocks = [nn.Linear(width, width + 1), nn.Tanh(), nn.Linear(width + 1, width)]
    return blocks, partial(projected_error, torch.randn(width, width))


def routed(width: int = 4) -> Modules:
    """Use one of two linear layers, by the sign of the first number: x_BD -> y_BD."""
    return [Route(width), nn.Linear(width + 1, width)], functional.mse_loss


def failing_early(width: int = 4) -> Modules:
    """Raise once in the first backward of block 1, whose output the next ones hand on."""
    inner = nn.Linear(width + 1, width + 2)
    blocks = [
        nn.Linear(width, width + 1),
        Failing(inner, Where.BACKWARD, 0),
        nn.Identity(),
        nn.Identity(),
        nn.Linear(width + 2, width),
    ]
    return blocks, functional.mse_loss


def wide(width: int = 4) -> Modules:
    """Compute in double precision: x_BD -> y_BD."""
    blocks, loss = mlp(width)
    return [block.double() for block in blocks], loss


def classifier(width: int = 4, classes: int = 5) -> Modules:
    """Count the valid targets, which are not -100: x_BD -> logits_BV."""
    return [nn.Linear(width, width + 1), nn.Tanh(), nn.Linear(width + 1, classes)], (
        TokenCrossEntropy()
    )


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


class Shift(nn.Module):
    """Adds one to its input in place, as no module of torch's own does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` itself."""
        return x.add_(1.0)


class Fork(nn.Module):
    """Returns what it makes of its input, and the input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x_BD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (y_BD, x_BD)."""
        return torch.tanh(self.linear(x_BD)), x_BD


class Join(Fork):
    """Adds what it makes of one tensor to the other."""

    def forward(self, parts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        """Take (y_BD, x_BD) and return z_BD, in which x_BD counts twice."""
        y_BD, x_BD = parts
        return self.linear(y_BD) * x_BD + x_BD  # type: ignore[no-any-return]


class Square(nn.Module):
    """A linear layer with as many outputs as inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        """Return y_BD."""
        return torch.tanh(self.linear(x_BD))


class Pair(nn.Module):
    """Two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        """Return y_BD."""
        return self.other(torch.tanh(self.one(x_BD)))  # type: ignore[no-any-return]


class Average(nn.Module):
    """Keeps a running mean of its inputs, in a new tensor every time, and adds it."""

    mean: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        """Return y_BD."""
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x_BD.detach().mean(0)
        return x_BD + self.mean


class Turned(nn.Module):
    """Swaps the last two dimensions without moving a number."""

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Return x_BDT."""
        return x_BTD.transpose(1, 2)


class Last(nn.Module):
    """Takes the mean over the last dimension; the order of summation depends on the strides."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x_BDT: torch.Tensor) -> torch.Tensor:
        """Return x_BD."""
        return x_BDT.sum(-1) / self.size


class Second(nn.Module):
    """Takes every second number, without moving one."""

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Return x_BTD with half as many columns."""
        return x_BTD[..., ::2]


class Sum(nn.Module):
    """Adds up; its gradient is one number in many places."""

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Return sums_BT1."""
        return x_BTD.sum(-1, keepdim=True)


class Thirds(nn.Module):
    """Divides its input without moving a number."""

    def forward(self, x_BD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return three tensors with a third of the columns each."""
        return x_BD.chunk(3, dim=-1)


class Mix(nn.Module):
    """Adds up three tensors in three ways."""

    def forward(self, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return y_B1."""
        first_BD, second_BD, third_BD = parts
        whole = second_BD.sum() / second_BD.numel()
        return first_BD.sum(1, keepdim=True) * whole + (third_BD * first_BD).mean(1, keepdim=True)


class Twice(nn.Module):
    """Returns its input twice."""

    def forward(self, x_BD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x_BD, x_BD)."""
        return x_BD, x_BD


class Weave(nn.Module):
    """Uses two tensors in turns; what it writes into one it reads in the other if they are one."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs) for _ in range(4))

    def forward(self, parts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return y_BD."""
        one_BD, other_BD = parts
        one_BD.mul_(2.0)
        used = (one_BD, other_BD, one_BD, other_BD)
        made = [layer(x_BD) for layer, x_BD in zip(self.layers, used, strict=True)]
        return torch.tanh(torch.stack(made)).sum(0)


class Noise(nn.Module):
    """Adds random numbers, in whatever mode it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return y."""
        return x + torch.randn_like(x)


def add_noise(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
    """Add random numbers to a module's output; a forward hook."""
    return output + torch.randn_like(output)


class Carry(nn.Module):
    """Hands its scale on, and a running mean that it changes in place."""

    mean: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.ones(width))

    def forward(self, x_BD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return (y_BD, scale_D, mean_D)."""
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x_BD.detach().mean(0))
        return self.linear(x_BD) * self.scale, self.scale, self.mean


class Apply(nn.Module):
    """Uses what `Carry` hands on."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Take (y_BD, scale_D, mean_D) and return z_BD."""
        y_BD, scale_D, mean_D = parts
        return self.linear(y_BD + mean_D) + self.linear(scale_D)  # type: ignore[no-any-return]


def projected_error(
    projection_DD: torch.Tensor, output_BD: torch.Tensor, target_BD: torch.Tensor
) -> torch.Tensor:
    """Return the mean squared error of what a projection leaves."""
    return functional.mse_loss(output_BD @ projection_DD, target_BD @ projection_DD)


class Route(nn.Module):
    """Two linear layers, of which a forward uses one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width + 1) for _ in range(2))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        """Return y_BD."""
        return self.layers[int(x_BD[0, 0] > 0)](x_BD)  # type: ignore[no-any-return]


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
