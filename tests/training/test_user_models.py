"""Models of a user's own: whatever blocks pass on, hold or do, a pipeline equals a plain loop."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from myelin import SGD, AdamW, Cluster, Model, Plan, Trainer
from myelin.errors import GraphError, ModelError, OpError
from myelin.models.building import build_blocks
from myelin.models.gpt import GPT
from myelin.models.model import Description, load
from myelin.testing import models
from myelin.testing.reference import PlainLoop, differing, same_bits

ADAMW = AdamW(lr=1e-2)
SEED = 7
TINY = GPT(layers=3, hidden=12, heads=3, vocab=13, context=9)


def vectors(step: int = 0, rows: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, rows, 4, generator=generator)
    return inputs.clone(), targets.clone()


def masked(step: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x_BTD, y_BTD = torch.randn(2, 11, 5, 4, generator=generator)
    mask_BT = torch.rand(11, 5, generator=generator) < 0.7
    return {"x": x_BTD.clone(), "mask": mask_BT}, y_BTD.clone()


def sequences(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(11, 64, 4, generator=generator), torch.randn(11, 4, generator=generator)


def grids(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, 11, 64, 4, generator=generator)
    return inputs.clone(), targets.clone()


def tokens(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = torch.randint(
        0, 13, (2, 11, 7), generator=torch.Generator().manual_seed(step)
    )
    return inputs.clone(), targets.clone()


def wide_vectors(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = vectors(step)
    return inputs.double(), targets.double()


def classes(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(step, step + 11)
    return vectors(step)[0], numbers.remainder(5).masked_fill(numbers.remainder(3) == 0, -100)


Make = Callable[..., tuple[Any, Any]]
CASES: dict[str, tuple[Model, Make]] = {
    "mlp": (Model(models.mlp, depth=4), vectors),
    "dict": (Model(models.masked, depth=4), masked),
    "tuple with whole numbers": (Model(models.tuple_passing, depth=4), vectors),
    "batch norm, frozen, no parameters": (Model(models.mixed), vectors),
    "frozen first": (Model(models.frozen_first), vectors),
    "parameter in two blocks": (Model(models.shared), vectors),
    "dropout": (Model(models.dropping), vectors),
    "in place": (Model(models.inplace), vectors),
    "inputs handed on": (Model(models.skipping), vectors),
    "buffers replaced": (Model(models.averaging), vectors),
    "classes": (Model(models.classifier), classes),
    "weight used often": (Model(models.repeated, blocks=3), vectors),
    "two weights in two blocks each": (Model(models.crossed), vectors),
    "double precision": (Model(models.wide), wide_vectors),
    "gaps in memory": (Model(models.gapped), grids),
    "parts of one tensor": (Model(models.chunked), vectors),
    "one tensor twice": (Model(models.doubled), vectors),
    "noise": (Model(models.noisy), vectors),
    "modules in evaluation mode": (Model(models.resting), vectors),
    "parameter and buffer handed on": (Model(models.carrying), vectors),
    "random loss": (Model(models.projected), vectors),
}
EACH = pytest.mark.parametrize(("model", "make"), CASES.values(), ids=CASES.keys())


def block_count(model: Description) -> int:
    return len(load(model.factory, model.arguments).blocks)


async def assert_equal_to_the_plain_loop(
    cluster: Cluster, model: Description, make: Make, plan: Plan
) -> None:
    loop = PlainLoop(model, ADAMW, seed=SEED, microbatches=plan.microbatches)
    trainer = await cluster.trainer(model, plan=plan, optimizer=ADAMW, seed=SEED)
    assert differing(await trainer.weights(), loop.weights()) == []
    pending = [trainer.step(make(step)) for step in range(4)]
    assert [(await step).loss for step in pending] == [loop.step(make(s)) for s in range(4)]
    assert differing(await trainer.gradients(make(9)), loop.gradients(make(9))) == []
    assert (await trainer.evaluate(make(9))).loss == loop.evaluate(make(9))
    assert differing(await trainer.weights(), loop.weights()) == []


@EACH
@pytest.mark.parametrize("pipeline", [1, 2, 3])
async def test_a_users_model_equals_the_plain_loop(model: Model, make: Make, pipeline: int) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=pipeline, microbatches=3)
        await assert_equal_to_the_plain_loop(cluster, model, make, plan)


@EACH
@pytest.mark.parametrize("placement", [(0, 1), (0, 0)], ids=["apart", "together"])
async def test_a_users_model_may_be_cut_anywhere(
    model: Model, make: Make, placement: tuple[int, ...]
) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        for cut in range(1, block_count(model)):
            plan = Plan(pipeline=2, microbatches=3, cuts=(cut,), placement=placement)
            await assert_equal_to_the_plain_loop(cluster, model, make, plan)


@EACH
async def test_a_users_model_may_have_a_stage_for_every_block(model: Model, make: Make) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=block_count(model), microbatches=3)
        await assert_equal_to_the_plain_loop(cluster, model, make, plan)


@EACH
@pytest.mark.parametrize(("pipeline", "every"), [(1, 1), (1, 2), (1, "paper"), (2, 2), (3, 1)])
async def test_recomputing_a_users_model_changes_no_bit(
    model: Model, make: Make, pipeline: int, every: int | str
) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=pipeline, microbatches=3, checkpoint=every)
        await assert_equal_to_the_plain_loop(cluster, model, make, plan)


@pytest.mark.slow
@pytest.mark.processes
async def test_users_models_equal_the_plain_loop_in_processes() -> None:
    async with Cluster(workers=2, threads=1) as cluster:
        for model, make in CASES.values():
            plan = Plan(pipeline=3, microbatches=3, placement=(0, 1, 0))
            await assert_equal_to_the_plain_loop(cluster, model, make, plan)


async def test_a_tensor_that_is_not_contiguous_changes_no_bit_on_one_worker() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=2, microbatches=3, cuts=(2,), placement=(0, 0))
        await assert_equal_to_the_plain_loop(cluster, Model(models.turned), sequences, plan)


async def test_a_tensor_that_is_not_contiguous_changes_no_bit_between_workers() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=2, microbatches=3, cuts=(2,))
        await assert_equal_to_the_plain_loop(cluster, Model(models.turned), sequences, plan)


@pytest.mark.parametrize("pipeline", [1, 2, 3])
@pytest.mark.parametrize("owner", [0, 1, 2])
async def test_any_block_may_own_a_tied_weight(owner: int, pipeline: int) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=pipeline, microbatches=3)
        model = Model(models.repeated, blocks=3, owner=owner)
        await assert_equal_to_the_plain_loop(cluster, model, vectors, plan)


# The caller's random numbers


@pytest.mark.parametrize("model", [Model(models.mixed), TINY], ids=["mixed", "gpt"])
async def test_a_model_that_draws_nothing_leaves_the_callers_generator_alone_meanwhile(
    model: Description,
) -> None:
    make = tokens if isinstance(model, GPT) else vectors
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await cluster.trainer(model, plan=Plan(pipeline=2, microbatches=3))
        torch.manual_seed(0)
        drawn = []
        for step in [trainer.step(make(step)) for step in range(5)]:
            finished = asyncio.ensure_future(step._result())
            while not finished.done():
                drawn.append(torch.rand(1))
                await asyncio.sleep(0)
    torch.manual_seed(0)
    assert torch.equal(torch.cat(drawn), torch.cat([torch.rand(1) for _ in drawn]))


async def test_dropout_leaves_the_callers_generator_as_it_was() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=2, microbatches=3)
        trainer = await cluster.trainer(Model(models.dropping), plan=plan)
        before = torch.get_rng_state()
        await trainer.step(vectors())
        assert torch.equal(torch.get_rng_state(), before)


# A failed step


@pytest.mark.parametrize("pipeline", [1, 2, 3])
async def test_a_failed_step_leaves_replaced_buffers_as_they_were(pipeline: int) -> None:
    loop = PlainLoop(Model(models.averaging), ADAMW, microbatches=3)
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=pipeline, microbatches=3)
        model = Model(models.averaging, call=5)  # the last microbatch of the second step
        trainer = await cluster.trainer(model, plan=plan, optimizer=ADAMW)
        assert (await trainer.step(vectors())).loss == loop.step(vectors())
        with pytest.raises(OpError, match="planted"):
            await trainer.step(vectors(1))
        assert differing(await trainer.weights(), loop.weights()) == []
        assert (await trainer.step(vectors(1))).loss == loop.step(vectors(1))
        assert differing(await trainer.weights(), loop.weights()) == []


# Weights by name


async def trainer_of(cluster: Cluster, model: Description, pipeline: int = 2) -> Trainer:
    plan = Plan(pipeline=pipeline, microbatches=3)
    return await cluster.trainer(model, plan=plan, optimizer=SGD(lr=0.1))


@EACH
async def test_weights_are_named_as_in_a_sequential(model: Model, make: Make) -> None:
    blocks = build_blocks(model, range(block_count(model)), 0)
    expected = nn.Sequential(*blocks.values()).state_dict()
    async with Cluster(workers=0, threads=1) as cluster:
        weights = await (await trainer_of(cluster, model)).weights()
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert same_bits(tensor, expected[name])
        assert not tensor.requires_grad


@EACH
async def test_weights_are_copies_and_can_be_assigned_again(model: Model, make: Make) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, model)
        before = await trainer.weights()
        kept = {name: tensor.clone() for name, tensor in before.items()}
        first = await trainer.step(make())
        assert differing(before, kept) == []
        assert differing(await trainer.weights(), before)
        await trainer.assign(before)
        assert differing(await trainer.weights(), before) == []
        drawing = (Model(models.dropping), Model(models.noisy))  # their draws depend on the step
        if model not in drawing:
            assert (await trainer.step(make())).loss == first.loss


async def test_weights_move_from_one_plan_to_another() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        first, second = await trainer_of(cluster, TINY), await trainer_of(cluster, TINY, 3)
        await first.step(tokens())
        await second.assign(await first.weights())
        losses = [(await trainer.step(tokens(1))).loss for trainer in (first, second)]
        assert losses[0] == losses[1]
        assert differing(await first.weights(), await second.weights()) == []


async def test_assigning_some_names_leaves_the_others() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, Model(models.mixed))
        before = await trainer.weights()
        new = {"0.1.running_mean": torch.arange(5.0), "3.bias": torch.ones(4)}
        await trainer.assign(new)
        assert differing(await trainer.weights(), before | new) == []


async def test_assigning_that_is_cancelled_has_written_all_or_nothing() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, Model(models.mlp), 3)
        before, outcomes = await trainer.weights(), {False}
        new = {name: torch.full_like(tensor, 2.0) for name, tensor in before.items()}
        ticks = 0
        while ticks < 40 or len(outcomes) < 2:  # the loop's ticks depend on the machine
            ticks += 1
            assigning = asyncio.create_task(trainer.assign(new))
            for _ in range(ticks):
                await asyncio.sleep(0)
            assigning.cancel()
            found = await trainer.weights()
            changed = differing(found, before)
            assert changed in ([], differing(new, before))
            outcomes.add(bool(changed))
            await trainer.assign(before)


@pytest.mark.parametrize("name", ["0.token.weight", "4.head.weight"])
async def test_assigning_either_name_of_a_tied_weight_assigns_it(name: str) -> None:
    new = {name: torch.randn(13, 12, generator=torch.Generator().manual_seed(0))}
    async with Cluster(workers=0, threads=1) as cluster:
        whole, cut = await trainer_of(cluster, TINY, 1), await trainer_of(cluster, TINY)
        await whole.assign(new)
        await cut.assign(new)
        assert differing(await whole.weights(), await cut.weights()) == []


@pytest.mark.parametrize("pipeline", [1, 2])
async def test_two_values_for_one_tied_weight_are_refused(pipeline: int) -> None:
    new = {"0.token.weight": torch.zeros(13, 12), "4.head.weight": torch.ones(13, 12)}
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, TINY, pipeline)
        with pytest.raises(ModelError, match="are one weight"):
            await trainer.assign(new)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"9.weight": torch.zeros(5, 4)}, "9.weight"),
        ({"0.weights": torch.zeros(5, 4)}, "names are those of"),
        ({"0.0.weight": torch.zeros(4, 5)}, r"shape \[5, 4\], not \[4, 5\]"),
        ({"2.bias": torch.zeros(())}, r"shape \[4\], not \[\]"),
    ],
)
async def test_wrong_weights_are_refused_and_nothing_is_changed(
    wrong: dict[str, torch.Tensor], text: str
) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, Model(models.mlp))
        before = await trainer.weights()
        with pytest.raises(ModelError, match=text):
            await trainer.assign({"0.0.bias": torch.ones(5)} | wrong)
        assert differing(await trainer.weights(), before) == []


# Values of a step's ops


class Watched:
    """A plain loop that keeps what every block returned for every microbatch."""

    def __init__(self, model: Description) -> None:
        self.loop = PlainLoop(model, SGD(lr=0.1), microbatches=3)
        self.outputs: dict[int, list[list[torch.Tensor]]] = {}
        for index, block in enumerate(self.loop.model):
            self.outputs[index] = []
            block.register_forward_hook(self._keep(index))

    def _keep(self, index: int) -> Callable[..., None]:
        def keep(_block: nn.Module, _inputs: object, output: Any) -> None:
            parts = [output] if isinstance(output, torch.Tensor) else flat(output)
            for part in parts:
                if part.requires_grad:
                    part.retain_grad()
            self.outputs[index].append(parts)

        return keep


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return list(value.values()) if isinstance(value, dict) else list(value)


OP_CASES = ["mlp", "dict", "tuple with whole numbers", "frozen first"]


@pytest.mark.parametrize("name", OP_CASES)
async def test_the_values_of_a_steps_ops_are_the_plain_loops(name: str) -> None:
    model, make = CASES[name]
    plain = Watched(model)
    plain.loop.step(make())
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=3, microbatches=3, cuts=(1, 3))
        trainer = await cluster.trainer(model, plan=plan, optimizer=SGD(lr=0.1))
        step = trainer.step(make())
        values = {
            (kind, stage, microbatch): step.op(kind, stage=stage, microbatch=microbatch)
            for kind in ("forward", "backward")
            for stage in range(3)
            for microbatch in range(3)
        }
        await step
        for microbatch in range(3):
            for stage, last_block in enumerate((0, 2)):
                outputs = plain.outputs[last_block][microbatch]
                forward = flat(await values["forward", stage, microbatch])
                assert all(same_bits(*pair) for pair in zip(forward, outputs, strict=True))
                backward = await values["backward", stage + 1, microbatch]
                for found, output in zip(backward, outputs, strict=True):
                    expected = output.grad if output.requires_grad else None
                    if found is None or expected is None:
                        assert found is expected
                    else:
                        assert same_bits(found, expected)
            assert all(part is None for part in await values["backward", 0, microbatch])


async def test_the_last_stages_forward_is_the_microbatchs_share_of_the_loss() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, Model(models.mlp))
        step = trainer.step(vectors())
        shares = [step.op("forward", stage=1, microbatch=microbatch) for microbatch in range(3)]
        total = sum([await share for share in shares], torch.zeros(()))
        assert (await step).loss == float(total)


async def test_a_value_belongs_to_the_caller() -> None:
    loop = PlainLoop(Model(models.mlp), SGD(lr=0.1), microbatches=3)
    async with Cluster(workers=0, threads=1) as cluster:
        plan = Plan(pipeline=2, microbatches=3, placement=(0, 0))
        trainer = await cluster.trainer(Model(models.mlp), plan=plan, optimizer=SGD(lr=0.1))
        step = trainer.step(vectors())
        (await step.op("forward", stage=0, microbatch=2)).fill_(torch.nan)
        assert (await step).loss == loop.step(vectors())
        assert differing(await trainer.weights(), loop.weights()) == []


@pytest.mark.parametrize(
    ("kind", "stage", "microbatch"),
    [("forward", 2, 0), ("backward", 0, 3), ("update", 0, None), ("sideways", 0, 0)],
)
async def test_an_op_that_a_step_does_not_have_is_refused(
    kind: str, stage: int, microbatch: int | None
) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, Model(models.mlp))
        step = trainer.step(vectors())
        with pytest.raises(
            GraphError, match="2 stages and 3 microbatches; kinds are forward, back"
        ):
            step.op(kind, stage=stage, microbatch=microbatch)
        assert (await step).index == 0


async def test_an_evaluation_has_forwards_and_no_backwards() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, Model(models.mlp))
        evaluation = trainer.evaluate(vectors())
        value = evaluation.op("forward", stage=0, microbatch=1)
        with pytest.raises(GraphError, match="backward"):
            evaluation.op("backward", stage=0, microbatch=1)
        assert (await value).shape == (4, 6)  # of two blocks
        await evaluation
