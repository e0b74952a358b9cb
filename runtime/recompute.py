"""Activation checkpointing: blocks that keep only their input, and run again in the backward.

torch's own checkpointing does the work. What is decided here is what makes the second run equal the
first to the last bit: it starts from a copy of the same input, since a block may write into what it
is given, and from the buffers as they were; what it does to buffers is thrown away. Random numbers
are the caller's business, who seeds each block.

Source: activation checkpoints of arXiv 2110.13005.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from myelin.runtime.strides import copied
from myelin.transports.packing import pack, unpack

Buffers: TypeAlias = list[tuple[nn.Module, dict[str, Tensor | None]]]


def recomputed(run: Callable[[Any], Any], value: Any, modules: Sequence[nn.Module]) -> Any:
    """Return `run(value)`, of which the backward keeps `value` alone and calls `run` again.

    Args:
        run: what to run; it must do the same when it is called again.
        value: its input; may hold tensors that want a gradient.
        modules: those whose buffers `run` reads or writes.
    """
    layout, tensors = pack(value)
    places = _places(tensors)
    before: Buffers | None = None

    def again(*tensors: Tensor) -> Any:
        nonlocal before
        own = [_copy(tensor) for tensor in tensors]
        inputs = unpack(layout, [own[place] for place in places])
        if before is None:
            before = [(module, _copies(module._buffers)) for module in modules]
            return run(inputs)
        with _swapped(before):
            return run(inputs)

    different = [tensors[places.index(i)] for i in range(max(places, default=-1) + 1)]
    return checkpoint(again, *different, use_reentrant=False, preserve_rng_state=False)


class _Copy(torch.autograd.Function):
    """A copy that lies in memory as its original does."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return copied(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        return gradients[0]


def _copy(tensor: Tensor) -> Tensor:
    return _Copy.apply(tensor)  # type: ignore[no-any-return,no-untyped-call]


def _places(tensors: Sequence[Tensor]) -> list[int]:
    """Return for each tensor its index among the different ones."""
    indices: dict[int, int] = {}
    return [indices.setdefault(id(tensor), len(indices)) for tensor in tensors]


def _copies(buffers: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if b is None else copied(b.detach()) for name, b in buffers.items()}


@contextmanager
def _swapped(buffers: Buffers) -> Iterator[None]:
    """Put copies of these in the place of the modules' buffers, and those back in the end."""
    now = [(module, dict(module._buffers)) for module, _ in buffers]
    try:
        for module, own in buffers:
            _put(module, _copies(own))
        yield
    finally:
        for module, own in now:
            _put(module, own)


def _put(module: nn.Module, buffers: Mapping[str, Tensor | None]) -> None:
    module._buffers.clear()
    module._buffers.update(buffers)
