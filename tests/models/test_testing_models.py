from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from myelin.models.building import build_blocks
from myelin.models.losses import total, weigh
from myelin.models.model import Model, load
from myelin.testing import models


def chain(model: Model) -> nn.Sequential:
    count = len(load(model.factory, model.arguments).blocks)
    return nn.Sequential(*build_blocks(model, range(count), 0).values())


def vectors(batch: int = 6, width: int = 4) -> torch.Tensor:
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(0))


def masked_batch() -> dict[str, torch.Tensor]:
    x_BTD = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    return {"x": x_BTD, "mask": torch.tensor([[True, True, False], [True, False, False]])}


CASES: list[tuple[Model, Any]] = [
    (Model(models.mlp, depth=4), vectors()),
    (Model(models.masked, depth=4), masked_batch()),
    (Model(models.tuple_passing, depth=4), vectors()),
    (Model(models.tuple_passing, depth=2), vectors()),
    (Model(models.mixed), vectors()),
    (Model(models.frozen_first), vectors()),
    (Model(models.shared), vectors()),
    (Model(models.dropping, dropout=0.1), vectors()),
    (Model(models.inplace), vectors()),
    (Model(models.skipping), vectors()),
    (Model(models.gapped), vectors()),
    (Model(models.chunked), vectors()),
    (Model(models.doubled), vectors()),
    (Model(models.noisy), vectors()),
    (Model(models.resting), vectors()),
    (Model(models.carrying), vectors()),
    (Model(models.projected), vectors()),
    (Model(models.standing_twice), vectors()),
]


@pytest.mark.parametrize(("model", "batch"), CASES, ids=lambda case: str(case)[:50])
def test_every_model_trains_and_only_its_trainable_parameters_get_gradients(
    model: Model, batch: Any
) -> None:
    blocks = chain(model)
    loss = load(model.factory, model.arguments).loss
    target = torch.zeros(2, 3, 4) if isinstance(batch, dict) else torch.zeros(6, 4)
    total(loss, blocks(batch), target, weigh(loss, target)).backward()  # type: ignore[no-untyped-call]
    for parameter in blocks.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad
    assert any(p.grad is not None and bool(p.grad.any()) for p in blocks.parameters())


def inputs_of_each_block(model: Model, batch: Any) -> Iterator[Any]:
    for block in chain(model):
        yield batch
        batch = block(batch)


def test_masked_passes_a_dict_with_a_boolean_tensor() -> None:
    for given in inputs_of_each_block(Model(models.masked), masked_batch()):
        assert given.keys() == {"x", "mask"}
        assert given["mask"].dtype == torch.bool


def test_masked_leaves_masked_positions_alone() -> None:
    batch = masked_batch()
    y_BTD = chain(Model(models.masked))(batch)
    assert torch.equal(y_BTD[~batch["mask"]], batch["x"][~batch["mask"]])
    assert not torch.equal(y_BTD[batch["mask"]], batch["x"][batch["mask"]])


def test_tuple_passing_passes_whole_numbers_and_a_tensor_without_dimensions() -> None:
    first, *rest = inputs_of_each_block(Model(models.tuple_passing, depth=4), vectors())
    assert isinstance(first, torch.Tensor)
    for x_BD, places_B, scale in rest:
        assert x_BD.requires_grad
        assert places_B.tolist() == [0, 1, 2, 3, 4, 5]
        assert scale.shape == ()
        assert not scale.requires_grad


def test_frozen_first_hands_over_a_tensor_that_needs_no_gradient() -> None:
    needs = [
        given.requires_grad for given in inputs_of_each_block(Model(models.frozen_first), vectors())
    ]
    assert needs == [False, False, False, True]


def test_mixed_updates_its_buffers() -> None:
    blocks = chain(Model(models.mixed))
    before = blocks[0].get_buffer("1.running_mean").clone()
    blocks(vectors())
    assert not torch.equal(blocks[0].get_buffer("1.running_mean"), before)


def outcome(blocks: nn.Sequential) -> str:
    try:
        output = blocks(vectors())
    except RuntimeError as error:
        return f"forward {error}"
    try:
        output.sum().backward()
    except RuntimeError as error:
        return f"backward {error}"
    return "fine"


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_planted_error_is_raised_in_its_pass_and_once(where: str) -> None:
    blocks = chain(Model(models.failing, where=where, block=2, microbatch=1))
    assert [outcome(blocks) for _ in range(4)] == ["fine", f"{where} planted", "fine", "fine"]


def test_a_planted_error_can_wait_for_a_step() -> None:
    model = Model(models.failing, where="backward", block=0, microbatch=1, step=1, microbatches=2)
    blocks = chain(model)
    outcomes = [outcome(blocks) for _ in range(5)]
    assert outcomes == ["fine", "fine", "fine", "backward planted", "fine"]


def test_failing_computes_what_mlp_computes() -> None:
    failing, plain = chain(Model(models.failing, microbatch=9)), chain(Model(models.mlp))
    assert torch.equal(failing(vectors()), plain(vectors()))
