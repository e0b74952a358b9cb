"""Takes values apart into a layout and tensors, and puts them together again; does no I/O.

A value is a tensor, `None`, a bool, int, float, str or bytes, or a tuple, list or dict with str
keys of values. The layout crosses the control bus (`msgspec.to_builtins`, `msgspec.convert`), the
tensors the data path. Types are exact: an instance of a subclass, a named tuple say, would come
back as something else and is refused, except that every kind of tensor counts as a tensor.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import msgspec
import torch

from myelin.transports.frames import MAX_ITEMS

Value: TypeAlias = (
    "torch.Tensor | bool | int | float | str | bytes"
    " | tuple[Value, ...] | list[Value] | dict[str, Value] | None"
)

DEPTH_LIMIT = 64  # what is nested deeper probably contains itself
INT_LIMITS = (-(2**63), 2**64 - 1)  # what msgpack can write


class _Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    """Base of the kinds of layout."""


class TensorAt(_Node, frozen=True, tag="tensor"):
    """The tensor at `index` among the tensors."""

    index: int


class NoneValue(_Node, frozen=True, tag="none"):
    """`None`."""


class BoolValue(_Node, frozen=True, tag="bool"):
    """A bool."""

    value: bool


class IntValue(_Node, frozen=True, tag="int"):
    """An int that fits into 64 bits."""

    value: int


class FloatValue(_Node, frozen=True, tag="float"):
    """A float, also a NaN or an infinity."""

    value: float


class StrValue(_Node, frozen=True, tag="str"):
    """A str."""

    value: str


class BytesValue(_Node, frozen=True, tag="bytes"):
    """Some bytes."""

    value: bytes


class TupleOf(_Node, frozen=True, tag="tuple"):
    """A tuple of values."""

    items: tuple["Layout", ...]


class ListOf(_Node, frozen=True, tag="list"):
    """A list of values."""

    items: tuple["Layout", ...]


class DictOf(_Node, frozen=True, tag="dict"):
    """A dict of values, in order."""

    items: dict[str, "Layout"]


Layout: TypeAlias = (
    TensorAt
    | NoneValue
    | BoolValue
    | IntValue
    | FloatValue
    | StrValue
    | BytesValue
    | TupleOf
    | ListOf
    | DictOf
)

_TOP = "the top"


def pack(value: object) -> tuple[Layout, list[torch.Tensor]]:
    """Take a value apart into its layout and its tensors, in the order of their indices.

    The tensors are the caller's own, not copies, and still require grad where they did.

    Raises:
        TypeError: there is something in it that is no value; the text has the path to it.
        ValueError: an int has more than 64 bits, a str is not Unicode text, or a container
            contains itself or has more than `MAX_ITEMS` items.
    """
    tensors: list[torch.Tensor] = []
    layout = _take_apart(value, "", 0, tensors)
    _check_length(len(tensors), "")
    return layout, tensors


def unpack(layout: Layout, tensors: Sequence[torch.Tensor]) -> Value:
    """Put a value together again from what `pack` made of it.

    Raises:
        ValueError: the layout's indices are not those of the tensors, each exactly once and in
            order.
    """
    indices = list(_indices(layout))
    if indices != list(range(len(tensors))):
        raise ValueError(
            f"the layout asks for the tensors {indices}, but there are {len(tensors)} tensors: it "
            f"must ask for 0, 1, 2 and so on, once each"
        )
    return _put_together(layout, tensors)


def tensors_of(value: object) -> list[torch.Tensor]:
    """Return the tensors in a value, in the order in which `pack` returns them."""
    return pack(value)[1]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: object) -> Value:
    """Return the same value with `function(tensor)` in the place of every tensor."""
    layout, tensors = pack(value)
    return unpack(layout, [function(tensor) for tensor in tensors])


def _take_apart(value: object, path: str, depth: int, tensors: list[torch.Tensor]) -> Layout:
    if depth > DEPTH_LIMIT:
        raise ValueError(
            f"the value is nested deeper than {DEPTH_LIMIT} at {path}: does it contain itself?"
        )
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return TensorAt(len(tensors) - 1)
    if type(value) is tuple or type(value) is list:
        _check_length(len(value), path)
        items = tuple(
            _take_apart(item, f"{path}[{index}]", depth + 1, tensors)
            for index, item in enumerate(value)
        )
        return TupleOf(items) if type(value) is tuple else ListOf(items)
    if type(value) is dict:
        _check_length(len(value), path)
        return DictOf(
            {
                _key(key, path): _take_apart(item, f'{path}["{key}"]', depth + 1, tensors)
                for key, item in value.items()
            }
        )
    return _plain(value, path)


def _check_length(items: int, path: str) -> None:
    if items > MAX_ITEMS:
        raise ValueError(
            f"there are {items} items at {path or _TOP}: at most {MAX_ITEMS} can travel "
            f"between workers; send numbers as a tensor, text as one str"
        )


def _key(key: object, path: str) -> str:
    if type(key) is not str:
        raise TypeError(
            f"a key of the dict at {path or _TOP} is {key!r} of type {type(key).__name__}: only "
            f"str keys can travel between workers"
        )
    return _text(key, path)


def _text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the str {text!r} at {path or _TOP} cannot be written as UTF-8 ({error.reason}): "
            f"send it as bytes"
        ) from None
    return text


def _plain(value: object, path: str) -> Layout:
    if value is None:
        return NoneValue()
    if type(value) is bool:
        return BoolValue(value)
    if type(value) is int:
        return IntValue(_small(value, path))
    if type(value) is float:
        return FloatValue(value)
    if type(value) is str:
        return StrValue(_text(value, path))
    if type(value) is bytes:
        return BytesValue(value)
    raise TypeError(
        f"the value at {path or _TOP} is a {type(value).__qualname__}: only tensors, None, bool, "
        f"int, float, str, bytes, and tuples, lists and dicts of these (no subclasses) can travel "
        f"between workers"
    )


def _small(number: int, path: str) -> int:
    if not INT_LIMITS[0] <= number <= INT_LIMITS[1]:
        raise ValueError(
            f"the int at {path or _TOP} has {number.bit_length()} bits: only 64 can travel "
            f"between workers; send it as bytes or as a str"
        )
    return number


def _indices(layout: Layout) -> Iterator[int]:
    match layout:
        case TensorAt():
            yield layout.index
        case TupleOf() | ListOf():
            for item in layout.items:
                yield from _indices(item)
        case DictOf():
            for item in layout.items.values():
                yield from _indices(item)


def _put_together(layout: Layout, tensors: Sequence[torch.Tensor]) -> Value:
    match layout:
        case TensorAt():
            return tensors[layout.index]
        case NoneValue():
            return None
        case TupleOf():
            return tuple(_put_together(item, tensors) for item in layout.items)
        case ListOf():
            return [_put_together(item, tensors) for item in layout.items]
        case DictOf():
            return {key: _put_together(item, tensors) for key, item in layout.items.items()}
        case BoolValue() | IntValue() | FloatValue() | StrValue() | BytesValue():
            return layout.value
