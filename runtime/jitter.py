"""Random delays for ops and messages: what must not change a result, tests can make happen.

Seeded per worker, so that a run with jitter can be repeated as far as threads allow.
"""

import random
import time

import msgspec


class Jitter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much to delay.

    Attributes:
        seed: of the delays.
        op_s: an op starts up to so many seconds late.
        message_s: a message is handed on up to so many seconds late, out of order if it so happens.
    """

    seed: int = 0
    op_s: float = 0.0
    message_s: float = 0.0


class Delays:
    """The delays of one worker."""

    def __init__(self, jitter: Jitter | None, worker: int) -> None:
        self._jitter = jitter
        self._random = random.Random(f"{jitter.seed if jitter else 0}/{worker}")

    def before_op(self) -> None:
        """Block the calling device thread for a while."""
        if self._jitter is not None and self._jitter.op_s:
            time.sleep(self._random.uniform(0, self._jitter.op_s))

    def of_message_s(self) -> float:
        """Return how many seconds a message is to be held back; 0.0 without jitter."""
        if self._jitter is None or not self._jitter.message_s:
            return 0.0
        return self._random.uniform(0, self._jitter.message_s)
