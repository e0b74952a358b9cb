"""Models with parameters, buffers and gradients such as a pipeline or its replicas could trip over.

Each is `Model("myelin.testing.odd_models:NAME")`, x_BD [B, 8] -> y_BD [B, 8], mean squared error.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from myelin.testing.models import Modules

# B microbatch, D width

WIDTH = 8


def _with(block: nn.Module, *others: nn.Module) -> Modules:
    return [block, *others, nn.Tanh(), nn.Linear(WIDTH, WIDTH)], functional.mse_loss


def transposed() -> Modules:
    """Have a weight that lies in memory the other way round."""
    linear = nn.Linear(WIDTH, WIDTH)
    linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
    return _with(linear)


class Picture(nn.Module):
    """A convolution whose weight has its channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(2, 2, 3, padding=1)
        weight = self.inner.weight.detach()
        self.inner.weight = nn.Parameter(weight.to(memory_format=torch.channels_last))

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return the convolved pictures as rows."""
        y_BD: Tensor = self.inner(x_BD.reshape(-1, 2, 2, 2)).flatten(1)
        return y_BD


def channels_last() -> Modules:
    """Have a convolution whose weight has its channels last."""
    return _with(Picture())


class Shifted(nn.Module):
    """Returns all columns of a wider result but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH + 1)

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return a view that begins inside of its memory."""
        y_BD: Tensor = self.inner(x_BD)
        return y_BD[:, 1:]


def written_views() -> Modules:
    """Write into a value that begins inside of its memory."""
    return _with(Shifted(), nn.ReLU(inplace=True))


class Empty(nn.Module):
    """Has a parameter without elements, which gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.nothing = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.empty(0))

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return the linear map."""
        y_BD: Tensor = self.inner(x_BD) + self.nothing.sum()
        return y_BD


def without_elements() -> Modules:
    """Have a parameter without elements."""
    return _with(Empty())


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


class Stop(nn.Module):
    """Lets no gradient through."""

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return a copy."""
        y_BD: Tensor = _NoGradient.apply(x_BD)  # type: ignore[no-untyped-call]
        return y_BD


def stopped() -> Modules:
    """Have parameters that get no gradient although they are used."""
    return _with(nn.Linear(WIDTH, WIDTH), nn.Identity(), Stop(), nn.Linear(WIDTH, WIDTH))


class Mean(nn.Module):
    """Adds a running mean of its input, kept in a buffer in one of several ways."""

    mean: Tensor | None

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(WIDTH, WIDTH)
        if kind != "registered late":
            start = None if kind == "none at first" else torch.zeros(WIDTH)
            self.register_buffer("mean", start, persistent=kind != "not persistent")
        if kind == "expanded":
            self.register_buffer("ones", torch.ones(1, WIDTH).expand(3, WIDTH))

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return the linear map plus the mean."""
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(WIDTH))
        if self.training:
            own, before = x_BD.detach().mean(0), self.mean
            self.mean = own if before is None else 0.5 * before + 0.5 * own
        y_BD: Tensor = self.inner(x_BD)
        return y_BD if self.mean is None else y_BD + self.mean


def not_persistent() -> Modules:
    """Have a buffer that no checkpoint has."""
    return _with(Mean("not persistent"))


def none_at_first() -> Modules:
    """Have a buffer that is None until the first forward."""
    return _with(Mean("none at first"))


def registered_late() -> Modules:
    """Register a buffer in the first forward."""
    return _with(Mean("registered late"))


def expanded_buffer() -> Modules:
    """Have a buffer that has been expanded."""
    return _with(Mean("expanded"))


class Last(nn.Module):
    """Keeps its latest input in a buffer, whatever its size."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("last", torch.zeros(1, WIDTH))

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return the linear map."""
        if self.training:
            self.last = x_BD.detach().clone()
        y_BD: Tensor = self.inner(x_BD)
        return y_BD


def last_batch() -> Modules:
    """Have a buffer whose shape depends on the batch."""
    return _with(Last())


class Precisions(nn.Module):
    """Has parameters of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(WIDTH, WIDTH).bfloat16()
        self.usual = nn.Linear(WIDTH, WIDTH)
        self.high = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return three linear maps, one after the other."""
        y_BD: Tensor = self.high(self.usual(self.low(x_BD.bfloat16()).float()).double())
        return y_BD.float()


def three_precisions() -> Modules:
    """Have parameters of three dtypes in one block."""
    return _with(Precisions())


class Lookup(nn.Module):
    """Looks rows up in a table whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=True)

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return a row of the table for each row."""
        y_BD: Tensor = self.table((x_BD[:, 0].abs() * 3).long().clamp(max=4))
        return y_BD


def sparse_gradient() -> Modules:
    """Have a gradient that is sparse; for SGD without momentum."""
    return _with(Lookup())


def all_frozen_first() -> Modules:
    """Have a first block without anything to train."""
    return _with(nn.Linear(WIDTH, WIDTH).requires_grad_(False))
