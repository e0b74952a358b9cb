"""One pipeline stage on its worker: its blocks, what a forward saves, what a backward returns.

The arithmetic is that of a plain loop over the whole model, to the last bit: a stage cuts the
autograd graph at its border and nowhere else. What crosses a border is `(value, wants_gradient)`,
one flag per tensor of the value, so that the next stage computes a gradient for exactly those
tensors that a plain loop would.

All methods run on the device's compute thread, except where they say otherwise.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from myelin.models.seeds import op_seed, seeded
from myelin.runtime.blackbox import BlackBox
from myelin.runtime.messages import StageSpec
from myelin.transports.packing import map_tensors, tensors_of


class Cursor:
    """Which model block runs right now on this worker's compute stream; None between blocks."""

    def __init__(self, black_box: BlackBox | None = None) -> None:
        self.block: int | None = None
        self._black_box = black_box

    def enter(self, block: int | None) -> None:
        """Say that `block` runs from now on."""
        self.block = block
        if self._black_box is not None:
            self._black_box.block(block)

    def watch(self, tensors: Sequence[Tensor], block: int) -> None:
        """Have the backward say that it enters `block` when it reaches the block's outputs."""
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self.enter(block))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Saved:
    """What a forward leaves for its backward."""

    leaves: list[Tensor]
    outputs: list[Tensor]


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A buffer and what it held before a run."""

    module: nn.Module
    name: str
    tensor: Tensor
    before: Tensor

    def restore(self) -> None:
        """Undo what a forward did: a write into the tensor, or another tensor in its place."""
        self.tensor.copy_(self.before)
        setattr(self.module, self.name, self.tensor)


class Stage:
    """A run of consecutive blocks of the model.

    Args:
        spec: which blocks.
        blocks: the built blocks by index; the stage keeps them.
        seed: the trainer's seed; random numbers depend on it, the step, the block and the
            microbatch alone.
        cursor: told which block runs.
    """

    def __init__(
        self,
        spec: StageSpec,
        blocks: dict[int, nn.Module],
        *,
        seed: int,
        cursor: Cursor,
    ) -> None:
        self.spec = spec
        self.blocks = {index: blocks[index] for index in range(spec.first, spec.last + 1)}
        self._seed, self._cursor = seed, cursor
        self._saved: dict[int, _Saved] = {}
        self._buffers: list[_Buffer] | None = None
        self._drawing = {index for index, block in self.blocks.items() if may_draw(block)}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by the names they have in `nn.Sequential(*all_blocks)`."""
        return {
            f"{index}.{name}": parameter
            for index, block in self.blocks.items()
            for name, parameter in block.named_parameters(remove_duplicate=False)
        }

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers that belong to a checkpoint, named like the parameters."""
        return {
            f"{index}.{name}": tensor
            for index, block in self.blocks.items()
            for name, tensor in block.state_dict(keep_vars=True).items()
            if not isinstance(tensor, nn.Parameter) and isinstance(tensor, Tensor)
        }

    def infer(self, value: Any) -> Any:
        """Run the blocks in evaluation mode and return the last one's output; saves nothing."""
        with torch.no_grad():
            for index, block in self.blocks.items():
                self._cursor.enter(index)
                block.eval()
                value = block(value)
        self._cursor.enter(None)
        return value

    def forward(
        self, value: Any, wants_gradient: Sequence[bool], *, step: int, microbatch: int
    ) -> Any:
        """Run the blocks in training mode; the output is attached to the autograd graph.

        Call `keep` with what a backward is to start from before the next forward.
        """
        self._remember_buffers()
        self._leaves: list[Tensor] = []
        flags = iter(wants_gradient)
        value = map_tensors(lambda tensor: self._enter(tensor, next(flags)), value)
        for index, block in self.blocks.items():
            self._cursor.enter(index)
            block.train()
            with self._random(index, step, microbatch):
                value = block(value)
            self._cursor.watch(tensors_of(value), index)
        self._cursor.enter(None)
        return value

    def _enter(self, tensor: Tensor, wants_gradient: bool) -> Tensor:
        leaf = tensor.detach().requires_grad_(wants_gradient)
        self._leaves.append(leaf)
        return leaf.clone() if wants_gradient else leaf  # blocks may write into it, not into a leaf

    def keep(self, microbatch: int, outputs: list[Tensor]) -> None:
        """Save what the backward of `microbatch` starts from: `outputs`, still attached."""
        self._saved[microbatch] = _Saved(self._leaves, outputs)

    def backward(
        self,
        microbatch: int,
        gradients: Sequence[Tensor | None],
        *,
        from_users: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> list[Tensor | None]:
        """Run the backward of one microbatch; parameter gradients are added to `.grad`.

        Args:
            microbatch: which forward it belongs to; what that one saved is freed.
            gradients: one for each tensor that was kept, None where there is none.
            from_users: parameters, with gradients that other stages computed for them. Autograd
                starts its sums with them, as it would in one graph of the whole model.

        Returns:
            The gradient of each tensor of the stage's input; they belong to the caller.
        """
        saved = self._saved.pop(microbatch)
        outputs = [
            (output, gradient)
            for output, gradient in zip(saved.outputs, gradients, strict=True)
            if output.requires_grad and gradient is not None
        ]
        roots = [*from_users, *outputs]
        if roots:
            tensors, given = zip(*roots, strict=True)
            torch.autograd.backward(tensors, given)
        self._cursor.enter(None)
        return [leaf.grad for leaf in saved.leaves]

    def discard(self) -> None:
        """Undo what an ended run left: saved activations, gradients, changed buffers."""
        self._saved.clear()
        for parameter in self.parameters().values():
            parameter.grad = None
        for buffer in self._buffers or ():
            buffer.restore()
        self._buffers = None

    def commit(self) -> None:
        """Forget how the buffers were before the run: it is not going to be undone."""
        self._buffers = None

    def _remember_buffers(self) -> None:
        if self._buffers is None:
            self._buffers = [
                _Buffer(module, name, buffer, buffer.detach().clone())
                for block in self.blocks.values()
                for module in block.modules()
                for name, buffer in module.named_buffers(recurse=False)
            ]

    def _random(self, index: int, step: int, microbatch: int) -> AbstractContextManager[None]:
        """Return the context in which a block draws its random numbers; most blocks draw none."""
        if index not in self._drawing:
            return nullcontext()
        return seeded(op_seed(self._seed, step, index, microbatch))


def may_draw(block: nn.Module) -> bool:
    """Tell whether a forward of `block` may draw random numbers; True where it cannot be known."""
    declared = getattr(block, "draws_random", None)
    if isinstance(declared, bool):
        return declared
    return any(not _deterministic(module) for module in block.modules())


def _deterministic(module: nn.Module) -> bool:
    if not type(module).__module__.startswith("torch.nn."):
        return False
    return (
        not getattr(module, "p", 0)
        and not getattr(module, "dropout", 0)
        and not isinstance(module, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)
    )
