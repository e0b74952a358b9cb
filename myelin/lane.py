"""Runs of one owner (a trainer, a graph), in order, at most so many in flight.

Book-keeping: says which run may be dispatched, and which must end because an earlier one failed.
"""

import asyncio
import collections
from dataclasses import dataclass, field

from myelin.run import Run


@dataclass(slots=True, eq=False)
class Pause:
    """A place in the queue at which its owner does something that is not a run.

    Attributes:
        reached: set once every run before it is over; the runs behind it wait for its end.
    """

    reached: asyncio.Event = field(default_factory=asyncio.Event)


class Lane:
    """A queue of runs.

    Args:
        limit: at most so many runs are dispatched and not over.
        dependent: a run builds on the one before it, so that it must not go on when that one has
            failed.
    """

    def __init__(self, *, limit: int, dependent: bool) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit}: at least one run must be allowed in flight")
        self._limit, self._dependent = limit, dependent
        self._queued: collections.deque[Run | Pause] = collections.deque()
        self._in_flight: list[Run] = []
        self.torn: BaseException | None = None  # why its owner's state is no longer whole
        self.over_s = 0.0  # when the latest run was over
        self.retired = False  # no run will be added any more

    def add(self, entry: Run | Pause) -> None:
        """Queue a run or a pause."""
        self._queued.append(entry)

    def next(self) -> Run | None:
        """Return the next run to dispatch now, counted as in flight from here on, or None.

        A pause whose turn it is is told so, and stays the next until it is ended.
        """
        head = self._queued[0] if self._queued else None
        if isinstance(head, Pause):
            if not self._in_flight:
                head.reached.set()
            return None
        ending = any(run.done.done() for run in self._in_flight)
        if head is None or ending or self.torn or len(self._in_flight) >= self._limit:
            return None
        self._queued.popleft()
        self._in_flight.append(head)
        return head

    def end(self, pause: Pause) -> None:
        """Let the runs behind a pause go on."""
        self._queued.remove(pause)

    def drop(self, run: Run) -> bool:
        """Take a run out that is still queued; return whether it was."""
        if run not in self._queued:
            return False
        self._queued.remove(run)
        return True

    def settle(self, run: Run) -> None:
        """Count a run as over."""
        if run in self._in_flight:
            self._in_flight.remove(run)

    def after(self, ended: Run) -> list[Run]:
        """Return the runs that must end because `ended` came to nothing: those that came later.

        Call it before `ended` is taken out. A run that would not have committed anything has none.
        """
        runs = self.all()
        if not self._dependent or ended not in runs or ended.program.committer is None:
            return []
        return runs[runs.index(ended) + 1 :]

    def all(self) -> list[Run]:
        """Return every run that is not over."""
        return [*self._in_flight, *(entry for entry in self._queued if isinstance(entry, Run))]

    def pauses(self) -> list[Pause]:
        """Return every pause that is not over."""
        return [entry for entry in self._queued if isinstance(entry, Pause)]
