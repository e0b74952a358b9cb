"""A shuffled order of n items that is computed, not stored; pure.

The order depends on (n, seed, epoch) alone: not on a global generator, nor on the version of a
library. Any place in it costs the same, so a position is restored by its number.

Source: a Feistel network over the smallest square domain of 2**(2h) >= n values, walked until it
lands below n (cycle walking; Black & Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The
round function is the finaliser of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014).
"""

import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt

_ROUNDS: Final = 6

Indices = npt.NDArray[np.uint64]


def shuffled(places: npt.ArrayLike, count: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return which of `count` items stand at some places of an epoch's order.

    Over all places from 0 to `count` - 1 every item comes exactly once.
    """
    values = np.array(places, dtype=np.uint64)
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    keys = [_key(seed, epoch, number) for number in range(_ROUNDS)]
    values = _encipher(values, half, keys)
    while (outside := values >= count).any():
        values[outside] = _encipher(values[outside], half, keys)
    return values.astype(np.int64)


def _key(seed: int, epoch: int, number: int) -> np.uint64:
    digest = hashlib.blake2b(f"{seed}/{epoch}/{number}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def _encipher(values: Indices, half: np.uint64, keys: list[np.uint64]) -> Indices:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right


def _mix(values: Indices) -> Indices:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
