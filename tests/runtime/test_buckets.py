from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from myelin.runtime.buckets import Chunk, elements_of, flattened, summed, unflatten
from myelin.runtime.optimizer import Named

SHAPES = [(2, 3), (), (4,), (1, 0), (5, 1)]


def parameters(*missing: int, seed: int = 0) -> list[Named]:
    """Make parameters with gradients, except those at some places."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index, shape in enumerate(SHAPES):
        parameter = nn.Parameter(torch.zeros(shape))
        if index not in missing:
            parameter.grad = torch.randn(shape, generator=generator)
        found.append(Named(str(index), parameter, decays=True))
    return found


def gradients(named: Sequence[Named]) -> list[Tensor | None]:
    return [each.parameter.grad for each in named]


def chunks_of(named: Sequence[Named], size: int) -> list[Chunk]:
    return [flattened(named, chunk, size) for chunk in range(-(-elements_of(named) // size))]


@settings(deadline=None)
@given(st.integers(1, 20), st.lists(st.sets(st.integers(0, 4)), min_size=1, max_size=4))
def test_the_sum_of_chunks_of_any_size_is_the_sum_of_the_gradients(
    size: int, missing: list[set[int]]
) -> None:
    replicas = [parameters(*gone, seed=index) for index, gone in enumerate(missing)]
    expected: list[Tensor | None] = []
    for there in zip(*map(gradients, replicas), strict=True):
        terms = [gradient for gradient in there if gradient is not None]
        expected.append(sum(terms[1:], start=terms[0].clone()) if terms else None)
    for chunk, own in enumerate(zip(*(chunks_of(r, size) for r in replicas), strict=True)):
        total = summed(own)
        for replica in replicas:
            unflatten(replica, chunk, size, total)
    for replica in replicas:
        for found, wanted in zip(gradients(replica), expected, strict=True):
            if wanted is None or not wanted.numel():
                assert found is None or not found.numel()
            else:
                assert found is not None
                assert torch.equal(found, wanted)


def test_a_chunk_is_a_copy_of_its_part_of_the_row() -> None:
    named = parameters()
    row = torch.cat([each.parameter.grad.flatten() for each in named])  # type: ignore[union-attr]
    there, numbers = flattened(named, 1, 5)
    assert there == [True, True, True]
    assert torch.equal(numbers, row[5:10])
    numbers.zero_()
    assert torch.equal(flattened(named, 1, 5)[1], row[5:10])


def test_replicas_are_added_in_their_order() -> None:
    one, tiny = torch.tensor([1.0]), torch.tensor([2.0**-24])
    chunks: list[Chunk] = [([True], one), ([True], tiny), ([True], tiny)]
    assert summed(chunks)[1].item() == 1.0
    assert summed(chunks[::-1])[1].item() == 1 + 2.0**-23
    assert one.item() == 1.0


@pytest.mark.parametrize("row", [torch.ones(3, 4).t(), torch.ones(1, 3).expand(4, 3)])
def test_a_gradient_that_is_not_contiguous_is_taken_and_replaced(row: Tensor) -> None:
    parameter = nn.Parameter(torch.zeros(4, 3))
    parameter.grad = row
    named = [Named("0", parameter, decays=True)]
    there, numbers = flattened(named, 0, 100)
    unflatten(named, 0, 100, (there, numbers * torch.arange(12)))
    assert torch.equal(parameter.grad, torch.arange(12.0).view(4, 3))


def test_without_parameters_a_chunk_is_empty() -> None:
    there, numbers = flattened([], 0, 10)
    assert (there, numbers.numel()) == ([], 0)
    unflatten([], 0, 10, summed([(there, numbers)] * 2))
