"""Data parallelism: replicas share a batch and end every step with the same weights."""

import pytest
import torch

from myelin import SGD, AdamW, Cluster, Model, Plan, Schedule, Trainer
from myelin.errors import BatchError, ClusterError, OpError
from myelin.models.gpt import GPT
from myelin.models.model import Description
from myelin.runtime import messages as m
from myelin.runtime.jitter import Jitter
from myelin.runtime.optimizer import Optimizer
from myelin.testing import models, ops
from myelin.testing.reference import PlainLoop, differing

TIED = GPT(layers=3, hidden=12, heads=3, vocab=13, context=9, dropout=0.1)
UNTIED = GPT(layers=3, hidden=12, heads=3, vocab=13, context=9, tied=False)
OPTIMIZER = AdamW(lr=1e-2, max_norm=0.5, schedule=Schedule("linear", warmup=2, steps=9))
STEPS = 6

Batch = tuple[torch.Tensor, torch.Tensor]


def tokens(step: int, rows: int = 11) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 13, (rows, 9), generator=generator)
    targets = ids[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
    return ids[:, :-1].clone(), targets


def vectors(step: int, rows: int = 11, width: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, rows, width, generator=generator)
    return inputs.clone(), targets.clone()


async def assert_equal_to_the_plain_loop(
    cluster: Cluster, model: Description, plan: Plan, optimizer: Optimizer = OPTIMIZER
) -> None:
    make = tokens if isinstance(model, GPT) else vectors
    loop = PlainLoop(model, optimizer, microbatches=plan.microbatches, replicas=plan.data)
    trainer = await cluster.trainer(model, plan=plan, optimizer=optimizer)
    pending = [trainer.step(make(step)) for step in range(STEPS)]
    losses = [(await step).loss for step in pending]
    assert losses == [loop.step(make(step)) for step in range(STEPS)]
    assert differing(await trainer.gradients(make(99)), loop.gradients(make(99))) == []
    assert (await trainer.evaluate(make(99))).loss == loop.evaluate(make(99))
    prediction = await trainer.predict(make(99)[0])
    assert torch.equal(prediction, torch.cat(loop.predict(make(99)[0])))
    assert differing(await trainer.weights(), loop.weights()) == []
    await assert_replicas_agree(cluster, trainer)


async def assert_replicas_agree(cluster: Cluster, trainer: Trainer) -> None:
    coordinator = cluster._members.coordinator
    async with coordinator.pause(trainer._lane):
        parts = []
        for workers in trainer.plan.grid:
            own = await coordinator.requests.ask_all(
                lambda _, number: m.Collect(number, trainer._number, m.State.WEIGHTS),
                sorted(set(workers)),
            )
            parts.append({name: tensor for part in own for name, tensor in part.items()})
    for part in parts[1:]:
        assert differing(part, parts[0]) == []


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize(("pipeline", "data"), [(1, 2), (1, 3), (2, 2), (3, 2), (2, 4)])
@pytest.mark.parametrize("gpt", [TIED, UNTIED], ids=["tied", "untied"])
async def test_any_grid_equals_a_plain_loop_that_sums_the_same_way(
    gpt: GPT, pipeline: int, data: int, microbatches: int
) -> None:
    plan = Plan(pipeline=pipeline, data=data, microbatches=microbatches, bucket=101, coarsening=3)
    jitter = Jitter(seed=pipeline * data, op_s=0.0003, message_s=0.0005)
    async with Cluster(workers=0, threads=1, jitter=jitter) as cluster:
        await assert_equal_to_the_plain_loop(cluster, gpt, plan)


@pytest.mark.parametrize(
    "model",
    [
        Model(models.mlp, width=4),
        Model(models.mixed),
        Model(models.averaging),
        Model(models.shared),
        Model(models.dropping),
        Model(models.carrying),
        Model(models.resting),
    ],
    ids=lambda model: model.factory.rpartition(":")[2],
)
async def test_replicas_of_a_users_model_equal_the_plain_loop(model: Model) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=2, data=2, microbatches=2, bucket=7, coarsening=1)
        await assert_equal_to_the_plain_loop(cluster, model, plan, SGD(lr=0.1, momentum=0.9))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [(1, 1), (1, 7), (64, 3), (1000, 1), (1 << 22, 4)])
async def test_the_size_of_the_chunks_changes_no_bit(chunk: tuple[int, int]) -> None:
    bucket, coarsening = chunk
    model = Model(models.mlp, width=4)
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=2, data=3, microbatches=2, bucket=bucket, coarsening=coarsening)
        await assert_equal_to_the_plain_loop(cluster, model, plan)


async def test_several_stages_of_a_replica_may_share_a_worker() -> None:
    plan = Plan(pipeline=4, placement=(0, 1, 0, 1), data=2, microbatches=2, bucket=50)
    assert plan.grid == ((0, 1, 0, 1), (2, 3, 2, 3))
    async with Cluster(workers=0, threads=1) as cluster:
        await assert_equal_to_the_plain_loop(cluster, TIED, plan)


