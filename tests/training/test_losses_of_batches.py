"""The loss is the mean over all valid targets of the whole batch, however it is split."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from myelin import SGD, AdamW, Cluster, Model, Plan, Trainer
from myelin.batch import joined
from myelin.errors import BatchError, RunError
from myelin.models.building import build_blocks
from myelin.models.gpt import GPT
from myelin.models.model import Description
from myelin.testing import models
from myelin.testing.reference import PlainLoop, differing, same_bits

TINY = GPT(layers=3, hidden=12, heads=3, vocab=13, context=9)
ADAMW = AdamW(lr=3e-3)
IGNORED = -100


def tokens(rows: int = 11, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randint(0, 13, (2, rows, 7), generator=generator)
    return inputs.clone(), targets.clone()


def unequally_ignored(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave many, few, one and, in rows 6 to 8, no targets to the microbatches."""
    inputs, targets = tokens(seed=seed)
    targets[2:5, 1:] = IGNORED
    targets[5, :6] = IGNORED
    targets[6:9] = IGNORED
    targets[10, ::2] = IGNORED
    return inputs, targets


def vectors(rows: int = 11, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(2, rows, 4, generator=generator)
    return inputs.clone(), targets.clone()


def classes(rows: int = 11, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator), torch.arange(rows) % 5


async def trainer_of(
    cluster: Cluster, model: Description, *, pipeline: int = 2, microbatches: int = 4
) -> Trainer:
    plan = Plan(pipeline=pipeline, microbatches=microbatches)
    return await cluster.trainer(model, plan=plan, optimizer=ADAMW)


def loop_of(model: Description, *, microbatches: int = 4) -> PlainLoop:
    return PlainLoop(model, ADAMW, microbatches=microbatches)


# Ignored targets


@pytest.mark.parametrize("microbatches", [1, 2, 4, 5, 11])
async def test_unequal_numbers_of_ignored_targets_change_nothing(microbatches: int) -> None:
    loop = loop_of(TINY, microbatches=microbatches)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, TINY, microbatches=microbatches)
        assert (
            differing(
                await trainer.gradients(unequally_ignored()), loop.gradients(unequally_ignored())
            )
            == []
        )
        for seed in range(3):
            result = await trainer.step(unequally_ignored(seed))
            assert result.loss == loop.step(unequally_ignored(seed))
            assert result.tokens == int((unequally_ignored(seed)[1] != IGNORED).sum())
        assert differing(await trainer.weights(), loop.weights()) == []


def of_the_whole_batch(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Compute loss and gradients without Myelin's losses, from the batch in one piece."""
    blocks = build_blocks(TINY, range(5), 0)
    model = nn.Sequential(*blocks.values())
    inputs, targets = batch
    logits = model(inputs).flatten(0, 1)
    loss = functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize("microbatches", [1, 2, 4, 11])
async def test_the_loss_is_that_of_the_batch_in_one_piece(microbatches: int) -> None:
    """Splitting changes the order of sums of at most 77 terms of about one size: 77 * 2^-24."""
    expected = of_the_whole_batch(unequally_ignored())
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, TINY, microbatches=microbatches)
        gradients = await trainer.gradients(unequally_ignored())
        loss = (await trainer.step(unequally_ignored())).loss
    assert {"loss", *gradients} == expected.keys()
    torch.testing.assert_close(torch.tensor(loss), expected["loss"], rtol=5e-6, atol=0)
    for name, gradient in gradients.items():
        bound = 5e-6 * float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=5e-6, atol=bound)


async def test_a_microbatch_without_targets_adds_nothing_and_breaks_nothing() -> None:
    inputs, targets = tokens(rows=8)
    targets[2:4] = IGNORED  # the second of four microbatches
    loop = loop_of(TINY)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, TINY)
        step = trainer.step((inputs, targets))
        share = step.op("forward", stage=1, microbatch=1)
        assert (await step).loss == loop.step((inputs, targets))
        assert float(await share) == 0.0
        weights = await trainer.weights()
    assert differing(weights, loop.weights()) == []
    assert all(weight.isfinite().all() for weight in weights.values())


REFUSED: list[tuple[Description, Callable[..., tuple[torch.Tensor, torch.Tensor]]]] = [
    (TINY, tokens),  # which looks at its targets before anything starts
    (Model(models.classifier), classes),  # whose worker finds out
]


