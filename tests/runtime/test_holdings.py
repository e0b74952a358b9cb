import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from myelin import AdamW
from myelin.models.building import BlockInfo
from myelin.models.losses import Loss
from myelin.models.model import Parts
from myelin.runtime.holdings import Holdings
from myelin.runtime.messages import Build, Collect, Describe, Described, StageSpec, State

DEVICES: list[str] = []
MODULE = "factories_of_a_test"


class Counted(nn.Linear):
    """A linear layer that says where it was allocated."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        DEVICES.append(self.weight.device.type)


def ready_made() -> tuple[list[nn.Module], Loss]:
    return [Counted(), nn.Tanh(), Counted()], functional.mse_loss


def sharing() -> Parts:
    first, last = Counted(), Counted()
    last.weight = first.weight
    return Parts((first, nn.Tanh(), last), functional.mse_loss)


def twice() -> tuple[list[nn.Module], Loss]:
    block = Counted()
    return [block, nn.Tanh(), block], functional.mse_loss


@pytest.fixture
def holdings(monkeypatch: pytest.MonkeyPatch) -> Holdings:
    monkeypatch.setitem(sys.modules, MODULE, sys.modules[__name__])
    DEVICES.clear()
    return Holdings(run_ahead=1, local_calls={}, black_box=None)


def build(factory: Callable[..., object], stages: int) -> Build:
    specs = tuple(StageSpec(stage, stage, stage) for stage in range(stages - 1))
    specs += (StageSpec(stages - 1, stages - 1, 2),)
    path = f"{MODULE}:{factory.__name__}"
    return Build(1, 0, path, {}, specs, stages - 1, (), AdamW(), seed=5)


def test_describing_builds_a_model_once_and_allocates_nothing(holdings: Holdings) -> None:
    answer = holdings.carry_out(Describe(7, f"{MODULE}:sharing", {}), None)
    assert answer == Described(
        7, (BlockInfo(6.0), BlockInfo(1.0), BlockInfo(6.0)), ((0, "weight", 2, "weight"),)
    )
    assert DEVICES == ["meta", "meta"]


@pytest.mark.parametrize("factory", [ready_made, sharing, twice])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_factory_is_called_once_a_build_however_many_stages_there_are(
    factory: Callable[..., object], stages: int, holdings: Holdings
) -> None:
    holdings.carry_out(build(factory, stages), None)
    assert len(DEVICES) == (1 if factory is twice else 2)
    weights = holdings.carry_out(Collect(2, 0, State.WEIGHTS), None)
    assert isinstance(weights, dict)
    assert list(weights) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    one_weight = factory is not ready_made
    assert torch.equal(weights["0.weight"], weights["2.weight"]) is one_weight
    shares_memory = weights["0.weight"].data_ptr() == weights["2.weight"].data_ptr()
    assert shares_memory is (one_weight and stages == 1)
