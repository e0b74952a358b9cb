import enum
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from myelin.transports.frames import MAX_ITEMS, Codec
from myelin.transports.packing import (
    DEPTH_LIMIT,
    DictOf,
    Layout,
    ListOf,
    NoneValue,
    TensorAt,
    TupleOf,
    map_tensors,
    pack,
    tensors_of,
    unpack,
)

tensors = st.builds(torch.full, st.just((2,)), st.floats(-9, 9))
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | tensors
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=15,
)


def same(one: Any, other: Any) -> bool:
    """Tell whether two values are equal, of equal types, and with the very same tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one is other
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Carrier(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    layout: Layout


def over_the_bus(layout: Layout) -> Layout:
    raw: bytes = msgpack.packb(msgspec.to_builtins(layout))
    received: Layout = msgspec.convert(msgpack.unpackb(raw), type=Layout)
    return received


@given(values)
def test_what_is_packed_and_sent_over_the_bus_unpacks_to_the_same_value(value: Any) -> None:
    layout, parts = pack(value)
    assert same(unpack(over_the_bus(layout), parts), value)
    assert over_the_bus(layout) == layout


@given(values)
def test_bytes_may_also_cross_as_msgpack_binary(value: Any) -> None:
    layout, parts = pack(value)
    raw = msgpack.packb(msgspec.to_builtins(layout, builtin_types=(bytes,)))
    assert same(unpack(msgspec.convert(msgpack.unpackb(raw), type=Layout), parts), value)


@given(values)
def test_mapping_the_tensors_leaves_everything_else_as_it_was(value: Any) -> None:
    before = tensors_of(value)
    doubled = map_tensors(lambda tensor: tensor * 2, value)
    after = tensors_of(doubled)
    assert [a.tolist() for a in after] == [(b * 2).tolist() for b in before]
    restored = iter(before)
    assert same(map_tensors(lambda _: next(restored), doubled), value)


def test_a_layout_says_where_each_tensor_stands() -> None:
    x, y = torch.zeros(1), torch.ones(2)
    layout, parts = pack((x, [None, {"mask": y}]))
    assert layout == TupleOf((TensorAt(0), ListOf((NoneValue(), DictOf({"mask": TensorAt(1)})))))
    assert parts[0] is x
    assert parts[1] is y


def test_a_layout_may_be_a_field_of_a_message() -> None:
    class Message(msgspec.Struct, forbid_unknown_fields=True):
        layout: Layout

    message = Message(pack({"x": torch.zeros(1), "n": [1, 2.0, b"\xff"]})[0])
    raw = msgpack.packb(msgspec.to_builtins(message))
    assert msgspec.convert(msgpack.unpackb(raw), type=Message) == message


def test_a_tensor_that_occurs_twice_is_packed_twice() -> None:
    x = torch.zeros(1)
    assert len(tensors_of([x, x])) == 2


def test_tensors_that_require_grad_are_handed_over_as_they_are() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert tensors_of({"w": parameter})[0] is parameter
    assert tensors_of(parameter * 2)[0].requires_grad


@pytest.mark.parametrize("number", [math.nan, math.inf, -0.0, 1.0, True, 1, -(2**63), 2**64 - 1])
def test_numbers_keep_their_type_and_bits(number: float) -> None:
    back = unpack(over_the_bus(pack(number)[0]), [])
    assert type(back) is type(number)
    assert repr(back) == repr(number)


class Color(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1, {"mask": object()}), r'at \[1\]\["mask"\] is a object: only tensors'),
        ([[{1, 2}]], r"at \[0\]\[0\] is a set"),
        (1j, "at the top is a complex"),
        ({"a": Color.RED}, r'at \["a"\] is a Color'),
        (Point(1, 2), "at the top is a Point"),
        ([OrderedDict(a=1)], r"at \[0\] is a OrderedDict"),
        ([np.float64(1.0)], r"at \[0\] is a float64"),
        ({"a": {1: 2}}, r'a key of the dict at \["a"\] is 1 of type int'),
        ({None: 2}, "a key of the dict at the top is None of type NoneType"),
        (lambda: 1, "is a function"),
        (torch.float32, "is a dtype"),
    ],
)
def test_what_is_no_value_is_refused_with_the_path_to_it(value: Any, text: str) -> None:
    for act in (pack, tensors_of):
        with pytest.raises(TypeError, match=text):
            act(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([2**64], r"the int at \[0\] has 65 bits"),
        (-(2**63) - 1, "the int at the top has 64 bits"),
        ({"a": "\ud800"}, r'at \["a"\] cannot be written as UTF-8'),
        ({"\ud800": 1}, "cannot be written as UTF-8"),
    ],
)
def test_what_msgpack_cannot_write_is_refused_with_the_path_to_it(value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pack(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match="does it contain itself"):
        pack(value)


@pytest.mark.parametrize("items", [list, tuple, lambda many: {str(i): i for i in many}])
def test_the_longest_value_allowed_crosses_the_bus(items: Callable[[Any], Any]) -> None:
    value = items(range(MAX_ITEMS))
    codec = Codec((Carrier,))
    frame = codec.encode(0, Carrier(pack(value)[0]))
    _, message = codec.decode(frame)
    assert isinstance(message, Carrier)
    assert unpack(message.layout, []) == value
    with pytest.raises(ValueError, match=rf"there are {MAX_ITEMS + 1} items at \[0\]: at most"):
        pack([items(range(MAX_ITEMS + 1))])


def test_more_tensors_than_can_be_announced_are_refused() -> None:
    tensors = [[torch.ones(())] * (MAX_ITEMS // 2)] * 3
    with pytest.raises(ValueError, match="items at the top: at most"):
        pack(tensors)


def test_the_deepest_value_allowed_crosses_the_bus() -> None:
    value: Any = torch.zeros(1)
    for _ in range(DEPTH_LIMIT):
        value = [value]
    layout, parts = pack(value)
    assert same(unpack(over_the_bus(layout), parts), value)
    with pytest.raises(ValueError, match="nested deeper"):
        pack([value])


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        (TensorAt(0), 0),
        (TensorAt(0), 2),
        (TensorAt(1), 1),
        (TensorAt(-1), 1),
        (TupleOf((TensorAt(0), TensorAt(0))), 2),
        (TupleOf((TensorAt(1), TensorAt(0))), 2),
        (DictOf({"a": ListOf((TensorAt(0), TensorAt(2)))}), 2),
        (NoneValue(), 1),
    ],
    ids=repr,
)
def test_a_layout_that_does_not_fit_the_tensors_is_refused(layout: Layout, count: int) -> None:
    with pytest.raises(ValueError, match="the layout asks for the tensors"):
        unpack(layout, [torch.zeros(1)] * count)


@pytest.mark.parametrize(
    "raw",
    [
        {"is": "module", "index": 0},
        {"is": "tensor"},
        {"is": "tensor", "index": "0"},
        {"is": "tensor", "index": 0, "device": "cuda"},
        {"is": "int", "value": True},
        {"is": "list", "items": [3]},
        {"index": 0},
        [],
    ],
    ids=repr,
)
def test_a_layout_outside_the_closed_set_is_refused_on_arrival(raw: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(raw, type=Layout)
