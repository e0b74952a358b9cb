import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import aclosing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from myelin.data import sources
from myelin.data.batches import TextData
from myelin.data.sources import AHEAD, batches_of
from myelin.data.tokens import TokenFile, TokenHeader, unnamed_tokens
from myelin.data.vocabulary import ByteVocabulary
from myelin.errors import DataError


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((2, 3), number), torch.full((2, 3), number + 1)


def number_of(pair: tuple[Any, Any]) -> int:
    inputs, targets = pair
    assert torch.equal(inputs + 1, targets)
    return int(inputs[0, 0])


def text_data(seed: int = 0) -> TextData:
    file = unnamed_tokens(["it was a dark and stormy night. " * 40], ByteVocabulary(), corpus="c")
    return TextData(file, ByteVocabulary(), context=8, batch_size=3, seed=seed)


async def collect(source: Any, count: int | None = None) -> list[tuple[Any, Any]]:
    taken: list[tuple[Any, Any]] = []
    async with aclosing(batches_of(source)) as batches:
        if count == 0:
            return taken
        async for pair in batches:
            taken.append(pair)
            if len(taken) == count:
                break
    return taken


@pytest.fixture(autouse=True)
async def nothing_left_behind() -> AsyncIterator[None]:
    """Check after each test that neither a task nor a thread of a source is alive."""
    tasks = asyncio.all_tasks()
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "myelin-data"]
    assert not [task for task in asyncio.all_tasks() - tasks if task.get_name() == "myelin-data"]


class Counting:
    """Numbered batches, endless; tells how many were taken, in which threads, and if closed."""

    def __init__(self) -> None:
        self.taken = 0
        self.closed = 0
        self.threads: set[str] = set()
        self.reached = threading.Event()

    def __iter__(self) -> Generator[Any, None, None]:
        try:
            while True:
                self.threads.add(threading.current_thread().name)
                self.taken += 1
                self.reached.set()
                yield batch(self.taken - 1)
        finally:
            self.threads.add(threading.current_thread().name)
            self.closed += 1


class CountingAsync(Counting):
    """The same, asynchronous."""

    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            while True:
                self.taken += 1
                yield batch(self.taken - 1)
                await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)
            self.closed += 1


KINDS: list[Callable[[], Any]] = [Counting, CountingAsync]


async def test_a_list_a_tuple_and_a_generator_come_in_order_and_end() -> None:
    made = [batch(number) for number in range(7)]
    for source in (made, tuple(made), iter(made), (pair for pair in made), map(list, made)):
        assert [number_of(pair) for pair in await collect(source)] == list(range(7))
    assert await collect([]) == []


async def test_an_async_generator_comes_in_order_and_ends() -> None:
    async def made() -> AsyncIterator[Any]:
        for number in range(7):
            yield batch(number)

    assert [number_of(pair) for pair in await collect(made())] == list(range(7))


async def test_a_torch_data_loader_is_a_source() -> None:
    numbers = torch.arange(10)
    loader = DataLoader(TensorDataset(numbers, numbers + 1), batch_size=4)
    pairs = await collect(loader)
    assert [inputs.tolist() for inputs, _ in pairs] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert torch.equal(pairs[0][1], pairs[0][0] + 1)


@pytest.mark.slow
async def test_a_torch_data_loader_with_processes_is_closed_early() -> None:
    numbers = torch.arange(100)
    loader = DataLoader(
        TensorDataset(numbers, numbers + 1),
        batch_size=4,
        num_workers=1,
        multiprocessing_context="spawn",
    )
    pairs = await collect(loader, 2)
    assert pairs[1][0].tolist() == [4, 5, 6, 7]
    gc.collect()
    assert not torch.multiprocessing.active_children()


async def test_text_is_a_source_without_end() -> None:
    expected = list(islice(text_data(), 40))
    taken = await collect(text_data(), 40)
    assert all(
        torch.equal(a, b)
        for x, y in zip(taken, expected, strict=True)
        for a, b in zip(x, y, strict=True)
    )


async def test_the_position_of_text_counts_what_was_handed_out_and_not_what_was_read() -> None:
    data, twin = text_data(), text_data()
    async with aclosing(batches_of(data)) as batches:
        async for _ in islice_async(batches, 5):
            next(twin)
            assert data.state() == twin.state()
    assert data.state() == twin.state()
    (resumed,) = await collect(data, 1)
    assert torch.equal(resumed[0], next(twin)[0])


async def islice_async(items: AsyncIterator[Any], count: int) -> AsyncIterator[Any]:
    for _ in range(count):
        yield await anext(items)


async def test_text_restored_in_the_middle_goes_on_from_there() -> None:
    data = text_data()
    expected = list(islice(text_data(), 6))
    async with aclosing(batches_of(data)) as batches:
        first = data.state()
        for _ in range(3):
            await anext(batches)
        data.restore(first)
        again = [await anext(batches) for _ in range(2)]
        data.skip()
        again.append(await anext(batches))
    wanted = [expected[0], expected[1], expected[3]]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(again, wanted, strict=True))


