"""Throws random and mutated frames at the decoder: only `FrameError` may come out."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import pytest

from myelin.errors import FrameError
from myelin.transports.frames import Codec, Goodbye, Heartbeat, Hello, Reject

SEED = 20_130_05
FRAMES = 160_000


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    name: str
    data: bytes
    shape: tuple[int, ...] = ()
    inner: "tuple[Chunk, ...]" = ()
    weights: dict[str, float] = {}
    owner: int | None = None


CODEC = Codec((Chunk,), max_frame_bytes=1 << 16)
VALID = [
    CODEC.encode(sequence, message)
    for sequence, message in enumerate(
        [
            Heartbeat(),
            Goodbye(),
            Reject(reason="wrong version"),
            Hello(
                node=1,
                incarnation="f00d",
                inbox="ipc:///tmp/m/1",
                protocol=1,
                torch="2.13.0",
                python="3.11.9",
                pid=77,
            ),
            Chunk(name="small", data=b""),
            Chunk(name="grün", data=bytes(range(256)), shape=(1, 2, 3), weights={"a": 1.5}),
            Chunk(
                name="nested",
                data=b"\xff" * 40,
                inner=(Chunk(name="x", data=b"", inner=(Chunk(name="y", data=b""),)),) * 3,
                owner=-1,
            ),
        ]
    )
]
_LENGTHS = b"\xc4\xc5\xc6\xc7\xc8\xc9\xd9\xda\xdb\xdc\xdd\xde\xdf"
_NESTERS = (b"\x91", b"\x81\xa1k", b"\xdc\x00\x01", b"\xdd\x00\x00\x00\x01", b"\x92\x01", b"\x9f")

Mutation = Callable[[random.Random, bytes], bytes]


def noise(rng: random.Random, frame: bytes) -> bytes:
    return rng.randbytes(rng.randrange(64))


def flip_bits(rng: random.Random, frame: bytes) -> bytes:
    changed = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(rng: random.Random, frame: bytes) -> bytes:
    return frame[: rng.randrange(len(frame))]


def duplicate(rng: random.Random, frame: bytes) -> bytes:
    start = rng.randrange(len(frame))
    end = rng.randint(start, len(frame))
    return frame[:end] + frame[start:]


def splice(rng: random.Random, frame: bytes) -> bytes:
    other = rng.choice(VALID)
    return frame[: rng.randrange(len(frame))] + other[rng.randrange(len(other)) :]


def claim_length(rng: random.Random, frame: bytes) -> bytes:
    place = rng.randrange(len(frame))
    claim = bytes([rng.choice(_LENGTHS)]) + rng.choice([b"\xff" * 4, b"\x7f\xff", rng.randbytes(4)])
    return frame[:place] + claim + frame[place:]


def nest(rng: random.Random, frame: bytes) -> bytes:
    place = rng.randrange(len(frame))
    depth = rng.choice([3, 30, 511, 1000, 1024, 3000])
    return frame[:place] + rng.choice(_NESTERS) * depth + frame[place:]


def inflate(rng: random.Random, frame: bytes) -> bytes:
    return frame * (1 + rng.randrange(2) * (CODEC.max_frame_bytes // len(frame)))


def reshape(rng: random.Random, frame: bytes) -> bytes:
    """Keep it MessagePack, and put something strange in one place of the message."""
    version, sequence, body = msgpack.unpackb(frame)
    strange: Any = rng.choice(
        [None, True, -1, 2**63, 1e400, "", "x" * 300, b"\x00", [], [[]], {}, {"type": "Chunk"}, 0.5]
    )
    match rng.randrange(5):
        case 0:
            version = strange
        case 1:
            sequence = strange
        case 2:
            body = strange
        case 3:
            body[rng.choice(list(body))] = strange
        case _:
            body[rng.choice(["", "extra", "type", "inner", "data"])] = strange
    packed: bytes = msgpack.packb([version, sequence, body])
    return packed


MUTATIONS: tuple[Mutation, ...] = (
    noise,
    flip_bits,
    truncate,
    duplicate,
    splice,
    claim_length,
    nest,
    inflate,
    reshape,
)


def verdict(frame: bytes) -> str:
    """Return how the decoder takes a frame; anything but `FrameError` escapes."""
    try:
        sequence, message = CODEC.decode(frame)
    except FrameError as error:
        return error.reason
    assert 0 <= sequence < 2**63
    assert type(message) in {Heartbeat, Goodbye, Reject, Hello, Chunk}
    return "valid"


@pytest.mark.slow
def test_only_frame_errors_come_out_of_the_decoder() -> None:
    rng, verdicts = random.Random(SEED), Counter[str]()
    for number in range(FRAMES):
        mutation = rng.choice(MUTATIONS)
        frame = mutation(rng, rng.choice(VALID))
        try:
            verdicts[verdict(frame)] += 1
        except Exception as error:
            error.add_note(f"seed {SEED}, frame {number}, {mutation.__name__}: {frame.hex()}")
            raise
        if number % 1000 == 0:
            assert [verdict(valid) for valid in VALID] == ["valid"] * len(VALID)
    assert sum(verdicts.values()) == FRAMES >= 100_000
    assert set(verdicts) == {"valid", "malformed", "unknown", "version", "oversized"}
    assert verdicts["malformed"] > FRAMES // 2


def test_what_a_mutation_leaves_valid_is_written_back_the_same() -> None:
    rng = random.Random(SEED + 1)
    for _ in range(4000):
        frame = flip_bits(rng, rng.choice(VALID))
        if verdict(frame) == "valid":
            again = CODEC.decode(CODEC.encode(*CODEC.decode(frame)))
            assert repr(again) == repr(CODEC.decode(frame))
