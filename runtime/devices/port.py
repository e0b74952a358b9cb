"""The port: the one verb that a device offers, and what it promises about order and completion.

*Issued* and *completed* are different. `launch` issues: it returns at once, and the work runs
behind everything that was launched on the same stream before, and behind the tickets named in
`after`. Completion is reported later, on the event loop, through `done`. A scheduler may therefore
launch an op whose inputs are issued and not completed, if they are on the same device.

How an accelerator fits: `launch` hands `work` to the one launch thread, which makes the stream wait
for the events of `after`, calls `work` (kernels are queued, Python returns) and records an event,
the ticket; a reaper finds completed events and calls `done` on the loop. `run_ahead` keeps the
stream fed meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from myelin.runtime.graph import Op


class Ticket(Protocol):
    """Stands for one launched op; later launches on other streams may wait for it."""

    @property
    def completed(self) -> bool:
        """Whether the device is done with the op, or has skipped it."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launched op ended.

    Attributes:
        value: what `work` returned, or None if it raised.
        error: what it raised, or None.
        started_s: device time at which it started, in seconds on the device's own clock.
        ended_s: device time at which it ended.
    """

    value: Any
    error: BaseException | None
    started_s: float
    ended_s: float


class Device(Protocol):
    """One device of a worker. `launch` and `close` are called from the worker's event loop."""

    @property
    def run_ahead(self) -> int:
        """How many ops a stream should have issued and not completed, so that it never runs dry."""
        ...

    def launch(
        self,
        op: Op,
        work: Callable[[], Any],
        *,
        after: Sequence[Ticket],
        done: Callable[[Outcome], None],
    ) -> Ticket:
        """Issue `work` on the stream of `op`; never blocks.

        Args:
            op: what is launched; its stream decides the order, its marks serve reports.
            work: called once, in stream order, on a thread of the device.
            after: tickets of ops on other streams that must be completed first.
            done: called on the event loop once the device is done with the op, also when it raised.

        Returns:
            The ticket of this op.

        Raises:
            RuntimeError: the device was closed.
        """
        ...

    async def close(self) -> None:
        """Let the running work end, skip what has not started, end all threads. Twice is fine."""
        ...
