import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from myelin.runtime.strides import Form, copied, restored, travelling

Forms = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 3), st.sampled_from([1, 1, 1, 3])), max_size=4
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Tensors as indexing, permuting and expanding make them."""
    dimensions = draw(Forms)
    sizes = [size * step for size, step, _ in dimensions]
    tensor = torch.arange(float(torch.Size(sizes).numel())).reshape(sizes)
    for dimension, (_, step, expanded) in enumerate(dimensions):
        tensor = tensor[(slice(None),) * dimension + (slice(draw(st.integers(0, 1)), None, step),)]
        if expanded > 1 and tensor.shape[dimension] > 0:
            tensor = tensor.narrow(dimension, 0, 1)
    order = draw(st.permutations(range(tensor.ndim)))
    tensor = tensor.permute(order)
    return tensor.expand(
        [
            dimensions[own][2] if dimensions[own][2] > 1 and size == 1 else size
            for own, size in zip(order, tensor.shape, strict=True)
        ]
    )


def lies_as(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) and (one.stride() == other.stride() or not one.numel())


@settings(deadline=None)
@given(tensors())
def test_a_copy_lies_as_its_original_does_in_memory_of_its_own(tensor: Tensor) -> None:
    copy = copied(tensor)
    assert lies_as(copy, tensor)
    if tensor.numel():
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


@settings(deadline=None)
@given(tensors())
def test_what_travelled_is_restored_as_it_lay(tensor: Tensor) -> None:
    way, form = travelling(tensor)
    came = way.clone(memory_format=torch.contiguous_format)
    assert lies_as(restored(came, form), tensor)
    assert came.numel() <= tensor.numel()


def test_a_dense_tensor_is_neither_copied_to_travel_nor_to_be_restored() -> None:
    tensor = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    way, form = travelling(tensor)
    assert way.is_contiguous()
    assert way.data_ptr() == tensor.data_ptr()
    assert restored(way, form).data_ptr() == way.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(10.0).unfold(0, 3, 1),
        torch.arange(10.0).unfold(0, 3, 1).T,
        torch.arange(40_000.0).as_strided((2, 2), (20_000, 1)),
        torch.arange(40_000.0).as_strided((1, 1, 2, 2), (1, 7, 1, 20_000)),
    ],
    ids=["windows", "windows turned", "sparse", "sparse and turned"],
)
def test_what_overlaps_or_is_mostly_gaps_is_closed_up_in_the_same_order(tensor: Tensor) -> None:
    way, form = travelling(tensor)
    came = restored(way.contiguous(), form)
    for copy in (copied(tensor), came):
        assert torch.equal(copy, tensor)
        assert copy.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert copy.stride() == came.stride()
        wide = [dimension for dimension in range(tensor.ndim) if tensor.shape[dimension] > 1]
        order = sorted(wide, key=lambda d: -tensor.stride()[d])
        assert order == sorted(wide, key=lambda d: -copy.stride()[d])


def test_a_tensor_that_is_not_strided_is_copied_by_torch_and_travels_as_it_is() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(copied(sparse).to_dense(), torch.eye(3))
    assert travelling(sparse) == (sparse, ())


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (((2, 3), (2, 1)), "cannot take the form"),
        (((3, 1),), "cannot take the form"),
        (((2, -1), (3, 1)), "cannot take the form"),
        (((2, 2), (3, 1)), "overlaps"),
        (((2, 10**9), (3, 1)), "mostly gaps"),
    ],
)
def test_a_form_that_no_tensor_is_sent_in_is_refused(form: Form, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        restored(torch.ones(2, 3), form)


@pytest.mark.parametrize("ahead", [0, 1, 5, 16, 17])
@pytest.mark.parametrize("shape", [(3, 5), (7,), ()])
def test_a_copy_begins_as_far_behind_full_vectors_as_its_original(
    shape: tuple[int, ...], ahead: int
) -> None:
    room = torch.randn(ahead + math.prod(shape))
    tensor = room[ahead:].view(shape)
    copy = copied(tensor)
    assert torch.equal(copy, tensor)
    assert copy.data_ptr() % 64 == tensor.data_ptr() % 64
    assert copy.stride() == tensor.stride()
    assert copy.data_ptr() != tensor.data_ptr()
