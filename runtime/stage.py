"""One pipeline stage on its worker: its blocks, what a forward saves, what a backward returns.

The arithmetic is that of a plain loop over the whole model, to the last bit: a stage cuts the
autograd graph at its border and nowhere else. What crosses a border is `(value, wants_gradient)`,
one flag per tensor of the value, so that the next stage computes a gradient for exactly those
tensors that a plain loop would.

Nobody writes into a tensor that has left a stage, since others may be reading it: a stage copies
what comes in, and blocks may write into the copies. A copy lies in memory as its original does, and
so do gradients, also where autograd has expanded them. A tensor that stands in a value twice is one
tensor on either side. Tensors that merely share memory, such as a tensor and a view of it, no
longer do so on the other side; that matters only to blocks that write into one of them.

All methods run on the device's compute thread, except where they say otherwise.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from myelin.models.seeds import op_seed, seeded
from myelin.runtime.blackbox import BlackBox
from myelin.runtime.messages import StageSpec
from myelin.runtime.recompute import recomputed
from myelin.runtime.strides import copied
from myelin.transports.packing import map_tensors, tensors_of


class Cursor:
    """Which model block runs right now on this worker's compute stream; None between blocks."""

    def __init__(self, black_box: BlackBox | None = None) -> None:
        self.block: int | None = None
        self._black_box = black_box

    def enter(self, block: int | None) -> None:
        """Say that `block` runs from now on."""
        self.block = block
        if self._black_box is not None:
            self._black_box.block(block)

    def watch(self, made: Sequence[Tensor], block: int) -> None:
        """Have the backward say that it enters `block` when it reaches a tensor that it made."""
        for tensor in made:
            tensor.register_hook(lambda _: self.enter(block))  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class _Inlet:
    """The place of a tensor in a stage's input; its gradient comes out here."""

    gradient: Tensor | None = None


class _Border(torch.autograd.Function):
    """Copies a tensor into a stage; its gradient goes to the inlet, as it lies in memory.

    The gradient is a copy too: autograd may let the `.grad` of a parameter share its memory, to
    which later backwards add.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, inlet: _Inlet) -> Tensor:
        ctx.inlet = inlet
        ctx.set_materialize_grads(False)
        return copied(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        (gradient,) = gradients
        if gradient is not None:
            ctx.inlet.gradient = copied(gradient)
        return None, None


@dataclass(frozen=True, slots=True)
class _Saved:
    """What a forward leaves for its backward."""

    inlets: list[_Inlet]
    outputs: list[Tensor]


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive blocks that run, and are recomputed, together."""

    indices: list[int]
    modules: list[nn.Module]


@dataclass(frozen=True, slots=True)
class _Buffers:
    """A module's buffers and what they held before a run; None is a buffer that has no tensor."""

    module: nn.Module
    tensors: dict[str, Tensor | None]
    before: dict[str, Tensor | None]

    @staticmethod
    def of(module: nn.Module) -> "_Buffers":
        """Remember a module's buffers."""
        tensors = dict(module._buffers)
        before = {n: None if t is None else copied(t.detach()) for n, t in tensors.items()}
        return _Buffers(module, tensors, before)

    def restore(self) -> None:
        """Undo what a forward did: writes into tensors, other tensors, more buffers or fewer."""
        self.module._buffers.clear()
        for name, tensor in self.tensors.items():
            self.module._buffers[name] = _with_content(tensor, self.before[name])


