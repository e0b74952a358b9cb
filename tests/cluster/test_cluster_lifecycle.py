"""Entering and leaving a cluster: nothing stays behind, however the block is left."""

import asyncio
import contextlib
import enum
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import myelin
from myelin.errors import ClusterError, GraphError, ModelError, RunError
from myelin.launch import LocalProcess
from myelin.runtime.event_loop import new_event_loop
from myelin.testing import ops
from myelin.testing.ops import Gate
from myelin.testing.watching import Held, is_alive, until, worker_ids

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Loop: TypeAlias = Callable[[], asyncio.AbstractEventLoop]

MODEL = myelin.Model("myelin.testing.models:mlp")
PLAN = myelin.Plan(pipeline=2, microbatches=2)
LOOPS = [pytest.param(new_event_loop, id="usual"), pytest.param(asyncio.new_event_loop, id="stock")]
PROCESSES = [pytest.mark.processes, pytest.mark.slow]
WORKERS = [pytest.param(0, id="inside"), pytest.param(2, id="processes", marks=PROCESSES)]


class Ending(enum.Enum):
    SUCCESS = enum.auto()
    EXCEPTION = enum.auto()
    CANCELLED = enum.auto()
    UNDER_WAY = enum.auto()


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Have done once what torch does only the first time, such as to open files."""

    async def main() -> None:
        async with myelin.Cluster(workers=0) as cluster:
            trainer = await cluster.trainer(MODEL, plan=PLAN)
            await trainer.step((torch.ones(4, 4), torch.ones(4, 4)))

    myelin.run(main)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = Held.now()
    yield
    assert Held.now() == before


def directories(directory: Path) -> list[Path]:
    return list(directory.glob("myelin-*"))


def run(main: Coroutine[Any, Any, None], loop: Loop) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main)


async def use(cluster: myelin.Cluster, batch: Batch, ending: Ending) -> None:
    """Train, and run a graph, so that there is something to give back; then come to an end."""
    trainer = await cluster.trainer(MODEL, plan=PLAN)
    take = trainer.evaluate if cluster.workers else trainer.step  # torch is slow at its first step
    await take(batch)
    graph = cluster.graph()
    there = graph.op(ops.plus, torch.ones(2), 1, worker=0)
    assert (await graph.op(ops.plus, there, 1, worker=1)).tolist() == [3, 3]
    match ending:
        case Ending.EXCEPTION:
            raise KeyError("planted")
        case Ending.CANCELLED:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await take(batch)
        case Ending.UNDER_WAY:
            take(batch)
            take(batch)
            await graph.run()


EXPECTED: dict[Ending, contextlib.AbstractContextManager[Any]] = {
    Ending.SUCCESS: contextlib.nullcontext(),
    Ending.EXCEPTION: pytest.raises(KeyError, match="planted"),
    Ending.CANCELLED: pytest.raises(asyncio.CancelledError),
    Ending.UNDER_WAY: contextlib.nullcontext(),
}


@pytest.mark.parametrize("ending", Ending)
@pytest.mark.parametrize("loop", LOOPS)
def test_nothing_stays_behind_however_a_cluster_is_left(
    loop: Loop, ending: Ending, batch: Batch, directory: Path
) -> None:
    leave(0, loop, ending, batch, directory)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("loop", "ending"),
    [
        (new_event_loop, Ending.UNDER_WAY),
        (new_event_loop, Ending.EXCEPTION),
        (asyncio.new_event_loop, Ending.CANCELLED),
        (asyncio.new_event_loop, Ending.SUCCESS),
    ],
)
def test_no_process_stays_behind_however_a_cluster_is_left(
    loop: Loop, ending: Ending, batch: Batch, directory: Path
) -> None:
    leave(2, loop, ending, batch, directory)


def leave(workers: int, loop: Loop, ending: Ending, batch: Batch, directory: Path) -> None:
    """Enter a cluster, use it, leave it, and look around."""

    async def main() -> None:
        with EXPECTED[ending]:
            async with myelin.Cluster(workers) as cluster:
                assert len(worker_ids()) == workers
                assert len(directories(directory)) == bool(workers)
                await use(cluster, batch, ending)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert worker_ids() == []
        assert directories(directory) == []

    run(main(), loop)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_cluster_lives_in_the_loop_of_any_thread(workers: int, batch: Batch) -> None:
    failures: list[BaseException] = []

    async def main() -> None:
        async with myelin.Cluster(workers) as cluster:
            await use(cluster, batch, Ending.SUCCESS)

    def notebook() -> None:
        try:
            myelin.run(main)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=notebook)
    thread.start()
    thread.join()
    assert not failures


async def test_several_clusters_can_be_open_at_once(batch: Batch) -> None:
    async with myelin.Cluster(0) as one, myelin.Cluster(0) as other:
        trainers = [await cluster.trainer(MODEL, plan=PLAN) for cluster in (one, other)]
        first, second = [(await trainer.step(batch)).loss for trainer in trainers]
        assert first == second


# Cancelled while it starts


def spawned(directory: Path) -> bool:
    return len(worker_ids()) == 2


def listening(directory: Path) -> bool:
    return any(directory.glob("myelin-*/w0"))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("moment", [spawned, listening])
def test_nothing_stays_behind_when_the_start_is_cancelled_more_than_once(
    moment: Callable[[Path], bool], directory: Path
) -> None:
    async def enter() -> None:
        async with myelin.Cluster(workers=2):
            await asyncio.Event().wait()

    async def main() -> None:
        entering = asyncio.create_task(enter())
        await until(lambda: moment(directory))
        started = worker_ids()
        for _ in range(3):
            entering.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await entering
        assert not any(map(is_alive, started))
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert directories(directory) == []

    run(main(), new_event_loop)


def test_a_start_that_takes_too_long_can_be_given_up() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0), myelin.Cluster(workers=2):
                raise AssertionError("it cannot be that quick")

    run(main(), new_event_loop)


# Left again and again while it is being left


@pytest.mark.slow
@pytest.mark.processes
def test_leaving_goes_on_to_its_end_however_often_it_is_cancelled(gate: Gate) -> None:
    async def leave(entered: asyncio.Event) -> None:
        async with myelin.Cluster(workers=1) as cluster, cluster.graph() as graph:
            await graph.op(ops.pass_gate, gate.path)
            entered.set()

    async def main() -> None:
        leaving = asyncio.create_task(leave(asyncio.Event()))
        await until(lambda: gate.reached)
        (worker,) = worker_ids()
        while not leaving.done():
            leaving.cancel()
            await asyncio.sleep(0)
        assert leaving.cancelled()
        assert not is_alive(worker)

    run(main(), new_event_loop)


@pytest.mark.slow
@pytest.mark.processes
def test_no_worker_is_killed_that_might_have_to_clear_up_after_us(
    gate: Gate, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We may be killed at any moment; then the directory is removed by a worker, or it is gone."""
    left_at_kills: list[list[Path]] = []
    kill = LocalProcess.kill

    def watched(process: LocalProcess) -> None:
        left_at_kills.append(directories(directory))
        kill(process)

    async def main() -> None:
        async with myelin.Cluster(workers=2) as cluster:
            graph = cluster.graph()
            graph.op(ops.pass_gate, gate.path)
            await graph.run()
            await until(lambda: gate.reached)

    monkeypatch.setattr(LocalProcess, "kill", watched)
    run(main(), new_event_loop)
    assert left_at_kills == [[], []]


