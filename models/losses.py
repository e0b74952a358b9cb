"""The loss contract: the loss of a batch is a mean over the whole batch, whatever its microbatches.

Two kinds of loss are understood:

- a plain callable `(output, target) -> scalar`, the mean over a microbatch's samples. Microbatches
  are weighted by their number of samples: the size of dimension 0 of the target's first tensor.
- a `CountedLoss`, which gives the *sum* over its valid items and counts them. It is the one to use
  when microbatches differ in how many targets are ignored.

`weigh` gives a microbatch's weight and `total` its share of the batch's loss. The shares of all
microbatches add up to the loss of the batch, and so do their gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch.nn import functional

from myelin.errors import BatchError, ModelError

# B microbatch, T tokens, V vocabulary

Loss: TypeAlias = Callable[[Any, Any], torch.Tensor]


@runtime_checkable
class CountedLoss(Protocol):
    """A loss that adds up over its valid items and knows how many there are."""

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        """Return the sum, a scalar, of the losses of all valid items; zero if there are none."""
        ...

    def count(self, target: Any) -> int:
        """Return the number of valid items in `target`."""
        ...


@dataclass(frozen=True, slots=True)
class TokenCrossEntropy:
    """Cross-entropy in nats of next-token logits, computed in fp32; a `CountedLoss`.

    Attributes:
        ignore_index: the target that counts for nothing.
    """

    ignore_index: int = -100

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Sum over valid targets; `output` is logits_BTV of any float type, `target` is ints_BT.

        Raises:
            BatchError: the shapes do not belong together.
        """
        if output.shape[:-1] != target.shape:
            raise BatchError(
                f"logits of shape {tuple(output.shape)} for targets of shape "
                f"{tuple(target.shape)}: logits need the targets' shape and one dimension more"
            )
        return functional.cross_entropy(
            output.flatten(end_dim=-2).float(),
            target.flatten().long(),
            ignore_index=self.ignore_index,
            reduction="sum",
        )

    def count(self, target: torch.Tensor) -> int:
        """Return the number of targets that are not ignored."""
        return int((target.long() != self.ignore_index).sum())


def weigh(loss: Loss, target: Any) -> int:
    """Return how much a microbatch counts: its valid items, or its samples for a plain loss.

    Raises:
        BatchError: the loss is plain and `target` has no tensor to count samples in.
        ModelError: the loss counted fewer than zero items.
    """
    if not isinstance(loss, CountedLoss):
        return _samples(target)
    weight = int(loss.count(target))
    if weight < 0:
        raise ModelError(f"{loss!r} counted {weight} valid items: count() must return at least 0")
    return weight


def total(loss: Loss, output: Any, target: Any, weight_of_all: int) -> torch.Tensor:
    """Return a microbatch's share of the batch's loss, a scalar to call `backward()` on.

    Args:
        loss: either kind of loss.
        output: what the last block returned for this microbatch.
        target: the microbatch's targets.
        weight_of_all: the sum of `weigh` over all microbatches of the batch, on all replicas.

    Raises:
        BatchError: there is nothing to learn from in the whole batch.
        ModelError: the loss is not a scalar tensor.
    """
    if weight_of_all < 1:
        raise BatchError(
            f"the batch weighs {weight_of_all}: it has no sample or every target is ignored; "
            "leave such batches out"
        )
    weight = None if isinstance(loss, CountedLoss) else weigh(loss, target)
    if weight == 0:
        raise BatchError("a microbatch has no samples: use fewer microbatches or larger batches")
    value = _scalar(loss, loss(output, target))
    return value / weight_of_all if weight is None else value * (weight / weight_of_all)


def _scalar(loss: Loss, value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.reshape(())
    what = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(type(value))
    raise ModelError(f"{loss!r} returned {what}: a loss must return a tensor with one number")


def _samples(target: Any) -> int:
    first = _first_tensor(target)
    if first is None or first.ndim == 0:
        raise BatchError(
            f"cannot count the samples of a target of {type(target).__name__}: a target needs a "
            "tensor whose dimension 0 is the sample, or a loss with a count(target) method"
        )
    return first.shape[0]


def _first_tensor(target: Any) -> torch.Tensor | None:
    if isinstance(target, torch.Tensor):
        return target
    parts: Sequence[Any] = ()
    if isinstance(target, Mapping):
        parts = tuple(target.values())
    elif isinstance(target, tuple | list):
        parts = target
    return next((found for part in parts if (found := _first_tensor(part)) is not None), None)
