import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from myelin.runtime.optimizer import (
    SGD,
    AdamW,
    Group,
    Named,
    Optimizer,
    Schedule,
    all_finite,
    named_parameters,
    set_rate,
)


class Holder(msgspec.Struct):
    """Stands for the message that carries a description."""

    optimizer: Optimizer


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 5), (7,), ())]


def named(parameters: Sequence[nn.Parameter]) -> list[Named]:
    """Give them names 0, 1, 2; all are decayed."""
    return [Named(str(index), p, decays=True) for index, p in enumerate(parameters)]


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
    described = trained(AdamW(**settings).build(named(ours)), ours)
    expected = trained(torch.optim.AdamW(theirs, fused=True, **settings), theirs)
    assert all(map(torch.equal, described, expected))
    assert not any(map(torch.equal, described, weights()))


def test_adamw_has_torchs_defaults() -> None:
    built = AdamW().build(named(weights())).defaults
    theirs = torch.optim.AdamW(weights()).defaults
    assert {name: built[name] for name in ("lr", "betas", "eps", "weight_decay")} == {
        name: theirs[name] for name in ("lr", "betas", "eps", "weight_decay")
    }
    assert built["fused"] is True


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs_own_to_the_last_bit(momentum: float) -> None:
    ours, theirs = weights(), weights()
    described = trained(SGD(lr=0.05, momentum=momentum, weight_decay=0.1).build(named(ours)), ours)
    torchs = torch.optim.SGD(theirs, lr=0.05, momentum=momentum, weight_decay=0.1)
    assert all(map(torch.equal, described, trained(torchs, theirs)))


def test_plain_sgd_subtracts_the_gradient() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    parameter.grad = torch.tensor([4.0, -4.0])
    SGD(lr=0.25).build(named([parameter])).step()
    assert torch.equal(parameter.detach(), torch.tensor([0.0, 3.0]))


# Groups


