"""fp32, one intra-op thread: what any pipeline computes equals a plain loop to the last bit."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import pytest_asyncio
import torch

from myelin import SGD, AdamW, Cluster, Jitter, Model, Plan
from myelin.models.gpt import GPT
from myelin.models.model import Description
from myelin.runtime.optimizer import Optimizer
from myelin.testing import models
from myelin.testing.reference import PlainLoop, differing

STEPS = 20
ADAMW = AdamW(lr=3e-3)
SEED = 7  # of weights and dropout

TIED = GPT(layers=3, hidden=12, heads=3, vocab=13, context=9)
UNTIED = GPT(layers=3, hidden=12, heads=3, vocab=13, context=9, tied=False)
DROPPING = GPT(layers=3, hidden=12, heads=3, vocab=13, context=9, dropout=0.1)


def tokens(step: int, *, rows: int = 11, length: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a batch that can be learnt, in which a fifth of the targets is ignored."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, 13, (rows, 1), generator=generator)
    run = (start + 3 * torch.arange(length + 1)) % 13
    targets = run[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
    return run[:, :-1].clone(), targets


def vectors(step: int, *, rows: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, rows, 4, generator=generator)
    return inputs.clone(), targets.clone()


def batch_for(model: Description, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens(step) if isinstance(model, GPT) else vectors(step)


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    gradients: dict[str, torch.Tensor]  # of one more batch, after the last step
    weights: dict[str, torch.Tensor]

    def differences(self, other: "Outcome") -> list[str]:
        losses = [f"loss {i}" for i, own in enumerate(self.losses) if own != other.losses[i]]
        gradients = [f"gradient of {n}" for n in differing(self.gradients, other.gradients)]
        return [*losses, *gradients, *differing(self.weights, other.weights)]


@cache
def plain(
    model: Description, optimizer: Optimizer, microbatches: int, steps: int = STEPS
) -> Outcome:
    loop = PlainLoop(model, optimizer, seed=SEED, microbatches=microbatches)
    losses = [loop.step(batch_for(model, step)) for step in range(steps)]
    return Outcome(losses, loop.gradients(batch_for(model, steps)), loop.weights())


async def trained(
    cluster: Cluster,
    model: Description,
    plan: Plan,
    optimizer: Optimizer = ADAMW,
    steps: int = STEPS,
) -> Outcome:
    """Train with as many steps in flight as the plan allows."""
    trainer = await cluster.trainer(model, plan=plan, optimizer=optimizer, seed=SEED)
    pending = [trainer.step(batch_for(model, step)) for step in range(steps)]
    losses = [(await step).loss for step in pending]
    gradients = await trainer.gradients(batch_for(model, steps))
    return Outcome(losses, gradients, await trainer.weights())


def shaken(seed: int) -> Jitter:
    return Jitter(seed=seed, op_s=0.0003, message_s=0.0005)


@pytest.mark.slow
def test_the_plain_loop_learns_and_its_settings_change_its_bits() -> None:
    outcomes = [
        plain(model, ADAMW, microbatches)
        for model in (TIED, UNTIED, DROPPING)
        for microbatches in (1, 2, 5, 8)
    ]
    for outcome in outcomes:
        assert outcome.losses[-1] < 0.9 * outcome.losses[0]
    assert len({tuple(outcome.losses) for outcome in outcomes}) == len(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, "paper", None])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
@pytest.mark.parametrize("pipeline", [1, 2, 3, 4])
@pytest.mark.parametrize("gpt", [TIED, UNTIED], ids=["tied", "untied"])
async def test_a_pipeline_under_jitter_equals_the_plain_loop(
    gpt: GPT, pipeline: int, microbatches: int, limit: int | str | None
) -> None:
    plan = Plan(pipeline=pipeline, microbatches=microbatches, pipeline_limit=limit)
    async with Cluster(workers=0, threads=1, jitter=shaken(pipeline * microbatches)) as cluster:
        outcome = await trained(cluster, gpt, plan)
    assert outcome.differences(plain(gpt, ADAMW, microbatches)) == []


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [1, 2, 3, 4])
async def test_dropout_draws_the_same_wherever_a_block_runs(pipeline: int) -> None:
    plan = Plan(pipeline=pipeline, microbatches=5)
    async with Cluster(workers=0, threads=1, jitter=shaken(pipeline)) as cluster:
        outcome = await trained(cluster, DROPPING, plan)
    assert outcome.differences(plain(DROPPING, ADAMW, 5)) == []


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [1, 2, 4])
@pytest.mark.parametrize("every", [1, 2, 5, "paper"])
async def test_dropout_is_the_same_when_blocks_are_recomputed(
    every: int | str, pipeline: int
) -> None:
    plan = Plan(pipeline=pipeline, microbatches=5, checkpoint=every)
    async with Cluster(workers=0, threads=1, jitter=shaken(pipeline)) as cluster:
        outcome = await trained(cluster, DROPPING, plan)
    assert outcome.differences(plain(DROPPING, ADAMW, 5)) == []


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("gpt", [TIED, UNTIED], ids=["tied", "untied"])
async def test_plain_gradient_descent_without_clipping_equals_the_plain_loop(
    gpt: GPT, pipeline: int
) -> None:
    optimizer = SGD(lr=0.5, momentum=0.9)
    async with Cluster(workers=0, threads=1, jitter=shaken(pipeline)) as cluster:
        outcome = await trained(cluster, gpt, Plan(pipeline=pipeline, microbatches=5), optimizer)
    assert outcome.differences(plain(gpt, optimizer, 5)) == []


PLACEMENTS = [(0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1), (1, 0), (0, 0, 0, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
async def test_several_stages_on_a_worker_change_no_bit(placement: tuple[int, ...]) -> None:
    plan = Plan(pipeline=len(placement), microbatches=5, placement=placement)
    async with Cluster(workers=0, threads=1, jitter=shaken(1)) as cluster:
        outcome = await trained(cluster, DROPPING, plan)
    assert outcome.differences(plain(DROPPING, ADAMW, 5)) == []


@pytest.mark.slow
async def test_two_runs_with_different_jitter_have_identical_bits() -> None:
    outcomes = []
    for seed in (1, 2):
        async with Cluster(workers=0, threads=1, jitter=shaken(seed)) as cluster:
            outcomes.append(await trained(cluster, DROPPING, Plan(pipeline=3, microbatches=5)))
    assert outcomes[0].differences(outcomes[1]) == []


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [1, 2, 5])
async def test_steps_in_flight_equal_steps_one_after_the_other(in_flight: int) -> None:
    plan = Plan(pipeline=3, microbatches=5, steps_in_flight=in_flight)
    async with Cluster(workers=0, threads=1, jitter=shaken(in_flight)) as cluster:
        outcome = await trained(cluster, TIED, plan)
        trainer = await cluster.trainer(TIED, plan=plan, optimizer=ADAMW, seed=SEED)
        losses = [(await trainer.step(tokens(step))).loss for step in range(STEPS)]
        weights = await trainer.weights()
    assert losses == outcome.losses
    assert differing(weights, outcome.weights) == []


@pytest.mark.slow
async def test_two_trainers_on_one_cluster_do_not_mix() -> None:
    async with Cluster(workers=0, threads=1, jitter=shaken(1)) as cluster:
        plan = Plan(pipeline=3, microbatches=5)
        first = await cluster.trainer(TIED, plan=plan, optimizer=ADAMW, seed=SEED)
        second = await cluster.trainer(DROPPING, plan=plan, optimizer=ADAMW, seed=SEED)
        pending = [(first.step(tokens(step)), second.step(tokens(step))) for step in range(STEPS)]
        losses = [((await one).loss, (await other).loss) for one, other in pending]
    expected = plain(TIED, ADAMW, 5).losses, plain(DROPPING, ADAMW, 5).losses
    assert losses == list(zip(*expected, strict=True))


@pytest.mark.slow
async def test_sizes_for_which_blas_works_in_blocks_change_no_bit() -> None:
    gpt = GPT(layers=2, hidden=96, heads=4, vocab=271, context=70, dropout=0.1)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randint(0, 271, (2, 7, 67), generator=generator)
    loop = PlainLoop(gpt, ADAMW, seed=SEED, microbatches=3)
    expected = [loop.step((inputs, targets)) for _ in range(4)]
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=2, microbatches=3)
        trainer = await cluster.trainer(gpt, plan=plan, optimizer=ADAMW, seed=SEED)
        losses = [(await trainer.step((inputs, targets))).loss for _ in range(4)]
        assert losses == expected
        assert differing(await trainer.weights(), loop.weights()) == []


@pytest.mark.parametrize("microbatches", [4, 7])
@pytest.mark.parametrize("width", [5, 6, 17])
async def test_microbatches_that_begin_anywhere_in_memory_change_no_bit(
    width: int, microbatches: int
) -> None:
    model, optimizer = Model(models.mlp, width=width), SGD(lr=0.1)
    loop = PlainLoop(model, optimizer, seed=SEED, microbatches=microbatches)
    generator = torch.Generator().manual_seed(0)
    batches = [tuple(torch.randn(2, 10, width, generator=generator).unbind()) for _ in range(8)]
    expected = [loop.step((inputs.clone(), targets.clone())) for inputs, targets in batches]
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=2, microbatches=microbatches)
        trainer = await cluster.trainer(model, plan=plan, optimizer=optimizer, seed=SEED)
        found = [
            (await trainer.step((inputs.clone(), targets.clone()))).loss
            for inputs, targets in batches
        ]
        assert found == expected
        assert differing(await trainer.weights(), loop.weights()) == []


async def test_another_seed_gives_another_model() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainers = [await cluster.trainer(TIED, seed=seed) for seed in (SEED, SEED, 8)]
        same, again, other = [await trainer.weights() for trainer in trainers]
    assert differing(same, again) == []
    assert differing(same, other)


# Weights used more than once. The order of a sum of more than two gradients is the plain loop's as
# long as only one stage besides the owner's uses the weight, however often either does.


@pytest.mark.parametrize("cuts", [(1,), (2,), (3,)])
async def test_a_weight_used_often_in_two_stages_equals_the_plain_loop(cuts: Sequence[int]) -> None:
    model, optimizer = Model(models.repeated), SGD(lr=0.1)
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=2, microbatches=3, cuts=cuts)
        outcome = await trained(cluster, model, plan, optimizer)
    assert outcome.differences(plain(model, optimizer, 3)) == []


async def test_a_weight_used_once_in_each_of_many_stages_equals_the_plain_loop() -> None:
    model, optimizer = Model(models.repeated, blocks=6), SGD(lr=0.1)
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=6, microbatches=3)
        outcome = await trained(cluster, model, plan, optimizer)
    assert outcome.differences(plain(model, optimizer, 3)) == []


async def test_a_weight_used_often_in_many_stages_differs_by_the_order_of_one_sum() -> None:
    """Each stage adds up its own gradients first, so a sum of n terms may round differently.

    The bound is that of any order of summation: n terms differ by less than n * 2^-23 of the sum of
    their magnitudes, which here is that of the gradient up to a small factor.
    """
    model, optimizer = Model(models.repeated, blocks=6), SGD(lr=0.1)
    loop = PlainLoop(model, optimizer, seed=SEED, microbatches=3)
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=3, microbatches=3, cuts=(2, 4))
        trainer = await cluster.trainer(model, plan=plan, optimizer=optimizer, seed=SEED)
        gradients = await trainer.gradients(vectors(0))
    expected = loop.gradients(vectors(0))
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        bound = 6 * 3 * 2**-23 * float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=bound)


# Real processes


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes() -> AsyncIterator[Cluster]:
    async with Cluster(workers=4, threads=1, jitter=shaken(5)) as cluster:
        yield cluster


CASES: list[tuple[GPT, dict[str, Any]]] = [
    (TIED, {"pipeline": 1, "microbatches": 2}),
    (TIED, {"pipeline": 2, "microbatches": 5}),
    (UNTIED, {"pipeline": 2, "microbatches": 8, "pipeline_limit": 1}),
    (DROPPING, {"pipeline": 3, "microbatches": 5, "pipeline_limit": "paper"}),
    (UNTIED, {"pipeline": 4, "microbatches": 8}),
    (TIED, {"pipeline": 4, "microbatches": 5, "placement": (0, 1, 0, 1)}),
    (DROPPING, {"pipeline": 4, "microbatches": 5, "placement": (0, 1, 1, 0)}),
    (TIED, {"pipeline": 3, "microbatches": 5, "placement": (0, 0, 1)}),
]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("gpt", "plan"), CASES, ids=lambda case: str(case)[-45:])
async def test_processes_under_jitter_equal_the_plain_loop(
    processes: Cluster, gpt: GPT, plan: dict[str, Any]
) -> None:
    outcome = await trained(processes, gpt, Plan(**plan))
    assert outcome.differences(plain(gpt, ADAMW, plan["microbatches"])) == []


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.asyncio(loop_scope="module")
async def test_processes_equal_threads_of_one_process(processes: Cluster) -> None:
    plan = Plan(pipeline=3, microbatches=5)
    outcome = await trained(processes, DROPPING, plan)
    async with Cluster(workers=0, threads=1) as cluster:
        assert outcome.differences(await trained(cluster, DROPPING, plan)) == []
