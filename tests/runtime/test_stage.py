"""One stage without a cluster; what a whole pipeline computes is tested in `tests/training`."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from myelin.runtime.messages import StageSpec
from myelin.runtime.stage import Cursor, Stage, may_draw
from myelin.testing.models import Carry, Fork, Join, Shift, Thirds, Twice, Weave, add_noise


class Recorder(Cursor):
    """A cursor that keeps which blocks were entered."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[int | None] = []

    def enter(self, block: int | None) -> None:
        self.entered.append(block)


def stage_of(
    *blocks: nn.Module, stage: int = 1, cursor: Cursor | None = None, every: int | None = None
) -> Stage:
    spec = StageSpec(stage, 0, len(blocks) - 1, every)
    return Stage(spec, dict(enumerate(blocks)), seed=0, cursor=cursor or Cursor())


def forward(stage: Stage, value: Any, wants: Sequence[bool], microbatch: int = 0) -> Any:
    output = stage.forward(value, wants, step=0, microbatch=microbatch)
    tensors = [output] if isinstance(output, Tensor) else list(output)
    stage.keep(microbatch, tensors)
    return output


# What comes in and what goes out


@pytest.mark.parametrize("wants", [True, False])
def test_a_block_that_writes_into_its_input_leaves_alone_what_came_in(wants: bool) -> None:
    came = torch.ones(2, 3)
    forward(stage_of(Shift()), came, [wants])
    assert torch.equal(came, torch.ones(2, 3))


def test_a_block_that_writes_into_its_input_leaves_alone_what_came_in_for_inference() -> None:
    came = torch.ones(2, 3)
    output = stage_of(Shift()).infer(came, step=0, microbatch=0)
    assert torch.equal(came, torch.ones(2, 3))
    assert torch.equal(output, torch.full((2, 3), 2.0))


def test_one_tensor_twice_comes_in_as_one_and_either_place_has_its_whole_gradient() -> None:
    stage = stage_of(Weave(3, 2))
    came = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    output = forward(stage, (came, came), [True, True])
    gradients = stage.backward(0, [torch.ones_like(output)])
    plain = came.clone().requires_grad_()
    through = plain * 1.0
    Weave.forward(stage.blocks[0], (through, through)).sum().backward()  # type: ignore[arg-type,no-untyped-call]
    for gradient in gradients:
        assert gradient is not None
        assert torch.equal(gradient, plain.grad)  # type: ignore[arg-type]


def test_one_tensor_twice_goes_out_as_one_and_its_gradient_counts_once() -> None:
    linear = nn.Linear(3, 3)
    stage = stage_of(linear, Twice())
    output = forward(stage, torch.ones(1, 3), [False])
    one, other = stage.leaving(output)
    assert one is other
    gradient = torch.ones(1, 3)
    stage.backward(0, [gradient, gradient])
    assert torch.equal(linear.bias.grad, torch.ones(3))  # type: ignore[arg-type]


def test_an_expanded_gradient_comes_back_expanded() -> None:
    class Add(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum(1)

    stage = stage_of(Add())
    output = forward(stage, torch.ones(2, 5), [True])
    (gradient,) = stage.backward(0, [torch.ones_like(output)])
    assert gradient is not None
    assert gradient.stride() == (1, 0)


def test_a_gradient_under_way_is_not_changed_by_a_later_backward() -> None:
    class Bias(nn.Module):
        """Adds views of its parameter, whose `.grad` autograd lets share the input's memory."""

        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.bias.view(2, 3).view(6)) * torch.arange(6.0)

    stage = stage_of(Bias())
    for microbatch in range(2):
        forward(stage, torch.ones(6), [True], microbatch)
    (first,) = stage.backward(0, [torch.ones(6)])
    stage.backward(1, [torch.ones(6)])
    assert first is not None
    assert torch.equal(first, torch.arange(6.0))