class Stage:
    """A run of consecutive blocks of the model.

    Args:
        spec: which blocks.
        blocks: the built blocks by index; the stage keeps them.
        seed: the trainer's seed; random numbers depend on it, the step, the block and the
            microbatch alone.
        cursor: told which block runs.
    """

    def __init__(
        self,
        spec: StageSpec,
        blocks: dict[int, nn.Module],
        *,
        seed: int,
        cursor: Cursor,
    ) -> None:
        self.spec = spec
        self.blocks = {index: blocks[index] for index in range(spec.first, spec.last + 1)}
        self._seed, self._cursor = seed, cursor
        self._saved: dict[int, _Saved] = {}
        self._buffers: list[_Buffers] | None = None
        self._drawing = {index for index, block in self.blocks.items() if may_draw(block)}
        self._modules = {m: None for block in self.blocks.values() for m in block.modules()}
        self._resting = [module for module in self._modules if not module.training]
        self._training: bool | None = None  # the mode that the blocks were put into, if any
        self._parts = self._in_parts(spec.every or len(self.blocks))

    def _in_parts(self, size: int) -> list["_Part"]:
        indices = list(self.blocks)
        groups = [indices[start : start + size] for start in range(0, len(indices), size)]
        return [
            _Part(group, list(dict.fromkeys(m for i in group for m in self.blocks[i].modules())))
            for group in groups
        ]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by the names they have in `nn.Sequential(*all_blocks)`."""
        return {
            f"{index}.{name}": parameter
            for index, block in self.blocks.items()
            for name, parameter in block.named_parameters(remove_duplicate=False)
        }

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers that belong to a checkpoint, named like the parameters."""
        return {
            f"{index}.{name}": tensor
            for index, block in self.blocks.items()
            for name, tensor in block.state_dict(keep_vars=True).items()
            if not isinstance(tensor, nn.Parameter) and isinstance(tensor, Tensor)
        }

    def buffer_state(self) -> list[dict[str, Tensor | None]]:
        """Return copies of all buffers of each module, also of those that no checkpoint has."""
        return [_Buffers.of(module).before for module in self._modules]

    def take_buffers(self, state: Sequence[Mapping[str, Tensor | None]]) -> None:
        """Take over the buffers of another replica's stage."""
        for module, own in zip(self._modules, state, strict=True):
            tensors = dict(module._buffers)
            module._buffers.clear()
            for name, value in own.items():
                module._buffers[name] = _with_content(tensors.get(name), value)

    def infer(self, value: Any, *, step: int, microbatch: int) -> Any:
        """Run the blocks in evaluation mode and return the last one's output; saves nothing."""
        self._switch(training=False)
        if self.spec.stage:
            value = each_once(copied, value)
        with torch.no_grad():
            for index, block in self.blocks.items():
                self._cursor.enter(index)
                with self._random(index, step, microbatch):
                    value = block(value)
        self._cursor.enter(None)
        return value

    def forward(
        self, value: Any, wants_gradient: Sequence[bool], *, step: int, microbatch: int
    ) -> Any:
        """Run the blocks in training mode; the output is attached to the autograd graph.

        Modules that the factory put into evaluation mode stay in it. Call `keep` with what a
        backward is to start from before the next forward.
        """
        self._switch(training=True)
        self._remember_buffers()
        value = self._enter(value, wants_gradient)
        for part in self._parts:
            run = partial(self._run, part, step, microbatch)
            value = run(value) if self.spec.every is None else recomputed(run, value, part.modules)
        self._cursor.enter(None)
        return value

    def _run(self, part: "_Part", step: int, microbatch: int, value: Any) -> Any:
        """Run some blocks in training mode."""
        tensors = tensors_of(value)
        for index in part.indices:
            self._cursor.enter(index)
            makers = {id(tensor): tensor.grad_fn for tensor in tensors}
            with self._random(index, step, microbatch):
                value = self.blocks[index](value)
            outputs = tensors_of(value)
            self._cursor.watch(list(_made(outputs, makers)), index)
            tensors = outputs
        return value

    def _enter(self, value: Any, wants_gradient: Sequence[bool]) -> Any:
        """Return the tensors for the blocks, which may write into them.

        Those of the first stage are the run's own parts of the batch, which nobody else reads.
        """
        inlets: dict[int, _Inlet] = {}
        wants = dict(zip(map(id, tensors_of(value)), wants_gradient, strict=True))

        def enter(tensor: Tensor) -> Tensor:
            inlet = inlets[id(tensor)] = _Inlet()
            if wants[id(tensor)]:
                leaf = tensor.detach().requires_grad_()
                return _Border.apply(leaf, inlet)  # type: ignore[no-any-return,no-untyped-call]
            return copied(tensor) if self.spec.stage else tensor

        entered = each_once(enter, value)
        self._inlets = [inlets[id(tensor)] for tensor in tensors_of(value)]
        return entered

    def leaving(self, output: Any) -> Any:
        """Return an output for others to read: detached, and no weight or buffer of this stage.

        Those may change while it is under way, so copies of them leave.
        """
        made = all(t.grad_fn is not None and not t._is_view() for t in tensors_of(output))
        own = set() if made else self._own_memory()

        def leave(tensor: Tensor) -> Tensor:
            detached = tensor.detach()
            return copied(detached) if _memory(detached) in own else detached

        return each_once(leave, output)

    def _own_memory(self) -> set[int]:
        """Return where the weights and buffers are."""
        return {
            _memory(tensor)
            for module in self._modules
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None and tensor.numel()
        }

    def keep(self, microbatch: int, outputs: list[Tensor]) -> None:
        """Save what the backward of `microbatch` starts from: `outputs`, still attached."""
        self._saved[microbatch] = _Saved(self._inlets, outputs)

    def backward(
        self,
        microbatch: int,
        gradients: Sequence[Tensor | None],
        *,
        from_users: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> list[Tensor | None]:
        """Run the backward of one microbatch; parameter gradients are added to `.grad`.

        Args:
            microbatch: which forward it belongs to; what that one saved is freed.
            gradients: one for each tensor that was kept, None where there is none.
            from_users: parameters, with gradients that other stages computed for them. Autograd
                starts its sums with them, as it would in one graph of the whole model.

        Returns:
            The gradient of each tensor of the stage's input; they belong to the caller. Of a tensor
            that stands in it twice, either place has the whole gradient.
        """
        saved = self._saved.pop(microbatch)
        outputs = {
            id(output): (output, gradient)
            for output, gradient in zip(saved.outputs, gradients, strict=True)
            if output.requires_grad and gradient is not None
        }
        roots = [*from_users, *outputs.values()]
        if roots:
            tensors, given = zip(*roots, strict=True)
            torch.autograd.backward(tensors, given)
        self._cursor.enter(None)
        return [inlet.gradient for inlet in saved.inlets]

    def discard(self) -> None:
        """Undo what an ended run left: saved activations, gradients, changed buffers."""
        self._saved.clear()
        for parameter in self.parameters().values():
            parameter.grad = None
        for buffer in self._buffers or ():
            buffer.restore()
        self._buffers = None

    def commit(self) -> None:
        """Forget how the buffers were before the run: it is not going to be undone."""
        self._buffers = None

    def _switch(self, *, training: bool) -> None:
        """Put all blocks into a mode, except for modules that the factory put to rest."""
        if self._training is training:
            return
        self._training = None  # for a `train` that raises
        for block in self.blocks.values():
            block.train() if training else block.eval()
        for module in self._resting:
            module.training = False
        self._training = training

    def _remember_buffers(self) -> None:
        if self._buffers is None:
            self._buffers = [_Buffers.of(module) for module in self._modules]

    def _random(self, index: int, step: int, microbatch: int) -> AbstractContextManager[None]:
        """Return the context in which a block draws its random numbers; most blocks draw none."""
        if index not in self._drawing:
            return nullcontext()
        return seeded(op_seed(self._seed, step, index, microbatch))


def _with_content(tensor: Tensor | None, value: Tensor | None) -> Tensor | None:
    """Return `tensor` with the content of `value`, or where it can't have that, `value`."""
    if tensor is None or value is None or tensor.shape != value.shape or 0 in tensor.stride():
        return value
    with torch.no_grad():
        return tensor.copy_(value)


def each_once(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return the value with `function(tensor)` in every place of each tensor, called once each."""
    done: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in done:
            done[id(tensor)] = function(tensor)
        return done[id(tensor)]

    return map_tensors(once, value)


def _made(outputs: Sequence[Tensor], makers: dict[int, Any]) -> Iterator[Tensor]:
    """Yield what a block has made of its inputs, whose ids and makers (before it ran) are given."""
    for tensor in outputs:
        maker = tensor.grad_fn
        if maker is not None and makers.get(id(tensor)) is not maker:
            makers[id(tensor)] = maker
            yield tensor


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def may_draw(block: nn.Module) -> bool:
    """Tell whether a forward of `block` may draw random numbers; True where it cannot be known."""
    declared = getattr(block, "draws_random", None)
    if isinstance(declared, bool):
        return declared
    return any(not _deterministic(module) for module in block.modules())


def _deterministic(module: nn.Module) -> bool:
    """Tell whether all that runs is torch's own, and of that what draws nothing."""
    hooked = module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module)
    if hooked or not type(module).__module__.startswith("torch.nn."):
        return False
    return (
        not getattr(module, "p", 0)
        and not getattr(module, "dropout", 0)
        and not isinstance(module, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)
    )
