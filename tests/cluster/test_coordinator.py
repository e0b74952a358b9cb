import asyncio
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import pytest
import torch

from myelin import coordinator as module
from myelin.coordinator import Coordinator
from myelin.errors import (
    BackpressureError,
    BatchError,
    ChannelClosed,
    ClusterError,
    FrameError,
    OpError,
    RunCancelled,
    RunError,
    ValueReleased,
    WorkerLost,
)
from myelin.lane import Lane
from myelin.run import InstalledProgram, Run
from myelin.runtime import messages as m
from myelin.runtime.graph import COORDINATOR, Graph, Kind, Op, Phase
from myelin.runtime.run import CANCELLED
from myelin.runtime.step import INPUTS, TARGETS, StepShape, build_step
from myelin.transports.datapath import TensorSpec
from myelin.transports.packing import pack

Message = TypeVar("Message", bound=msgspec.Struct)
PLANTED = m.Failure(
    m.Cause.OP,
    "ValueError",
    "planted",
    "Traceback: planted",
    "forward",
    stage=1,
    microbatch=2,
    block=3,
)
CLOSED = m.Failure(m.Cause.CHANNEL, "ChannelClosed", "worker 1 closed its end", "", "send", op=0)


class FakePath:
    """Takes every tensor at once, and delivers what is put into it."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, str]] = []
        self.dropped: list[int] = []
        self.refusal: Exception | None = None
        self.coming: list[asyncio.Future[Any]] = []

    def send(
        self, peer: int, tensors: Sequence[torch.Tensor], *, label: str
    ) -> asyncio.Future[None]:
        self.sent.append((peer, label))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.refusal is None:
            done.set_result(None)
        else:
            done.set_exception(self.refusal)
        return done

    def receive(
        self, peer: int, specs: Sequence[TensorSpec], *, label: str
    ) -> asyncio.Future[list[torch.Tensor]]:
        self.coming.append(asyncio.get_running_loop().create_future())
        return self.coming[-1]

    def drop(self, peer: int, reason: str) -> None:
        self.dropped.append(peer)

    async def close(self) -> None:
        return


class Desk:
    """A coordinator of two workers whose part the test plays."""

    def __init__(self) -> None:
        self.path = FakePath()
        self.doing: dict[int, tuple[int, int, int | None]] = {}
        self.refusal: Exception | None = None
        self._sent: list[tuple[int, msgspec.Struct]] = []
        self.coordinator = Coordinator(2, send=self._send, path=self.path, doing=self.doing.get)

    def _send(self, worker: int, message: msgspec.Struct) -> None:
        if self.refusal is not None:
            raise self.refusal
        self._sent.append((worker, message))

    def told(self, kind: type[Message]) -> list[tuple[int, Message]]:
        """Return what workers were told of one kind since the last call."""
        found = [(w, message) for w, message in self._sent if isinstance(message, kind)]
        self._sent = [entry for entry in self._sent if not isinstance(entry[1], kind)]
        return found

    def step(self, phase: Phase = Phase.TRAIN) -> InstalledProgram:
        """Install the program of a step of two stages."""
        graph = build_step(StepShape((0, 1), 1, 1), phase)
        return self.coordinator.install(graph, trainer=7)

    def lane(self, limit: int = 2) -> Lane:
        return self.coordinator.lane(limit=limit, dependent=True)

    async def submitted(self, lane: Lane, *programs: InstalledProgram) -> list[Run]:
        """Submit a run of each program and let what may be dispatched be dispatched."""
        inputs = {INPUTS: torch.ones(1), TARGETS: torch.ones(1)}
        runs = [
            self.coordinator.submit(lane, program, dict(inputs), step=step)
            for step, program in enumerate(programs)
        ]
        await tick()
        return runs

    def done(self, run: Run) -> None:
        """Have both workers report that their part is over."""
        for worker in (0, 1):
            outputs = {"loss": 0.5} if worker else {}
            self.coordinator.receive(worker, m.RunDone(run.number, outputs, 0.25))

    def drained(self, run: Run, *updated: int) -> None:
        """Have both workers report that nothing of a run is under way."""
        for worker in (0, 1):
            self.coordinator.receive(worker, m.RunDrained(run.number, worker in updated))

    def holds_nothing(self) -> bool:
        """Tell whether the coordinator has forgotten all that is over."""
        c = self.coordinator
        return not (c._runs or len(c.requests) or c._values or c._outdated)


@pytest.fixture
async def desk() -> Desk:
    return Desk()


async def tick() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def numbers(desk: Desk, kind: type[Any]) -> list[tuple[int, int]]:
    """Return (worker, run) of orders that name a run."""
    return [(worker, message.run) for worker, message in desk.told(kind)]


# Requests


async def test_answers_find_their_requests_in_any_order(desk: Desk) -> None:
    coordinator = desk.coordinator
    requests = [
        asyncio.ensure_future(coordinator.requests.ask(worker, m.Peers(coordinator.number(), ())))
        for worker in (0, 1)
    ]
    await tick()
    for worker, asked in reversed(desk.told(m.Peers)):
        coordinator.receive(worker, m.Done(asked.request))
    answers = [await request for request in requests]
    assert [answer.request for answer in answers] == [1, 2]
    assert desk.holds_nothing()


async def test_a_refusal_is_raised_where_the_request_was_made(desk: Desk) -> None:
    request = asyncio.ensure_future(desk.coordinator.requests.ask(1, m.Peers(4, ())))
    await tick()
    failure = m.Failure(m.Cause.OP, "ValueError", "planted", "Traceback", "build")
    desk.coordinator.receive(1, m.Refused(4, failure))
    with pytest.raises(OpError, match="build on worker 1 raised ValueError: planted") as caught:
        await request
    assert caught.value.worker == 1
    assert desk.coordinator.broken is None


async def test_errors_that_the_user_can_mend_keep_their_type(desk: Desk) -> None:
    request = asyncio.ensure_future(desk.coordinator.requests.ask(1, m.Peers(4, ())))
    await tick()
    failure = m.Failure(m.Cause.USER, "BatchError", "empty", "", "build")
    desk.coordinator.receive(1, m.Refused(4, failure))
    with pytest.raises(BatchError, match=r"^empty$"):
        await request


async def test_what_a_users_own_op_raises_is_never_taken_for_an_error_of_ours(desk: Desk) -> None:
    (run,) = await desk.submitted(desk.lane(), desk.step())
    failure = m.Failure(m.Cause.OP, "GraphError", "theirs", "", "call")
    desk.coordinator.receive(0, m.RunFailed(run.number, failure))
    with pytest.raises(OpError, match="theirs"):
        await run.done


async def test_the_answer_to_a_cancelled_request_is_ignored_also_a_refusal(desk: Desk) -> None:
    request = asyncio.ensure_future(desk.coordinator.requests.ask(0, m.Peers(4, ())))
    await tick()
    request.cancel()
    await tick()
    desk.coordinator.receive(0, m.Refused(4, PLANTED))
    assert desk.coordinator.broken is None
    assert desk.holds_nothing()


async def test_the_refusal_of_an_order_that_must_not_fail_ends_everything(desk: Desk) -> None:
    desk.step()
    (_, order), _ = desk.told(m.Install)
    desk.coordinator.receive(0, m.Refused(order.request, PLANTED))
    assert isinstance(desk.coordinator.broken, OpError)


async def test_a_request_that_cannot_be_sent_is_not_waited_for(desk: Desk) -> None:
    desk.refusal = FrameError("too long", peer=0, reason="oversized")
    with pytest.raises(FrameError, match="too long"):
        await desk.coordinator.requests.ask(0, m.Peers(4, ()))
    assert desk.holds_nothing()


async def test_all_requests_are_answered_before_the_first_refusal_is_raised(desk: Desk) -> None:
    asked = asyncio.ensure_future(
        desk.coordinator.requests.ask_all(lambda _, number: m.Peers(number, ()), (0, 1))
    )
    await tick()
    (_, first), (_, second) = desk.told(m.Peers)
    desk.coordinator.receive(0, m.Refused(first.request, PLANTED))
    await tick()
    assert not asked.done()
    desk.coordinator.receive(1, m.Done(second.request))
    with pytest.raises(OpError, match="planted"):
        await asked


# Runs


async def test_a_run_is_started_everywhere_and_over_when_all_have_said_so(desk: Desk) -> None:
    program = desk.step()
    (run,) = await desk.submitted(desk.lane(), program)
    assert numbers(desk, m.Start) == [(0, run.number), (1, run.number)]
    assert desk.path.sent == [(0, "load slot=0"), (1, "load slot=1")]
    desk.coordinator.receive(0, m.RunDone(run.number, {}, 0.25))
    assert not run.done.done()
    desk.done(run)
    report = await run.done
    assert (report.outputs, report.busy_s) == ({"loss": 0.5}, {0: 0.25, 1: 0.25})
    assert run.settled.is_set()
    assert desk.holds_nothing()


async def test_a_failed_op_ends_its_run_at_once_and_on_all_workers(desk: Desk) -> None:
    (run,) = await desk.submitted(desk.lane(), desk.step())
    desk.coordinator.receive(1, m.RunFailed(run.number, PLANTED))
    with pytest.raises(OpError) as caught:
        await run.done
    error = caught.value
    assert (error.worker, error.kind, error.stage, error.microbatch, error.block) == (
        *(1, "forward", 1, 2, 3),
    )
    assert str(error) == (
        "forward on worker 1, stage 1, microbatch 2, block 3 raised ValueError: planted"
        "\n\nTraceback: planted"
    )
    assert numbers(desk, m.Abort) == [(0, run.number), (1, run.number)]
    assert not run.settled.is_set()
    desk.drained(run)
    assert run.settled.is_set()
    assert desk.holds_nothing()


async def test_the_next_run_waits_until_the_failed_one_is_over_everywhere(desk: Desk) -> None:
    lane, program = desk.lane(), desk.step()
    (failed,) = await desk.submitted(lane, program)
    desk.coordinator.receive(1, m.RunFailed(failed.number, PLANTED))
    desk.told(m.Start)
    (after,) = await desk.submitted(lane, program)
    assert desk.told(m.Start) == []
    desk.coordinator.receive(0, m.RunDrained(failed.number, False))
    assert desk.told(m.Start) == []
    desk.coordinator.receive(1, m.RunDrained(failed.number, False))
    assert numbers(desk, m.Start) == [(0, after.number), (1, after.number)]
    desk.done(after)
    await after.done
    with pytest.raises(OpError):
        await failed.done


async def test_later_steps_fall_with_the_first_and_say_so_once(desk: Desk) -> None:
    program = desk.step()
    first, flying, queued = await desk.submitted(desk.lane(), program, program, program)
    desk.coordinator.receive(0, m.RunFailed(first.number, PLANTED))
    for run in (flying, queued):
        with pytest.raises(RunError) as caught:
            await run.done
        assert str(caught.value).count("the run before it failed") == 1
        assert "planted" in str(caught.value)
    aborted = [(w, run.number) for run in (first, flying) for w in (0, 1)]
    assert sorted(numbers(desk, m.Abort)) == sorted(aborted)
    with pytest.raises(OpError):
        await first.done
    desk.drained(first)
    desk.drained(flying)
    assert desk.holds_nothing()


async def test_a_failed_evaluation_lets_later_steps_go_on(desk: Desk) -> None:
    evaluate, train = desk.step(Phase.EVALUATE), desk.step()
    evaluation, step = await desk.submitted(desk.lane(), evaluate, train)
    desk.coordinator.receive(0, m.RunFailed(evaluation.number, PLANTED))
    with pytest.raises(OpError):
        await evaluation.done
    desk.drained(evaluation)
    desk.done(step)
    await step.done


async def test_a_second_failure_of_the_same_run_changes_nothing(desk: Desk) -> None:
    (run,) = await desk.submitted(desk.lane(), desk.step())
    desk.coordinator.receive(1, m.RunFailed(run.number, PLANTED))
    desk.told(m.Abort)
    desk.coordinator.receive(0, m.RunFailed(run.number, CLOSED))
    desk.coordinator.receive(0, m.RunFailed(99, PLANTED))
    with pytest.raises(OpError, match="planted"):
        await run.done
    assert desk.told(m.Abort) == []


async def test_reports_of_a_run_that_is_over_are_ignored(desk: Desk) -> None:
    (run,) = await desk.submitted(desk.lane(), desk.step())
    desk.done(run)
    desk.done(run)
    desk.drained(run)
    desk.coordinator.receive(0, m.RunFailed(run.number, PLANTED))
    assert (await run.done).outputs == {"loss": 0.5}


async def test_a_half_done_update_ends_the_trainer_but_not_the_cluster(desk: Desk) -> None:
    lane, program = desk.lane(limit=1), desk.step()
    torn, queued = await desk.submitted(lane, program, program)
    desk.coordinator.receive(1, m.RunFailed(torn.number, PLANTED))
    desk.drained(torn, 0)
    for run in (torn, queued):
        with pytest.raises(RunError):
            await run.done
    with pytest.raises(RunError, match="some workers have updated their weights"):
        desk.coordinator.submit(lane, program, {}, step=0)
    (other,) = await desk.submitted(desk.lane(), program)
    desk.done(other)
    await other.done


async def test_an_input_that_cannot_travel_ends_its_run(desk: Desk) -> None:
    program = desk.step()
    inputs = {INPUTS: torch.ones(1), TARGETS: {1, 2}}
    run = desk.coordinator.submit(desk.lane(), program, inputs, step=0)
    await tick()
    with pytest.raises(RunError, match=r"input 1 cannot be sent to worker 1: .* is a set"):
        await run.done
    assert numbers(desk, m.Abort) == [(0, run.number), (1, run.number)]
    desk.drained(run)
    assert desk.coordinator.broken is None


# Cancelling


async def test_a_cancelled_queued_run_takes_later_ones_along_and_no_worker_hears_of_it(
    desk: Desk,
) -> None:
    program = desk.step()
    first, second, third = await desk.submitted(desk.lane(limit=1), program, program, program)
    second.cancel()
    with pytest.raises(RunCancelled):
        await second.done
    with pytest.raises(RunError, match="the run before it was cancelled"):
        await third.done
    assert desk.told(m.Cancel) == []
    desk.done(first)
    await first.done
    assert desk.holds_nothing()


async def test_only_the_worker_that_commits_can_tell_whether_a_step_may_be_cancelled(
    desk: Desk,
) -> None:
    (run,) = await desk.submitted(desk.lane(), desk.step())
    run.cancel()
    assert numbers(desk, m.Cancel) == [(0, run.number)]
    assert not run.done.done()
    desk.done(run)  # it was too late
    await run.done
    run.cancel()
    assert desk.told(m.Cancel) == []


async def test_a_step_that_was_cancelled_in_time_says_so(desk: Desk) -> None:
    (run,) = await desk.submitted(desk.lane(), desk.step())
    run.cancel()
    desk.coordinator.receive(0, m.RunFailed(run.number, CANCELLED))
    with pytest.raises(RunCancelled, match="no weight was changed"):
        await run.done


async def test_a_run_that_commits_nothing_is_cancelled_at_once(desk: Desk) -> None:
    (run,) = await desk.submitted(desk.lane(), desk.step(Phase.EVALUATE))
    run.cancel()
    with pytest.raises(RunCancelled):
        await run.done
    assert numbers(desk, m.Abort) == [(0, run.number), (1, run.number)]


async def test_nobody_need_await_a_run_that_was_cancelled(desk: Desk) -> None:
    evaluation, queued = await desk.submitted(desk.lane(1), *[desk.step(Phase.EVALUATE)] * 2)
    evaluation.cancel()
    queued.cancel()


# Values


def announced(desk: Desk, worker: int, key: tuple[int, int], value: object) -> None:
    layout, tensors = pack(value)
    assert not tensors
    purpose = m.Purpose.VALUE
    desk.coordinator.receive(worker, m.Announce(purpose, key, "value", layout, (), ()))


async def test_values_asked_for_in_time_are_watched_from_the_start(desk: Desk) -> None:
    program = desk.step()
    run = desk.coordinator.submit(desk.lane(), program, {INPUTS: 1, TARGETS: 2}, step=0)
    index = program.graph.find(Kind.FORWARD, stage=1, microbatch=0)
    assert index is not None
    value = run.value(index)
    await tick()
    worker, local = program.split.place[index]
    assert [start.watch for _, start in desk.told(m.Start)] == [(), (local,)]
    announced(desk, worker, (run.number, local), "seen")
    assert await value == "seen"
    desk.done(run)
    assert desk.holds_nothing()


async def test_values_asked_for_later_are_watched_or_gone(desk: Desk) -> None:
    program = desk.step()
    (run,) = await desk.submitted(desk.lane(), program)
    there, gone = run.value(2), run.value(3)
    for worker, watch in desk.told(m.Watch):
        if (worker, watch.op) == program.split.place[2]:
            announced(desk, worker, (run.number, watch.op), 7)
        else:
            desk.coordinator.receive(worker, m.ValueGone(run.number, watch.op))
    assert await there == 7
    with pytest.raises(ValueReleased, match="ask for it together with the run"):
        await gone
    desk.done(run)
    assert desk.holds_nothing()


async def test_a_value_that_does_not_get_across_is_told_to_whoever_awaits_it(desk: Desk) -> None:
    (run,) = await desk.submitted(desk.lane(), desk.step())
    value = run.value(2)
    ((worker, watch),) = desk.told(m.Watch)
    layout, _ = pack(torch.ones(1))
    key, spec = (run.number, watch.op), TensorSpec((1,), "float32")
    announcement = m.Announce(m.Purpose.VALUE, key, "value", layout, (spec,), ((),))
    desk.coordinator.receive(worker, announcement)
    desk.path.coming[0].set_exception(ChannelClosed("closed", peer=worker))
    with pytest.raises(ChannelClosed):
        await value
    desk.done(run)


async def test_values_fail_with_their_run_and_are_forgotten(desk: Desk) -> None:
    program = desk.step()
    run = desk.coordinator.submit(desk.lane(), program, {INPUTS: 1, TARGETS: 2}, step=0)
    value = run.value(2)
    await tick()
    desk.coordinator.receive(0, m.RunFailed(run.number, PLANTED))
    with pytest.raises(OpError):
        await value
    with pytest.raises(OpError):
        await run.done
    desk.drained(run)
    assert desk.holds_nothing()


@pytest.mark.parametrize("how", ["lost", "left"])
async def test_a_value_of_a_finished_run_fails_once_there_is_nobody_to_ask(
    desk: Desk, how: str
) -> None:
    (run,) = await desk.submitted(desk.lane(), desk.step())
    desk.done(run)
    if how == "lost":
        desk.coordinator.worker_ended(1, "was killed by SIGKILL")
    else:
        desk.coordinator.close()
    with pytest.raises(WorkerLost if how == "lost" else ClusterError):
        await run.value(2)


# Programs and lanes


async def pausing(desk: Desk, lane: Lane, log: list[str], after: Run | None = None) -> None:
    async with desk.coordinator.pause(lane, after=None if after is None else after.done):
        log.append("begun")
        await asyncio.sleep(0)
        log.append("over")


async def test_a_pause_stands_in_the_queue_like_a_run(desk: Desk) -> None:
    lane, program, log = desk.lane(), desk.step(), list[str]()
    before = await desk.submitted(lane, program)
    pause = asyncio.create_task(pausing(desk, lane, log))
    await tick()
    behind = await desk.submitted(lane, program)
    assert [run for _, run in numbers(desk, m.Start)] == [before[0].number] * 2
    assert log == []
    desk.done(before[0])
    await pause
    assert log == ["begun", "over"]
    await tick()
    assert [run for _, run in numbers(desk, m.Start)] == [behind[0].number] * 2


async def test_a_pause_that_was_cancelled_holds_nothing_up(desk: Desk) -> None:
    lane, program, log = desk.lane(), desk.step(), list[str]()
    (before,) = await desk.submitted(lane, program)
    pause = asyncio.create_task(pausing(desk, lane, log))
    await tick()
    (behind,) = await desk.submitted(lane, program)
    pause.cancel()
    await asyncio.wait((pause,))
    assert pause.cancelled()
    assert [run for _, run in numbers(desk, m.Start)] == [
        *[before.number] * 2,
        *[behind.number] * 2,
    ]
    assert log == []


async def test_the_failure_a_pause_waits_for_is_raised_before_all_is_over(desk: Desk) -> None:
    lane, program, log = desk.lane(), desk.step(Phase.GRADIENTS), list[str]()
    (run,) = await desk.submitted(lane, program)
    pause = asyncio.create_task(pausing(desk, lane, log, after=run))
    (behind,) = await desk.submitted(lane, desk.step())
    desk.coordinator.receive(1, m.RunFailed(run.number, PLANTED))
    with pytest.raises(OpError, match="planted"):
        await pause
    assert log == []
    desk.drained(run)
    assert behind.number


@pytest.mark.parametrize("how", ["lost", "left"])
async def test_a_pause_ends_when_the_cluster_does(desk: Desk, how: str) -> None:
    lane, log = desk.lane(), list[str]()
    await desk.submitted(lane, desk.step())
    pause = asyncio.create_task(pausing(desk, lane, log))
    await tick()
    if how == "lost":
        desk.coordinator.worker_ended(0, "was killed by SIGKILL")
    else:
        desk.coordinator.close()
    with pytest.raises(ClusterError):
        await pause
    with pytest.raises(ClusterError):
        await pausing(desk, lane, log)
    assert (log, lane.pauses()) == ([], [])


async def test_a_program_is_discarded_only_when_no_run_needs_it_any_more(desk: Desk) -> None:
    lane, program = desk.lane(limit=1), desk.step()
    first, second = await desk.submitted(lane, program, program)
    desk.coordinator.discard(program)
    desk.done(first)
    assert desk.told(m.Discard) == []
    desk.done(second)
    assert [(w, order.program) for w, order in desk.told(m.Discard)] == [
        (0, program.number),
        (1, program.number),
    ]
    await first.done
    await second.done


async def test_a_program_that_one_worker_refuses_is_discarded_on_the_others(desk: Desk) -> None:
    graph = Graph(Phase.CALLS)
    for worker in (0, 1):
        graph.add(Op(Kind.CALL, worker))
    installing = asyncio.ensure_future(
        desk.coordinator.install_calls(graph, ["nowhere:nothing"], ["nothing"])
    )
    await tick()
    (_, good), (_, bad) = desk.told(m.Install)
    desk.coordinator.receive(0, m.Done(good.request))
    failure = m.Failure(m.Cause.USER, "GraphError", "no", "", "x")
    desk.coordinator.receive(1, m.Refused(bad.request, failure))
    with pytest.raises(ValueError, match="no"):
        await installing
    assert [worker for worker, _ in desk.told(m.Discard)] == [0, 1]


async def test_a_retired_lane_is_forgotten_once_it_is_empty(desk: Desk) -> None:
    lane = desk.lane(limit=1)
    runs = await desk.submitted(lane, *[desk.step(Phase.EVALUATE)] * 2)
    desk.coordinator.retire(lane)
    for run in runs:
        assert desk.coordinator._lanes == [lane]
        desk.done(run)
        await run.done
    assert desk.coordinator._lanes == []
    desk.coordinator.retire(desk.lane())
    assert desk.coordinator._lanes == []


# Ends of workers


async def test_a_lost_worker_ends_every_run_and_request_with_one_error(desk: Desk) -> None:
    program = desk.step()
    lane, other = desk.lane(), desk.lane()
    runs = [*await desk.submitted(lane, *[program] * 3), *await desk.submitted(other, program)]
    request = asyncio.ensure_future(desk.coordinator.requests.ask(0, m.Peers(4, ())))
    await tick()
    desk.coordinator.worker_ended(1, "was killed by SIGKILL")
    errors = []
    for awaited in (*(run.done for run in runs), request):
        with pytest.raises(WorkerLost) as caught:
            await awaited
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 1
    assert str(errors[0]) == "worker 1 was killed by SIGKILL; it was running no op"
    assert errors[0].worker == 1
    assert all(run.settled.is_set() for run in runs)
    assert desk.path.dropped == [1]
    assert desk.holds_nothing()


async def test_a_broken_cluster_says_why_and_gives_no_more_orders(desk: Desk) -> None:
    lane, program = desk.lane(), desk.step()
    desk.coordinator.worker_ended(0, "exited with code 3")
    desk.told(m.Install)
    with pytest.raises(ClusterError, match="cannot go on: worker 0 exited with code 3"):
        desk.coordinator.submit(lane, program, {}, step=0)
    with pytest.raises(ClusterError, match="exited with code 3"):
        await desk.coordinator.requests.ask(1, m.Peers(4, ()))
    desk.coordinator.discard(desk.step())
    assert desk.told(m.Discard) == []
    assert desk.told(m.Install) == []


async def test_the_first_end_is_the_one_that_counts(desk: Desk) -> None:
    desk.coordinator.worker_ended(1, "was killed by SIGKILL")
    desk.coordinator.worker_ended(0, "exited with code 70")
    desk.coordinator.close()
    assert isinstance(desk.coordinator.broken, WorkerLost)
    assert desk.coordinator.broken.worker == 1


async def test_the_black_box_tells_what_a_lost_worker_was_doing(desk: Desk) -> None:
    program = desk.step()
    (run,) = await desk.submitted(desk.lane(), program)
    index = program.graph.find(Kind.BACKWARD, stage=1, microbatch=0)
    assert index is not None
    worker, local = program.split.place[index]
    desk.doing[worker] = (run.number, local, 5)
    desk.coordinator.worker_ended(worker, "was killed by SIGKILL")
    with pytest.raises(WorkerLost) as caught:
        await run.done
    assert caught.value.doing == "backward on worker 1, stage 1, microbatch 0, block 5"
    assert str(caught.value) == (
        "worker 1 was killed by SIGKILL, while it ran: "
        "backward on worker 1, stage 1, microbatch 0, block 5"
    )


@pytest.mark.parametrize("record", [(99, 0, None), (None, 10_000, 1), (None, -7, None)])
async def test_a_black_box_that_makes_no_sense_says_nothing(
    desk: Desk, record: tuple[int | None, int, int | None]
) -> None:
    (run,) = await desk.submitted(desk.lane(), desk.step())
    number, op, block = record
    desk.doing[1] = (run.number if number is None else number, op, block)
    desk.coordinator.worker_ended(1, "was killed by SIGKILL")
    with pytest.raises(WorkerLost, match=r"^worker 1 was killed by SIGKILL"):
        await run.done


async def test_a_neighbours_complaint_waits_for_the_end_of_the_worker_that_caused_it(
    desk: Desk,
) -> None:
    (run,) = await desk.submitted(desk.lane(), desk.step())
    desk.coordinator.receive(0, m.RunFailed(run.number, CLOSED))
    await tick()
    assert not run.done.done()
    desk.coordinator.worker_ended(1, "was killed by SIGKILL")
    with pytest.raises(WorkerLost, match="worker 1 was killed"):
        await run.done


async def test_a_channel_that_broke_at_both_ends_is_told_when_the_run_is_over_everywhere(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SUSPICION_S", 0.01)
    (run,) = await desk.submitted(desk.lane(), desk.step())
    for worker in (0, 1):
        desk.coordinator.receive(worker, m.RunFailed(run.number, CLOSED))
    desk.drained(run)
    with pytest.raises(OpError, match="ChannelClosed"):
        await run.done
    assert run.settled.is_set()
    assert desk.holds_nothing()


async def test_an_answer_that_does_not_get_across_ends_the_cluster(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SUSPICION_S", 0.01)
    collecting = asyncio.ensure_future(
        desk.coordinator.requests.ask(1, m.Collect(4, 7, m.State.WEIGHTS))
    )
    (run,) = await desk.submitted(desk.lane(), desk.step())
    layout, _ = pack(torch.ones(1))
    spec = TensorSpec((1,), "float32")
    announcement = m.Announce(m.Purpose.REPLY, (4, 0), "collect", layout, (spec,), ((),))
    desk.coordinator.receive(1, announcement)
    await tick()
    desk.path.coming[0].set_exception(ChannelClosed("worker 1 closed its end", peer=1))
    with pytest.raises(ChannelClosed):
        await collecting
    with pytest.raises(ChannelClosed):
        await run.done
    assert isinstance(desk.coordinator.broken, ChannelClosed)


async def test_runs_of_a_queue_share_out_the_time(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    lane, program = desk.lane(), desk.step()
    first, second = await desk.submitted(lane, program, program)
    now_s = 102.0
    desk.done(first)
    now_s = 103.0
    desk.done(second)
    now_s = 110.0
    (third,) = await desk.submitted(lane, program)
    now_s = 110.5
    desk.done(third)
    reports = [await run.done for run in (first, second, third)]
    assert [report.elapsed_s for report in reports] == [2.0, 1.0, 0.5]
    assert [report.idle_fraction for report in reports] == [0.875, 0.75, 0.5]


async def test_our_own_trouble_with_a_channel_waits_likewise(desk: Desk) -> None:
    desk.path.refusal = ChannelClosed("closed", peer=0)
    (run,) = await desk.submitted(desk.lane(), desk.step())
    assert not run.done.done()
    desk.coordinator.worker_ended(0, "was killed by SIGKILL")
    with pytest.raises(WorkerLost):
        await run.done


async def test_a_broken_channel_without_a_lost_worker_ends_the_cluster_a_little_later(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SUSPICION_S", 0.0)
    (run,) = await desk.submitted(desk.lane(), desk.step())
    desk.coordinator.receive(0, m.RunFailed(run.number, CLOSED))
    with pytest.raises(OpError, match="worker 1 closed its end"):
        await run.done
    assert isinstance(desk.coordinator.broken, OpError)


async def test_what_a_user_has_given_up_does_not_keep_the_rest_from_ending(desk: Desk) -> None:
    run, evaluation = await desk.submitted(desk.lane(), desk.step(), desk.step(Phase.EVALUATE))
    run.want(2).cancel()  # nobody should be able to, and yet
    value = run.value(3)
    hasty = asyncio.ensure_future(desk.coordinator.requests.ask(0, m.Peers(4, ())))
    patient = asyncio.ensure_future(desk.coordinator.requests.ask(0, m.Peers(5, ())))
    await tick()
    hasty.cancel()
    desk.coordinator.worker_ended(1, "was killed by SIGKILL")
    for awaited in (run.done, evaluation.done, value, patient):
        with pytest.raises(WorkerLost):
            await awaited
    with pytest.raises(asyncio.CancelledError):
        await hasty


async def test_a_lost_worker_is_logged_once_and_nobody_need_look_at_the_runs(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    await desk.submitted(desk.lane(), *[desk.step(Phase.EVALUATE)] * 3)
    desk.coordinator.worker_ended(1, "was killed by SIGKILL")
    desk.coordinator.worker_ended(0, "was killed by SIGKILL")
    desk.coordinator.close()
    assert caplog.messages == [
        "the cluster cannot go on: worker 1 was killed by SIGKILL; it was running no op"
    ]


async def test_leaving_ends_what_is_under_way_and_nobody_need_look_at_it(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    lane, program = desk.lane(), desk.step()
    (run,) = await desk.submitted(lane, program)
    desk.coordinator.receive(0, m.RunFailed(run.number, CLOSED))  # its time does not come any more
    desk.coordinator.close()
    assert caplog.messages == []
    assert run.settled.is_set()
    with pytest.raises(ClusterError, match=r"this cluster was left: use it inside"):
        desk.coordinator.submit(lane, program, {}, step=0)


async def test_an_order_that_cannot_be_sent_loses_the_worker(desk: Desk) -> None:
    (run,) = await desk.submitted(desk.lane(), desk.step(Phase.EVALUATE))
    desk.refusal = BackpressureError("node 0 takes no more frames")
    run.cancel()
    assert isinstance(desk.coordinator.broken, BackpressureError)


async def test_a_message_that_workers_do_not_send_loses_the_worker(desk: Desk) -> None:
    (run,) = await desk.submitted(desk.lane(), desk.step())
    desk.coordinator.receive(1, m.Shutdown())
    with pytest.raises(FrameError, match="worker 1 sent a Shutdown") as caught:
        await run.done
    assert (caught.value.peer, caught.value.reason) == (1, "unknown")


async def test_a_bad_frame_between_workers_ends_everything_and_names_both(desk: Desk) -> None:
    (run,) = await desk.submitted(desk.lane(), desk.step())
    desk.coordinator.receive(1, m.PeerFault(0, "gap", "3 frames of node 0 are missing"))
    with pytest.raises(FrameError, match="worker 1 got a bad frame: 3 frames of node 0") as caught:
        await run.done
    assert (caught.value.peer, caught.value.reason) == (0, "gap")


async def test_nothing_is_sent_to_a_worker_about_programs_of_which_it_has_no_op(
    desk: Desk,
) -> None:
    graph = Graph(Phase.CALLS)
    load = graph.add(Op(Kind.LOAD, 1, peer=COORDINATOR))
    graph.add(Op(Kind.CALL, 1, inputs=(load,)))
    program = desk.coordinator.install(graph, trainer=7)
    (run,) = await desk.submitted(desk.lane(), program)
    assert [worker for worker, _ in desk.told(m.Install)] == [1]
    assert [worker for worker, _ in desk.told(m.Start)] == [1]
    desk.coordinator.receive(1, m.RunDone(run.number, {}, 0.0))
    await run.done
