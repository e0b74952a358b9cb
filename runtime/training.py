"""Does the ops of a training step, an evaluation or a prediction on the stages of one worker.

One `StepExecutor` per trainer and worker; it owns the stages, their optimizers and their gradients.

Sums are made in microbatch order. A weight that two stages share lives with its owner; the user's
stage has a copy. For every microbatch the user's gradient travels to the owner, whose autograd
starts its own sum with it: the order in which one process with one shared tensor would add them.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from myelin.errors import BatchError
from myelin.models.building import assemble
from myelin.models.losses import total, weigh
from myelin.models.model import Parts, load
from myelin.runtime.blackbox import BlackBox
from myelin.runtime.buckets import Chunk, elements_of, flattened, summed, unflatten
from myelin.runtime.executor import RunState
from myelin.runtime.graph import Kind, Op, Phase
from myelin.runtime.messages import Build, TieSpec
from myelin.runtime.optimizer import (
    Named,
    all_finite,
    clipping,
    gradients_of,
    named_parameters,
    norms_of,
    scale,
    set_rate,
)
from myelin.runtime.stage import Cursor, Stage
from myelin.runtime.strides import copied
from myelin.transports.packing import map_tensors, tensors_of

_Share: TypeAlias = tuple[Chunk, list[dict[str, Tensor | None]] | None]
"""A chunk of gradients, and with one of them the buffers of every module of the stage."""


class StepExecutor:
    """An `Executor` for the programs of one trainer.

    Args:
        build: the coordinator's order; blocks are built here, and no others.
        black_box: told which block is running.
    """

    def __init__(self, build: Build, black_box: BlackBox | None = None) -> None:
        self._last_stage, self._ties = build.last_stage, build.ties
        parts = load(build.factory, build.arguments, seed=build.seed)
        self._loss = parts.loss
        self._cursor = Cursor(black_box)
        self._stages = _build_stages(build, parts, self._cursor)
        self._tied_gradients: dict[tuple[int, int], Tensor | None] = {}
        self._gradients: dict[int, dict[str, Tensor]] = {}  # by stage, of the latest such run
        self._optimizer = build.optimizer
        self._replica, self._replicas, self._chunk = build.replica, build.replicas, build.chunk
        self._own = {stage: self._own_parameters(stage) for stage in self._stages}
        self._optimizers = {
            stage: build.optimizer.build(own) for stage, own in self._own.items() if own
        }
        self._do: Mapping[Kind, Callable[[Op, RunState, Sequence[Any]], Any]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.TIE_GRADIENT: self._tie_gradient,
            Kind.FLATTEN: self._flatten,
            Kind.REDUCE: self._reduce,
            Kind.UNFLATTEN: self._unflatten,
            Kind.NORM: self._norm,
            Kind.COMMIT: self._commit,
            Kind.UPDATE: self._update,
            Kind.REFRESH: self._refresh,
        }

    def execute(self, op: Op, state: RunState, inputs: Sequence[Any]) -> Any:
        """See `Executor`. On an error the state tells which block was running."""
        self._cursor.enter(None)
        try:
            return self._do[op.kind](op, state, inputs)
        except BaseException:
            state.block = self._cursor.block
            raise

    def discard(self, state: RunState) -> None:
        """See `Executor`."""
        self._tied_gradients.clear()
        self._gradients.clear()
        for stage in self._stages.values():
            stage.discard()

    def present(self, op: Op, value: Any) -> Any:
        """See `Executor`: a border value without its gradient flags."""
        if op.kind is Kind.FORWARD and op.stage != self._last_stage:
            return value[0]
        return value

    def elements(self) -> dict[str, int]:
        """Return for each stage, by its number, how many elements its optimizer updates."""
        return {str(stage): elements_of(own) for stage, own in self._own.items()}

    def weights(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name, detached; they stay the executor's."""
        found: dict[str, Tensor] = {}
        for stage in self._stages.values():
            found |= stage.parameters() | stage.buffers()
        return {name: tensor.detach() for name, tensor in found.items()}

    def take_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the latest run for gradients alone, by name; gives them away."""
        found, self._gradients = self._gradients, {}
        return {name: gradient for part in found.values() for name, gradient in part.items()}

    def assign(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite parameters and buffers by name, in place."""
        own = self.weights()
        for name, tensor in weights.items():
            own[name].copy_(tensor)

    def _forward(self, op: Op, state: RunState, inputs: Sequence[Any]) -> Any:
        stage, microbatch = self._stage(op), _microbatch(op)
        if op.stage == 0:
            own = state.microbatches // self._replicas
            value = _split(inputs[0], state, "inputs", own)[microbatch - self._replica * own]
            wants = [False] * len(tensors_of(value))
        else:
            value, wants = inputs[0]
        backward = state.phase in (Phase.TRAIN, Phase.GRADIENTS)
        if backward:
            output = stage.forward(value, wants, step=state.step, microbatch=microbatch)
        else:
            output = stage.infer(value, step=state.step, microbatch=microbatch)
        if op.stage == self._last_stage:
            return self._finish_forward(stage, state, microbatch, output, inputs[1:])
        tensors = tensors_of(output)
        if backward:
            stage.keep(microbatch, tensors)
        return stage.leaving(output), [t.requires_grad for t in tensors]

    def _finish_forward(
        self, stage: Stage, state: RunState, microbatch: int, output: Any, targets: Sequence[Any]
    ) -> Any:
        """Return this microbatch's share of the loss, or in a prediction the output itself."""
        if state.phase is Phase.PREDICT:
            return stage.leaving(output)
        target = _split(targets[0], state, "targets", state.microbatches)[microbatch]
        with torch.set_grad_enabled(state.phase is not Phase.EVALUATE):
            loss = total(self._loss, output, target, self._weight(state, targets[0]))
        if state.phase is not Phase.EVALUATE:
            stage.keep(microbatch, [loss])
        loss = loss.detach()
        so_far = state.scratch.get("loss")
        state.scratch["loss"] = loss if so_far is None else so_far + loss
        state.outputs[f"loss {self._replica}"] = float(state.scratch["loss"])
        return loss

    def _weight(self, state: RunState, targets: Any) -> int:
        """Return how many items the loss of the whole batch is the mean of."""
        if "weight" not in state.scratch:
            parts = _split(targets, state, "targets", state.microbatches)
            weight = sum(weigh(self._loss, part) for part in parts)
            if not weight:
                raise BatchError(
                    "no target of this batch counts towards the loss, so its mean does not exist; "
                    "leave the batch out"
                )
            state.scratch["weight"] = weight
            state.outputs["weight"] = float(weight)
        return int(state.scratch["weight"])

    def _backward(self, op: Op, state: RunState, inputs: Sequence[Any]) -> Any:
        stage, microbatch = self._stage(op), _microbatch(op)
        assert op.stage is not None
        if op.stage == self._last_stage:
            gradients, tied = [torch.ones(())], list(inputs)
        else:
            gradients, tied = inputs[0], list(inputs[1:])
        owned = zip(self._owned_ties(op.stage), tied, strict=True)
        from_users = [
            (parameter, gradient) for parameter, gradient in owned if gradient is not None
        ]
        result = stage.backward(microbatch, gradients, from_users=from_users)
        for slot, tie in enumerate(self._ties):
            if tie.user_stage == op.stage:
                used = self._parameter(tie.user_stage, tie.user_block, tie.user_name)
                self._tied_gradients[slot, microbatch], used.grad = used.grad, None
        return result

    def _set_gradients_aside(self, stage: Stage) -> None:
        """Keep a stage's gradients, and leave the stage as if the run had not been.

        Those of other replicas are the same, and nobody asks for them.
        """
        if self._replica:
            stage.discard()
            return
        names: dict[nn.Parameter, str] = {}
        for name, parameter in stage.parameters().items():
            names.setdefault(parameter, name)
        found = {n: p.grad for p, n in names.items() if p.grad is not None}
        self._gradients[stage.spec.stage] = found
        stage.discard()

    def _tie_gradient(self, op: Op, state: RunState, inputs: Sequence[Any]) -> Tensor | None:
        return self._tied_gradients.pop((op.slot, _microbatch(op)))

    def _flatten(self, op: Op, state: RunState, inputs: Sequence[Any]) -> _Share:
        """Return a chunk of the stage's gradients; the first replica adds its buffers to one."""
        assert op.stage is not None
        chunk = flattened(self._own[op.stage], op.slot, self._chunk)
        tells = state.phase is Phase.TRAIN and not self._replica and not op.slot
        return chunk, self._stage(op).buffer_state() if tells else None

    def _reduce(self, op: Op, state: RunState, inputs: Sequence[_Share]) -> _Share:
        """Return the sum over the replicas, and the first one's buffers."""
        return summed([chunk for chunk, _ in inputs]), inputs[0][1]

    def _unflatten(self, op: Op, state: RunState, inputs: Sequence[_Share]) -> None:
        """Take over what was summed; replicas end a step with the first one's buffers."""
        assert op.stage is not None
        chunk, buffers = inputs[0]
        unflatten(self._own[op.stage], op.slot, self._chunk, chunk)
        if self._replica and buffers is not None:
            self._stage(op).take_buffers(buffers)

    def _norm(
        self, op: Op, state: RunState, inputs: Sequence[Any]
    ) -> tuple[bool, Tensor | None] | None:
        """Return whether all gradients of the stage are finite, and the norm of each if needed.

        In a run for gradients alone it sets them aside instead.
        """
        assert op.stage is not None
        if state.phase is Phase.GRADIENTS:
            self._set_gradients_aside(self._stage(op))
            return None
        gradients = gradients_of(self._own[op.stage])
        if self._optimizer.max_norm is None:
            return all_finite(gradients), None
        return all_finite(gradients), norms_of(gradients)

    def _commit(
        self, op: Op, state: RunState, inputs: Sequence[tuple[bool, Tensor | None]]
    ) -> tuple[bool, float]:
        """Return whether to update, and what to multiply all gradients with."""
        coefficient, apply = 1.0, all(finite for finite, _ in inputs)
        norms = [norm for _, norm in inputs if norm is not None]
        if self._optimizer.max_norm is not None:
            norm, coefficient = clipping(torch.cat(norms), self._optimizer.max_norm)
            state.outputs["gradient_norm"] = norm
        state.outputs["skipped"] = float(not apply)
        return apply, coefficient

    def _update(self, op: Op, state: RunState, inputs: Sequence[Any]) -> list[Tensor] | None:
        """Return the new values of weights that other stages have copies of; None if skipped."""
        assert op.stage is not None
        apply, coefficient = inputs[0]
        if not apply:
            self._stages[op.stage].discard()
            return None
        state.updated = True
        optimizer = self._optimizers.get(op.stage)
        if optimizer is not None:
            set_rate(optimizer, self._optimizer, state.step)
            scale(gradients_of(self._own[op.stage]), coefficient)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._stages[op.stage].commit()
        return [parameter.detach() for parameter in self._owned_ties(op.stage)]

    def _refresh(self, op: Op, state: RunState, inputs: Sequence[Any]) -> None:
        if inputs[0] is None:
            return
        state.updated = True
        tie = self._ties[op.slot]
        owned = [t for t in _by_user(self._ties) if t.owner_stage == tie.owner_stage]
        value = inputs[0][owned.index(tie)]
        self._parameter(tie.user_stage, tie.user_block, tie.user_name).detach().copy_(value)

    def _stage(self, op: Op) -> Stage:
        assert op.stage is not None
        return self._stages[op.stage]

    def _parameter(self, stage: int, block: int, name: str) -> nn.Parameter:
        return self._stages[stage].blocks[block].get_parameter(name)

    def _owned_ties(self, stage: int) -> list[nn.Parameter]:
        """Return the owned parameter of each tie, in the order of the users' gradients."""
        return [
            self._parameter(stage, tie.owner_block, tie.owner_name)
            for tie in _by_user(self._ties)
            if tie.owner_stage == stage
        ]

    def _used_ties(self, stage: int) -> list[nn.Parameter]:
        return [
            self._parameter(stage, tie.user_block, tie.user_name)
            for tie in self._ties
            if tie.user_stage == stage
        ]

    def _own_parameters(self, stage: int) -> list[Named]:
        """Return what this stage's optimizer updates: each weight once, none frozen or copied."""
        copies = {id(parameter) for parameter in self._used_ties(stage)}
        own = named_parameters(self._stages[stage].blocks)
        return [named for named in own if id(named.parameter) not in copies]


