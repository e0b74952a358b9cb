"""Real threads; every wait is for the thing itself, so nothing depends on how fast it comes."""

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import torch

from myelin.runtime.devices.cpu import CpuDevice
from myelin.runtime.devices.port import Device, Outcome, Ticket
from myelin.runtime.graph import Kind, Op, Stream

COMPUTE, COPY, BACK = (
    Op(Kind.CALL, 0, stream) for stream in (Stream.COMPUTE, Stream.H2D, Stream.D2H)
)


class Bench:
    """A device, and a log of what it reported, on which thread."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.log: list[tuple[str, Outcome]] = []
        self.threads: set[int] = set()
        self._gates: list[threading.Event] = []

    def gate(self) -> threading.Event:
        """Return an event that work can wait for; it is set before the device is closed."""
        self._gates.append(threading.Event())
        return self._gates[-1]

    async def close(self) -> None:
        for gate in self._gates:
            gate.set()
        await self.device.close()

    def launch(
        self, name: str, work: Callable[[], Any], *after: Ticket, op: Op = COMPUTE
    ) -> tuple[Ticket, "asyncio.Future[Outcome]"]:
        over: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        done = partial(self._done, name, over)
        return self.device.launch(op, work, after=after, done=done), over

    def _done(self, name: str, over: "asyncio.Future[Outcome]", outcome: Outcome) -> None:
        self.threads.add(threading.get_ident())
        self.log.append((name, outcome))
        over.set_result(outcome)

    @property
    def order(self) -> list[str]:
        return [name for name, _ in self.log]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench(CpuDevice("test-device"))
    yield made
    await made.close()


def threads_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def hold(device: Device, *ops: Op) -> threading.Event:
    """Keep streams of a device busy until the returned event is set; return once they are."""
    gate = threading.Event()
    for op in ops:
        begun = threading.Event()

        def work(begun: threading.Event = begun) -> None:
            begun.set()
            gate.wait()

        device.launch(op, work, after=(), done=lambda outcome: None)
        begun.wait()
    return gate


def fail(error: BaseException) -> None:
    raise error


async def test_work_runs_on_a_thread_of_its_stream_and_is_reported_on_the_loops(
    bench: Bench,
) -> None:
    _, over = bench.launch("work", lambda: threading.current_thread().name)
    assert (await over).value == "test-device-compute"
    _, over = bench.launch("copy", lambda: threading.current_thread().name, op=COPY)
    assert (await over).value == "test-device-h2d"
    assert bench.threads == {threading.get_ident()}


async def test_a_stream_has_one_thread_and_gets_it_when_it_is_first_used(bench: Bench) -> None:
    assert threads_of("test-device") == []
    for _ in range(3):
        await bench.launch("work", threading.get_ident)[1]
    assert len({outcome.value for _, outcome in bench.log}) == 1
    assert len(threads_of("test-device")) == 1


async def test_work_runs_in_the_order_of_its_launches_and_is_reported_in_that_order(
    bench: Bench,
) -> None:
    ran: list[int] = []
    launched = [bench.launch(str(n), partial(ran.append, n)) for n in range(500)]
    await asyncio.gather(*(over for _, over in launched))
    assert ran == list(range(500))
    assert bench.order == [str(n) for n in range(500)]


async def test_a_launch_does_not_wait_for_the_work(bench: Bench) -> None:
    gate = bench.gate()
    ticket, over = bench.launch("held", gate.wait)
    assert not ticket.completed
    assert not over.done()
    gate.set()
    await over
    assert ticket.completed


async def test_streams_run_at_the_same_time(bench: Bench) -> None:
    """Each waits for the other to have started: one after the other they would wait for ever."""
    here, there = threading.Event(), threading.Event()

    def meet(mine: threading.Event, other: threading.Event) -> bool:
        mine.set()
        return other.wait(timeout=60)

    _, first = bench.launch("compute", lambda: meet(here, there))
    _, second = bench.launch("copy", lambda: meet(there, here), op=COPY)
    assert (await first).value is True
    assert (await second).value is True


async def test_work_waits_for_the_tickets_of_other_streams(bench: Bench) -> None:
    gate, ran = bench.gate(), list[str]()

    def copy() -> None:
        gate.wait()
        ran.append("copy")

    copied, _ = bench.launch("copy", copy, op=COPY)
    computed, computing = bench.launch("compute", lambda: ran.append("compute"), copied)
    _, back = bench.launch("back", lambda: ran.append("back"), computed, copied, op=BACK)
    _, beside = bench.launch("beside", lambda: None, op=Op(Kind.CALL, 0, Stream.COMM))
    await beside
    assert ran == []
    gate.set()
    await computing
    await back
    assert ran == ["copy", "compute", "back"]


async def test_a_ticket_is_completed_before_its_op_is_reported(bench: Bench) -> None:
    ticket, over = bench.launch("work", lambda: None)
    await over
    assert ticket.completed


async def test_the_outcome_has_the_value_and_the_time_that_the_work_took(bench: Bench) -> None:
    before = time.perf_counter()
    _, over = bench.launch("work", lambda: (time.perf_counter(), "value"))
    outcome = await over
    assert outcome.error is None
    during, value = outcome.value
    assert value == "value"
    assert before <= outcome.started_s <= during <= outcome.ended_s <= time.perf_counter()


@pytest.mark.parametrize(
    "error", [ValueError("planted"), KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError()]
)
async def test_whatever_work_raises_is_reported_and_the_stream_goes_on(
    bench: Bench, error: BaseException
) -> None:
    ticket, over = bench.launch("bad", partial(fail, error))
    _, after = bench.launch("good", lambda: "value", ticket, op=COPY)
    _, behind = bench.launch("behind", lambda: "value")
    outcome = await over
    assert outcome.error is error
    assert outcome.value is None
    assert outcome.started_s <= outcome.ended_s
    assert ticket.completed
    assert [(await other).value for other in (after, behind)] == ["value", "value"]


async def test_many_completions_between_two_turns_of_the_loop_are_all_reported(
    bench: Bench,
) -> None:
    """The loop is kept from turning until a hundred ops are over, on two streams."""
    launched = [
        bench.launch(str(n), lambda n=n: n, op=op)  # type: ignore[misc]
        for n in range(50)
        for op in (COMPUTE, COPY)
    ]
    last = threading.Event()
    ends = [bench.launch("end", lambda: None, op=op)[0] for op in (COMPUTE, COPY)]
    _, waiter = bench.launch("told", last.set, *ends, op=BACK)
    last.wait(timeout=60)
    assert bench.log == []
    await waiter
    await asyncio.gather(*(over for _, over in launched))
    assert [outcome.value for name, outcome in bench.log if name.isdigit()].count(49) == 2
    assert len(bench.log) == 103


async def test_completions_wake_a_loop_that_sleeps(bench: Bench) -> None:
    for n in range(200):
        _, over = bench.launch(str(n), lambda: None)
        await over
    assert len(bench.log) == 200


async def test_what_work_returned_is_let_go_once_it_was_reported(bench: Bench) -> None:
    """The thread then waits for a launch that never comes, and holds the value no longer."""
    freed = threading.Event()

    class Value:
        """Stands for a large tensor."""

    def make() -> Value:
        value = Value()
        weakref.finalize(value, freed.set)
        return value

    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    bench.device.launch(COMPUTE, make, after=(), done=lambda outcome: over.set_result(None))
    await over
    assert await asyncio.to_thread(freed.wait, 10)


async def test_torch_uses_as_many_threads_as_it_is_told_and_other_devices_keep_theirs() -> None:
    here = torch.get_num_threads()
    device = CpuDevice("one-thread", threads=1)
    _, over = Bench(device).launch("work", torch.get_num_threads)
    assert (await over).value == 1
    await device.close()
    assert torch.get_num_threads() == here


@pytest.mark.parametrize("run_ahead", [1, 3])
async def test_the_device_says_how_far_it_wants_to_run_ahead(run_ahead: int) -> None:
    device = CpuDevice("ahead", run_ahead=run_ahead)
    assert device.run_ahead == run_ahead
    await device.close()


# Closing


async def test_closing_lets_the_running_work_end_and_skips_what_has_not_started() -> None:
    device = CpuDevice("closing")
    bench = Bench(device)
    started, gate, ran = threading.Event(), threading.Event(), list[str]()

    def running() -> str:
        started.set()
        gate.wait()
        return "value"

    _, first = bench.launch("running", running)
    ticket, second = bench.launch("queued", lambda: ran.append("queued"))
    _, third = bench.launch("elsewhere", lambda: ran.append("elsewhere"), ticket, op=COPY)
    started.wait()
    closing = asyncio.create_task(device.close())
    await asyncio.sleep(0)  # lets close begin
    assert not closing.done()
    gate.set()
    await closing
    assert ran == []
    assert (await first).value == "value"
    for over in (second, third):
        outcome = await over
        assert isinstance(outcome.error, asyncio.CancelledError)
        assert outcome.value is None
    assert ticket.completed
    assert threads_of("closing") == []


async def test_closing_leaves_the_loop_free_while_it_waits() -> None:
    device = CpuDevice("closing")
    gate = hold(device, COMPUTE)
    closing = asyncio.create_task(device.close())
    asyncio.get_running_loop().call_soon(gate.set)  # would never come if close blocked
    await closing


async def test_a_device_can_be_closed_twice_and_without_having_been_used() -> None:
    unused, used = CpuDevice("closing"), CpuDevice("closing")
    await Bench(used).launch("work", lambda: None)[1]
    for device in (unused, used):
        await device.close()
        await device.close()
    assert threads_of("closing") == []


async def test_two_closers_of_one_device_both_return() -> None:
    device = CpuDevice("closing")
    gate = hold(device, COMPUTE, COPY)
    closers = [asyncio.create_task(device.close()) for _ in range(2)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*closers)
    assert threads_of("closing") == []


async def test_a_close_that_was_cancelled_can_be_made_up_for() -> None:
    device = CpuDevice("closing")
    gate = hold(device, COMPUTE)
    closing = asyncio.create_task(device.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    gate.set()
    await device.close()
    assert threads_of("closing") == []


def test_a_thread_that_finishes_after_its_loop_is_closed_ends_quietly() -> None:
    async def leave_without_waiting() -> threading.Event:
        device = CpuDevice("orphan")
        gate = hold(device, COMPUTE)
        closing = asyncio.create_task(device.close())
        await asyncio.sleep(0)
        closing.cancel()
        return gate

    gate = asyncio.run(leave_without_waiting())
    (thread,) = threads_of("orphan")
    assert thread.daemon  # it does not keep the process alive either
    gate.set()
    thread.join(timeout=60)
    assert not thread.is_alive()


async def test_two_devices_do_not_share_threads() -> None:
    one, two = CpuDevice("device-one"), CpuDevice("device-two")
    names = [
        (await Bench(device).launch("work", lambda: threading.current_thread().name)[1]).value
        for device in (one, two)
    ]
    assert names == ["device-one-compute", "device-two-compute"]
    await one.close()
    await two.close()


async def test_an_error_in_one_report_does_not_hold_up_the_reports_behind_it() -> None:
    device, loop = CpuDevice("raising"), asyncio.get_running_loop()
    bench, logged, both = Bench(device), list[object](), threading.Event()
    loop.set_exception_handler(lambda _, context: logged.append(context["exception"]))
    error = ValueError("planted in a report")
    device.launch(COMPUTE, lambda: None, after=(), done=lambda outcome: fail(error))
    _, over = bench.launch("behind", lambda: None)
    device.launch(COMPUTE, both.set, after=(), done=lambda outcome: None)
    both.wait()  # the loop does not turn meanwhile, so both reports come in one batch
    await over
    await device.close()
    assert logged == [error]


async def test_a_closed_device_takes_no_more_ops() -> None:
    device = CpuDevice("closed")
    await device.close()
    with pytest.raises(RuntimeError, match="was closed"):
        device.launch(COMPUTE, lambda: None, after=(), done=lambda outcome: None)
