"""Parameter groups, schedules, clipping and skipped steps, on any cut of a model."""

import pytest
import torch

from myelin import SGD, AdamW, Cluster, Group, Model, Plan, Schedule
from myelin.errors import PlanError
from myelin.models.gpt import GPT
from myelin.runtime.optimizer import Optimizer
from myelin.testing import models, ops
from myelin.testing.reference import PlainLoop, differing

TIED = GPT(layers=3, hidden=12, heads=3, vocab=13, context=9, dropout=0.1)
UNTIED = GPT(layers=3, hidden=12, heads=3, vocab=13, context=9, tied=False)
STEPS = 20
FULL = {
    "max_norm": 0.5,
    "schedule": Schedule("cosine", warmup=4, steps=15, floor=0.1),
    "groups": (Group("*.bias", weight_decay=0.5, lr_scale=0.5), Group("0.*", lr_scale=2.0)),
}
OPTIMIZERS: list[Optimizer] = [
    AdamW(lr=1e-2, weight_decay=0.2, **FULL),  # type: ignore[arg-type]
    SGD(lr=0.5, momentum=0.9, weight_decay=0.1, **FULL),  # type: ignore[arg-type]
]

Batch = tuple[torch.Tensor, torch.Tensor]


def tokens(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 13, (7, 9), generator=generator)
    return ids[:, :-1].clone(), ids[:, 1:].clone()


def vectors(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, 7, 4, generator=generator)
    return inputs.clone(), targets.clone()


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [1, 2, 3])
@pytest.mark.parametrize("gpt", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adamw", "sgd"])
async def test_groups_schedule_and_clipping_equal_the_plain_loop(
    optimizer: Optimizer, gpt: GPT, pipeline: int
) -> None:
    loop = PlainLoop(gpt, optimizer, microbatches=3)
    norms = list[float]()
    expected = []
    for step in range(STEPS):
        gradients = loop.gradients(tokens(step)).values()
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        expected.append(loop.step(tokens(step)))
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=pipeline, microbatches=3)
        trainer = await cluster.trainer(gpt, plan=plan, optimizer=optimizer)
        results = [await trainer.step(tokens(step)) for step in range(STEPS)]
        assert [result.loss for result in results] == expected
        assert [result.gradient_norm for result in results] == norms
        assert max(norms) > 0.5  # so that something was clipped
        assert differing(await trainer.weights(), loop.weights()) == []
    rates = [optimizer.lr * optimizer.schedule.factor(step) for step in range(STEPS)]
    assert [result.lr for result in results] == rates
    assert not any(result.skipped for result in results)


async def test_a_norm_that_is_not_asked_for_is_not_there() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await cluster.trainer(Model(models.mlp))
        assert (await trainer.step(vectors(0))).gradient_norm is None


@pytest.mark.parametrize("pipeline", [1, 2, 3])
async def test_the_optimizers_defaults_are_the_same_on_any_cut(pipeline: int) -> None:
    loop = PlainLoop(TIED, AdamW(weight_decay=0.5), microbatches=3)
    for step in range(3):
        loop.step(tokens(step))
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=pipeline, microbatches=3)
        trainer = await cluster.trainer(TIED, plan=plan, optimizer=AdamW(weight_decay=0.5))
        for step in range(3):
            await trainer.step(tokens(step))
        assert differing(await trainer.weights(), loop.weights()) == []


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("block", [0, 1, 2])
async def test_a_gradient_of_nan_on_one_stage_leaves_all_stages_as_they_were(
    block: int, max_norm: float | None
) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await cluster.trainer(
            Model(ops.flawed, block=block),
            plan=Plan(pipeline=3, microbatches=2),
            optimizer=AdamW(lr=0.1, max_norm=max_norm),
        )
        before = await trainer.weights()
        results = [await trainer.step(vectors(step)) for step in range(3)]
        assert [result.skipped for result in results] == [True] * 3
        assert all(result.loss < float("inf") for result in results)
        assert differing(await trainer.weights(), before) == []


@pytest.mark.parametrize("optimizer", [AdamW(lr=0.1), SGD(lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("pipeline", [1, 2, 4])
@pytest.mark.parametrize("row", [0, 6])
async def test_a_skipped_step_leaves_no_trace_in_states_and_buffers(
    row: int, pipeline: int, optimizer: Optimizer
) -> None:
    model, bad = Model(models.mixed), vectors(99)
    bad[0][row, 2] = float("nan")
    loop = PlainLoop(model, optimizer, microbatches=3)
    expected = [loop.step(vectors(step)) for step in range(6)]
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=pipeline, microbatches=3)
        trainer = await cluster.trainer(model, plan=plan, optimizer=optimizer)
        batches = [vectors(0), vectors(1), bad, vectors(2), bad, bad, *map(vectors, (3, 4, 5))]
        results = [await step for step in [trainer.step(batch) for batch in batches]]
        assert [result.index for result in results] == list(range(9))
        assert [number for number, result in enumerate(results) if result.skipped] == [2, 4, 5]
        assert [result.loss for result in results if not result.skipped] == expected
        assert differing(await trainer.weights(), loop.weights()) == []


async def test_a_pattern_that_fits_no_parameter_is_refused() -> None:
    optimizer = AdamW(groups=(Group("*.bias"), Group("*.wieght")))
    async with Cluster(workers=0, threads=1) as cluster:
        with pytest.raises(PlanError, match=r"'\*\.wieght'.* fits no parameter; .*0\.0\.bias"):
            await cluster.trainer(Model(models.mlp), optimizer=optimizer)
        trainer = await cluster.trainer(Model(models.mlp))
        assert (await trainer.step(vectors(0))).index == 0
