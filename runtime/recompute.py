"""Activation checkpointing: blocks that keep only their input, and run again in the backward.

torch's own checkpointing does the work. What is decided here is what makes the second run equal the
first to the last bit: it starts from a copy of the same input, since a block may write into what it
is given, and from the buffers as they were; what it does to buffers is thrown away. Random numbers
are the caller's business, who seeds each block.

Source: activation checkpoints of arXiv 2110.13005.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from myelin.runtime.strides import copied
from myelin.transports.packing import pack, unpack

Buffers: TypeAlias = list[tuple[nn.Module, str, Tensor]]


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
            before = [(m, name, buffer.clone()) for m, name, buffer in _buffers(modules)]
            return run(inputs)
        with _swapped(before):
            return run(inputs)

    different = [tensors[places.index(i)] for i in range(max(places, default=-1) + 1)]
    return checkpoint(again, *different, use_reentrant=False, preserve_rng_state=False)


class _Copy(torch.autograd.Function):
    """A copy that lies in memory as its original does."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return copied(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _copy(tensor: Tensor) -> Tensor:
    return _Copy.apply(tensor)  # type: ignore[no-any-return,no-untyped-call]


def _places(tensors: Sequence[Tensor]) -> list[int]:
    """Return for each tensor its index among the different ones."""
    indices: dict[int, int] = {}
    return [indices.setdefault(id(tensor), len(indices)) for tensor in tensors]


def _buffers(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            yield module, name, buffer


@contextmanager
def _swapped(buffers: Buffers) -> Iterator[None]:
    """Put copies of these in the place of the modules' buffers, and those back in the end."""
    now: list[tuple[nn.Module, str, Tensor | None]]
    now = [(module, name, module._buffers[name]) for module, name, _ in buffers]
    try:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.clone()
        yield
    finally:
        for module, name, own in now:
            module._buffers[name] = own
