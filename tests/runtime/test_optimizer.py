from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from myelin.runtime.optimizer import SGD, AdamW, Optimizer


class Holder(msgspec.Struct):
    """Stands for the message that carries a description."""

    optimizer: Optimizer


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 5), (7,), ())]


def trained(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Take five steps with gradients that differ from step to step."""
    for step in range(5):
        for index, parameter in enumerate(parameters):
            parameter.grad = (parameter.detach() + step) * (index - 1.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [parameter.detach() for parameter in parameters]


@pytest.mark.slow  # torch imports half of itself at the first step
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lr": 0.3, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
        {"lr": 0.01, "betas": (0.0, 0.0), "weight_decay": 0.0},
    ],
)
def test_adamw_is_torchs_own_to_the_last_bit(settings: dict[str, Any]) -> None:
    ours, theirs = weights(), weights()
    described = trained(AdamW(**settings).build(ours), ours)
    expected = trained(torch.optim.AdamW(theirs, fused=True, **settings), theirs)
    assert all(map(torch.equal, described, expected))
    assert not any(map(torch.equal, described, weights()))


def test_adamw_has_torchs_defaults() -> None:
    built = AdamW().build(weights()).defaults
    theirs = torch.optim.AdamW(weights()).defaults
    assert {name: built[name] for name in ("lr", "betas", "eps", "weight_decay")} == {
        name: theirs[name] for name in ("lr", "betas", "eps", "weight_decay")
    }
    assert built["fused"] is True


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs_own_to_the_last_bit(momentum: float) -> None:
    ours, theirs = weights(), weights()
    described = trained(SGD(lr=0.05, momentum=momentum).build(ours), ours)
    expected = trained(torch.optim.SGD(theirs, lr=0.05, momentum=momentum), theirs)
    assert all(map(torch.equal, described, expected))


def test_plain_sgd_subtracts_the_gradient() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    parameter.grad = torch.tensor([4.0, -4.0])
    SGD(lr=0.25).build([parameter]).step()
    assert torch.equal(parameter.detach(), torch.tensor([0.0, 3.0]))


@settings(deadline=None)
@given(
    st.floats(0, 10),
    st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    st.floats(0, 1),
    st.floats(0, 0.99),
)
def test_descriptions_cross_the_bus_unchanged(
    lr: float, betas: tuple[float, float], decay: float, momentum: float
) -> None:
    for described in (AdamW(lr=lr, betas=betas, weight_decay=decay), SGD(lr=lr, momentum=momentum)):
        frame = msgspec.msgpack.encode(Holder(described))
        assert msgspec.msgpack.decode(frame, type=Holder).optimizer == described
        plain = msgspec.to_builtins(Holder(described))
        assert msgspec.convert(plain, Holder).optimizer == described


@pytest.mark.parametrize(
    "bad", [{"lr": -1.0}, {"eps": -1e-9}, {"weight_decay": -0.1}, {"lr": float("nan")}]
)
def test_negative_settings_of_adamw_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must not be negative: AdamW"):
        AdamW(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, float("nan"))])
def test_betas_outside_their_range_are_refused(betas: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="each must be at least 0 and below 1"):
        AdamW(betas=betas)


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"momentum": 1.0}, {"momentum": -0.1}])
def test_settings_of_sgd_outside_their_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"lr must not be negative, momentum in \[0, 1\)"):
        SGD(**bad)


@pytest.mark.parametrize(
    "plain",
    [
        {"type": "adamw", "lr": -1.0},
        {"type": "adamw", "lr": "fast"},
        {"type": "adamw", "speed": 1.0},
        {"type": "lion"},
        {"type": "sgd", "betas": [0.9, 0.9]},
    ],
)
def test_a_description_from_the_bus_is_checked_like_any_other(plain: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"optimizer": plain}, Holder)