async def test_two_readers_of_one_text_share_it_without_repeating() -> None:
    data = text_data()
    expected = [inputs for inputs, _ in islice(text_data(), 8)]
    async with aclosing(batches_of(data)) as one, aclosing(batches_of(data)) as other:
        pairs = [p for _ in range(4) for p in await asyncio.gather(anext(one), anext(other))]
    found = sorted(inputs.tolist() for inputs, _ in pairs)
    assert found == sorted(inputs.tolist() for inputs in expected)


async def test_an_error_in_text_is_raised_and_moves_nothing() -> None:
    header = TokenHeader("uint16", 100, "bytes", "c", "d")
    data = TextData(TokenFile(header, np.zeros(100, np.uint16)), ByteVocabulary(), batch_size=2)
    with pytest.raises(DataError, match="not chosen"):
        await collect(data)
    assert data.position == 0


async def test_reading_leaves_the_loop_free() -> None:
    released = threading.Event()

    def waits_for_the_loop() -> Iterator[Any]:
        assert released.wait(timeout=30)
        yield batch(0)

    asyncio.get_running_loop().call_soon(released.set)
    assert len(await collect(waits_for_the_loop())) == 1


async def test_iterating_and_closing_happen_in_one_thread_that_is_not_the_loops() -> None:
    source = Counting()
    await collect(source, 5)
    assert source.threads == {"myelin-data"}


@pytest.mark.parametrize("kind", KINDS)
async def test_at_most_two_batches_are_read_ahead(kind: Callable[[], Any]) -> None:
    source = kind()
    async with aclosing(batches_of(source)) as batches:
        for number in range(20):
            assert number_of(await anext(batches)) == number
            for _ in range(10):
                await asyncio.sleep(0)
            assert source.taken <= number + 1 + AHEAD


async def test_an_async_source_is_read_ahead() -> None:
    source = CountingAsync()
    async with aclosing(batches_of(source)) as batches:
        await anext(batches)
        for _ in range(10):
            await asyncio.sleep(0)
        assert source.taken == 1 + AHEAD


async def test_an_iterable_is_read_ahead_while_the_loop_does_something_else() -> None:
    third = threading.Event()

    def made() -> Iterator[Any]:
        for number in range(5):
            if number == AHEAD:
                third.set()
            yield batch(number)

    async with aclosing(batches_of(made())) as batches:
        await anext(batches)
        assert third.wait(timeout=30)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 6])
async def test_a_consumer_that_stops_early_closes_the_source(
    kind: Callable[[], Any], count: int
) -> None:
    source = kind()
    assert [number_of(pair) for pair in await collect(source, count)] == list(range(count))
    assert source.closed == 1


@pytest.mark.parametrize("kind", [*KINDS, text_data])
async def test_a_source_that_was_never_read_is_never_started(kind: Callable[[], Any]) -> None:
    source = kind()
    assert await collect(source, 0) == []
    assert getattr(source, "taken", 0) == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_consumer_that_raises_closes_the_source(kind: Callable[[], Any]) -> None:
    source = kind()

    async def consume() -> None:
        async with aclosing(batches_of(source)) as batches:
            async for _ in batches:
                raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        await consume()
    assert source.closed == 1


async def test_a_consumer_cancelled_while_it_waits_closes_the_source() -> None:
    closed = asyncio.Event()

    async def never() -> AsyncIterator[Any]:
        try:
            yield batch(0)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            closed.set()

    got_one = asyncio.Event()

    async def consume() -> None:
        async with aclosing(batches_of(never())) as batches:
            async for _ in batches:
                got_one.set()

    consumer = asyncio.create_task(consume())
    await got_one.wait()
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert closed.is_set()


async def test_a_consumer_cancelled_during_a_blocking_read_waits_for_its_end() -> None:
    started, release, closed = threading.Event(), threading.Event(), threading.Event()

    def slow() -> Iterator[Any]:
        try:
            started.set()
            assert release.wait(timeout=30)
            yield batch(0)
        finally:
            closed.set()

    consumer = asyncio.create_task(collect(slow()))
    await asyncio.to_thread(started.wait)
    consumer.cancel()
    asyncio.get_running_loop().call_soon(release.set)
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert closed.is_set()


async def test_a_read_that_never_ends_is_left_behind_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "CLOSE_TIMEOUT_S", 0.01)
    started, release, closed = threading.Event(), threading.Event(), threading.Event()

    def stuck() -> Iterator[Any]:
        try:
            started.set()
            release.wait(timeout=30)
            yield batch(0)
        finally:
            closed.set()

    consumer = asyncio.create_task(collect(stuck()))
    await asyncio.to_thread(started.wait)
    (thread,) = (t for t in threading.enumerate() if t.name == "myelin-data")
    assert thread.daemon
    consumer.cancel()
    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        await consumer
    assert "its thread is left behind" in caplog.text
    release.set()  # should it come back after all, it still cleans up
    thread.join(timeout=30)
    assert closed.is_set()


