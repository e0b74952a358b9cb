"""What becomes of runs when ops raise, callers give up and workers die."""

import asyncio
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import myelin
from myelin.errors import (
    ClusterError,
    HandshakeError,
    ModelError,
    MyelinError,
    OpError,
    PlanError,
    RunCancelled,
    RunError,
    WorkerLost,
)
from myelin.runtime.stage import Stage
from myelin.testing import ops
from myelin.testing.ops import Gate
from myelin.testing.watching import until, worker_ids

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]

MLP = myelin.Model("myelin.testing.models:mlp")
PLAN = myelin.Plan(pipeline=2, microbatches=3, cuts=[1])
DEADLINE_S = 60.0  # far more than it should take

pytestmark = pytest.mark.asyncio(loop_scope="module")


def failing(where: str, block: int, microbatch: int, step: int = 0) -> myelin.Model:
    return myelin.Model(
        "myelin.testing.models:failing",
        where=where,
        block=block,
        microbatch=microbatch,
        step=step,
        microbatches=PLAN.microbatches,
    )


def gated(gate: Gate, where: str, block: int, call: int) -> myelin.Model:
    return myelin.Model(ops.gated, gate=gate.path, where=where, block=block, call=call)


async def same_as_without(
    cluster: myelin.Cluster, trainer: myelin.Trainer, batch: Batch, *, steps: int
) -> None:
    """Assert that a trainer is where one is that took so many steps, and that both go on alike."""
    other = await cluster.trainer(MLP, plan=PLAN)
    for _ in range(steps):
        await other.step(batch)
    expected, found = await other.step(batch), await trainer.step(batch)
    assert (found.index, found.loss) == (steps, expected.loss)
    assert trainer.steps_done == steps + 1
    assert_same(await trainer.weights(), await other.weights())


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert the same bits; names of wrapped blocks have an `inner` in them."""
    plain = {name.replace(".inner.", "."): tensor for name, tensor in found.items()}
    assert plain.keys() == {name.replace(".inner.", ".") for name in expected}
    for name, tensor in expected.items():
        assert torch.equal(plain[name.replace(".inner.", ".")], tensor), name


# Ops that raise


@pytest.mark.parametrize("microbatch", [0, 2])
@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
async def test_a_block_that_raises_is_named_and_leaves_the_trainer_as_it_was(
    cluster: myelin.Cluster, batch: Batch, where: str, block: int, microbatch: int
) -> None:
    trainer = await cluster.trainer(failing(where, block, microbatch, step=1), plan=PLAN)
    await trainer.step(batch)
    before = await trainer.weights()
    with pytest.raises(OpError) as caught:
        await trainer.step(batch)
    stage, error = min(block, 1), caught.value
    assert (error.worker, error.stage) == (stage, stage)
    assert (error.kind, error.microbatch, error.block) == (where, microbatch, block)
    place = f"{where} on worker {stage}, stage {stage}, microbatch {microbatch}, block {block}"
    assert str(error).startswith(f"{place} raised RuntimeError: planted\n\nTraceback")
    assert "myelin/testing/models.py" in error.remote_traceback
    assert_same(await trainer.weights(), before)
    await same_as_without(cluster, trainer, batch, steps=1)


async def test_a_failed_step_takes_the_one_behind_it_along(
    cluster: myelin.Cluster, batch: Batch
) -> None:
    trainer = await cluster.trainer(failing("backward", 0, 1, step=1), plan=PLAN)
    steps = [trainer.step(batch) for _ in range(4)]
    assert (await steps[0]).index == 0
    with pytest.raises(OpError, match="planted"):
        await steps[1]
    for step in steps[2:]:
        with pytest.raises(RunError, match=r"the run before it failed: backward on worker 0.*"):
            await step
    await same_as_without(cluster, trainer, batch, steps=1)


async def test_a_failed_step_leaves_those_before_it_alone(
    cluster: myelin.Cluster, batch: Batch
) -> None:
    trainer = await cluster.trainer(failing("forward", 2, 2, step=1), plan=PLAN)
    first, second = trainer.step(batch), trainer.step(batch)
    with pytest.raises(OpError):
        await second
    assert (await first).index == 0
    await same_as_without(cluster, trainer, batch, steps=1)


async def test_a_failed_evaluation_does_not_keep_steps_from_going_on(
    cluster: myelin.Cluster, batch: Batch
) -> None:
    trainer = await cluster.trainer(failing("forward", 1, 1), plan=PLAN)
    evaluation, step = trainer.evaluate(batch), trainer.step(batch)
    with pytest.raises(OpError):
        await evaluation
    assert (await step).index == 0
    await same_as_without(cluster, trainer, batch, steps=1)


async def test_an_iteration_over_steps_ends_with_the_error_of_the_first_that_failed(
    cluster: myelin.Cluster, batch: Batch
) -> None:
    trainer = await cluster.trainer(failing("forward", 1, 1, step=2), plan=PLAN)
    seen: list[int] = []

    async def fit() -> None:
        async for step in trainer.fit([batch] * 8, ahead=2):
            assert step.index == len(seen)
            seen.append(step.index)

    with pytest.raises(OpError, match="planted"):
        await fit()
    assert seen == [0, 1]
    await same_as_without(cluster, trainer, batch, steps=2)


async def test_fifty_failures_in_a_row_leave_nothing_and_change_nothing(
    cluster: myelin.Cluster, batch: Batch
) -> None:
    inputs, targets = batch
    model = myelin.Model(ops.poisonable)
    trainer, other = [await cluster.trainer(model, plan=PLAN) for _ in range(2)]
    harmless = ({"x": inputs, "poison": torch.zeros(4, dtype=torch.int64)}, targets)
    probe = cluster.graph()
    counts = [probe.op(ops.tensors_alive, worker=worker) for worker in (0, 1)]

    async def alive() -> tuple[list[int], int, int]:
        run = await probe.run()
        tensors = [await run[count] for count in counts]
        return tensors, len(asyncio.all_tasks()), threading.active_count()

    held = None
    for number in range(50):
        code = (1, -3, 3, -1, 2, -2)[number % 6]
        poison = torch.zeros(4, dtype=torch.int64)
        poison[number % 4] = code
        bad = ({"x": inputs, "poison": poison}, targets)
        steps = [trainer.step(each) for each in (harmless, bad, harmless)[: 1 + number % 3]]
        for index, step in enumerate(steps):
            if index == 0:
                assert (await step).loss == (await other.step(harmless)).loss
            else:
                with pytest.raises(RunError) as caught:
                    await step
                assert isinstance(caught.value, OpError) == (index == 1)
                assert "planted" in str(caught.value)
        if number == 10:
            held = await alive()
    assert await alive() == held
    assert_same(await trainer.weights(), await other.weights())


async def test_a_failed_step_that_nobody_awaits_is_told_by_asyncio(
    inside: myelin.Cluster, batch: Batch, noise: list[str]
) -> None:
    trainer = await inside.trainer(failing("forward", 1, 1), plan=PLAN)
    trainer.step(batch)
    await trainer.weights()  # by then the step is over everywhere
    await asyncio.sleep(0)
    gc.collect()
    assert len(noise) == 1
    assert "exception was never retrieved" in noise[0]
    assert "planted" in noise[0]
    noise.clear()


# Callers that give up


async def test_a_running_step_can_be_cancelled_and_its_number_is_free_again(
    cluster: myelin.Cluster, batch: Batch, gate: Gate
) -> None:
    trainer = await cluster.trainer(gated(gate, "backward", 1, 1), plan=PLAN)
    before = await trainer.weights()
    running, behind = trainer.step(batch), trainer.step(batch)
    await until(lambda: gate.reached)
    running.cancel()
    with pytest.raises(RunCancelled, match="no weight was changed"):
        await running
    with pytest.raises(RunError, match="before it failed: the run was cancelled"):
        await behind
    running.cancel()
    gate.open()
    assert_same(await trainer.weights(), before)
    await same_as_without(cluster, trainer, batch, steps=0)


async def test_a_queued_step_can_be_cancelled_and_takes_those_behind_it_along(
    cluster: myelin.Cluster, batch: Batch, gate: Gate
) -> None:
    plan = myelin.Plan(pipeline=2, microbatches=3, cuts=[1], steps_in_flight=1)
    trainer = await cluster.trainer(gated(gate, "forward", 0, 0), plan=plan)
    running, queued, last = [trainer.step(batch) for _ in range(3)]
    await until(lambda: gate.reached)
    queued.cancel()
    with pytest.raises(RunCancelled):
        await queued
    with pytest.raises(RunError, match="the run before it was cancelled"):
        await last
    gate.open()
    assert (await running).index == 0
    await same_as_without(cluster, trainer, batch, steps=1)


async def test_a_cancelled_evaluation_does_not_keep_steps_from_going_on(
    cluster: myelin.Cluster, batch: Batch, gate: Gate
) -> None:
    trainer = await cluster.trainer(gated(gate, "forward", 2, 1), plan=PLAN)
    running, step, queued, last = (
        trainer.evaluate(batch),
        trainer.step(batch),
        trainer.evaluate(batch),
        trainer.step(batch),
    )
    await until(lambda: gate.reached)
    queued.cancel()
    running.cancel()
    gate.open()
    assert ((await step).index, (await last).index) == (0, 1)
    for evaluation in (running, queued):
        with pytest.raises(RunCancelled):
            await evaluation
    await same_as_without(cluster, trainer, batch, steps=2)


async def test_a_step_whose_updates_have_begun_is_finished_instead_of_cancelled(
    cluster: myelin.Cluster, batch: Batch, gate: Gate
) -> None:
    trainer = await cluster.trainer(myelin.Model(ops.gated_update, gate=gate.path), plan=PLAN)
    step = trainer.step(batch)
    await until(lambda: gate.reached)
    step.cancel()
    gate.open()
    assert (await step).index == 0
    step.cancel()
    assert (await step).index == 0
    await same_as_without(cluster, trainer, batch, steps=1)


async def test_giving_up_waiting_for_a_step_does_not_end_it(
    cluster: myelin.Cluster, batch: Batch, gate: Gate
) -> None:
    trainer = await cluster.trainer(gated(gate, "forward", 1, 0), plan=PLAN)
    step = trainer.step(batch)
    value = step.op("forward", stage=0, microbatch=0)

    async def wait() -> None:
        await step

    waiting = asyncio.create_task(wait())
    await until(lambda: gate.reached)
    waiting.cancel()
    value.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(step, 0)
    gate.open()
    assert (await step).index == 0
    await same_as_without(cluster, trainer, batch, steps=1)


async def test_a_half_done_update_ends_the_trainer_but_not_the_cluster(
    cluster: myelin.Cluster, batch: Batch, tmp_path: Path
) -> None:
    model = myelin.Model(ops.torn_update, path=str(tmp_path / "once"))
    trainer = await cluster.trainer(model, plan=PLAN)
    steps = trainer.step(batch), trainer.step(batch)
    with pytest.raises(OpError, match=r"update on worker \d, stage \d raised RuntimeError"):
        await steps[0]
    with pytest.raises(RunError):
        await steps[1]
    await trainer.weights()  # by then the run is over everywhere
    for use in (trainer.step, trainer.evaluate):
        with pytest.raises(RunError, match="some workers have updated their weights"):
            use(batch)
    other = await cluster.trainer(MLP, plan=PLAN)
    assert (await other.step(batch)).index == 0


async def test_a_run_that_cannot_be_undone_ends_the_trainer_but_not_the_cluster(
    inside: myelin.Cluster, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await inside.trainer(failing("forward", 1, 1), plan=PLAN)

    def fail(self: Stage) -> None:
        raise RuntimeError("no way back")

    with monkeypatch.context() as patched:
        patched.setattr(Stage, "discard", fail)
        with pytest.raises(OpError, match="planted"):
            await trainer.step(batch)
        await trainer.weights()  # by then the run is over everywhere
    with pytest.raises(RunError, match="some workers have updated their weights"):
        trainer.step(batch)
    other = await inside.trainer(MLP, plan=PLAN)
    assert (await other.step(batch)).index == 0


# Models that cannot be


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("nowhere.models:model", {}, "importing nowhere.models raised ModuleNotFoundError"),
    ("myelin.testing.ops:missing", {}, "has no function 'missing'"),
    ("myelin.testing.ops:no_model", {"message": "planted"}, "raised ValueError: planted"),
    ("myelin.testing.models:mlp", {"size": 3}, "size"),
    ("myelin.testing.ops:echo", {}, "."),
    ("myelin.testing.ops:unbuildable", {"block": 0}, "planted"),
    ("myelin.testing.ops:unbuildable", {"block": 2}, "planted"),
]


@pytest.mark.parametrize(("factory", "arguments", "text"), BAD)
async def test_a_model_that_cannot_be_made_is_refused_and_does_no_harm(
    cluster: myelin.Cluster, batch: Batch, factory: str, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ModelError, match=text):
        await cluster.trainer(myelin.Model(factory, **arguments), plan=PLAN)
    trainer = await cluster.trainer(MLP, plan=PLAN)
    assert (await trainer.step(batch)).index == 0


@pytest.mark.slow
@pytest.mark.processes
async def test_what_others_have_built_of_a_model_that_cannot_be_made_is_freed(
    outside: myelin.Cluster,
) -> None:
    async def alive() -> list[int]:
        async with outside.graph() as graph:
            counts = [graph.op(ops.tensors_alive, worker=worker) for worker in (0, 1)]
            run = await graph.run()
            return [await run[count] for count in counts]

    before = await alive()
    for _ in range(3):
        with pytest.raises(ModelError, match="planted"):
            await outside.trainer(myelin.Model(ops.unbuildable, block=2), plan=PLAN)
    assert await alive() == before


async def test_a_plan_that_does_not_fit_is_refused(cluster: myelin.Cluster) -> None:
    with pytest.raises(PlanError, match="4 stages"):
        await cluster.trainer(MLP, plan=myelin.Plan(pipeline=4, placement=[0, 1, 0, 1]))


@pytest.mark.slow
@pytest.mark.processes
async def test_a_plan_for_more_workers_than_there_are_is_refused(
    outside: myelin.Cluster,
) -> None:
    with pytest.raises(ClusterError, match=r"3 workers are needed and the cluster has 2"):
        await outside.trainer(MLP, plan=myelin.Plan(pipeline=3))


async def test_a_lambda_is_no_model() -> None:
    with pytest.raises(ModelError, match="cannot be imported by a worker"):
        myelin.Model(lambda: 1)


@pytest.mark.slow
@pytest.mark.processes
async def test_what_workers_print_comes_out_here_while_they_live(
    outside: myelin.Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    await outside.graph().op(ops.say, "one", "two", worker=1)
    seen = ""

    def said() -> bool:
        nonlocal seen
        seen += capfd.readouterr().err
        return "one" in seen and "two" in seen

    await until(said)
    assert sorted(seen.splitlines()) == ["[worker 1] one", "[worker 1] two"]


# Workers that die


@asynccontextmanager
async def two(**settings: Any) -> AsyncIterator[tuple[myelin.Cluster, list[int]]]:
    """Start two workers; gives the cluster, and the process of each."""
    known = set(worker_ids())
    async with myelin.Cluster(2, **settings) as cluster, asyncio.timeout(DEADLINE_S):
        graph = cluster.graph()
        places = [graph.op(os.getpid, worker=worker) for worker in (0, 1)]
        run = await graph.run()
        pids = [await run[place] for place in places]
        assert set(pids) == set(worker_ids()) - known
        yield cluster, pids


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("where", "block", "victim"),
    [("forward", 2, 1), ("backward", 0, 0), ("forward", 0, 1)],
    ids=lambda value: str(value),
)
async def test_a_worker_killed_in_the_middle_of_an_op_ends_all_that_is_awaited(
    batch: Batch, gate: Gate, where: str, block: int, victim: int
) -> None:
    async with two() as (cluster, pids):
        trainer = await cluster.trainer(gated(gate, where, block, 1), plan=PLAN)
        first, second = trainer.step(batch), trainer.step(batch)
        value = first.op("backward", stage=0, microbatch=2)
        await until(lambda: gate.reached)
        os.kill(pids[victim], signal.SIGKILL)
        for awaited in (first, second, value):
            with pytest.raises(WorkerLost) as caught:
                await awaited
            error = caught.value
            assert error.worker == victim
            assert str(error).startswith(f"worker {victim} was killed by SIGKILL")
            if victim == min(block, 1):
                assert error.doing == (
                    f"{where} on worker {victim}, stage {victim}, microbatch 1, block {block}"
                )
        with pytest.raises(ClusterError, match=r"cannot go on: worker . was killed by SIGKILL"):
            trainer.step(batch)
        for request in (trainer.weights(), cluster.trainer(MLP)):
            with pytest.raises(ClusterError, match="cannot go on"):
                await request


@pytest.mark.slow
@pytest.mark.processes
async def test_a_worker_killed_while_idle_is_told_at_the_next_use() -> None:
    async with two() as (cluster, pids):
        os.kill(pids[0], signal.SIGKILL)

        errors: list[ClusterError] = []

        def told() -> bool:
            try:
                cluster.graph()
            except ClusterError as error:
                errors.append(error)
            return bool(errors)

        await until(told)
        assert "worker 0 was killed by SIGKILL; it was running no op" in str(errors[0])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("victim", [0, 1])
async def test_a_worker_killed_while_tensors_are_under_way_is_the_one_that_is_named(
    victim: int,
) -> None:
    async with two() as (cluster, pids):
        graph = cluster.graph(limit=4)
        there = graph.op(ops.zeros, 16, worker=0)
        back = graph.op(ops.echo, there, worker=1)
        last = graph.op(ops.size, graph.op(ops.echo, back, worker=0), worker=0)
        runs = [await graph.run() for _ in range(60)]
        await runs[2]
        os.kill(pids[victim], signal.SIGKILL)
        with pytest.raises(WorkerLost, match=f"worker {victim} was killed by SIGKILL"):
            await runs[-1][last]


@pytest.mark.slow
@pytest.mark.processes
async def test_a_worker_that_is_silent_for_too_long_is_lost_but_not_while_it_starts() -> None:
    async with two(silence_s=1.5) as (cluster, pids):
        graph = cluster.graph()
        op = graph.op(ops.plus, 1, 1, worker=1)
        assert await op == 2
        os.kill(pids[1], signal.SIGSTOP)
        run = await graph.run()
        with pytest.raises(WorkerLost, match=r"worker 1 has been silent for \d\.\d s \(stopped"):
            await run


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        (ops.kill, (), "was killed by SIGKILL, while it ran: call of kill on worker 0"),
        (ops.die, (7,), "exited with code 7; its last words:\ncannot go on"),
        (ops.break_loop, (), "exited with code 70; its last words:\n"),
    ],
)
async def test_a_worker_that_ends_tells_why(
    function: Any, arguments: tuple[Any, ...], text: str, gate: Gate
) -> None:
    async with myelin.Cluster(1) as cluster, cluster.graph() as graph:
        op = graph.op(function, *arguments)
        last = graph.op(ops.pass_gate, gate.path, op)
        with pytest.raises(WorkerLost) as caught:
            await last
        assert text in str(caught.value)
        if function is ops.break_loop:
            assert "RuntimeError: a planted bug" in str(caught.value)


@pytest.mark.slow
@pytest.mark.processes
async def test_a_worker_killed_while_it_starts_is_named() -> None:
    known = set(worker_ids())
    cluster = myelin.Cluster(2)
    entering = asyncio.ensure_future(cluster.__aenter__())
    await until(lambda: len(set(worker_ids()) - known) == 2)
    last = max(set(worker_ids()) - known)
    os.kill(last, signal.SIGKILL)
    with pytest.raises(HandshakeError, match=r"worker \d was killed by SIGKILL before it said"):
        await entering
    assert set(worker_ids()) == known


def plant_start(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every Python process that imports from where we do begin with `code`."""
    (folder / "sitecustomize.py").write_text(code)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.slow
@pytest.mark.processes
async def test_a_worker_that_dies_at_import_says_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, sys; sys.stderr.write('no GPU, no fun\\n'); sys.stderr.flush(); os._exit(9)"
    plant_start(tmp_path, code, monkeypatch)
    with pytest.raises(HandshakeError) as caught:
        await myelin.Cluster(2).__aenter__()
    assert "exited with code 9; its last words:\nno GPU, no fun\n" in str(caught.value)


@pytest.mark.slow
@pytest.mark.processes
async def test_a_worker_that_does_not_start_in_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = worker_ids()
    plant_start(tmp_path, "import threading; threading.Event().wait()", monkeypatch)
    with pytest.raises(HandshakeError, match=r"did not say hello within 0\.5 s"):
        await myelin.Cluster(2, hello_deadline_s=0.5).__aenter__()
    assert worker_ids() == known


async def test_all_that_a_cluster_raises_is_of_one_family() -> None:
    for kind in (ClusterError, HandshakeError, OpError, RunCancelled, WorkerLost):
        assert issubclass(kind, MyelinError)
