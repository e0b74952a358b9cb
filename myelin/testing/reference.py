"""A plain training loop, with nothing of Myelin's runtime: what every pipeline must equal.

One model, one optimizer, one thread of control; the same microbatches, one after the other.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from myelin.models.building import assemble
from myelin.models.losses import total, weigh
from myelin.models.model import Description, load
from myelin.models.seeds import op_seed, seeded
from myelin.runtime.optimizer import Optimizer, named_parameters, set_rate

Buffers: TypeAlias = list[dict[str, torch.Tensor | None]]


class PlainLoop:
    """Trains a described model the way a script would.

    In training, modules that the factory put into evaluation mode stay in it.

    Args:
        description: the model; all its blocks are built here, so a tied weight is one parameter.
        optimizer: what updates it.
        seed: as the trainer's: initial weights and all that blocks draw depend on it.
        microbatches: how many parts a replica's share is split into, if it has so many rows.
        replicas: gradients are summed up for each replica's share of a batch, and then those sums,
            as replicas do; buffers are those of the first.
    """

    def __init__(
        self,
        description: Description,
        optimizer: Optimizer,
        *,
        seed: int = 0,
        microbatches: int = 1,
        replicas: int = 1,
    ) -> None:
        parts = load(description.factory, description.arguments, seed=seed)
        (blocks,) = assemble(parts, [range(len(parts.blocks))], seed)
        self.model = nn.Sequential(*blocks.values())
        self.loss = parts.loss
        self._resting = [m for block in blocks.values() for m in block.modules() if not m.training]
        self.steps = 0
        self._seed, self._microbatches, self._replicas = seed, microbatches, replicas
        self._description = optimizer
        self._optimizer = optimizer.build(named_parameters(dict(enumerate(self.model))))

    def step(self, batch: tuple[Any, Any]) -> float:
        """Train on one batch and return its loss."""
        loss = self._accumulate(batch)
        set_rate(self._optimizer, self._description, self.steps)
        if self._description.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._description.max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1
        return loss

    def gradients(self, batch: tuple[Any, Any]) -> dict[str, torch.Tensor]:
        """Return the gradients of one batch; weights and buffers stay as they are."""
        before = self._buffers()
        self._accumulate(batch)
        found = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        self._optimizer.zero_grad()
        self._set_buffers(before)
        return found

    def evaluate(self, batch: tuple[Any, Any]) -> float:
        """Return the loss of one batch in evaluation mode."""
        self.model.eval()
        with torch.no_grad():
            shares = [
                total(self.loss, self._forward(value, microbatch), target, weight)
                for microbatch, (value, target, weight) in enumerate(self._split(batch))
            ]
        own = len(shares) // self._replicas
        return sum(float(sum(shares[r * own : (r + 1) * own])) for r in range(self._replicas))

    def predict(self, inputs: Any) -> list[Any]:
        """Return the output for each microbatch of `inputs`, in evaluation mode."""
        self.model.eval()
        with torch.no_grad():
            parts = _parts(inputs, self._count(inputs))
            return [self._forward(value, number) for number, value in enumerate(parts)]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of all parameters and buffers."""
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def _accumulate(self, batch: tuple[Any, Any]) -> float:
        self.model.train()
        for module in self._resting:
            module.training = False
        parts = list(enumerate(self._split(batch)))
        own = len(parts) // self._replicas
        losses, sums = [], []
        before, after = self._buffers(), None
        for replica in range(self._replicas):
            self._set_buffers(before)
            losses.append(self._accumulate_share(parts[replica * own : (replica + 1) * own]))
            sums.append([parameter.grad for parameter in self.model.parameters()])
            self._optimizer.zero_grad()
            after = after or self._buffers()
        self._set_buffers(after or [])
        for parameter, *gradients in zip(self.model.parameters(), *sums, strict=True):
            there = [gradient for gradient in gradients if gradient is not None]
            parameter.grad = sum(there[1:], start=there[0]) if there else None
        return sum(map(float, losses))

    def _accumulate_share(self, parts: list[tuple[int, tuple[Any, Any, int]]]) -> torch.Tensor:
        shares = []
        for microbatch, (value, target, weight) in parts:
            share = total(self.loss, self._forward(value, microbatch), target, weight)
            share.backward()  # type: ignore[no-untyped-call]
            shares.append(share.detach())
        return sum(shares[1:], start=shares[0])

    def _buffers(self) -> Buffers:
        return [_copies(module._buffers) for module in self.model.modules()]

    def _set_buffers(self, values: Buffers) -> None:
        for module, own in zip(self.model.modules(), values, strict=True):
            module._buffers.clear()
            module._buffers.update(_copies(own))

    def _forward(self, value: Any, microbatch: int) -> Any:
        for index, block in enumerate(self.model):
            with seeded(op_seed(self._seed, self.steps, index, microbatch)):
                value = block(value)
        return value

    def _count(self, inputs: Any) -> int:
        """Return how many parts a batch is split into."""
        return self._replicas * min(self._microbatches, _rows(inputs) // self._replicas)

    def _split(self, batch: tuple[Any, Any]) -> Iterator[tuple[Any, Any, int]]:
        """Yield (inputs, targets, weight of the whole batch) of each microbatch."""
        inputs, targets = (_parts(value, self._count(batch[0])) for value in batch)
        weight = sum(weigh(self.loss, target) for target in targets)
        for value, target in zip(inputs, targets, strict=True):
            yield value, target, weight


def _copies(buffers: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: None if each is None else each.clone() for name, each in buffers.items()}


def _rows(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return len(value)
    return _rows(next(iter(value.values() if isinstance(value, dict) else value)))


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names under which two sets of tensors do not have the very same bits."""
    return sorted(
        name
        for name in {*one, *other}
        if name not in one or name not in other or not same_bits(one[name], other[name])
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors agree in dtype, shape and every bit; NaN is then like NaN."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(t.detach().reshape(-1).view(torch.uint8) for t in (one, other)))


def _parts(value: Any, parts: int) -> list[Any]:
    """Split every tensor in a tensor, tuple, list or dict along dimension 0; no part is empty."""
    if isinstance(value, torch.Tensor):
        own = copy.deepcopy(value)  # a block may write into it; it keeps its strides
        return list(own.tensor_split(min(parts, len(own))))
    if isinstance(value, dict):
        columns = {key: _parts(part, parts) for key, part in value.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [type(value)(row) for row in zip(*(_parts(part, parts) for part in value), strict=True)]