@pytest.mark.parametrize("infer", [False, True])
def test_weights_and_buffers_leave_as_copies(infer: bool) -> None:
    stage = stage_of(block := Carry(3))
    x = torch.ones(2, 3)
    output = stage.infer(x, step=0, microbatch=0) if infer else forward(stage, x, [False])
    _, scale, mean = stage.leaving(output)
    expected = block.scale.detach().clone(), block.mean.clone()
    with torch.no_grad():
        block.scale.zero_()
        block.mean.zero_()
    assert torch.equal(scale, expected[0])
    assert torch.equal(mean, expected[1])


def test_what_a_stage_made_itself_leaves_without_a_copy() -> None:
    stage = stage_of(nn.Linear(3, 6), Thirds())
    output = forward(stage, torch.ones(2, 3), [True])
    left = stage.leaving(output)
    assert [t.data_ptr() for t in left] == [t.data_ptr() for t in output]
    assert not any(t.requires_grad for t in left)


# Which block the backward is in


def entered_backwards(*blocks: nn.Module) -> list[int | None]:
    stage = stage_of(*blocks, cursor=(recorder := Recorder()))
    output = forward(stage, torch.ones(2, 3), [True])
    recorder.entered.clear()
    stage.backward(0, [torch.ones_like(output)])
    return recorder.entered


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (lambda: [nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)], [2, 1, 0]),
        (lambda: [nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 3)], [2, 0]),
        (lambda: [nn.Linear(3, 3), nn.Identity()], [0]),
        (lambda: [nn.Linear(3, 3), Shift(), nn.Linear(3, 3)], [2, 1, 0]),
        (lambda: [nn.Tanh(), Fork(3, 3), nn.Identity(), Join(3, 3)], [3, 1, 0]),
    ],
    ids=["plain", "handed on", "handed on last", "in place", "handed on beside another"],
)
def test_a_backward_enters_the_blocks_that_made_something(
    blocks: Callable[[], list[nn.Module]], expected: list[int]
) -> None:
    assert entered_backwards(*blocks()) == [*expected, None]


def test_a_parameter_that_is_handed_on_gathers_no_hooks() -> None:
    stage = stage_of(block := Carry(3))
    for microbatch in range(3):
        forward(stage, torch.ones(2, 3), [False], microbatch)
    assert not block.scale._backward_hooks


# Modes


def test_modules_that_were_built_in_evaluation_mode_are_trained_in_it() -> None:
    modes: list[list[bool]] = []

    class Seen(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            modes.append([module.training for module in self.modules()])
            return self[0](x)  # type: ignore[no-any-return]

    within = nn.Sequential(inmost := nn.Tanh()).eval()
    inmost.train()
    stage = stage_of(Seen(nn.Tanh(), nn.Tanh().eval(), within))
    forward(stage, torch.ones(1), [False])
    stage.infer(torch.ones(1), step=0, microbatch=0)
    forward(stage, torch.ones(1), [False])
    built = [True, True, False, False, True]
    assert modes == [built, [False] * 5, built]


def test_a_module_that_keeps_itself_from_training_is_asked_to() -> None:
    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> "Frozen":
            super().train(mode)
            self[0].eval()
            return self

    stage = stage_of(Frozen(nn.Dropout()))
    assert torch.equal(forward(stage, torch.ones(9), [False]), torch.ones(9))


# Random numbers


def test_a_block_draws_the_same_in_inference_for_the_same_step_and_microbatch() -> None:
    block = nn.Linear(3, 3)
    block.register_forward_hook(add_noise)
    stage = stage_of(block)

    def output(step: int, microbatch: int) -> Tensor:
        return stage.infer(torch.ones(1, 3), step=step, microbatch=microbatch)  # type: ignore[no-any-return]

    assert torch.equal(output(1, 2), output(1, 2))
    assert not torch.equal(output(1, 2), output(1, 1))
    assert not torch.equal(output(1, 2), output(2, 2))


def hooked() -> nn.Module:
    block = nn.Sequential(nn.Tanh())
    block[0].register_forward_hook(add_noise)
    return block


def hooked_before() -> nn.Module:
    block = nn.Tanh()
    block.register_forward_pre_hook(lambda module, inputs: None)
    return block


def with_another_forward() -> nn.Module:
    block = nn.Tanh()
    block.forward = torch.randn_like  # type: ignore[method-assign]
    return block


class Own(nn.Module):
    """Nobody knows what it does."""


class Sworn(Own):
    """Says what it does."""

    draws_random = False


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: nn.Linear(2, 2), False),
        (lambda: nn.Sequential(nn.Tanh(), nn.Dropout(0.0)), False),
        (nn.Dropout, True),
        (nn.RReLU, True),
        (hooked, True),
        (hooked_before, True),
        (with_another_forward, True),
        (Own, True),
        (Sworn, False),
    ],
)
def test_a_block_may_draw_unless_it_is_known_not_to(
    make: Callable[[], nn.Module], expected: bool
) -> None:
    assert may_draw(make()) is expected


