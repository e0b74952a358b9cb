"""Descriptions of optimizers that can cross the bus, and the torch optimizers they stand for.

The arithmetic of an update is torch's own; nothing here computes one. What is decided here: which
parameters share their settings, and what the learning rate is at a step.
"""

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from myelin.models.checks import shown

_ADVICE = "describe one, such as optimizer=myelin.AdamW(lr=1e-3) or myelin.SGD(lr=1e-2)"
_UNDECAYED = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)


_KINDS: dict[Any, str] = {
    int: "a whole number",
    int | None: "a whole number, or None",
    float: "a plain number",
    float | None: "a plain number, or None",
    str: "a text",
}
_EXAMPLES = {
    "betas": "two plain numbers, such as (0.9, 0.95)",
    "groups": 'a tuple of groups, such as (Group("*.bias", weight_decay=0.0),)',
    "schedule": 'a schedule, such as Schedule("cosine", steps=1000)',
    "shape": '"constant", "linear" or "cosine"',
}


def _check_types(settings: msgspec.Struct) -> None:
    """Refuse a field whose value is not of its type, which no worker could decode."""
    for field in msgspec.structs.fields(settings):
        value = getattr(settings, field.name)
        try:
            msgspec.convert(value, field.type)
        except (msgspec.ValidationError, TypeError) as error:
            wanted = _EXAMPLES.get(field.name) or _KINDS[field.type]
            raise ValueError(f"{field.name}={shown(value)}: use {wanted}") from error


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the learning rate is multiplied with, step by step; constant by default.

    During the warm-up the factor of step s (from 0) is `(s + 1) / warmup`. Then it goes from 1 to
    `floor`, which it reaches at step `steps` and keeps.

    Attributes:
        shape: "constant", "linear" or "cosine" (half a period).
        warmup: steps of the warm-up.
        steps: where `floor` is reached; needed unless the shape is constant.
        floor: the last factor.
    """

    shape: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    steps: int | None = None
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_types(self)
        if self.warmup < 0 or not 0 <= self.floor <= 1:
            raise ValueError(f"warmup must not be negative, floor in [0, 1]: {self}")
        if self.shape != "constant" and (self.steps is None or self.steps <= self.warmup):
            raise ValueError(
                f"steps={self.steps}: a {self.shape} schedule needs the number of steps until it "
                f"is at its floor, more than the {self.warmup} of the warm-up"
            )

    def factor(self, step: int) -> float:
        """Return the factor of step `step`, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.shape == "constant":
            return 1.0
        assert self.steps is not None
        part = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        left = 1 - part if self.shape == "linear" else (1 + math.cos(math.pi * part)) / 2
        return self.floor + (1 - self.floor) * left


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of its own for some parameters.

    Attributes:
        names: a shell pattern of names as `nn.Sequential(*blocks)` has them: "*.bias", "0.token.*".
        weight_decay: in the place of the optimizer's.
        lr_scale: multiplies the learning rate.
    """

    names: str
    weight_decay: float | None = None
    lr_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_types(self)
        if not ((self.weight_decay is None or self.weight_decay >= 0) and self.lr_scale >= 0):
            raise ValueError(f"weight_decay and lr_scale must not be negative: {self}")


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter, and what its settings depend on.

    Attributes:
        name: in `nn.Sequential(*blocks)`; of a weight with several, the first.
        parameter: it stays its owner's.
        decays: whether it is decayed where no group says otherwise.
    """

    name: str
    parameter: nn.Parameter
    decays: bool


def named_parameters(blocks: Mapping[int, nn.Module]) -> list[Named]:
    """Return the parameters of `blocks` that can be trained, each once, in the model's order.

    Decayed by default are matrices and larger, except embeddings and what belongs to a norm.
    """
    found: dict[int, Named] = {}
    for index, block in blocks.items():
        for path, module in block.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                decays = parameter.ndim > 1 and not isinstance(module, _UNDECAYED)
                full = ".".join(part for part in (str(index), path, name) if part)
                if parameter.requires_grad:
                    found.setdefault(id(parameter), Named(full, parameter, decays))
    return list(found.values())


