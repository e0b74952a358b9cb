"""Models of `myelin.testing.odd_models` on grids of every kind, against the plain loop."""

import pytest
import torch

from myelin import SGD, AdamW, Cluster, Model, Plan
from myelin.runtime.optimizer import Optimizer
from myelin.testing import odd_models
from myelin.testing.reference import PlainLoop, differing

Batch = tuple[torch.Tensor, torch.Tensor]

MODELS = [
    "transposed",
    "channels_last",
    "written_views",
    "without_elements",
    "stopped",
    "not_persistent",
    "none_at_first",
    "registered_late",
    "expanded_buffer",
    "last_batch",
    "three_precisions",
    "all_frozen_first",
]
PLANS = {
    "one stage": Plan(microbatches=2),
    "stages": Plan(pipeline=3, microbatches=2),
    "recomputed": Plan(microbatches=2, checkpoint=1),
    "stages recomputed": Plan(pipeline=2, microbatches=2, checkpoint=2),
    "replicas": Plan(pipeline=2, data=2, microbatches=2, bucket=7, coarsening=1),
    "three replicas": Plan(data=3, microbatches=2),
    "replicas recomputed": Plan(data=2, microbatches=2, checkpoint=2, bucket=50),
}


def vectors(step: int, rows: int = 11) -> Batch:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, rows, odd_models.WIDTH, generator=generator)
    return inputs.clone(), targets.clone()


async def assert_equal_to_the_plain_loop(model: Model, plan: Plan, optimizer: Optimizer) -> None:
    loop = PlainLoop(model, optimizer, microbatches=plan.microbatches, replicas=plan.data)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await cluster.trainer(model, plan=plan, optimizer=optimizer)
        for step in range(4):
            assert (await trainer.step(vectors(step))).loss == loop.step(vectors(step))
        before = await trainer.weights()
        gradients = await trainer.gradients(vectors(9))
        assert differing(gradients, loop.gradients(vectors(9))) == []
        assert differing(await trainer.weights(), before) == []
        assert (await trainer.step(vectors(5))).loss == loop.step(vectors(5))
        assert differing(await trainer.weights(), loop.weights()) == []


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("name", MODELS)
async def test_an_odd_model_equals_the_plain_loop(name: str, plan: Plan) -> None:
    model = Model(f"myelin.testing.odd_models:{name}")
    await assert_equal_to_the_plain_loop(model, plan, AdamW(lr=0.01, weight_decay=0.1))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
async def test_a_sparse_gradient_equals_the_plain_loops(plan: Plan) -> None:
    """Replicas sum it as a dense one: what several rows add to one place is rounded once more."""
    model, optimizer = Model("myelin.testing.odd_models:sparse_gradient"), SGD(lr=0.1)
    loop = PlainLoop(model, optimizer, microbatches=plan.microbatches, replicas=plan.data)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await cluster.trainer(model, plan=plan, optimizer=optimizer)
        found = [(await trainer.step(vectors(step))).loss for step in range(4)]
        expected = [loop.step(vectors(step)) for step in range(4)]
        weights = await trainer.weights()
    if plan.data == 1:
        assert found == expected
        assert differing(weights, loop.weights()) == []
    assert found == pytest.approx(expected, rel=1e-6)
    for name, weight in loop.weights().items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=2**-20)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("name", ["none_at_first", "registered_late", "expanded_buffer"])
async def test_a_skipped_first_step_leaves_buffers_as_they_were(name: str, plan: Plan) -> None:
    model, bad = Model(f"myelin.testing.odd_models:{name}"), vectors(99)
    bad[0][:, 1] = float("nan")
    loop = PlainLoop(model, AdamW(), microbatches=plan.microbatches, replicas=plan.data)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await cluster.trainer(model, plan=plan)
        assert (await trainer.step(bad)).skipped
        assert differing(await trainer.weights(), loop.weights()) == []
        for step in range(3):
            assert (await trainer.step(vectors(step))).loss == loop.step(vectors(step))
        assert differing(await trainer.weights(), loop.weights()) == []
