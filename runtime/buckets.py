"""A stage's gradients as one row of numbers, cut into chunks that are summed over the replicas.

The row has the gradients one behind the other, in the order of the model's parameters; a chunk may
begin or end inside of one. What has no gradient on any replica has none afterwards.

Source: the bucketed reduction of arXiv 2110.13005.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from myelin.runtime.optimizer import Named

Chunk: TypeAlias = tuple[list[bool], dict[str, Tensor]]
"""For each parameter in the chunk whether it has a gradient; the numbers by dtype, [elements]."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a parameter that lies in a chunk."""

    parameter: torch.nn.Parameter
    begin: int
    end: int

    @property
    def kind(self) -> str:
        """The name of its dtype: a sum is made in the gradients' own."""
        return str(self.parameter.dtype).removeprefix("torch.")


def elements_of(parameters: Sequence[Named]) -> int:
    """Return the length of the row."""
    return sum(named.parameter.numel() for named in parameters)


def flattened(parameters: Sequence[Named], chunk: int, size: int) -> Chunk:
    """Return a chunk of the row, which is `size` long except for the last; it is the caller's."""
    there, parts = list[bool](), dict[str, list[Tensor]]()
    for piece in _pieces(parameters, chunk * size, (chunk + 1) * size):
        there.append(piece.parameter.grad is not None)
        parts.setdefault(piece.kind, []).append(_numbers(piece))
    return there, {kind: torch.cat(numbers) for kind, numbers in parts.items()}


def summed(chunks: Sequence[Chunk]) -> Chunk:
    """Return the sum of all replicas' chunks, added up in the order in which they are given."""
    there = list(chunks[0][0])
    totals = {kind: numbers.clone() for kind, numbers in chunks[0][1].items()}
    for own, numbers in chunks[1:]:
        there = [one or other for one, other in zip(there, own, strict=True)]
        for kind, total in totals.items():
            total += numbers[kind]
    return there, totals


def unflatten(parameters: Sequence[Named], chunk: int, size: int, value: Chunk) -> None:
    """Write a chunk into the gradients."""
    there, numbers = value
    at = dict.fromkeys(numbers, 0)
    pieces = _pieces(parameters, chunk * size, (chunk + 1) * size)
    for piece, has in zip(pieces, there, strict=True):
        begin = at[piece.kind]
        at[piece.kind] = end = begin + piece.end - piece.begin
        if has:
            _write(piece, numbers[piece.kind][begin:end])


def _pieces(parameters: Sequence[Named], begin: int, end: int) -> Iterator[_Piece]:
    at = 0
    for named in parameters:
        size = named.parameter.numel()
        first, last = max(begin - at, 0), min(end - at, size)
        if first < last:
            yield _Piece(named.parameter, first, last)
        at += size


def _numbers(piece: _Piece) -> Tensor:
    gradient = piece.parameter.grad
    if gradient is None:
        return piece.parameter.new_zeros(piece.end - piece.begin)
    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    return dense.reshape(-1)[piece.begin : piece.end]


def _write(piece: _Piece, numbers: Tensor) -> None:
    """Write into a parameter's gradient, which then lies in memory as the parameter does.

    Optimizers rely on that: torch's fused ones go through both as if they were rows.
    """
    parameter = piece.parameter
    gradient = parameter.grad
    if gradient is None:
        parameter.grad = gradient = torch.zeros_like(parameter)
    elif gradient.is_sparse or gradient.stride() != parameter.stride():
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        parameter.grad = gradient = torch.empty_like(parameter).copy_(dense).detach()
    row = gradient.detach().reshape(-1)
    row[piece.begin : piece.end].copy_(numbers)
    if row.untyped_storage().data_ptr() != gradient.untyped_storage().data_ptr():
        gradient.detach().copy_(row.view(gradient.shape))
