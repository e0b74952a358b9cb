"""The CPU as a device: one thread per stream, made when the stream is first used.

Work runs in the order of its launches; a thread waits for the tickets of other streams, which
cannot deadlock, since a ticket exists only once its op has been launched. Completions are handed to
the loop in batches: a thread wakes the loop only if no wake-up is under way.
"""

import asyncio
import collections
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from myelin.runtime.devices.port import Outcome, Ticket
from myelin.runtime.graph import Op, Stream


class _CpuTicket:
    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def completed(self) -> bool:
        return self._event.is_set()

    def complete(self) -> None:
        self._event.set()

    def wait(self) -> None:
        self._event.wait()


class _Launch:
    __slots__ = ("after", "done", "ticket", "work")

    def __init__(
        self,
        work: Callable[[], Any],
        after: Sequence[Ticket],
        done: Callable[[Outcome], None],
    ) -> None:
        self.work, self.after, self.done = work, after, done
        self.ticket = _CpuTicket()


class CpuDevice:
    """A `Device` on the CPU.

    Args:
        name: prefix of the thread names.
        threads: intra-op threads of torch for work on this device; None leaves torch's setting.
        run_ahead: see `Device`; 1 lets the scheduler decide at the last moment.
    """

    def __init__(self, name: str, *, threads: int | None = None, run_ahead: int = 1) -> None:
        self._name, self._threads, self._run_ahead = name, threads, run_ahead
        self._loop = asyncio.get_running_loop()
        self._queues: dict[Stream, SimpleQueue[_Launch | None]] = {}
        self._workers: list[threading.Thread] = []
        self._completions: collections.deque[tuple[Callable[[Outcome], None], Outcome]] = (
            collections.deque()
        )
        self._waking = False
        self._closing = False
        self._threads_alive = 0
        self._thread_ended = asyncio.Event()

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
        if self._closing:
            raise RuntimeError(f"{self._name} was closed: it takes no more ops")
        launch = _Launch(work, after, done)
        self._queue(op.stream).put(launch)
        return launch.ticket

    async def close(self) -> None:
        """See `Device`. Waits for the op that is running; a thread cannot be interrupted."""
        self._closing = True
        for queue in self._queues.values():
            queue.put(None)
        self._queues.clear()
        while self._threads_alive:
            await self._thread_ended.wait()
            self._thread_ended.clear()
        for thread in self._workers:
            thread.join()  # its last statement has run: this does not block
        self._workers.clear()

    def _count_ended(self) -> None:
        self._threads_alive -= 1
        self._thread_ended.set()

    def _queue(self, stream: Stream) -> "SimpleQueue[_Launch | None]":
        queue = self._queues.get(stream)
        if queue is None:
            queue = self._queues[stream] = SimpleQueue()
            thread = threading.Thread(
                target=self._serve, args=(queue,), name=f"{self._name}-{stream.value}", daemon=True
            )
            self._workers.append(thread)
            self._threads_alive += 1
            thread.start()
        return queue

    def _serve(self, queue: "SimpleQueue[_Launch | None]") -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while (launch := queue.get()) is not None:
            for ticket in launch.after:
                assert isinstance(ticket, _CpuTicket)
                ticket.wait()
            outcome = self._run(launch.work)
            launch.ticket.complete()
            self._report(launch.done, outcome)
            del launch, outcome  # hold no tensor while waiting for the next launch
        self._call_loop(self._count_ended)

    def _run(self, work: Callable[[], Any]) -> Outcome:
        started = time.perf_counter()
        if self._closing:
            return Outcome(None, asyncio.CancelledError("device closed"), started, started)
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the run's to report
            return Outcome(None, error, started, time.perf_counter())
        return Outcome(value, None, started, time.perf_counter())

    def _report(self, done: Callable[[Outcome], None], outcome: Outcome) -> None:
        self._completions.append((done, outcome))
        if self._waking:
            return
        self._waking = True
        self._call_loop(self._deliver)

    def _call_loop(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(callback)

    def _deliver(self) -> None:
        self._waking = False  # first, so that what is appended from now on wakes the loop again
        while self._completions:
            done, outcome = self._completions.popleft()
            try:
                done(outcome)
            except Exception as error:  # noqa: BLE001 - one report must not hold up the next
                message = f"a report of {self._name} raised"
                self._loop.call_exception_handler({"message": message, "exception": error})
