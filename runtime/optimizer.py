"""Descriptions of optimizers that can cross the bus, and the torch optimizers they stand for.

The arithmetic is torch's own; nothing here computes an update.
"""

from collections.abc import Iterable

import msgspec
import torch


class AdamW(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="adamw"):
    """Adam with decoupled weight decay, by torch's fused kernel.

    Attributes:
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay, for every parameter.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        beta1, beta2 = self.betas
        if not (self.lr >= 0 and self.eps >= 0 and self.weight_decay >= 0):
            raise ValueError(f"lr, eps and weight_decay must not be negative: {self}")
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ValueError(f"betas={self.betas}: each must be at least 0 and below 1")

    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return torch's optimizer over `parameters`, whose state belongs to it."""
        return torch.optim.AdamW(
            parameters,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=True,
        )


class SGD(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sgd"):
    """Plain gradient descent, with momentum if asked for; its errors show in the weights at once.

    Attributes:
        lr: learning rate.
        momentum: share of the previous update that is kept.
    """

    lr: float = 1e-2
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not (self.lr >= 0 and 0 <= self.momentum < 1):
            raise ValueError(f"lr must not be negative, momentum in [0, 1): {self}")

    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return torch's optimizer over `parameters`, whose state belongs to it."""
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)


Optimizer = AdamW | SGD