@pytest.mark.parametrize(("model", "make"), REFUSED, ids=["gpt", "classifier"])
async def test_a_batch_without_targets_is_refused_and_the_next_step_works(
    model: Description, make: Callable[..., tuple[torch.Tensor, torch.Tensor]]
) -> None:
    loop = loop_of(model)
    inputs, targets = make()
    nothing = inputs, torch.full_like(targets, IGNORED)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, model)
        assert (await trainer.step(make())).loss == loop.step(make())
        for refuse in (trainer.step, trainer.evaluate):
            with pytest.raises(BatchError, match=r"leave (the batch|it) out"):
                await refuse(nothing)
        with pytest.raises(BatchError):
            await trainer.gradients(nothing)
        assert differing(await trainer.weights(), loop.weights()) == []
        result = await trainer.step(make(seed=1))
        assert (result.index, result.loss) == (1, loop.step(make(seed=1)))
        assert differing(await trainer.weights(), loop.weights()) == []


# Batches that do not divide


@pytest.mark.parametrize(("rows", "microbatches"), [(11, 4), (7, 5), (9, 2), (3, 8), (1, 8)])
@pytest.mark.parametrize("model", [TINY, Model(models.mlp)], ids=["gpt", "mlp"])
async def test_a_batch_that_does_not_divide_is_used_whole(
    model: Description, rows: int, microbatches: int
) -> None:
    make = tokens if isinstance(model, GPT) else vectors
    loop = loop_of(model, microbatches=microbatches)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, model, microbatches=microbatches)
        for seed in range(3):
            result = await trainer.step(make(rows, seed))
            assert result.loss == loop.step(make(rows, seed))
            assert result.tokens == make(rows, seed)[1].numel() // (4 if make is vectors else 1)
        assert differing(await trainer.weights(), loop.weights()) == []


async def test_batches_of_many_sizes_one_after_the_other_equal_the_plain_loop() -> None:
    loop = loop_of(TINY)
    sizes = [11, 2, 8, 1, 3, 11, 5]
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, TINY, pipeline=3)
        pending = [trainer.step(tokens(rows, rows)) for rows in sizes]
        assert [(await step).loss for step in pending] == [
            loop.step(tokens(rows, rows)) for rows in sizes
        ]
        assert differing(await trainer.weights(), loop.weights()) == []


async def test_samples_count_alike_in_microbatches_of_different_size() -> None:
    """A plain loss is a mean; that of 5 rows in parts of 3 and 2 is not the mean of two means."""
    inputs, targets = vectors(rows=5)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, Model(models.mlp), microbatches=2)
        outputs = await trainer.predict(inputs)
        loss = (await trainer.evaluate((inputs, targets))).loss
    whole = functional.mse_loss(outputs, targets)
    mean_of_means = (
        sum(
            functional.mse_loss(*part)
            for part in zip(outputs.tensor_split(2), targets.tensor_split(2), strict=True)
        )
        / 2
    )
    torch.testing.assert_close(torch.tensor(loss), whole, rtol=1e-6, atol=0)
    assert abs(float(mean_of_means) - float(whole)) > 1e-3


# Evaluation, prediction, gradients


OTHERS: list[tuple[Description, Callable[..., tuple[Any, Any]]]] = [
    (TINY, unequally_ignored),
    (GPT(layers=3, hidden=12, heads=3, vocab=13, context=9, dropout=0.3), tokens),
    (Model(models.mixed), vectors),
    (Model(models.dropping), vectors),
]
IDS = ["ignored", "dropout", "batch norm", "dropping"]


@pytest.mark.parametrize("pipeline", [1, 3])
@pytest.mark.parametrize(("model", "make"), OTHERS, ids=IDS)
async def test_an_evaluation_equals_a_plain_one_and_changes_nothing(
    model: Description, make: Callable[..., tuple[Any, Any]], pipeline: int
) -> None:
    loop = loop_of(model)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, model, pipeline=pipeline)
        assert (await trainer.step(make())).loss == loop.step(make())
        before, random = await trainer.weights(), torch.get_rng_state()
        result = await trainer.evaluate(make(seed=1))
        assert (result.index, result.loss) == (1, loop.evaluate(make(seed=1)))
        assert torch.equal(torch.get_rng_state(), random)
        assert differing(await trainer.weights(), before) == []
        assert (await trainer.step(make(seed=2))).loss == loop.step(make(seed=2))
        assert differing(await trainer.weights(), loop.weights()) == []