class _Common(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all optimizers have.

    Attributes:
        schedule: how the learning rate changes from step to step.
        max_norm: where the norm of all gradients together is larger they are scaled down to it.
        groups: settings of their own for some parameters; the first whose pattern fits counts.
    """

    schedule: Schedule = Schedule()
    max_norm: float | None = None
    groups: tuple[Group, ...] = ()

    def _check(self) -> None:
        _check_types(self)
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"max_norm={self.max_norm}: use a number above 0, or None")

    def _split(self, parameters: Iterable[Named], lr: float, decay: float) -> list[dict[str, Any]]:
        """Return torch's parameter groups: one for each (scale of lr, weight decay) there is."""
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for named in parameters:
            scale, own_decay = 1.0, decay if named.decays else 0.0
            for group in self.groups:
                if fnmatch.fnmatchcase(named.name, group.names):
                    scale = group.lr_scale
                    own_decay = own_decay if group.weight_decay is None else group.weight_decay
                    break
            groups.setdefault((scale, own_decay), []).append(named.parameter)
        return [
            {"params": members, "lr": lr * scale, "lr_scale": scale, "weight_decay": own_decay}
            for (scale, own_decay), members in groups.items()
        ]

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the patterns of groups that fit none of `names`."""
        known = list(names)
        return [group.names for group in self.groups if not fnmatch.filter(known, group.names)]


class AdamW(
    _Common, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="adamw", kw_only=True
):
    """Adam with decoupled weight decay, by torch's fused kernel.

    Attributes:
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay; by default not of biases, norms and embeddings.
        schedule: how the learning rate changes from step to step.
        max_norm: where the norm of all gradients together is larger they are scaled down to it.
        groups: settings of their own for some parameters; the first whose pattern fits counts.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        self._check()
        beta1, beta2 = self.betas
        if not (0 <= self.lr < math.inf and self.eps >= 0 and self.weight_decay >= 0):
            raise ValueError(
                f"lr must be finite; lr, eps and weight_decay must not be negative: {self}"
            )
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ValueError(f"betas={self.betas}: each must be at least 0 and below 1")

    def build(self, parameters: Iterable[Named]) -> torch.optim.Optimizer:
        """Return torch's optimizer over `parameters`, whose state belongs to it."""
        groups = self._split(parameters, self.lr, self.weight_decay)
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


class SGD(
    _Common, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="sgd", kw_only=True
):
    """Plain gradient descent, with momentum if asked for; its errors show in the weights at once.

    Attributes:
        lr: learning rate.
        momentum: share of the previous update that is kept.
        weight_decay: what is added of a weight to its gradient; as `AdamW` has it, not of all.
        schedule: how the learning rate changes from step to step.
        max_norm: where the norm of all gradients together is larger they are scaled down to it.
        groups: settings of their own for some parameters; the first whose pattern fits counts.
    """

    lr: float = 1e-2
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self._check()
        if not (0 <= self.lr < math.inf and self.weight_decay >= 0 and 0 <= self.momentum < 1):
            raise ValueError(
                f"lr must be finite; lr and weight_decay must not be negative, momentum in [0, 1): "
                f"{self}"
            )

    def build(self, parameters: Iterable[Named]) -> torch.optim.Optimizer:
        """Return torch's optimizer over `parameters`, whose state belongs to it."""
        groups = self._split(parameters, self.lr, self.weight_decay)
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum)


Optimizer = AdamW | SGD


def check_optimizer(optimizer: object) -> Optimizer:
    """Return what describes an optimizer as it is.

    Raises:
        ValueError: it describes none.
    """
    if isinstance(optimizer, AdamW | SGD):
        return optimizer
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if issubclass(kind, AdamW | SGD):
        raise ValueError(
            f"optimizer={kind.__name__} is the class: give its settings, such as "
            f"optimizer=myelin.{kind.__name__}(lr=1e-3)"
        )
    if issubclass(kind, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer={kind.__module__}.{kind.__name__}: an optimizer of torch holds the tensors "
            f"of one process, and every worker makes its own; {_ADVICE}"
        )
    raise ValueError(f"optimizer={shown(optimizer)} describes no optimizer: {_ADVICE}")


def set_rate(optimizer: torch.optim.Optimizer, description: Optimizer, step: int) -> None:
    """Give every parameter group the learning rate of step `step`."""
    rate = description.lr * description.schedule.factor(step)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


def gradients_of(parameters: Iterable[Named]) -> list[torch.Tensor]:
    """Return all gradients there are, in the order of the parameters."""
    return [each.parameter.grad for each in parameters if each.parameter.grad is not None]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a gradient, which may be sparse."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def all_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Tell whether no gradient has an infinity or a NaN in it.

    A sum that is finite proves it, in a thirtieth of the time that looking at every number takes;
    one that is not may have overflowed.
    """
    values = [_values(gradient) for gradient in gradients]
    if all(math.isfinite(float(each.sum())) for each in values):
        return True
    return all(bool(each.isfinite().all()) for each in values)


def norms_of(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the norm of each gradient; float32 [gradients]."""
    norms = [torch.linalg.vector_norm(_values(gradient)) for gradient in gradients]
    return torch.stack(norms) if norms else torch.empty(0)


def clipping(norms: torch.Tensor, max_norm: float) -> tuple[float, float]:
    """Return the norm of all gradients together, and the factor that brings it to `max_norm`.

    As `torch.nn.utils.clip_grad_norm_` has it, to the last bit, if `norms` is in the model's order.
    """
    norm = torch.linalg.vector_norm(norms)
    return float(norm), float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def scale(gradients: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply gradients with a factor, in place."""
    if factor != 1.0:
        for gradient in gradients:
            gradient.mul_(factor)
