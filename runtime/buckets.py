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

Chunk: TypeAlias = tuple[list[bool], Tensor]
"""For each parameter in the chunk whether it has a gradient, and the numbers; float [elements]."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a parameter that lies in a chunk."""

    parameter: torch.nn.Parameter
    begin: int
    end: int


def elements_of(parameters: Sequence[Named]) -> int:
    """Return the length of the row."""
    return sum(named.parameter.numel() for named in parameters)


def flattened(parameters: Sequence[Named], chunk: int, size: int) -> Chunk:
    """Return a chunk of the row, which is `size` long except for the last; it is the caller's."""
    pieces = list(_pieces(parameters, chunk * size, (chunk + 1) * size))
    parts = [_numbers(piece) for piece in pieces]
    there = [piece.parameter.grad is not None for piece in pieces]
    return there, torch.cat(parts) if parts else torch.empty(0)


def summed(chunks: Sequence[Chunk]) -> Chunk:
    """Return the sum of all replicas' chunks, added up in the order in which they are given."""
    there, total = list(chunks[0][0]), chunks[0][1].clone()
    for own, numbers in chunks[1:]:
        there = [one or other for one, other in zip(there, own, strict=True)]
        total += numbers
    return there, total


def unflatten(parameters: Sequence[Named], chunk: int, size: int, value: Chunk) -> None:
    """Write a chunk into the gradients."""
    begin = 0
    there, numbers = value
    pieces = _pieces(parameters, chunk * size, (chunk + 1) * size)
    for piece, has in zip(pieces, there, strict=True):
        end = begin + piece.end - piece.begin
        if has:
            _row(piece)[piece.begin : piece.end].copy_(numbers[begin:end])
        begin = end


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
    return gradient.detach().reshape(-1)[piece.begin : piece.end]


def _row(piece: _Piece) -> Tensor:
    """Return a parameter's gradient as a row that shares its memory; makes it if there is none."""
    parameter = piece.parameter
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    elif not parameter.grad.is_contiguous():
        parameter.grad = parameter.grad.contiguous()
    return parameter.grad.detach().view(-1)