def test_a_thread_is_waited_for_also_when_leaving_is_cancelled(gate: Gate) -> None:
    async def leave() -> None:
        async with myelin.Cluster(workers=0) as cluster, cluster.graph() as graph:
            await graph.op(ops.pass_gate, gate.path)

    async def main() -> None:
        leaving = asyncio.create_task(leave())
        await until(lambda: gate.reached)
        for _ in range(100):
            leaving.cancel()
            await asyncio.sleep(0)
        assert not leaving.done()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await leaving

    run(main(), new_event_loop)


@pytest.mark.parametrize("stream", ["compute", "comm"])
def test_leaving_starts_no_more_ops(gate: Gate, stream: str) -> None:
    second = Gate(f"{gate.path}.second")

    async def main() -> None:
        async with myelin.Cluster(workers=0) as cluster:
            graph = cluster.graph()
            first = graph.op(ops.pass_gate, gate.path, stream=stream)
            graph.op(ops.pass_gate, second.path, first, worker=0)
            graph.op(ops.pass_gate, second.path, first, worker=1)
            await graph.run()
            await until(lambda: gate.reached)
            asyncio.get_running_loop().call_later(0.05, gate.open)

    run(main(), new_event_loop)
    assert not second.reached


# Bad use


@pytest.mark.parametrize("workers", [-1, 1.5, "2", None, True])
def test_a_number_of_workers_that_is_none_is_refused(workers: Any) -> None:
    with pytest.raises(ValueError, match=r"workers="):
        myelin.Cluster(workers)


