"""The codec: what goes in comes out, and every bad frame is refused with the right reason."""

import math
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myelin.errors import FrameError
from myelin.transports.frames import (
    MAX_FRAME_BYTES,
    MAX_ITEMS,
    PROTOCOL_VERSION,
    Codec,
    ForeignFrame,
    ForeignHello,
    ForeignReject,
    Goodbye,
    Heartbeat,
    Hello,
    Reject,
)


class Leaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    name: str
    payload: bytes = b""
    score: float = 0.0


class Tree(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    leaf: Leaf
    children: tuple["Tree", ...] = ()
    counts: dict[str, int] = {}
    parent: int | None = None


class Picky(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    number: int

    def __post_init__(self) -> None:
        if self.number == 13:
            raise KeyError(self.number)


HELLO = Hello(
    node=3,
    incarnation="a1",
    inbox="ipc:///tmp/x/3",
    protocol=PROTOCOL_VERSION,
    torch="2.13.0",
    python="3.11.9",
    pid=42,
)
CODEC = Codec((Leaf, Tree, Picky))

int64 = st.integers(-(2**63), 2**64 - 1)
leaves = st.builds(
    Leaf, name=st.text(), payload=st.binary(), score=st.floats(allow_nan=False, width=64)
)
trees = st.recursive(
    st.builds(Tree, leaf=leaves),
    lambda inner: st.builds(
        Tree,
        leaf=leaves,
        children=st.lists(inner, max_size=3).map(tuple),
        counts=st.dictionaries(st.text(), int64, max_size=3),
        parent=st.none() | int64,
    ),
    max_leaves=8,
)
own = st.sampled_from([HELLO, Reject(reason="no"), Heartbeat(), Goodbye()])
messages = leaves | trees | own


def wire(*items: Any) -> bytes:
    """Write what a codec would not."""
    packed: bytes = msgpack.packb(list(items))
    return packed


def reason_of(frame: bytes, codec: Codec = CODEC) -> str:
    with pytest.raises(FrameError) as caught:
        codec.decode(frame)
    assert caught.value.peer is None
    assert len(str(caught.value)) < 1000
    return caught.value.reason


@settings(max_examples=30)
@given(sequence=st.integers(0, 2**63 - 1), message=messages)
def test_what_is_encoded_is_decoded(sequence: int, message: msgspec.Struct) -> None:
    assert CODEC.decode(CODEC.encode(sequence, message)) == (sequence, message)


def test_a_frame_is_messagepack_of_version_sequence_and_tagged_map() -> None:
    frame = CODEC.encode(7, Leaf(name="x", payload=b"\x00"))
    expected = [1, 7, {"type": "Leaf", "name": "x", "payload": b"\x00", "score": 0.0}]
    assert msgpack.unpackb(frame) == expected


def test_infinities_and_not_a_number_travel() -> None:
    _, up = CODEC.decode(CODEC.encode(0, Leaf(name="", score=math.inf)))
    _, nan = CODEC.decode(CODEC.encode(0, Leaf(name="", score=math.nan)))
    assert isinstance(up, Leaf)
    assert up.score == math.inf
    assert isinstance(nan, Leaf)
    assert math.isnan(nan.score)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        b"not messagepack at all",
        CODEC.encode(0, HELLO)[:-1],
        CODEC.encode(0, HELLO) + b"\x00",
        wire(),
        msgpack.packb({}),
        msgpack.packb(1),
        wire(None, 0, {"type": "Heartbeat"}),
        wire(True, 0, {"type": "Heartbeat"}),
        wire(1.0, 0, {"type": "Heartbeat"}),
        wire("1", 0, {"type": "Heartbeat"}),
        wire(1),
        wire(1, 0),
        wire(1, 0, {"type": "Heartbeat"}, 0),
        wire(1, -1, {"type": "Heartbeat"}),
        wire(1, 2**63, {"type": "Heartbeat"}),
        wire(1, True, {"type": "Heartbeat"}),
        wire(1, 0.0, {"type": "Heartbeat"}),
        wire(1, None, {"type": "Heartbeat"}),
        wire(1, [[]] * 1000, {"type": "Heartbeat"}),
        wire(1, 0, ["Heartbeat"]),
        wire(1, 0, {}),
        wire(1, 0, {"type": 1}),
        wire(1, 0, {"type": b"Heartbeat"}),
        wire(1, 0, {b"type": "Heartbeat"}),
        wire(1, 0, {"type": "Heartbeat", "more": 1}),
        wire(1, 0, {"type": "Heartbeat", b"more": 1}),
        wire(1, 0, {"type": "Leaf"}),
        wire(1, 0, {"type": "Leaf", "name": 1}),
        wire(1, 0, {"type": "Leaf", "name": None}),
        wire(1, 0, {"type": "Leaf", "name": b"bytes"}),
        wire(1, 0, {"type": "Leaf", "name": "", "payload": "dGV4dA=="}),
        wire(1, 0, {"type": "Leaf", "name": "", "score": "1.0"}),
        wire(1, 0, {"type": "Tree", "leaf": {"type": "Tree", "name": ""}}),
        wire(1, 0, {"type": "Tree", "leaf": {"type": "Leaf", "name": ""}, "parent": 1.5}),
        wire(1, 0, {"type": "Tree", "leaf": {"type": "Leaf", "name": ""}, "counts": {b"": 1}}),
        wire(1, 0, {"type": "Picky", "number": 13}),
        wire(1, 0, {"type": "Reject", "reason": "x" * 9000}),
        b"\x93\x01\x00\x82\xa4type\xa9Heartbeat\x05\x05",  # a number as a key
        b"\x93\x01\x00\x81\xa4type\xa2\xff\xfe",  # not UTF-8
        b"\x93\x01\x00\x81\xa4type\xd4\x05x",  # an extension
        b"\x93\x01\x00\x81\xa4type\xc7\x00\x05",  # an empty one
        b"\x93\x01\x00\x81\xa4type\xd6\xff\x00\x00\x00\x01",  # a timestamp
    ],
)
def test_a_malformed_frame_is_refused(frame: bytes) -> None:
    assert reason_of(frame) == "malformed"


