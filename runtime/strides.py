"""How a tensor lies in memory, and copies that lie alike: the last bits of some sums depend on it.

A copy has its original's strides, gaps and expanded dimensions (stride 0) included. Two kinds of
tensors are closed up instead, their dimensions in the same order as before: those with elements
that share a place without being expanded, such as windows made by `unfold`, and those that fill
less than 1/4096 of the memory they reach over, such as a batch cut across a whole corpus.

A copy also begins as many bytes behind a multiple of 64 as its original: a microbatch is a view
into its batch, and kernels begin with what lies before the first full vector.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Form: TypeAlias = tuple[tuple[int, int], ...]
"""Size and stride of each dimension."""

_SPARSEST = 4096
_ALIGNMENT = 64  # bytes; torch's own on the CPU


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor without a graph that lies in memory as it does; see above."""
    if tensor.layout is not torch.strided:
        return tensor.clone()
    ahead = ahead_of(tensor)
    if tensor.is_contiguous() and not ahead:
        return tensor.clone()
    form = _form_of(tensor)
    part = _room(form, tensor, ahead)
    part.copy_(_unexpanded(tensor, form))
    return _expanded(part, form)


def ahead_of(tensor: Tensor) -> int:
    """Return how many elements behind a multiple of 64 bytes a tensor begins."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return 0
    return tensor.data_ptr() % _ALIGNMENT // tensor.element_size()


def travelling(tensor: Tensor) -> tuple[Tensor, Form]:
    """Return what must travel of a tensor, and the form that `restored` gives it again.

    What travels is contiguous where that takes no copy. The form is () where it stays as it came.
    """
    if tensor.layout is not torch.strided or not tensor.numel() or _is_usual(tensor):
        return tensor, ()
    form = _form_of(tensor)
    return _unexpanded(tensor, form).permute(_outermost_first(form)), form


def restored(tensor: Tensor, form: Form, ahead: int = 0) -> Tensor:
    """Give a contiguous tensor that came the form of its original.

    It uses the same memory if the original had no gaps and began at a multiple of 64 bytes.

    Args:
        tensor: what came.
        form: what `travelling` returned with it.
        ahead: `ahead_of` the original.

    Raises:
        ValueError: no tensor of that form travels as this one.
    """
    if not 0 <= ahead < _ALIGNMENT:
        raise ValueError(f"a tensor cannot begin {ahead} elements behind {_ALIGNMENT} bytes")
    if not form:
        if not ahead:
            return tensor
        form = tuple(zip(tensor.shape, tensor.stride(), strict=True))
    _check(tensor, form)
    if _reach(form) == tensor.numel() and not ahead:
        sizes, strides = zip(*form, strict=True)
        return tensor.as_strided(sizes, strides)
    part = _room(form, tensor, ahead)
    part.permute(_outermost_first(form)).copy_(tensor)
    return _expanded(part, form)


def _form_of(tensor: Tensor) -> Form:
    """Return the form of a tensor's copies."""
    form = tuple(zip(tensor.shape, tensor.stride(), strict=True))
    return form if _is_possible(form) else _closed_up(form)


def _is_usual(tensor: Tensor) -> bool:
    """Tell whether a tensor is contiguous to the last stride, also where nothing depends on it."""
    stride = 1
    for size, own in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if own != stride:
            return False
        stride *= size
    return True


def _is_possible(form: Form) -> bool:
    """Tell whether a tensor can be written in this form, and takes no unreasonable memory."""
    furthest = 0
    for dimension in reversed(_outermost_first(form)):
        size, stride = form[dimension]
        if size > 1 and stride:
            if stride <= furthest:
                return False
            furthest += (size - 1) * stride
    return furthest < _SPARSEST * math.prod(_sizes(form))


def _closed_up(form: Form) -> Form:
    strides, stride = [0] * len(form), 1
    sizes = _sizes(form)
    for dimension in reversed(_outermost_first(form)):
        strides[dimension] = stride if form[dimension][1] else 0
        stride *= sizes[dimension]
    return tuple((size, stride) for (size, _), stride in zip(form, strides, strict=True))


def _sizes(form: Form) -> list[int]:
    """Return the sizes of what is there: an expanded dimension counts once."""
    return [size if stride else min(size, 1) for size, stride in form]


def _reach(form: Form) -> int:
    """Return how many elements lie between the first and the last, both included."""
    return 1 + sum((size - 1) * stride for size, stride in form)


def _outermost_first(form: Form) -> list[int]:
    return sorted(range(len(form)), key=lambda dimension: -form[dimension][1])


def _room(form: Form, like: Tensor, ahead: int = 0) -> Tensor:
    """Return memory for a tensor of this form, `ahead` elements behind where it would begin."""
    sizes, strides = _sizes(form), [stride for _, stride in form]
    if not ahead:
        return torch.empty_strided(sizes, strides, dtype=like.dtype, device=like.device)
    room = torch.empty(ahead + _reach(form), dtype=like.dtype, device=like.device)
    part = torch.empty(0, dtype=like.dtype, device=like.device)  # no view: blocks may write into it
    return part.set_(room.untyped_storage(), ahead, sizes, strides)


def _unexpanded(tensor: Tensor, form: Form) -> Tensor:
    for dimension, (size, stride) in enumerate(form):
        if size > 1 and not stride:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _expanded(part: Tensor, form: Form) -> Tensor:
    sizes = [size for size, _ in form]
    return part if list(part.shape) == sizes else part.expand(sizes)


def _check(tensor: Tensor, form: Form) -> None:
    sizes = _sizes(form)
    expected: Sequence[int] = [sizes[dimension] for dimension in _outermost_first(form)]
    if min(min(pair) for pair in form) < 0 or list(tensor.shape) != expected:
        raise ValueError(f"a tensor of shape {list(tensor.shape)} cannot take the form {form}")
    if not _is_possible(form):
        raise ValueError(f"no tensor is sent in the form {form}: it overlaps or is mostly gaps")