@pytest.mark.parametrize(
    "setting", [{"threads": 0}, {"silence_s": 0}, {"hello_deadline_s": -1}, {"data_timeout_s": 0.0}]
)
def test_settings_that_cannot_be_are_refused_before_anything_starts(
    setting: dict[str, Any],
) -> None:
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        myelin.Cluster(2, **setting)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"threads": "2"}, "threads='2': use a whole number of at least 1 and below 1025, or None"),
        ({"threads": 1.5}, "threads=1.5"),
        ({"threads": True}, "threads=True"),
        ({"threads": 10**6}, f"threads=1000000: .*this machine has {os.cpu_count()} cores"),
        ({"silence_s": "5"}, "silence_s='5': use a number of seconds above 0"),
        ({"silence_s": float("nan")}, "silence_s=nan"),
        ({"data_timeout_s": None}, "data_timeout_s=None"),
        ({"jitter": 3}, r"jitter=3: use myelin\.Jitter\(\.\.\.\), or None"),
    ],
)
def test_settings_of_a_wrong_type_are_refused_before_anything_starts(
    setting: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        myelin.Cluster(2, **setting)


async def test_a_cluster_must_be_entered_first() -> None:
    cluster = myelin.Cluster(0)
    assert repr(cluster) == "<Cluster in the calling process, not entered yet>"
    with pytest.raises(ClusterError, match=r"not entered yet: use it inside"):
        cluster.graph()
    with pytest.raises(ClusterError, match="not entered yet"):
        await cluster.trainer(MODEL)


async def test_a_cluster_can_be_entered_only_once() -> None:
    cluster = myelin.Cluster(0)
    async with cluster:
        with pytest.raises(ClusterError, match="make a new one"):
            await cluster.__aenter__()
        assert await cluster.graph().op(ops.plus, 1, 1) == 2
    with pytest.raises(ClusterError, match="left already; make a new one"):
        await cluster.__aenter__()


async def test_nothing_of_a_cluster_works_once_it_was_left(batch: Batch) -> None:
    async with myelin.Cluster(0) as cluster:
        trainer = await cluster.trainer(MODEL, plan=PLAN)
        step = trainer.step(batch)
        await step
        graph = cluster.graph()
        op = graph.op(ops.plus, 1, 1)
        run = await graph.run(keep=[])
        await run
    assert "left already" in repr(cluster)
    with pytest.raises(ClusterError, match="left already: use it inside"):
        cluster.graph()
    for use in (lambda: trainer.step(batch), lambda: trainer.predict(batch[0])):
        with pytest.raises(ClusterError, match="was left: use it inside its `async with` block"):
            use()
    for call in (trainer.weights(), trainer.gradients(batch), graph.run()):
        with pytest.raises(ClusterError, match="was left"):
            await call
    with pytest.raises(ClusterError, match="was left"):
        await run[op]
    assert (await step).index == 0  # what is known stays known


@pytest.mark.parametrize("error", [None, KeyError])
async def test_leaving_with_something_under_way_is_told_unless_there_was_an_error(
    gate: Gate, error: type[Exception] | None, caplog: pytest.LogCaptureFixture, batch: Batch
) -> None:
    gate.open()
    with contextlib.suppress(KeyError):
        async with myelin.Cluster(0) as cluster:
            trainer = await cluster.trainer(MODEL, plan=PLAN)
            for _ in range(3):
                trainer.step(batch)
            if error is not None:
                raise error
    told = "the cluster was left with 3 runs under way; await them first"
    assert caplog.messages == ([told] if error is None else [])


def test_a_cluster_cannot_be_used_from_another_loop(batch: Batch) -> None:
    async def enter() -> tuple[myelin.Cluster, myelin.Trainer]:
        cluster = myelin.Cluster(0)
        await cluster.__aenter__()
        return cluster, await cluster.trainer(MODEL, plan=PLAN)

    async def use(trainer: myelin.Trainer) -> None:
        with pytest.raises(ClusterError, match="belongs to another event loop"):
            trainer.step(batch)
        with pytest.raises(ClusterError, match="belongs to another event loop"):
            await trainer.weights()

    async def main() -> None:
        cluster, trainer = await enter()
        thread = threading.Thread(target=lambda: asyncio.run(use(trainer)))
        thread.start()
        await asyncio.to_thread(thread.join)
        await trainer.step(batch)
        await cluster.__aexit__(None, None, None)

    run(main(), new_event_loop)


def test_a_cluster_cannot_be_used_once_its_loop_is_gone(batch: Batch) -> None:
    first, second = new_event_loop(), new_event_loop()
    cluster = myelin.Cluster(0)

    async def enter() -> myelin.Trainer:
        await cluster.__aenter__()
        return await cluster.trainer(MODEL, plan=PLAN)

    async def use(trainer: myelin.Trainer) -> None:
        with pytest.raises(ClusterError, match="belongs to another event loop"):
            trainer.step(batch)

    trainer = first.run_until_complete(enter())
    second.run_until_complete(use(trainer))
    with pytest.raises(ClusterError, match="belongs to another event loop"):
        trainer.step(batch)
    first.run_until_complete(cluster.__aexit__(None, None, None))
    for loop in (first, second):
        loop.close()


async def test_threads_inside_the_process_are_as_many_as_the_callers() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        async with myelin.Cluster(0) as cluster, cluster.graph() as graph:
            assert await graph.op(torch.get_num_threads) == 3
    finally:
        torch.set_num_threads(before)


async def test_what_was_under_way_when_a_cluster_was_left_says_so(gate: Gate) -> None:
    gate.open()
    async with myelin.Cluster(0) as cluster:
        graph = cluster.graph()
        op = graph.op(ops.pass_gate, gate.path)
        run = await graph.run()
        value = run[op]
    for awaited in (run, value):
        with pytest.raises(ClusterError, match="left while this was under way"):
            await awaited


# Growing inside the calling process


async def test_workers_inside_the_process_come_as_plans_ask_for_them_also_all_at_once(
    batch: Batch,
) -> None:
    async with myelin.Cluster(0) as cluster:
        trainers = await asyncio.gather(
            *(cluster.trainer(MODEL, plan=myelin.Plan(pipeline=p)) for p in (2, 1, 3, 2))
        )
        losses = [(await trainer.step(batch)).loss for trainer in trainers]
        assert len(set(losses)) == 1
        graph = cluster.graph()
        value = graph.op(ops.plus, 1, worker=4)
        assert await graph.op(ops.plus, value, 1, worker=0) == 2
        again = await asyncio.gather(*(trainer.step(batch) for trainer in trainers))
        assert len({step.loss for step in again}) == 1


@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 5, 8])
async def test_trainers_can_be_asked_for_while_workers_are_being_added(
    ticks: int, batch: Batch
) -> None:
    async with myelin.Cluster(0) as cluster:
        first = asyncio.create_task(cluster.trainer(MODEL, plan=PLAN))
        for _ in range(ticks):
            await asyncio.sleep(0)
        second = await cluster.trainer(MODEL, plan=PLAN)
        losses = [(await trainer.step(batch)).loss for trainer in (second, await first)]
        assert losses[0] == losses[1]


