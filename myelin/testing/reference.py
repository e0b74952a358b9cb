"""A plain training loop, with nothing of Myelin's runtime: what every pipeline must equal.

One model, one optimizer, one thread of control; the same microbatches, one after the other.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from myelin.models.building import assemble
from myelin.models.losses import total, weigh
from myelin.models.model import Description, load
from myelin.models.seeds import op_seed, seeded
from myelin.runtime.optimizer import Optimizer, named_parameters, set_rate


class PlainLoop:
    """Trains a described model the way a script would.

    In training, modules that the factory put into evaluation mode stay in it.

    Args:
        description: the model; all its blocks are built here, so a tied weight is one parameter.
        optimizer: what updates it.
        seed: as the trainer's: initial weights and all that blocks draw depend on it.
        microbatches: how many parts a batch is split into, if it has so many rows.
    """

    def __init__(
        self,
        description: Description,
        optimizer: Optimizer,
        *,
        seed: int = 0,
        microbatches: int = 1,
    ) -> None:
        parts = load(description.factory, description.arguments, seed=seed)
        (blocks,) = assemble(parts, [range(len(parts.blocks))], seed)
        self.model = nn.Sequential(*blocks.values())
        self.loss = parts.loss
        self._resting = [m for block in blocks.values() for m in block.modules() if not m.training]
        self.steps = 0
        self._seed, self._microbatches = seed, microbatches
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
        before = [buffer.clone() for buffer in self.model.buffers()]
        self._accumulate(batch)
        found = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        self._optimizer.zero_grad()
        for buffer, value in zip(self.model.buffers(), before, strict=True):
            buffer.copy_(value)
        return found

    def evaluate(self, batch: tuple[Any, Any]) -> float:
        """Return the loss of one batch in evaluation mode."""
        self.model.eval()
        with torch.no_grad():
            shares = [
                total(self.loss, self._forward(value, microbatch), target, weight)
                for microbatch, (value, target, weight) in enumerate(self._split(batch))
            ]
        return float(sum(shares))

    def predict(self, inputs: Any) -> list[Any]:
        """Return the output for each microbatch of `inputs`, in evaluation mode."""
        self.model.eval()
        with torch.no_grad():
            parts = _parts(inputs, self._microbatches)
            return [self._forward(value, number) for number, value in enumerate(parts)]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of all parameters and buffers."""
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def _accumulate(self, batch: tuple[Any, Any]) -> float:
        self.model.train()
        for module in self._resting:
            module.training = False
        shares = []
        for microbatch, (value, target, weight) in enumerate(self._split(batch)):
            share = total(self.loss, self._forward(value, microbatch), target, weight)
            share.backward()  # type: ignore[no-untyped-call]
            shares.append(share.detach())
        return float(sum(shares))

    def _forward(self, value: Any, microbatch: int) -> Any:
        for index, block in enumerate(self.model):
            with seeded(op_seed(self._seed, self.steps, index, microbatch)):
                value = block(value)
        return value

    def _split(self, batch: tuple[Any, Any]) -> Iterator[tuple[Any, Any, int]]:
        """Yield (inputs, targets, weight of the whole batch) of each microbatch."""
        inputs, targets = (_parts(value, self._microbatches) for value in batch)
        weight = sum(weigh(self.loss, target) for target in targets)
        for value, target in zip(inputs, targets, strict=True):
            yield value, target, weight


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
