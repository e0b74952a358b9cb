"""What a newcomer gets wrong when asking for a trainer is told at once, and harms nothing."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch import nn

import myelin
from myelin import SGD, AdamW, Cluster, Plan, Trainer
from myelin.errors import BatchError, ModelError, PlanError
from myelin.models.gpt import GPT
from myelin.testing import models

TINY = GPT(layers=1, hidden=4, heads=1, vocab=13, context=9)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(workers=0, threads=1) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(cluster: Cluster) -> Trainer:
    return await cluster.trainer(TINY, plan=Plan(pipeline=2))


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(12).reshape(2, 6)
    return ids, (ids + 1) % 13


async def check_unharmed(cluster: Cluster) -> None:
    """Train a step with another trainer."""
    trainer = await cluster.trainer(TINY, optimizer=SGD(lr=0.1))
    assert (await trainer.step(tokens())).tokens == 12


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"optimizer": "adamw"}, r"optimizer='adamw' .*myelin\.AdamW\(lr=1e-3\)"),
        ({"optimizer": ""}, r"optimizer='' .*myelin\.AdamW"),
        ({"optimizer": AdamW}, r"AdamW is the class: .*optimizer=myelin\.AdamW\(lr="),
        ({"optimizer": torch.optim.AdamW}, r"an optimizer of torch .*myelin\.AdamW"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
            r"optimizer=torch\.optim\.sgd\.SGD: an optimizer of torch .*myelin\.AdamW",
        ),
        ({"seed": "x"}, "seed='x': use a whole number, from 0 to below"),
        ({"seed": 2**70}, f"seed={2**70}: use a whole number"),
        ({"seed": True}, "seed=True"),
        ({"seed": None}, "seed=None"),
        ({"plan": {"pipeline": 2}}, r"plan=\{'pipeline': 2\} is no plan: .*Plan\(pipeline=2\)"),
        ({"plan": 2}, "plan=2 is no plan"),
    ],
)
async def test_a_wrong_argument_is_refused_and_the_cluster_goes_on(
    cluster: Cluster, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        await cluster.trainer(TINY, **arguments)
    await check_unharmed(cluster)


async def test_a_plan_that_is_none_is_an_error_of_the_plan() -> None:
    async with Cluster(workers=0) as cluster:
        with pytest.raises(PlanError):
            await cluster.trainer(TINY, plan={"pipeline": 2})  # type: ignore[arg-type]


class Strange:
    factory = "myelin.testing.models:mlp"
    arguments: dict[str, Any] = {"hidden": {1, 2}}  # noqa: RUF012 - a description as users write it


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("model", "text"),
    [
        (None, "None is no model"),
        (nn.Linear(1, 1), r"module \(Linear\) lies in this process .*returns \(blocks, loss\)"),
        ("my_pkg:build", r"so write myelin\.Model\('my_pkg:build', \.\.\.\)"),
        (GPT, r"GPT is a class, so call it with its settings, GPT\(\.\.\.\)"),
        (nn.Linear, "Linear is a class, not a description"),
        (models.mlp, r"is a function, so write myelin\.Model\(mlp, \.\.\.\)"),
        (Strange(), "argument hidden is {1, 2}"),
    ],
    ids=["none", "module", "path", "class", "module class", "function", "argument"],
)
async def test_what_is_no_model_is_refused_with_what_to_write(
    cluster: Cluster, model: Any, text: str
) -> None:
    with pytest.raises(ModelError, match=text) as caught:
        await cluster.trainer(model)
    if not isinstance(model, Strange):
        assert "GPT(layers=..." in str(caught.value)
        assert 'myelin.Model("my_pkg.models:build", ...)' in str(caught.value)
    await check_unharmed(cluster)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"steps": "3"}, "steps='3': use a whole number of at least 0, or None until"),
        ({"steps": 2.5}, "steps=2.5"),
        ({"steps": -1}, "steps=-1"),
        ({"steps": True}, "steps=True"),
        ({"ahead": "a"}, "ahead='a': use a whole number of at least 0"),
        ({"ahead": -1}, "ahead=-1"),
    ],
)
async def test_fit_refuses_numbers_that_are_none(
    trainer: Trainer, arguments: dict[str, Any], text: str
) -> None:
    before = trainer.steps_done
    with pytest.raises(ValueError, match=text):
        await anext(trainer.fit([tokens()], **arguments))
    assert trainer.steps_done == before
    results = [result async for result in trainer.fit([tokens()])]
    assert [result.index for result in results] == [before]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tokens": "2"}, "tokens='2': use a whole number of at least 0"),
        ({"tokens": -1}, "tokens=-1"),
        ({"temperature": "1"}, "temperature='1': use a number of at least 0"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 1.5}, "top_k=1.5: use a whole number of at least 1, or None for all"),
        ({"top_k": 0}, "top_k=0"),
        ({"seed": "a"}, "seed='a': use a whole number"),
        ({"seed": 2**64}, f"seed={2**64}"),
    ],
)
async def test_generate_refuses_numbers_that_are_none(
    trainer: Trainer, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        await trainer.generate([1, 2], **{"tokens": 1} | arguments)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("prompt", ["a text", None, [1.5], 3])
async def test_a_prompt_that_holds_no_ids_is_refused_with_how_to_make_them(
    trainer: Trainer, prompt: Any
) -> None:
    with pytest.raises(BatchError, match=r"no token id .*data\.encode\(text\)"):
        await trainer.generate(prompt, tokens=1)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({"0.position.weight": [1, 2]}, r"0\.position\.weight=\[1, 2\] is no tensor"),
        ([1, 2], r"weights=\[1, 2\]: give a dict of tensors by name"),
        (None, "weights=None: give a dict"),
        ({3: torch.ones(1)}, r"no weights named \[3\]"),
        (
            {"0.position.weight": torch.ones(9, 4, dtype=torch.int64)},
            r"is torch\.float32, not torch\.int64: use tensor\.to\(torch\.float32\)",
        ),
        ({"0.position.weight": torch.ones(9, 4).double()}, r"torch\.float32, not torch\.float64"),
    ],
)
async def test_weights_that_are_none_or_of_another_dtype_are_refused_and_nothing_changes(
    trainer: Trainer, weights: Any, text: str
) -> None:
    before = await trainer.weights()
    with pytest.raises(ModelError, match=text):
        await trainer.assign(weights)
    after = await trainer.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
@pytest.mark.processes
async def test_wrong_arguments_leave_worker_processes_unharmed() -> None:
    async with Cluster(workers=1, threads=1) as cluster:
        for arguments in ({"optimizer": "adamw"}, {"seed": 2**70}, {"plan": {"pipeline": 2}}):
            with pytest.raises(ValueError, match=next(iter(arguments))):
                await cluster.trainer(TINY, **arguments)
        model: Any
        for model in (None, GPT, nn.Linear(1, 1)):
            with pytest.raises(ModelError):
                await cluster.trainer(model)
        await check_unharmed(cluster)


def test_the_public_optimizers_are_those_of_the_advice() -> None:
    assert (myelin.AdamW, myelin.SGD) == (AdamW, SGD)
