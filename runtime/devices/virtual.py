"""A device without arithmetic on a clock without time: durations come from a cost model.

Everything runs in one thread and in one order, so that tests and simulations are deterministic.
Nothing happens by itself: `VirtualClock.run` calls what is due, in order of time and then of
request.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from myelin.runtime.devices.port import Outcome, Ticket
from myelin.runtime.graph import Op, Stream


class VirtualClock:
    """Calls what was asked for when its time comes; time jumps from one call to the next."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Call `call` at `time_s`, which must not be in the past."""
        if time_s < self.now_s:
            raise ValueError(f"time {time_s} is over: it is {self.now_s}")
        heapq.heappush(self._due, (time_s, next(self._order), call))

    def run(self) -> float:
        """Call all that is due, and what that asks for, until nothing is left; return the time."""
        while self._due:
            self.now_s, _, call = heapq.heappop(self._due)
            call()
        return self.now_s


class _VirtualTicket:
    __slots__ = ("_clock", "ends_s")

    def __init__(self, clock: VirtualClock, ends_s: float) -> None:
        self._clock, self.ends_s = clock, ends_s

    @property
    def completed(self) -> bool:
        return self._clock.now_s >= self.ends_s


class VirtualDevice:
    """A `Device` whose ops take `duration_s(op)` seconds of virtual time.

    `work` is called at the op's end, so that planted errors and values behave as on a real device.
    """

    def __init__(
        self, clock: VirtualClock, duration_s: Callable[[Op], float], *, run_ahead: int = 1
    ) -> None:
        self._clock, self._duration_s, self._run_ahead = clock, duration_s, run_ahead
        self._free_s: dict[Stream, float] = {}
        self.busy_s = 0.0

    @property
    def run_ahead(self) -> int:
        """See `Device`."""
        return self._run_ahead

    def launch(
        self,
        op: Op,
        work: Callable[[], Any],
        *,
        after: Sequence[Ticket],
        done: Callable[[Outcome], None],
    ) -> Ticket:
        """See `Device`."""
        starts_s = max(self._clock.now_s, self._free_s.get(op.stream, 0.0))
        for ticket in after:
            assert isinstance(ticket, _VirtualTicket)
            starts_s = max(starts_s, ticket.ends_s)
        ends_s = starts_s + self._duration_s(op)
        self._free_s[op.stream] = ends_s
        self.busy_s += ends_s - starts_s
        self._clock.at(ends_s, lambda: done(_call(work, starts_s, ends_s)))
        return _VirtualTicket(self._clock, ends_s)

    async def close(self) -> None:
        """See `Device`; there is nothing to end."""


def _call(work: Callable[[], Any], starts_s: float, ends_s: float) -> Outcome:
    try:
        return Outcome(work(), None, starts_s, ends_s)
    except Exception as error:  # noqa: BLE001 - the run reports it
        return Outcome(None, error, starts_s, ends_s)