@pytest.mark.slow
@pytest.mark.processes
async def test_replicas_in_processes_equal_the_plain_loop() -> None:
    async with Cluster(workers=4, threads=1) as cluster:
        for gpt in (TIED, UNTIED):
            plan = Plan(pipeline=2, data=2, microbatches=3, bucket=200)
            await assert_equal_to_the_plain_loop(cluster, gpt, plan)


async def test_the_loss_does_not_depend_on_the_grid() -> None:
    losses = []
    async with Cluster(workers=0, threads=1) as cluster:
        for data, microbatches in ((1, 4), (2, 2), (4, 1)):
            plan = Plan(pipeline=2, data=data, microbatches=microbatches)
            trainer = await cluster.trainer(TIED, plan=plan, optimizer=SGD(lr=0.1))
            losses.append([(await trainer.step(tokens(step, rows=8))).loss for step in range(5)])
    assert losses[1] == pytest.approx(losses[0], rel=2e-6)
    assert losses[2] == pytest.approx(losses[0], rel=2e-6)


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 7, 8])
async def test_a_batch_with_few_rows_or_an_odd_number_is_shared_as_well(rows: int) -> None:
    plan = Plan(pipeline=1, data=2, microbatches=3)
    loop = PlainLoop(Model(models.mlp), SGD(lr=0.1), microbatches=3, replicas=2)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await cluster.trainer(Model(models.mlp), plan=plan, optimizer=SGD(lr=0.1))
        for step in range(3):
            batch = vectors(step, rows)
            assert (await trainer.step(batch)).loss == loop.step(batch)
        assert differing(await trainer.weights(), loop.weights()) == []


async def test_a_batch_without_a_row_for_each_replica_is_refused() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await cluster.trainer(Model(models.mlp), plan=Plan(data=3))
        for use in (trainer.step, trainer.evaluate):
            with pytest.raises(BatchError, match=r"2 rows for data=3 replicas: .* at least 3 in"):
                use(vectors(0, rows=2))
        with pytest.raises(BatchError, match="2 rows for data=3 replicas"):
            trainer.predict(vectors(0, rows=2)[0])
        assert (await trainer.step(vectors(0, rows=3))).index == 0


@pytest.mark.parametrize("row", [0, 10])
async def test_a_nan_in_one_replica_has_the_step_skipped_on_all(row: int) -> None:
    bad = vectors(99)
    bad[0][row, 1] = float("nan")
    plan = Plan(pipeline=2, data=2, microbatches=2)
    loop = PlainLoop(Model(models.mixed), OPTIMIZER, microbatches=2, replicas=2)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await cluster.trainer(Model(models.mixed), plan=plan, optimizer=OPTIMIZER)
        loop.step(vectors(0))
        assert not (await trainer.step(vectors(0))).skipped
        assert (await trainer.step(bad)).skipped
        assert differing(await trainer.weights(), loop.weights()) == []
        loop.steps += 1
        assert (await trainer.step(vectors(1))).loss == loop.step(vectors(1))
        assert differing(await trainer.weights(), loop.weights()) == []
        await assert_replicas_agree(cluster, trainer)


@pytest.mark.parametrize(("microbatch", "worker"), [(1, 0), (2, 2)])
async def test_an_op_that_raises_in_one_replica_ends_the_step_on_all(
    microbatch: int, worker: int
) -> None:
    plan = Plan(pipeline=2, cuts=[1], data=2, microbatches=2)
    poison = torch.zeros(8, dtype=torch.int64)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await cluster.trainer(Model(ops.poisonable), plan=plan, optimizer=OPTIMIZER)
        harmless = ({"x": vectors(0, 8)[0], "poison": poison}, vectors(0, 8)[1])
        await trainer.step(harmless)
        before = await trainer.weights()
        bad = poison.clone()
        bad[2 * microbatch] = -1
        with pytest.raises(OpError) as caught:
            await trainer.step(({"x": vectors(0, 8)[0], "poison": bad}, vectors(0, 8)[1]))
        error = caught.value
        assert (error.worker, error.stage, error.microbatch) == (worker, 0, microbatch)
        assert differing(await trainer.weights(), before) == []
        assert (await trainer.step(harmless)).index == 1
        await assert_replicas_agree(cluster, trainer)


async def test_assigned_weights_reach_every_replica() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=2, data=2)
        trainer = await cluster.trainer(TIED, plan=plan)
        new = {name: torch.full_like(t, 0.25) for name, t in (await trainer.weights()).items()}
        await trainer.assign(new)
        assert differing(await trainer.weights(), new) == []
        await assert_replicas_agree(cluster, trainer)


@pytest.mark.slow
@pytest.mark.processes
async def test_more_replicas_than_workers_are_refused() -> None:
    async with Cluster(workers=2) as cluster:
        with pytest.raises(ClusterError, match="4 workers are needed and the cluster has 2"):
            await cluster.trainer(Model(models.mlp), plan=Plan(pipeline=2, data=2))