# Recomputing


class Remembering(nn.Module):
    """Multiplies with a weight and remembers where in memory its results were."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("calls", torch.zeros(()))
        self.returned: list[StorageWeakRef] = []
        self.runs = 0

    def forward(self, x_BD: Tensor) -> Tensor:
        self.runs += 1
        self.calls += 1
        y_BD = x_BD * self.weight
        self.returned.append(StorageWeakRef(y_BD.untyped_storage()))  # type: ignore[no-untyped-call]
        return y_BD


@pytest.mark.parametrize(
    ("every", "kept", "runs"),
    [
        (None, [True, True, True, True], [1, 1, 1, 1]),
        (1, [True, True, True, True], [2, 2, 2, 2]),
        (2, [False, True, False, True], [2, 2, 2, 2]),
        (3, [False, False, True, True], [2, 2, 2, 2]),
        (9, [False, False, False, True], [2, 2, 2, 2]),
    ],
)
def test_only_the_outputs_of_every_so_many_blocks_are_kept(
    every: int | None, kept: list[bool], runs: list[int]
) -> None:
    blocks = [Remembering() for _ in range(4)]
    stage = stage_of(*blocks, every=every)
    output = forward(stage, torch.ones(2, 3), [True])
    alive = [not block.returned[0].expired() for block in blocks]  # type: ignore[no-untyped-call]
    assert alive == kept
    (gradient,) = stage.backward(0, [torch.ones_like(output)])
    assert torch.equal(gradient, torch.full((2, 3), 16.0))  # type: ignore[arg-type]
    assert [block.runs for block in blocks] == runs
    assert [block.calls.item() for block in blocks] == [1, 1, 1, 1]  # the second run does not count


def test_an_error_while_recomputing_names_its_block() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.runs = 0

        def forward(self, x_BD: Tensor) -> Tensor:
            self.runs += 1
            if self.runs > 1:
                raise RuntimeError("planted")
            return x_BD * 2.0

    cursor = Cursor()
    stage = stage_of(Remembering(), Once(), Remembering(), cursor=cursor, every=3)
    output = forward(stage, torch.ones(2, 3), [True])
    with pytest.raises(RuntimeError, match="planted"):
        stage.backward(0, [torch.ones_like(output)])
    assert cursor.block == 1


def test_microbatches_in_flight_are_recomputed_each_for_itself() -> None:
    stage = stage_of(Remembering(), Shift(), Remembering(), every=2)
    inputs = [torch.full((1, 3), float(number)) for number in range(4)]
    outputs = [forward(stage, value, [True], number) for number, value in enumerate(inputs)]
    for number in range(4):
        stage.backward(number, [torch.ones_like(outputs[number])])
    plain = [torch.full((3,), 2.0, requires_grad=True) for _ in range(2)]
    for value in inputs:
        ((value * plain[0] + 1) * plain[1]).sum().backward()  # type: ignore[no-untyped-call]
    for index, expected in zip((0, 2), plain, strict=True):
        weight = stage.blocks[index].weight
        assert torch.equal(weight.grad, expected.grad)  # type: ignore[arg-type]