@pytest.mark.parametrize("field", msgspec.to_builtins(HELLO))
def test_a_hello_must_be_whole_and_of_the_right_types(field: str) -> None:
    body = msgspec.to_builtins(HELLO)
    missing = {name: value for name, value in body.items() if name != field}
    assert reason_of(wire(1, 0, missing)) == "malformed"
    if field != "type":
        assert reason_of(wire(1, 0, body | {field: [1]})) == "malformed"
        assert reason_of(wire(1, 0, body | {field: True})) == "malformed"


@pytest.mark.parametrize(
    ("field", "value"), [("node", -2), ("node", 2**31), ("inbox", "x" * 129), ("torch", "y" * 129)]
)
def test_a_hello_keeps_within_bounds(field: str, value: object) -> None:
    assert reason_of(wire(1, 0, msgspec.to_builtins(HELLO) | {field: value})) == "malformed"


def test_a_message_outside_the_closed_set_is_unknown() -> None:
    assert reason_of(wire(1, 0, {"type": "Shell", "command": "rm"})) == "unknown"
    assert reason_of(CODEC.encode(0, Leaf(name="")), Codec(())) == "unknown"
    assert reason_of(wire(1, 0, {"type": "L" * 100_000})) == "unknown"


def test_a_frame_may_be_as_long_as_the_limit_and_no_longer() -> None:
    frame = CODEC.encode(0, Leaf(name="x" * 100))
    exact, short = Codec((Leaf,), max_frame_bytes=len(frame)), Codec((Leaf,), max_frame_bytes=100)
    assert exact.decode(exact.encode(0, Leaf(name="x" * 100)))[0] == 0
    assert reason_of(frame, short) == "oversized"
    with pytest.raises(FrameError, match=f"Leaf of {len(frame)} bytes, where 100 are") as caught:
        short.encode(0, Leaf(name="x" * 100))
    assert caught.value.reason == "oversized"


def test_the_usual_limit_is_64_mebibytes() -> None:
    assert Codec(()).max_frame_bytes == MAX_FRAME_BYTES == 64 * 2**20


@pytest.mark.parametrize(
    "claim",
    [
        b"\xdc\xff\xff",  # arrays
        b"\xdd\xff\xff\xff\xff",
        b"\xde\xff\xff",  # maps
        b"\xdf\xff\xff\xff\xff",
        b"\xda\xff\xff",  # texts
        b"\xdb\xff\xff\xff\xff",
        b"\xc5\xff\xff",  # bytes
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",  # an extension
    ],
)
def test_a_length_that_is_not_there_costs_no_memory(claim: bytes) -> None:
    assert reason_of(claim) == "malformed"
    assert reason_of(b"\x93\x01\x00" + claim + b"\x00" * 20) == "malformed"