def _build_stages(build: Build, parts: Parts, cursor: Cursor) -> dict[int, Stage]:
    groups = [range(spec.first, spec.last + 1) for spec in build.stages]
    built = assemble(parts, groups, build.seed)
    return {
        spec.stage: Stage(spec, blocks, seed=build.seed, cursor=cursor)
        for spec, blocks in zip(build.stages, built, strict=True)
    }


def _by_user(ties: Sequence[TieSpec]) -> list[TieSpec]:
    """Order ties as a backward meets their users: the last stage first."""
    return sorted(ties, key=lambda tie: -tie.user_stage)


def _microbatch(op: Op) -> int:
    assert op.microbatch is not None
    return op.microbatch


def _split(value: Any, state: RunState, name: str, count: int) -> list[Any]:
    """Split every tensor of a batch along its first dimension, evenly to within one."""
    if name not in state.scratch:
        parts: dict[int, list[Tensor]] = defaultdict(list)
        for tensor in tensors_of(value):
            for number, part in enumerate(tensor.tensor_split(count)):
                parts[number].append(copied(part))  # views would share a version counter
        state.scratch[name] = [_rebuild(value, parts[number]) for number in range(count)]
    return list(state.scratch[name])


def _rebuild(value: Any, tensors: list[Tensor]) -> Any:
    remaining = iter(tensors)
    return map_tensors(lambda _: next(remaining), value)
