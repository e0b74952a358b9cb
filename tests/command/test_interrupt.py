"""What Ctrl-C does to a running task."""

import asyncio
import signal
from collections.abc import Iterator

import pytest

from myelin.command.interrupt import Interrupt


@pytest.fixture(autouse=True)
def ctrl_c_as_in_a_terminal() -> Iterator[None]:
    """Undo that a shell starts background jobs with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def forever() -> None:
    await asyncio.Event().wait()


async def press() -> None:
    """Press Ctrl-C and let the loop see it."""
    signal.raise_signal(signal.SIGINT)
    for _ in range(3):
        await asyncio.sleep(0)


async def test_ctrl_c_cancels_the_task() -> None:
    reached = []

    async def work() -> None:
        with Interrupt():
            reached.append("inside")
            await forever()

    task = asyncio.create_task(work(), name="work")
    await asyncio.sleep(0)
    await press()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reached == ["inside"]


async def test_the_first_ctrl_c_of_a_patient_block_only_tells_and_the_next_one_cancels() -> None:
    told = []

    async def work() -> None:
        with Interrupt() as interrupt, interrupt.patient(lambda: told.append("first")):
            await forever()

    task = asyncio.create_task(work(), name="work")
    await asyncio.sleep(0)
    await press()
    assert told == ["first"]
    assert not task.done()
    await press()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert told == ["first"]


async def test_after_a_patient_block_ctrl_c_cancels_again() -> None:
    told: list[str] = []
    patient_over = asyncio.Event()

    async def work() -> None:
        with Interrupt() as interrupt:
            with interrupt.patient(lambda: told.append("told")):
                pass
            patient_over.set()
            await forever()

    task = asyncio.create_task(work(), name="work")
    await patient_over.wait()
    await press()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert told == []


async def test_afterwards_ctrl_c_is_what_it_was() -> None:
    with Interrupt():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def test_a_program_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupt():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        await press()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_in_another_thread_nothing_is_changed() -> None:
    async def work() -> str:
        with Interrupt():
            return "done"

    async def in_a_thread() -> str:
        return await asyncio.to_thread(asyncio.run, work())

    assert asyncio.run(in_a_thread()) == "done"