@pytest.mark.slow
def test_long_claims_within_each_other_are_refused() -> None:
    claim = b"\xdd" + (MAX_ITEMS - 1).to_bytes(4, "big")
    assert reason_of(claim * 1000 + b"\x00" * MAX_ITEMS) == "malformed"
    assert reason_of(b"\xdd" + (MAX_ITEMS + 1).to_bytes(4, "big") + b"\xc0" * (MAX_ITEMS + 1)) == (
        "malformed"
    )


@pytest.mark.parametrize("depth", [1, 100, 500, 1000, 1020, 1023, 1024, 1025, 100_000])
@pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa1x"])
def test_deep_nesting_is_refused_at_any_depth(depth: int, opener: bytes) -> None:
    assert reason_of(opener * depth + b"\xc0") == "malformed"
    inside = b"\x93\x01\x00\x82\xa4type\xa4Leaf\xa4name" + opener * depth + b"\xc0"
    assert reason_of(inside) == "malformed"


def nested_tree(depth: int) -> bytes:
    leaf = b"\xa4leaf\x82\xa4type\xa4Leaf\xa4name\xa0"
    opener = b"\x83\xa4type\xa4Tree" + leaf + b"\xa8children\x91"
    return b"\x93\x01\x00" + opener * depth + b"\x82\xa4type\xa4Tree" + leaf


def test_a_message_may_hold_itself_to_some_depth() -> None:
    _, message = CODEC.decode(nested_tree(200))
    for _ in range(200):
        assert isinstance(message, Tree)
        (message,) = message.children
    for depth in (500, 511, 512, 600):  # first the validation gives up, then the parser
        assert reason_of(nested_tree(depth)) == "malformed"


def test_a_frame_of_another_version_says_which() -> None:
    for version in (0, 2, -1, 2**63):
        assert reason_of(wire(version, 0, {"type": "Heartbeat"})) == "version"
        assert reason_of(wire(version, "a whole other layout")) == "version"
    with pytest.raises(ForeignFrame, match="version 9, where version 1 is spoken") as caught:
        CODEC.decode(wire(9))
    assert (caught.value.version, caught.value.said) == (9, None)


def test_hello_and_reject_are_understood_in_any_version() -> None:
    hello = {"type": "Hello", "node": 5, "inbox": "ipc:///x", "colour": "new in version 9"}
    with pytest.raises(ForeignFrame) as caught:
        CODEC.decode(wire(9, 0, hello))
    assert caught.value.said == ForeignHello(node=5, inbox="ipc:///x")
    with pytest.raises(ForeignFrame) as caught:
        CODEC.decode(wire(9, 0, {"type": "Reject", "reason": "old", "code": 4}))
    assert caught.value.said == ForeignReject(reason="old")
    for body in ({"type": "Hello", "node": "5", "inbox": "x"}, {"type": "Reject"}, {"type": "New"}):
        with pytest.raises(ForeignFrame) as caught:
            CODEC.decode(wire(9, 0, body))
        assert caught.value.said is None


def test_a_message_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(FrameError, match="Unlisted is not a message of this bus") as caught:
        CODEC.encode(0, Unlisted())
    assert caught.value.reason == "unknown"
    deep = Tree(leaf=Leaf(name=""))
    for _ in range(5000):
        deep = Tree(leaf=Leaf(name=""), children=(deep,))
    unwritable: list[Any] = [
        Leaf(name="\ud800"),
        Tree(leaf=Leaf(name=""), parent=2**64),
        Leaf(name=object()),  # type: ignore[arg-type]
        deep,
    ]
    for message in unwritable:
        with pytest.raises(FrameError, match="cannot be written as MessagePack") as caught:
            CODEC.encode(0, message)
        assert caught.value.reason == "malformed"


class Unlisted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Untagged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Numbered(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=5):
    pass


class Elsewhere(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    pass


class Lenient(msgspec.Struct, frozen=True, tag=True):
    pass


class Changing(msgspec.Struct, forbid_unknown_fields=True, tag=True):
    pass


class Namesake(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="Hello"):
    pass


@pytest.mark.parametrize("loose", [Untagged, Numbered, Elsewhere, Lenient, Changing, Namesake])
def test_a_message_type_that_could_not_be_checked_is_no_part_of_a_codec(
    loose: type[msgspec.Struct],
) -> None:
    with pytest.raises(ValueError, match=r"tag|declare"):
        Codec((loose,))


def test_a_codec_needs_room_for_a_frame() -> None:
    with pytest.raises(ValueError, match="max_frame_bytes=0"):
        Codec((), max_frame_bytes=0)