class Net(nn.Module):
    """Has one parameter of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 4)
        self.norm = nn.LayerNorm((2, 4))
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.free = nn.Parameter(torch.ones(2, 2))
        self.scale = nn.Parameter(torch.ones(()))


def groups_of(
    optimizer: AdamW | SGD, blocks: dict[int, nn.Module]
) -> dict[str, tuple[float, float]]:
    """Return (learning rate, weight decay) of every parameter by name."""
    parameters = named_parameters(blocks)
    names = {id(each.parameter): each.name for each in parameters}
    return {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in optimizer.build(parameters).param_groups
        for parameter in group["params"]
    }


def test_matrices_are_decayed_and_biases_norms_and_embeddings_are_not() -> None:
    assert groups_of(AdamW(lr=0.5, weight_decay=0.25), {3: Net()}) == {
        "3.free": (0.5, 0.25),
        "3.scale": (0.5, 0.0),
        "3.embedding.weight": (0.5, 0.0),
        "3.norm.weight": (0.5, 0.0),
        "3.norm.bias": (0.5, 0.0),
        "3.linear.weight": (0.5, 0.25),
        "3.linear.bias": (0.5, 0.0),
    }


def test_the_first_group_whose_pattern_fits_counts() -> None:
    groups = (
        Group("3.linear.*", weight_decay=0.125),
        Group("*.bias", weight_decay=1.0, lr_scale=2.0),
        Group("3.e*", lr_scale=0.5),
    )
    found = groups_of(SGD(lr=0.5, weight_decay=0.25, groups=groups), {3: Net()})
    assert found["3.linear.bias"] == (0.5, 0.125)
    assert found["3.norm.bias"] == (1.0, 1.0)
    assert found["3.embedding.weight"] == (0.25, 0.0)
    assert found["3.free"] == (0.5, 0.25)


def test_patterns_that_fit_nothing_are_found() -> None:
    optimizer = AdamW(groups=(Group("*.bias"), Group("*.wieght"), Group("7.*")))
    assert optimizer.unmatched(["0.weight", "0.bias", "1.weight"]) == ["*.wieght", "7.*"]


def test_a_weight_with_several_names_goes_by_the_first() -> None:
    embedding, head = nn.Embedding(3, 4), nn.Linear(4, 3, bias=False)
    head.weight = embedding.weight
    assert groups_of(AdamW(lr=1.0, weight_decay=0.5), {0: embedding, 1: head}) == {
        "0.weight": (1.0, 0.0)
    }
    assert groups_of(AdamW(lr=1.0, weight_decay=0.5), {0: head, 1: embedding}) == {
        "0.weight": (1.0, 0.5)
    }


# Schedules


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (Schedule(), [1, 1, 1, 1, 1, 1, 1]),
        (Schedule(warmup=2), [0.5, 1, 1, 1, 1, 1, 1]),
        (Schedule("linear", steps=4), [1, 0.75, 0.5, 0.25, 0, 0, 0]),
        (Schedule("linear", warmup=2, steps=6, floor=0.5), [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5]),
        (Schedule("cosine", steps=4, floor=0.2), [1, 0.8828427, 0.6, 0.3171573, 0.2, 0.2, 0.2]),
    ],
)
def test_a_schedule_multiplies_the_rate(schedule: Schedule, factors: list[float]) -> None:
    found = [schedule.factor(step) for step in range(7)]
    assert found == pytest.approx(factors, abs=1e-7)
    parameter = nn.Parameter(torch.ones(2, 2))
    description = SGD(lr=3.0, schedule=schedule, groups=(Group("x", lr_scale=2.0),))
    optimizer = description.build([Named("x", parameter, decays=True)])
    for step, factor in enumerate(found):
        set_rate(optimizer, description, step)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(6.0 * factor)


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_the_cosine_is_torchs_own_after_the_warm_up(warmup: int, floor: float) -> None:
    schedule = Schedule("cosine", warmup=warmup, steps=50, floor=floor)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50 - warmup, eta_min=floor)
    for step in range(warmup, 51):
        assert schedule.factor(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-6)
        optimizer.step()
        torchs.step()


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 20),
    st.integers(1, 100),
    st.floats(0, 1),
)
def test_factors_stay_between_floor_and_one_and_fall_after_the_warm_up(
    shape: str, warmup: int, more: int, floor: float
) -> None:
    schedule = Schedule(shape, warmup, warmup + more, floor)  # type: ignore[arg-type]
    factors = [schedule.factor(step) for step in range(warmup + more + 5)]
    assert factors[:warmup] == sorted(factors[:warmup])
    later = factors[warmup:]
    assert later == sorted(later, reverse=True)
    assert later[0] == 1.0
    assert math.isclose(later[-1], 1.0 if shape == "constant" else floor, abs_tol=1e-12)


# Descriptions


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
    more: dict[str, Any] = {
        "schedule": Schedule("cosine", warmup=3, steps=9),
        "max_norm": 1.5,
        "groups": (Group("*.bias", weight_decay=decay), Group("0.*", lr_scale=lr)),
    }
    described = (
        AdamW(lr=lr, betas=betas, weight_decay=decay, **more),
        SGD(lr=lr, momentum=momentum, **more),
    )
    for each in described:
        frame = msgspec.msgpack.encode(Holder(each))
        assert msgspec.msgpack.decode(frame, type=Holder).optimizer == each
        plain = msgspec.to_builtins(Holder(each))
        assert msgspec.convert(plain, Holder).optimizer == each


@pytest.mark.parametrize(
    "bad", [{"lr": -1.0}, {"eps": -1e-9}, {"weight_decay": -0.1}, {"lr": float("nan")}]
)
def test_negative_settings_of_adamw_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must not be negative: AdamW"):
        AdamW(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"lr": True}, "lr=True: use a plain number"),
        ({"lr": "1e-3"}, "lr='1e-3': use a plain number"),
        ({"lr": torch.tensor(1e-3)}, r"lr=tensor\(0\.0010\): use a plain number"),
        ({"lr": None}, "lr=None: use a plain number"),
        ({"lr": math.inf}, "lr must be finite"),
        ({"lr": 10**400}, "lr=1000.*: use a plain number"),
        ({"weight_decay": "x"}, "weight_decay='x': use a plain number"),
        ({"max_norm": "x"}, "max_norm='x': use a plain number, or None"),
        ({"schedule": "cosine"}, r"schedule='cosine': use a schedule, .*Schedule\("),
        ({"groups": Group("*")}, r"groups=Group\(.*: use a tuple of groups"),
        ({"groups": ("*.bias",)}, r"groups=\('\*\.bias',\): use a tuple of groups"),
    ],
)
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_settings_of_a_wrong_type_are_refused_with_what_to_use(
    kind: type[AdamW] | type[SGD], bad: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        kind(**bad)


@pytest.mark.parametrize("bad", [{"eps": "x"}, {"eps": None}, {"eps": False}])
def test_eps_must_be_a_number(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"eps=.*: use a plain number"):
        AdamW(**bad)


@pytest.mark.parametrize("betas", [0.9, (0.9,), (0.9, 0.9, 0.9), "ab", (0.9, "x"), None])
def test_betas_must_be_two_numbers(betas: Any) -> None:
    with pytest.raises(
        ValueError, match=r"betas=.*: use two plain numbers, such as \(0\.9, 0\.95\)"
    ):
        AdamW(betas=betas)


def test_a_momentum_must_be_a_number() -> None:
    with pytest.raises(ValueError, match=r"momentum='0\.9': use a plain number"):
        SGD(momentum="0.9")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"names": 3}, "names=3: use a text"),
        ({"names": "*", "weight_decay": "0"}, "weight_decay='0': use a plain number, or None"),
        ({"names": "*", "lr_scale": None}, "lr_scale=None: use a plain number"),
    ],
)
def test_a_group_of_a_wrong_type_is_refused(bad: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Group(**bad)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"warmup": 1.5}, "warmup=1.5: use a whole number"),
        ({"warmup": "3"}, "warmup='3': use a whole number"),
        ({"steps": "9"}, "steps='9': use a whole number, or None"),
        ({"floor": "x"}, "floor='x': use a plain number"),
        ({"shape": 3}, 'shape=3: use "constant", "linear" or "cosine"'),
    ],
)
def test_a_schedule_of_a_wrong_type_is_refused(bad: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Schedule(**bad)


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, float("nan"))])
def test_betas_outside_their_range_are_refused(betas: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="each must be at least 0 and below 1"):
        AdamW(betas=betas)


@pytest.mark.parametrize(
    "bad", [{"lr": -1.0}, {"momentum": 1.0}, {"momentum": -0.1}, {"weight_decay": -1.0}]
)
def test_settings_of_sgd_outside_their_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must not be negative, momentum in \[0, 1\)"):
        SGD(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_a_largest_norm_that_leaves_nothing_is_refused(
    kind: type[AdamW] | type[SGD], norm: float
) -> None:
    with pytest.raises(ValueError, match="use a number above 0, or None"):
        kind(max_norm=norm)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"shape": "exponential"}, 'use "constant", "linear" or "cosine"'),
        ({"warmup": -1}, "must not be negative"),
        ({"floor": 1.5}, "floor in"),
        ({"shape": "cosine"}, "needs the number of steps"),
        ({"shape": "linear", "warmup": 5, "steps": 5}, "more than the 5 of the warm-up"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(bad: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Schedule(**bad)


@pytest.mark.parametrize("bad", [{"weight_decay": -1.0}, {"lr_scale": -1.0}])
def test_negative_settings_of_a_group_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must not be negative: Group"):
        Group("*", **bad)


@pytest.mark.parametrize(
    "plain",
    [
        {"type": "adamw", "lr": -1.0},
        {"type": "adamw", "lr": "fast"},
        {"type": "adamw", "speed": 1.0},
        {"type": "adamw", "schedule": {"shape": "steep"}},
        {"type": "adamw", "groups": [{"lr_scale": 1.0}]},
        {"type": "lion"},
        {"type": "sgd", "betas": [0.9, 0.9]},
    ],
)
def test_a_description_from_the_bus_is_checked_like_any_other(plain: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"optimizer": plain}, Holder)


# What a step looks at


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_one_number_that_is_not_finite_is_found(place: int, bad: float) -> None:
    gradients = [torch.ones(3, 3), torch.ones(7)]
    assert all_finite(gradients)
    gradients[place].view(-1)[2] = bad
    assert not all_finite(gradients)


def test_infinities_of_both_signs_are_found() -> None:
    assert not all_finite([torch.tensor([math.inf, -math.inf])])


def test_large_numbers_are_finite_although_their_sum_is_not() -> None:
    largest = torch.finfo(torch.float32).max
    assert all_finite([torch.full((9,), largest)])
    assert all_finite([torch.full((9,), 6e4, dtype=torch.float16)])


def test_no_numbers_are_finite() -> None:
    assert all_finite([])
    assert all_finite([torch.empty(0)])
