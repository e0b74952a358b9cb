"""What crosses from stage to stage; `test_user_models.py` compares whole steps of many models."""

import asyncio
from typing import Any

import pytest
import torch
from torch import nn

from myelin import SGD, AdamW, Cluster, Jitter, Model, Plan, Trainer
from myelin.errors import OpError
from myelin.testing import models
from myelin.testing.reference import PlainLoop, differing

SEED = 3
APART_AND_TOGETHER = pytest.mark.parametrize(
    "placement", [(0, 1), (0, 0)], ids=["apart", "together"]
)


def vectors(rows: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = torch.randn(2, rows, 4, generator=torch.Generator().manual_seed(0))
    return inputs.clone(), targets.clone()


async def trainer_of(cluster: Cluster, model: Model, **plan: Any) -> Trainer:
    return await cluster.trainer(
        model, plan=Plan(microbatches=3, **plan), optimizer=AdamW(lr=1e-2), seed=SEED
    )


def loop_of(model: Model) -> PlainLoop:
    return PlainLoop(model, AdamW(lr=1e-2), seed=SEED, microbatches=3)


# Values under way


@APART_AND_TOGETHER
@pytest.mark.parametrize("cut", [1, 3, 5])
async def test_a_value_is_what_the_stage_returned_whatever_the_next_one_writes_into_it(
    cut: int, placement: tuple[int, int]
) -> None:
    model, (inputs, _) = Model(models.inplace), vectors()
    first = loop_of(model)
    first.model = nn.Sequential(*list(first.model)[:cut])
    expected = first.predict(inputs)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, model, pipeline=2, cuts=(cut,), placement=placement)
        prediction = trainer.predict(inputs)
        values = [prediction.op("forward", stage=0, microbatch=number) for number in range(3)]
        assert all(map(torch.equal, await asyncio.gather(*values), expected))


@APART_AND_TOGETHER
async def test_a_tensor_that_stands_twice_is_one_value_with_one_gradient(
    placement: tuple[int, int],
) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(
            cluster, Model(models.doubled), pipeline=2, cuts=(2,), placement=placement
        )
        step = trainer.step(vectors())
        value = step.op("forward", stage=0, microbatch=0)
        gradient = step.op("backward", stage=1, microbatch=0)
        for one, other in await asyncio.gather(value, gradient):
            assert one is other


@pytest.mark.parametrize("pipeline", [2, 4])
async def test_values_that_alias_a_buffer_hold_still_whatever_the_timing(pipeline: int) -> None:
    model = Model(models.carrying)
    loop = loop_of(model)
    losses = [loop.step(vectors()) for _ in range(10)]
    async with Cluster(
        workers=0, threads=1, jitter=Jitter(seed=1, op_s=0.0003, message_s=0.0005)
    ) as cluster:
        trainer = await trainer_of(cluster, model, pipeline=pipeline)
        steps = [trainer.step(vectors()) for _ in range(10)]
        assert [(await step).loss for step in steps] == losses
        assert differing(await trainer.weights(), loop.weights()) == []


# Batches


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("kind", ["gaps", "turned", "expanded"])
async def test_a_batch_lies_in_the_models_memory_as_it_lay_in_the_callers(
    kind: str, pipeline: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(11, 64, 512, generator=generator)
    batches = {
        "gaps": table[..., ::2],
        "turned": table.transpose(1, 2),
        "expanded": table[..., :1].expand(11, 64, 512),
    }
    inputs = batches[kind]
    target = torch.randn(*inputs.shape[:-1], 4, generator=generator)
    model = Model(models.summing)
    loop = loop_of(model)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, model, pipeline=pipeline)
        gradients = await trainer.gradients((inputs, target))
    assert differing(gradients, loop.gradients((inputs, target))) == []


# Random numbers


@pytest.mark.parametrize("pipeline", [1, 2, 4])
async def test_what_draws_in_evaluation_draws_what_the_plain_loop_draws(pipeline: int) -> None:
    model, (inputs, targets) = Model(models.noisy), vectors()
    loop = loop_of(model)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, model, pipeline=pipeline)
        for _ in range(2):
            expected = loop.evaluate((inputs, targets))
            assert (await trainer.evaluate((inputs, targets))).loss == expected
            assert (await trainer.evaluate((inputs, targets))).loss == expected
            assert torch.equal(await trainer.predict(inputs), torch.cat(loop.predict(inputs)))
            assert (await trainer.step((inputs, targets))).loss == loop.step((inputs, targets))


# Gradients


@pytest.mark.parametrize("pipeline", [1, 2])
async def test_gradients_are_of_their_own_batch_though_an_earlier_one_was_not_collected(
    pipeline: int,
) -> None:
    model, (_, targets) = Model(models.routed), vectors(3)
    inputs = torch.ones(3, 4)
    loop = loop_of(model)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, model, pipeline=pipeline)
        abandoned = asyncio.ensure_future(trainer.gradients((-inputs, targets)))
        await asyncio.sleep(0)  # it has been asked for
        abandoned.cancel()
        found = await trainer.gradients((inputs, targets))
    expected = loop.gradients((inputs, targets))
    assert "0.layers.0.weight" not in expected
    assert differing(found, expected) == []


# Blame


@pytest.mark.parametrize("plan", [{}, {"pipeline": 2, "cuts": (2,)}, {"pipeline": 2, "cuts": (4,)}])
async def test_a_failing_backward_is_reported_with_the_block_that_made_the_tensor(
    plan: dict[str, Any],
) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, Model(models.failing_early), **plan)
        with pytest.raises(OpError, match="planted") as caught:
            await trainer.step(vectors())
        assert caught.value.block == 1


# Weights that two stages of one worker share


@pytest.mark.parametrize("model", [Model(models.shared), Model(models.standing_twice)])
async def test_ready_made_blocks_that_share_weights_are_trained_as_one(model: Model) -> None:
    loop = PlainLoop(model, SGD(lr=0.1), seed=SEED, microbatches=3)
    losses = [loop.step(vectors()) for _ in range(3)]
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=3, microbatches=3, placement=(0, 0, 0))
        trainer = await cluster.trainer(model, plan=plan, optimizer=SGD(lr=0.1), seed=SEED)
        assert [(await trainer.step(vectors())).loss for _ in range(3)] == losses
        assert differing(await trainer.weights(), loop.weights()) == []
