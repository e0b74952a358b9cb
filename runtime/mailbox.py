"""Holds messages that came before their run was begun, and drops those whose run is over.

Workers begin runs in the same order and end them at different times, so a fast neighbour's message
for the next run may come while this worker is still at the one before.
"""

from collections import defaultdict
from typing import Any


class Mailbox:
    """Messages by run. Runs are numbered upwards, and are begun in that order."""

    def __init__(self) -> None:
        self._held: dict[int, list[tuple[int, Any]]] = defaultdict(list)
        self._ended = 0
        self._skipped: set[int] = set()

    def hold(self, run: int, op: int, value: Any) -> None:
        """Keep a message for a run that is not begun yet; one for a run that is over is dropped."""
        if run > self._ended and run not in self._skipped:
            self._held[run].append((op, value))

    def take(self, run: int) -> list[tuple[int, Any]]:
        """Return what came for `run` before it was begun, in order of arrival."""
        return self._held.pop(run, [])

    def end(self, run: int) -> None:
        """Drop what is held for `run` and for all before it, and all that may still come."""
        self._ended = max(self._ended, run)
        self._skipped = {skipped for skipped in self._skipped if skipped > self._ended}
        for held in [held for held in self._held if held <= self._ended]:
            del self._held[held]

    def skip(self, run: int) -> None:
        """Drop what is held and may still come for `run`, which is not going to be begun."""
        self._skipped.add(run)
        self._held.pop(run, None)

    def __len__(self) -> int:
        """Return how many messages are held."""
        return sum(len(messages) for messages in self._held.values())