async def test_an_evaluation_sees_the_steps_asked_for_before_it_and_no_others() -> None:
    loop = loop_of(TINY)
    expected = [loop.evaluate(tokens(seed=9))]
    for step in range(2):
        loop.step(tokens(seed=step))
        expected.append(loop.evaluate(tokens(seed=9)))
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, TINY)
        pending = [trainer.evaluate(tokens(seed=9))]
        for step in range(2):
            trainer.step(tokens(seed=step))
            pending.append(trainer.evaluate(tokens(seed=9)))
        assert [(await evaluation).loss for evaluation in reversed(pending)] == expected[::-1]


@pytest.mark.parametrize("rows", [1, 3, 11])
async def test_a_prediction_joins_the_rows_in_order(rows: int) -> None:
    loop = loop_of(TINY)
    loop.model.eval()
    inputs, _ = tokens(rows)
    with torch.no_grad():
        parts = [loop.model(part) for part in inputs.tensor_split(min(rows, 4))]
        row_by_row = torch.cat([loop.model(row[None]) for row in inputs])
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, TINY, pipeline=3)
        logits = await trainer.predict(inputs)
    assert same_bits(logits, torch.cat(parts))
    torch.testing.assert_close(logits, row_by_row, rtol=1e-4, atol=1e-6)


def test_what_microbatches_return_is_joined_tensor_by_tensor() -> None:
    parts = [
        (torch.zeros(2, 3), {"x": torch.arange(2), "n": 1}),
        (torch.ones(1, 3), {"x": torch.arange(1), "n": 1}),
    ]
    first, rest = joined(parts)
    assert first.tolist() == [[0.0] * 3, [0.0] * 3, [1.0] * 3]
    assert rest["x"].tolist() == [0, 1, 0]
    assert rest["n"] == 1


@pytest.mark.parametrize("pipeline", [1, 2, 3])
@pytest.mark.parametrize(("model", "make"), OTHERS, ids=IDS)
async def test_gradients_leave_weights_buffers_and_the_optimizer_alone(
    model: Description, make: Callable[..., tuple[Any, Any]], pipeline: int
) -> None:
    loop = loop_of(model)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, model, pipeline=pipeline)
        before = await trainer.weights()
        gradients = await trainer.gradients(make(seed=1))
        assert differing(gradients, loop.gradients(make(seed=1))) == []
        assert differing(await trainer.weights(), before) == []
        assert (await trainer.step(make())).loss == loop.step(make())
        assert differing(await trainer.weights(), loop.weights()) == []


async def test_gradients_and_steps_in_flight_do_not_mix() -> None:
    loop = loop_of(TINY)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, TINY)
        asked = asyncio.ensure_future(trainer.gradients(tokens(seed=1)))
        await asyncio.sleep(0)  # until it has been asked for
        step = trainer.step(tokens())
        assert differing(await asked, loop.gradients(tokens(seed=1))) == []
        assert (await step).loss == loop.step(tokens())
        assert differing(await trainer.weights(), loop.weights()) == []


async def test_gradients_of_two_batches_asked_for_at_once_do_not_mix() -> None:
    loop = loop_of(TINY)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, TINY)
        found = await asyncio.gather(*(trainer.gradients(tokens(seed=s)) for s in (1, 2)))
    for seed, gradients in zip((1, 2), found, strict=True):
        assert differing(gradients, loop.gradients(tokens(seed=seed))) == []


async def test_gradients_of_a_failed_run_are_not_left_for_the_next() -> None:
    model = Model(models.failing, where="backward", block=0, microbatch=2)
    loop = PlainLoop(Model(models.mlp), SGD(lr=0.1), microbatches=3)
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=3, microbatches=3)
        trainer = await cluster.trainer(model, plan=plan, optimizer=SGD(lr=0.1))
        with pytest.raises(RunError):
            await trainer.gradients(vectors())
        found = await trainer.gradients(vectors())
    gradients = {name.replace(".inner", ""): gradient for name, gradient in found.items()}
    assert differing(gradients, loop.gradients(vectors())) == []
