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
    assert torch.equal(numbers["float32"], row[5:10])
    numbers["float32"].zero_()
    assert torch.equal(flattened(named, 1, 5)[1]["float32"], row[5:10])


def test_replicas_are_added_in_their_order() -> None:
    one, tiny = torch.tensor([1.0]), torch.tensor([2.0**-24])
    chunks: list[Chunk] = [([True], {"float32": value}) for value in (one, tiny, tiny)]
    assert summed(chunks)[1]["float32"].item() == 1.0
    assert summed(chunks[::-1])[1]["float32"].item() == 1 + 2.0**-23
    assert one.item() == 1.0


@pytest.mark.parametrize("row", [torch.ones(3, 4).t(), torch.ones(1, 3).expand(4, 3)])
def test_a_gradient_that_is_not_contiguous_is_taken_and_replaced(row: Tensor) -> None:
    parameter = nn.Parameter(torch.zeros(4, 3))
    parameter.grad = row
    named = [Named("0", parameter, decays=True)]
    there, numbers = flattened(named, 0, 100)
    unflatten(named, 0, 100, (there, {"float32": numbers["float32"] * torch.arange(12)}))
    assert torch.equal(parameter.grad, torch.arange(12.0).view(4, 3))


def test_without_parameters_a_chunk_is_empty() -> None:
    there, numbers = flattened([], 0, 10)
    assert (there, numbers) == ([], {})
    unflatten([], 0, 10, summed([(there, numbers)] * 2))


def test_a_gradient_lies_in_memory_as_its_parameter_does() -> None:
    parameter = nn.Parameter(torch.zeros(4, 3).t())
    named = [Named("0", parameter, decays=True)]
    parameter.grad = torch.arange(12.0).view(3, 4)
    for chunk in range(3):
        unflatten(named, chunk, 5, summed([flattened(named, chunk, 5)] * 2))
        assert parameter.grad.stride() == parameter.stride() == (1, 3)
    assert torch.equal(parameter.grad, 2 * torch.arange(12.0).view(3, 4))


def test_numbers_of_each_dtype_are_summed_as_such() -> None:
    named = []
    for index, dtype in enumerate((torch.bfloat16, torch.float64, torch.bfloat16)):
        parameter = nn.Parameter(torch.zeros(2, dtype=dtype))
        parameter.grad = torch.full((2,), 1 + 2.0**-index, dtype=dtype)
        named.append(Named(str(index), parameter, decays=True))
    there, numbers = flattened(named, 0, 100)
    assert {kind: len(own) for kind, own in numbers.items()} == {"bfloat16": 4, "float64": 2}
    unflatten(named, 0, 100, summed([(there, numbers)] * 3))
    found = [(each.parameter.grad.dtype, each.parameter.grad.tolist()) for each in named]  # type: ignore[union-attr]
    assert found == [
        (torch.bfloat16, [6.0, 6.0]),
        (torch.float64, [4.5, 4.5]),
        (torch.bfloat16, [3.75, 3.75]),
    ]
