"""Reads batches from whatever gives them, ahead of the consumer and off the event loop's thread.

At most two batches are held ready. Order is kept, errors come in their place, and nothing is left
running when the consumer stops early or is cancelled.
"""

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import aclosing, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeAlias, TypeVar

import torch

from myelin.data.batches import Batch, TextData
from myelin.errors import DataError

T = TypeVar("T")

Source: TypeAlias = TextData | Iterable[Any] | AsyncIterable[Any]
"""Gives pairs (inputs, targets): a list, a generator, a torch `DataLoader`, a `TextData`."""

AHEAD: Final = 2
CLOSE_TIMEOUT_S: Final = 2.0  # for a `next` that waits for what never comes

_END: Final = object()

log = logging.getLogger(__name__)


async def batches_of(source: Source) -> AsyncGenerator[tuple[Any, Any], None]:
    """Yield the batches of a source.

    Iterables are read in a thread of their own, at most two batches ahead; an async iterable in a
    task of its own, likewise. The position of a `TextData` moves only when a batch is handed out,
    so its `state()` never counts what was merely read ahead. Any other generator is used up: it
    is closed at the end, also when the consumer stops before.

    Close it (`contextlib.aclosing`) unless you read it to the end. Closing waits for a read under
    way, for a few seconds at most.

    Raises:
        DataError: the source cannot be iterated over, or gave something that is no pair.
    """
    async with aclosing(_items(source)) as items:
        async for item in items:
            yield _pair(item)


def _items(source: Source) -> AsyncGenerator[object, None]:
    if isinstance(source, TextData):
        return _of_text(source)
    if isinstance(source, (str, os.PathLike)):
        raise DataError(
            f"{os.fspath(source)!r} is a path and not batches; use myelin.data.text({source!r})"
        )
    if isinstance(source, AsyncIterable):
        return _of_async(source)
    if isinstance(source, Iterable) and not isinstance(source, torch.Tensor):
        return _of_iterable(source)
    raise DataError(
        f"{_kind(source)} gives no batches; use an iterable of (inputs, targets), an async one, a "
        f"torch DataLoader, or myelin.data.text(path)"
    )


def _pair(item: object) -> tuple[Any, Any]:
    """Check that a batch is a pair; what is in it is for the trainer and the model to judge."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise DataError(
            f"a batch is a pair (inputs, targets); the source gave {_kind(item)}; "
            f"for text use myelin.data.text(path)"
        )
    inputs, targets = item
    return inputs, targets


def _kind(value: object) -> str:
    name = type(value).__qualname__
    if isinstance(value, torch.Tensor):
        return f"a {name} of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list, dict)):
        return f"a {name} of {len(value)}"
    return f"a {name}"


class _Reader:
    """One thread that runs blocking calls in order.

    It is a daemon, so a call that never returns cannot keep the program from ending.
    """

    def __init__(self, last: Callable[[], None]) -> None:
        """Run `last` after all other calls, in the same thread."""
        self._last = last
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="myelin-data", daemon=True)

    async def __aenter__(self) -> "_Reader":
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait until the running call and `last` have ended; an error of `last` is raised here.

        Cancelled, or after `CLOSE_TIMEOUT_S`, it waits no longer and the thread ends by itself.
        """
        ended = self.submit(self._last)
        self._calls.put(None)
        if await _settled(ended):
            self._thread.join()
            ended.result()
        else:
            _warn_left_behind("thread")

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Run a call in the thread after those submitted before, unless it is cancelled by then."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001 - raised again by who awaits it
                    future.set_exception(error)

        self._calls.put(run)
        return future

    def _run(self) -> None:
        while (run := self._calls.get()) is not None:
            run()
            del run  # keep no batch alive while waiting


async def _settled(future: "Future[Any]") -> bool:
    """Wait until a call has ended, or too long; tell which. Cancelling leaves the call alone."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def tell(_: object) -> None:
        with suppress(RuntimeError):  # nobody waits any more: the loop is closed
            loop.call_soon_threadsafe(ended.set)

    future.add_done_callback(tell)
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await ended.wait()
    return future.done()


def _warn_left_behind(what: str) -> None:
    log.warning(
        "the source of batches has not come back within %s s; its %s is left behind",
        CLOSE_TIMEOUT_S,
        what,
    )


async def _of_iterable(source: Iterable[Any]) -> AsyncGenerator[object, None]:
    def read() -> Generator[Any, None, None]:
        yield from source  # so that `iter`, `next` and `close` all happen in the thread

    items = read()
    async with _Reader(items.close) as reader:
        pending: deque[Future[Any]] = deque()
        try:
            while True:
                while len(pending) <= AHEAD:
                    pending.append(reader.submit(lambda: next(items, _END)))
                item = await asyncio.wrap_future(pending.popleft())
                if item is _END:
                    return
                yield item
                del item
        finally:
            for future in pending:
                future.cancel()


async def _of_text(data: TextData) -> AsyncGenerator[object, None]:
    async with _Reader(lambda: None) as reader:
        pending: dict[int, Future[Batch]] = {}
        try:
            while True:
                position = data.position
                wanted = [
                    position + row
                    for row in range(0, (AHEAD + 1) * data.batch_size, data.batch_size)
                ]
                for place in pending.keys() - wanted:  # it was restored, or read by somebody else
                    pending.pop(place).cancel()
                for place in wanted:
                    if place not in pending:
                        pending[place] = reader.submit(partial(data.batch_at, place))
                batch = await asyncio.wrap_future(pending.pop(position))
                if data.position == position:
                    data.skip()
                    yield batch
        finally:
            for future in pending.values():
                future.cancel()


async def _of_async(source: AsyncIterable[Any]) -> AsyncGenerator[object, None]:
    ready: asyncio.Queue[object] = asyncio.Queue()
    room = asyncio.Semaphore(AHEAD - 1)
    pump = asyncio.create_task(_pump(source, ready, room), name="myelin-data")
    try:
        while (item := await ready.get()) is not _END:
            room.release()
            yield item
            del item
    finally:
        pump.cancel()
        await asyncio.wait([pump], timeout=CLOSE_TIMEOUT_S)
        if not pump.done():
            _warn_left_behind("task")
        elif not pump.cancelled() and (error := pump.exception()):
            raise error
    pump.result()  # a source that cancelled itself has not come to its end


async def _pump(
    source: AsyncIterable[Any], ready: "asyncio.Queue[object]", room: asyncio.Semaphore
) -> None:
    """Iterate, and close, in one task: some sources may not be closed by another."""
    try:
        items = aiter(source)
        try:
            async for item in items:
                ready.put_nowait(item)
                del item
                await room.acquire()
        finally:
            if isinstance(items, AsyncGenerator):
                await items.aclose()
    finally:
        ready.put_nowait(_END)
