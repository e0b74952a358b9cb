import dataclasses
import enum
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from torch import nn
from torch.nn import functional

from myelin.errors import ModelError
from myelin.models.gpt import GPT
from myelin.models.model import Description, Model, Parts, Tie, check_description, load
from myelin.testing import models

RETURNED: dict[str, Any] = {}


def give(key: str) -> Any:
    """Stands for a factory: returns, or raises, what the test put there."""
    value = RETURNED[key]
    if isinstance(value, Exception):
        raise value
    return value


@pytest.fixture
def returning(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], Parts]:
    """Load a factory that returns what is given."""
    monkeypatch.setitem(sys.modules, "factory_of_a_test", sys.modules[__name__])

    def loading(made: object) -> Parts:
        RETURNED["it"] = made
        return load("factory_of_a_test:give", {"key": "it"})

    return loading


def linear() -> nn.Module:
    return nn.Linear(2, 3)


def test_a_model_is_a_path_and_its_arguments() -> None:
    model = Model("pkg.mod:build", width=3, name="x", rate=0.5, deep=True, nothing=None)
    assert model.factory == "pkg.mod:build"
    assert model.arguments == {
        "width": 3,
        "name": "x",
        "rate": 0.5,
        "deep": True,
        "nothing": None,
    }


def test_both_kinds_of_model_are_descriptions() -> None:
    described: list[Description] = [Model("pkg.mod:build"), GPT(1, 4, 2, 8, 16)]
    assert [d.factory for d in described] == ["pkg.mod:build", "myelin.models.gpt:build"]


def test_a_module_level_function_stands_for_its_path() -> None:
    assert Model(models.mlp, width=3) == Model("myelin.testing.models:mlp", width=3)


def test_a_lambda_is_refused() -> None:
    with pytest.raises(ModelError, match="lambdas"):
        Model(lambda: None)


def test_arguments_may_be_called_factory_and_self() -> None:
    assert Model("pkg.mod:build", factory=1, self=2).arguments == {"factory": 1, "self": 2}


def test_arguments_come_back_from_the_wire_as_they_are_here() -> None:
    class Size(enum.IntEnum):
        SMALL = 3

    class Name(enum.StrEnum):
        ANN = "ann"

    model = Model("a:b", sizes=(1, (2, 3)), tree={"k": [None, (True,)]}, n=Size.SMALL, s=Name.ANN)
    assert model.arguments == {
        "sizes": [1, [2, 3]],
        "tree": {"k": [None, [True]]},
        "n": 3,
        "s": "ann",
    }
    assert type(model.arguments["n"]) is int
    assert type(model.arguments["s"]) is str
    assert msgpack.unpackb(msgpack.packb(model.arguments)) == model.arguments


def test_a_model_cannot_be_changed_from_outside() -> None:
    widths = [1, 2]
    model = Model("a:b", widths=widths)
    widths.append(3)
    model.arguments["widths"] = "other"
    assert model.arguments == {"widths": [1, 2]}
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.factory = "c:d"  # type: ignore[misc]


def test_equal_models_are_equal_and_hash_alike() -> None:
    assert Model("a:b", n=[1]) == Model("a:b", n=(1,))
    assert Model("a:b", n=[1]) != Model("a:b", n=[2])
    assert len({Model("a:b", n=[1]), Model("a:b", n=[1])}) == 1


def test_its_repr_could_be_typed_in() -> None:
    assert repr(Model("a:b", n=1, s="x")) == "Model('a:b', n=1, s='x')"


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (torch.float32, "argument it is torch.float32"),
        (torch.zeros(2), "argument it is tensor"),
        ([1, {"k": object()}], r"argument it\[1\]\['k'\]"),
        ({1: 2}, "keyed by str"),
        ({1, 2}, "set"),
        (b"x", "bytes"),
        (2**64, "64-bit"),
        (-(2**63) - 1, "64-bit"),
        (linear, "function"),
        ("\ud800", "str"),
        (ENDLESS, "deeper than"),
    ],
)
def test_what_is_not_plain_is_refused_by_its_place(value: Any, where: str) -> None:
    with pytest.raises(ModelError, match=where):
        Model("a:b", it=value)


@pytest.mark.parametrize("value", [2**64 - 1, -(2**63), float("inf"), "ä\n\0", "", [], {}])
def test_plain_values_at_the_edge_are_taken(value: Any) -> None:
    assert Model("a:b", it=value).arguments["it"] == value


def test_parts_pairs_and_sequentials_load_alike(returning: Callable[[object], Parts]) -> None:
    blocks, loss = [nn.Linear(2, 3), nn.Tanh()], functional.mse_loss
    made: list[object] = [
        Parts(tuple(blocks), loss),
        (blocks, loss),
        (tuple(blocks), loss),
        (nn.Sequential(*blocks), loss),
        (nn.ModuleList(blocks), loss),
    ]
    assert [returning(each) for each in made] == [Parts(tuple(blocks), loss)] * 5