@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89])
async def test_a_trainer_can_be_given_up_at_any_moment(ticks: int, batch: Batch) -> None:
    async with myelin.Cluster(0) as cluster:
        asking = asyncio.create_task(cluster.trainer(MODEL, plan=PLAN))
        for _ in range(ticks):
            await asyncio.sleep(0)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        trainer = await cluster.trainer(MODEL, plan=myelin.Plan(pipeline=3, microbatches=2))
        assert (await trainer.step(batch)).index == 0


@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89])
async def test_a_refusal_that_nobody_waits_for_any_more_does_no_harm(ticks: int) -> None:
    async with myelin.Cluster(0) as cluster:
        asking = asyncio.create_task(cluster.trainer(myelin.Model("nowhere:model")))
        for _ in range(ticks):
            await asyncio.sleep(0)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError, ModelError):
            await asking
        assert await cluster.graph().op(ops.plus, 1, 1) == 2


async def test_workers_inside_the_process_are_not_lost_however_short_the_silence(
    batch: Batch,
) -> None:
    async with myelin.Cluster(0, silence_s=0.05) as cluster:
        trainer = await cluster.trainer(MODEL, plan=PLAN)
        stop = asyncio.get_running_loop().time() + 0.3
        while asyncio.get_running_loop().time() < stop:
            await trainer.step(batch)


async def test_a_graph_that_was_left_takes_nothing_more() -> None:
    async with myelin.Cluster(0) as cluster:
        async with cluster.graph() as graph:
            op = graph.op(ops.plus, 1, 1)
            await op
        for call in (lambda: graph.op(ops.plus, 1), lambda: graph.input("x")):
            with pytest.raises(GraphError, match="left already"):
                call()
        with pytest.raises(GraphError, match="left already"):
            await graph.run()
        with pytest.raises((GraphError, RunError)):
            await op
