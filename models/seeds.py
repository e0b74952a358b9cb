"""Stable seeds, and the one place where the process-wide random generator is set.

torch's default CPU generator belongs to the process, not to the thread. With `workers=0` several
workers build and run blocks on threads of one process. The lock that `seeded` takes keeps their
draws apart; it cannot stop others, the caller or a data set say, who draw without it while a block
does: they change its draws, and theirs come from its seed.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_GENERATOR = threading.RLock()
_WHOLE_FACTORY = -1


def block_seed(seed: int, block: int) -> int:
    """Return the seed under which block number `block` is initialised, wherever it is built."""
    return _digest("block", seed, block)


def factory_seed(seed: int) -> int:
    """Return the seed under which a factory runs that builds all its blocks at once."""
    return _digest("block", seed, _WHOLE_FACTORY)


def op_seed(seed: int, step: int, block: int, microbatch: int) -> int:
    """Return the seed of one block's random draws (dropout) for one microbatch of one step.

    It does not depend on stage, worker or order, so neither do the draws.
    """
    return _digest("op", seed, step, block, microbatch)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the process-wide CPU generator; what it was before is put back at the end.

    Threads that enter wait for each other, so leave it out where nothing is drawn. It costs 3 us;
    `torch.manual_seed`, which sets the same state, costs 126 us as it looks for accelerators.
    """
    generator = torch.default_generator
    with _GENERATOR:
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)


def _digest(kind: str, *numbers: int) -> int:
    text = ":".join((kind, *map(str, numbers)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