def test_builders_and_classes_and_modules_may_be_mixed(
    returning: Callable[[object], Parts],
) -> None:
    assert len(returning(([linear, nn.Tanh, nn.Linear(3, 2)], nn.MSELoss())).blocks) == 3


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (None, r"returned NoneType: return \(blocks, loss\)"),
        (nn.Sequential(nn.Tanh()), r"returned Sequential: return \(blocks, loss\)"),
        ([nn.Tanh(), nn.Tanh()], r"returned list: return \(blocks, loss\)"),
        ((nn.Tanh(), nn.MSELoss()), "divide a single module into several"),
        (("ab", nn.MSELoss()), "str as its blocks"),
        (([], nn.MSELoss()), "no blocks"),
        (([nn.Tanh(), 3], nn.MSELoss()), "int as block 1"),
        (([nn.Tanh()], None), "NoneType as its loss"),
        (([nn.Tanh()], nn.Linear(1, 1)), "move them into the last block"),
    ],
)
def test_what_a_factory_may_not_return_is_refused_with_the_remedy(
    made: object, text: str, returning: Callable[[object], Parts]
) -> None:
    with pytest.raises(ModelError, match=text) as caught:
        returning(made)
    assert "factory_of_a_test:give" in str(caught.value)


@pytest.mark.parametrize(
    ("ties", "text"),
    [
        ([Tie(0, "weight", 3, "weight")], "blocks are 0 to 2"),
        ([Tie(-1, "weight", 1, "weight")], "blocks are 0 to 2"),
        ([Tie(1, "weight", 1, "weight")], "inside one block"),
        ([Tie(0, "weight", 2, "weight"), Tie(1, "weight", 2, "weight")], "one owner only"),
        ([Tie(0, "weight", 1, "weight"), Tie(1, "weight", 2, "weight")], "first owner"),
    ],
)
def test_ties_that_make_no_sense_are_refused(
    ties: list[Tie], text: str, returning: Callable[[object], Parts]
) -> None:
    with pytest.raises(ModelError, match=text):
        returning(Parts((linear, linear, linear), functional.mse_loss, tuple(ties)))


def test_a_factory_that_raises_is_named_with_its_arguments_and_cause(
    returning: Callable[[object], Parts],
) -> None:
    planted = OSError("no such file")
    with pytest.raises(
        ModelError, match=r"raised OSError: no such file.*\{'key': 'it'\}"
    ) as caught:
        returning(planted)
    assert caught.value.__cause__ is planted


def test_arguments_that_the_factory_does_not_take_are_refused_with_its_signature() -> None:
    with pytest.raises(ModelError, match=r"takes \(width: int = 4.*gives \(widht\)"):
        load("myelin.testing.models:mlp", {"widht": 3})
    with pytest.raises(ModelError, match="missing a required argument: 'layers'"):
        load("myelin.models.gpt:build", {})


def test_a_factory_draws_the_same_weights_every_time_and_leaves_the_generator_alone() -> None:
    def weight(seed: int) -> torch.Tensor:
        block = load("myelin.testing.models:mlp", {}, seed=seed).blocks[0]
        assert isinstance(block, nn.Sequential)
        return next(block.parameters())

    before = torch.get_rng_state()
    first, again, other = weight(1), weight(1), weight(2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_parameter_held_by_two_modules_is_found_to_be_tied() -> None:
    assert load("myelin.testing.models:shared", {}).ties == (Tie(0, "weight", 2, "weight"),)


def test_a_module_that_stands_twice_is_tied_in_all_its_parameters(
    returning: Callable[[object], Parts],
) -> None:
    twice = nn.Linear(2, 2)
    ties = returning(([twice, nn.Tanh(), twice], functional.mse_loss)).ties
    assert ties == (Tie(0, "weight", 2, "weight"), Tie(0, "bias", 2, "bias"))


def test_a_declared_tie_is_not_found_twice(returning: Callable[[object], Parts]) -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    last.weight = first.weight
    declared = Tie(0, "weight", 1, "weight")
    assert returning(Parts((first, last), functional.mse_loss, (declared,))).ties == (declared,)


def test_a_shared_buffer_is_refused_since_workers_cannot_share_it(
    returning: Callable[[object], Parts],
) -> None:
    norm = nn.BatchNorm1d(2, affine=False)
    with pytest.raises(ModelError, match="buffer 'running_mean' of block 1 is also in block 0"):
        returning(([norm, norm], functional.mse_loss))


def test_a_script_on_disk_can_be_a_model(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from torch import nn\n"
        "def build(widths):\n"
        "    blocks = [nn.Linear(a, b) for a, b in zip(widths, widths[1:])]\n"
        "    return blocks, nn.MSELoss()\n"
    )
    model = Model(f"{path}:build", widths=(2, 3, 4))
    assert len(load(model.factory, model.arguments).blocks) == 2


def test_a_factory_that_raises_is_told_with_the_line_of_the_users_own_code(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from torch import nn\n\n\ndef build(width):\n    return deeper(width)\n\n\n"
        "def deeper(width):\n    return [nn.Linear(width, 'x')], None\n"
    )
    with pytest.raises(ModelError, match=f"{path}:9\\); it was called with {{'width': 3}}"):
        load(f"{path}:build", {"width": 3})


@pytest.mark.parametrize("model", [Model("myelin.testing.models:mlp")])
def test_a_description_passes_as_it_is(model: Model) -> None:
    assert check_description(model) is model