async def test_an_async_source_that_will_not_close_is_left_behind_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "CLOSE_TIMEOUT_S", 0.01)
    release = asyncio.Event()

    async def stuck() -> AsyncIterator[Any]:
        try:
            yield batch(0)
            yield batch(1)
        finally:
            await release.wait()

    with caplog.at_level(logging.WARNING):
        await collect(stuck(), 1)
    assert "its task is left behind" in caplog.text
    (task,) = (t for t in asyncio.all_tasks() if t.get_name() == "myelin-data")
    release.set()
    await asyncio.wait([task])


async def test_cancelling_twice_leaves_nothing_running() -> None:
    started, release = threading.Event(), threading.Event()

    def slow() -> Iterator[Any]:
        started.set()
        assert release.wait(timeout=30)
        yield batch(0)

    consumer = asyncio.create_task(collect(slow()))
    await asyncio.to_thread(started.wait)
    (thread,) = (t for t in threading.enumerate() if t.name == "myelin-data")
    consumer.cancel()
    await asyncio.sleep(0)
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    release.set()
    await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_an_error_of_the_source_comes_in_its_place(asynchronous: bool) -> None:
    def fails() -> Iterator[Any]:
        yield batch(0)
        yield batch(1)
        raise OSError("planted")

    async def fails_async() -> AsyncIterator[Any]:
        for pair in fails():
            yield pair

    async with aclosing(batches_of(fails_async() if asynchronous else fails())) as batches:
        assert [number_of(await anext(batches)) for _ in range(2)] == [0, 1]
        with pytest.raises(OSError, match="planted") as caught:
            await anext(batches)
    assert caught.traceback[-1].name == "fails"


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_an_error_while_the_source_is_closed_is_raised(asynchronous: bool) -> None:
    def fails() -> Iterator[Any]:
        try:
            while True:
                yield batch(0)
        finally:
            raise OSError("planted in closing")

    async def fails_async() -> AsyncIterator[Any]:
        try:
            while True:
                yield batch(0)
        finally:
            raise OSError("planted in closing")

    with pytest.raises(OSError, match="planted in closing"):
        await collect(fails_async() if asynchronous else fails(), 1)


async def test_an_iterable_that_cannot_be_started_raises_its_own_error() -> None:
    class Broken:
        def __iter__(self) -> Iterator[Any]:
            raise OSError("planted")

    class BrokenAsync:
        def __aiter__(self) -> AsyncIterator[Any]:
            raise OSError("planted")

    for source in (Broken(), BrokenAsync()):
        with pytest.raises(OSError, match="planted"):
            await collect(source)


async def test_an_async_source_that_cancels_itself_does_not_pass_for_ended() -> None:
    async def odd() -> AsyncIterator[Any]:
        yield batch(0)
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await collect(odd())


@pytest.mark.parametrize(
    ("item", "named"),
    [
        (torch.zeros(2, 3), r"a Tensor of shape \(2, 3\)"),
        ((torch.zeros(1),), "a tuple of 1"),
        ([torch.zeros(1)] * 3, "a list of 3"),
        ({"inputs": 1, "targets": 2}, "a dict of 2"),
        ("ab", "a str"),
        (None, "a NoneType"),
        (7, "a int"),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_what_is_no_pair_is_refused_by_what_it_is(
    item: object, named: str, asynchronous: bool
) -> None:
    async def made() -> AsyncIterator[Any]:
        yield item
        yield item

    with pytest.raises(DataError, match=rf"pair \(inputs, targets\); the source gave {named}"):
        await collect(made() if asynchronous else [item])


async def test_a_pair_may_hold_more_than_tensors() -> None:
    inputs = {"ids": torch.zeros(2, 3), "mask": torch.ones(2, 3)}
    ((taken, targets),) = await collect([[inputs, torch.zeros(2)]])
    assert taken is inputs
    assert targets.shape == (2,)


@pytest.mark.parametrize(
    ("source", "named"),
    [(7, "a int"), (None, "a NoneType"), (torch.zeros(4, 2), "a Tensor"), (batch, "a function")],
)
async def test_what_gives_no_batches_is_refused(source: Any, named: str) -> None:
    with pytest.raises(DataError, match=f"{named}.* gives no batches; use an iterable"):
        await collect(source)


async def test_a_path_is_refused_with_the_call_that_was_meant() -> None:
    for path in ("corpus/", Path("corpus/")):
        with pytest.raises(DataError, match=r"is a path and not batches; use myelin\.data\.text"):
            await collect(path)


async def test_one_batch_in_place_of_many_is_refused() -> None:
    with pytest.raises(DataError, match=r"the source gave a Tensor of shape \(2, 3\)"):
        await collect(batch(0))


def test_a_source_can_be_read_on_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for source in (Counting(), CountingAsync()):
            pairs = runner.run(collect(source, 10))
            assert [number_of(pair) for pair in pairs] == list(range(10))
            assert source.closed == 1
