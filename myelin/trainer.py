"""The trainer: steps, evaluations and predictions of one model on a cluster's workers."""

import asyncio
import itertools
import operator
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, TypeVar

import torch

from myelin.batch import checked_batch, checked_inputs, joined, rows_of
from myelin.coordinator import Coordinator
from myelin.data import batches_of
from myelin.errors import BatchError, ClusterError, GraphError, ModelError, PlanError
from myelin.members import to_the_end
from myelin.models.checks import check_number, check_seed, check_whole, shown
from myelin.models.model import Description
from myelin.models.sampling import sample
from myelin.plan import Plan
from myelin.run import InstalledProgram, Run, RunReport
from myelin.runtime import messages as m
from myelin.runtime.graph import Kind, Phase
from myelin.runtime.optimizer import Optimizer
from myelin.runtime.step import INPUTS, TARGETS, StepShape, build_step, inputs_slot
from myelin.transports.packing import map_tensors

Result = TypeVar("Result")
_KINDS = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step or of an evaluation.

    Attributes:
        index: number of the step, from 0; of an evaluation, how many steps went before.
        loss: mean over all valid tokens (or samples) of the whole batch.
        tokens: how many that were.
        elapsed_s: seconds from the first order to the last worker's end.
        idle_fraction: share of the workers' time during which their compute streams did nothing.
        busy: for each worker, the share of the time during which it computed.
        lr: the learning rate of the step; of an evaluation that of the next step.
        skipped: whether nothing was updated, since a gradient was infinite or NaN.
        gradient_norm: of all gradients together before clipping; None where `max_norm` is not set.
    """

    index: int
    loss: float
    tokens: int
    elapsed_s: float
    idle_fraction: float
    busy: Mapping[int, float]
    lr: float = 0.0
    skipped: bool = False
    gradient_norm: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Valid tokens (or samples) per second."""
        return self.tokens / self.elapsed_s if self.elapsed_s else 0.0


class Pending(Generic[Result]):
    """A step, an evaluation or a prediction that was asked for.

    Await it in any order, and as often as you like.

    Cancelling a task that awaits it does not end the run; `cancel` does.
    """

    def __init__(self, run: Run, finish: Callable[[RunReport], Awaitable[Result]]) -> None:
        self._run = run
        self._finish = finish

    def __await__(self) -> Generator[Any, None, Result]:
        """Wait for the result.

        Raises:
            RunError: what ended the run; weights are as they were before it.
            BatchError: what a worker found wrong with the batch, likewise.
        """
        return self._result().__await__()

    def __repr__(self) -> str:
        done = self._run.done
        if not done.done():
            state = "in flight" if self._run.number else "queued"
        else:
            state = "done" if self._run.error is None else f"failed: {self._run.error}"
        return f"<{self._run.program.graph.phase.value} of step {self._run.step}, {state}>"

    def op(
        self, kind: str, *, stage: int | None = None, microbatch: int | None = None
    ) -> "asyncio.Future[Any]":
        """Return a future of one op's value: what the op computed, which then is the caller's.

        `"forward"` gives a stage's output (of the last stage: the microbatch's share of the loss),
        `"backward"` the gradient of each tensor of the stage's input, in order. Ask before the next
        `await`, since a value is released when its last reader is over.

        Args:
            kind: "forward" or "backward".
            stage: the pipeline stage.
            microbatch: the microbatch.

        Raises:
            GraphError: the step has no such op.
        """
        graph = self._run.program.graph
        index = None
        if kind in _KINDS:
            index = graph.find(Kind(kind), stage=stage, microbatch=microbatch)
        if index is None:
            stages = 1 + max(op.stage or 0 for op in graph.ops)
            raise GraphError(
                f"no op {kind!r} with stage={stage}, microbatch={microbatch} in this run: it has "
                f"{stages} stages and {graph.microbatches} microbatches; kinds are "
                f"{', '.join(_KINDS)}"
            )
        return self._run.value(index)

    def cancel(self) -> None:
        """End the run on all workers; awaiting it then raises `RunCancelled`.

        A run whose updates have begun is finished instead.
        """
        self._run.cancel()

    async def _result(self) -> Result:
        return await self._finish(await asyncio.shield(self._run.done))


class Trainer:
    """Trains one model. Made by `Cluster.trainer`; lives as long as its cluster, or until `close`.

    Steps are carried out in the order in which they were asked for; several may be in flight.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        number: int,
        *,
        model: Description,
        plan: Plan,
        optimizer: Optimizer,
        stages: Sequence[range],
        elements: Sequence[int],
        ties: Sequence[m.TieSpec],
    ) -> None:
        self.model, self.plan, self.stages = model, plan, tuple(stages)
        self.optimizer = optimizer
        self._chunks = tuple(max(1, -(-size // plan.chunk)) for size in elements)
        self.steps_done = 0
        self._coordinator, self._number = coordinator, number
        self._ties = tuple(ties)
        self._lane = coordinator.lane(limit=plan.steps_in_flight, dependent=True)
        self._programs: dict[tuple[Phase, int], InstalledProgram] = {}
        self._asked = 0
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Trainer of {self.model!r}: {self.plan.pipeline} stages, {self.steps_done} steps>"

    def step(self, batch: tuple[Any, Any]) -> Pending[StepResult]:
        """Ask for one training step; returns at once.

        Args:
            batch: (inputs, targets); each a tensor, or a tuple, list or dict of tensors, with the
                same number of rows in dimension 0. It is split into microbatches along that
                dimension, evenly to within one row. The tensors must not change until the step is
                over.

        Raises:
            BatchError: the batch cannot be used; nothing was started.
            RunError: an earlier failure left the weights half updated.
        """
        pending = self._submit(Phase.TRAIN, batch, self._asked, self._result)
        self._asked += 1
        return pending

    def evaluate(self, batch: tuple[Any, Any]) -> Pending[StepResult]:
        """Ask for the loss of one batch, in evaluation mode and without gradients; returns at once.

        It stands in the same queue as the steps: the weights are those after the steps asked for so
        far.
        """
        return self._submit(Phase.EVALUATE, batch, self._asked, self._result)

    def predict(self, inputs: Any) -> Pending[Any]:
        """Ask for the model's output for `inputs`, in evaluation mode; returns at once.

        The outputs of all microbatches are joined along dimension 0; they belong to the caller.
        """
        self._check_open()
        checked_inputs(self.model, inputs)
        program = self._program(Phase.PREDICT, rows_of(inputs))
        loads = self._shares(inputs, program.graph.microbatches)
        run = self._coordinator.submit(self._lane, program, loads, step=self._asked)
        last = self.plan.pipeline - 1
        values = []
        for microbatch in range(program.graph.microbatches):
            index = program.graph.find(Kind.FORWARD, stage=last, microbatch=microbatch)
            assert index is not None
            values.append(run.value(index))

        async def finish(_report: RunReport) -> Any:
            return joined([await value for value in values])

        return Pending(run, finish)

    async def gradients(self, batch: tuple[Any, Any]) -> dict[str, torch.Tensor]:
        """Return the gradients of one batch by parameter name; weights do not change.

        The names are those of `nn.Sequential(*blocks)`; the tensors belong to the caller.
        """
        pending = self._submit(Phase.GRADIENTS, batch, self._asked, self._result)
        async with self._coordinator.pause(self._lane, after=pending):
            return await self._collect(m.State.GRADIENTS)

    async def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of all parameters and buffers after the steps asked for so far, by name.

        The names are those of `nn.Sequential(*blocks).state_dict()`.
        """
        self._check_open()
        async with self._coordinator.pause(self._lane):
            return await self._collect(m.State.WEIGHTS)

    async def assign(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Overwrite parameters and buffers by name; names that are left out stay as they are.

        Once it has begun to write, cancelling waits until all is written.

        Raises:
            ModelError: a name, a shape or a dtype is not the model's; nothing was changed.
        """
        self._check_open()
        _check_tensors(weights)
        async with self._coordinator.pause(self._lane):
            own = await self._shapes()
            _check_weights(weights, {name: form for part in own for name, form in part.items()})
            weights = _with_copies(weights, self._ties)
            await to_the_end(self._overwrite(weights, own))

    async def check_groups(self) -> None:
        """Check that every group of the optimizer has a parameter.

        Raises:
            PlanError: one has none; probably its pattern has a slip.
        """
        if not self.optimizer.groups:
            return
        names = [name for part in await self._shapes() for name in part]
        unmatched = self.optimizer.unmatched(names)
        if unmatched:
            raise PlanError(
                f"the group {unmatched[0]!r} of the optimizer fits no parameter; names are those "
                f"of nn.Sequential(*blocks), for example {sorted(names)[:3]}"
            )

    async def close(self) -> None:
        """Free the model on all workers, once what was asked for is over; nothing works any more.

        Cancelled, it goes on in the background. Without it a model is freed with its cluster.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._free(), name="close trainer")
        await asyncio.shield(self._closing)

    async def _free(self) -> None:
        with suppress(ClusterError):  # a cluster that is broken or left has nothing to free
            async with self._coordinator.pause(self._lane):
                workers = [worker for r in range(self.plan.data) for worker in self._workers_of(r)]
                self._coordinator.discard_trainer(self._number, workers)
        self._coordinator.retire(self._lane)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise ClusterError("this trainer was closed: ask the cluster for a new one")

    async def fit(
        self, data: Any, steps: int | None = None, *, ahead: int = 0
    ) -> AsyncGenerator[StepResult, None]:
        """Train on `data`, yielding every step's result in order.

        Args:
            data: an iterable or async iterable of batches, a torch `DataLoader`, or what
                `myelin.data.text` returns.
            steps: how many steps; None until the data ends, which those of `text` never do.
            ahead: how many steps to have in flight while the caller looks at a result. With 0 the
                weights in the loop's body are those after the step it is shown.

        Raises:
            ValueError: `steps` or `ahead` is no whole number of at least 0.
            DataError: `data` gives no batches, or does not fit the model.
        """
        if steps is not None:
            check_whole("steps", steps, least=0, instead=", or None until the data ends")
        check_whole("ahead", ahead, least=0)
        if steps == 0:
            return
        if hasattr(data, "bind"):
            data.bind(getattr(self.model, "context", None))
        flying: list[Pending[StepResult]] = []
        started = 0
        batches = batches_of(data)
        try:
            async for batch in batches:
                flying.append(self.step(batch))
                started += 1
                if steps is not None and started >= steps:
                    break
                if len(flying) > ahead:
                    yield await flying.pop(0)
            while flying:
                yield await flying.pop(0)
        finally:
            await batches.aclose()

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        tokens: int,
        temperature: float = 0.8,
        top_k: int | None = None,
        seed: int = 0,
    ) -> list[int]:
        """Continue a prompt of token ids, one token at a time; returns the new ids.

        For a quick look at what was learnt: every token is a forward of the whole context.

        Args:
            prompt: at least one token id.
            tokens: how many to add.
            temperature: 0 takes the likeliest token each time.
            top_k: sample among the `top_k` likeliest only.
            seed: of the sampling.

        Raises:
            BatchError: the prompt is empty or holds no valid ids.
            ValueError: another argument is of the wrong type or out of range.
        """
        ids = _token_ids(prompt)
        check_whole("tokens", tokens, least=0)
        check_number("temperature", temperature, least=0)
        if top_k is not None:
            check_whole("top_k", top_k, least=1, instead=", or None for all tokens")
        check_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        context = getattr(self.model, "context", None)
        given = len(ids)
        for _ in range(tokens):
            window = ids if context is None else ids[-context:]
            logits_BTV = await self.predict(torch.tensor([window], dtype=torch.int64))
            chosen = sample(
                logits_BTV[0, -1], temperature=temperature, top_k=top_k, generator=generator
            )
            ids.append(chosen)
        return ids[given:]

    def _submit(
        self,
        phase: Phase,
        batch: tuple[Any, Any],
        step: int,
        finish: Callable[[Run, RunReport], StepResult],
    ) -> Pending[StepResult]:
        self._check_open()
        inputs, targets = checked_batch(self.model, batch)
        program = self._program(phase, rows_of(inputs))
        loads = self._shares(inputs, program.graph.microbatches) | {TARGETS: targets}
        run = self._coordinator.submit(self._lane, program, loads, step=step)
        if phase is Phase.TRAIN:
            run.on_failure = lambda: self._give_back(run.step)
            run.done.add_done_callback(lambda _: self._count(run))

        async def result(report: RunReport) -> StepResult:
            return finish(run, report)

        return Pending(run, result)

    def _program(self, phase: Phase, rows: int) -> InstalledProgram:
        """Return the program for a batch of so many rows; made and sent when first needed."""
        if rows < self.plan.data:
            raise BatchError(
                f"a batch of {rows} rows for data={self.plan.data} replicas: give each replica a "
                f"row, at least {self.plan.data} in all"
            )
        microbatches = min(self.plan.microbatches, rows // self.plan.data)
        known = self._programs.get((phase, microbatches))
        if known is None:
            ties = tuple((tie.owner_stage, tie.user_stage) for tie in self._ties if tie.crosses)
            shape = StepShape(
                self.plan.stage_workers,
                microbatches,
                self.plan.limit,
                ties,
                self.plan.data,
                self._chunks,
            )
            graph = build_step(shape, phase)
            known = self._coordinator.install(graph, trainer=self._number)
            self._programs[phase, microbatches] = known
        return known

    def _give_back(self, step: int) -> None:
        """Free the number of a step that was not done; those behind it fail with it."""
        self._asked = min(self._asked, step)

    def _count(self, run: Run) -> None:
        if run.error is None:
            self.steps_done = run.step + 1

    def _result(self, run: Run, report: RunReport) -> StepResult:
        return StepResult(
            index=run.step,
            loss=sum(report.outputs[f"loss {replica}"] for replica in range(self.plan.data)),
            tokens=int(report.outputs["weight"]),
            lr=self.optimizer.lr * self.optimizer.schedule.factor(run.step),
            skipped=bool(report.outputs.get("skipped")),
            gradient_norm=report.outputs.get("gradient_norm"),
            elapsed_s=report.elapsed_s,
            idle_fraction=report.idle_fraction,
            busy={w: busy_s / report.elapsed_s for w, busy_s in report.busy_s.items()},
        )

    async def _shapes(self) -> list[dict[str, tuple[str, list[int]]]]:
        """Return dtype and shape of every parameter and buffer, for each worker by name."""
        return await self._coordinator.requests.ask_all(
            lambda _worker, number: m.Collect(number, self._number, m.State.SHAPES),
            self._workers_of(0),
        )

    async def _overwrite(
        self, weights: Mapping[str, torch.Tensor], own: Sequence[Mapping[str, Any]]
    ) -> None:
        for replica in range(self.plan.data):
            for worker, shapes in zip(self._workers_of(replica), own, strict=True):
                part = {name: weights[name] for name in shapes if name in weights}
                await self._coordinator.assign(worker, self._number, part)

    async def _collect(self, state: m.State) -> dict[str, torch.Tensor]:
        parts = await self._coordinator.requests.ask_all(
            lambda _worker, number: m.Collect(number, self._number, state), self._workers_of(0)
        )
        found = {name: tensor for part in parts for name, tensor in part.items()}
        return dict(sorted(found.items(), key=lambda item: _natural(item[0])))

    def _workers_of(self, replica: int) -> list[int]:
        return sorted(set(self.plan.grid[replica]))

    def _shares(self, inputs: Any, microbatches: int) -> dict[int, Any]:
        """Return each replica's share of the inputs by slot: the rows of its own microbatches."""
        if self.plan.data == 1:
            return {INPUTS: inputs}
        rows, own = rows_of(inputs), microbatches // self.plan.data
        begins = [sum(_sizes(rows, microbatches)[: r * own]) for r in range(self.plan.data + 1)]
        cuts = [slice(*pair) for pair in itertools.pairwise(begins)]
        return {inputs_slot(r): map_tensors(itemgetter(cut), inputs) for r, cut in enumerate(cuts)}


def _token_ids(prompt: Sequence[int]) -> list[int]:
    try:
        ids = [operator.index(token) for token in prompt]
    except TypeError as error:
        raise BatchError(
            f"prompt={shown(prompt)} holds something that is no token id ({error}): give a list of "
            f"whole numbers; a text must be encoded first, such as by data.encode(text)"
        ) from error
    if not ids:
        raise BatchError("the prompt is empty: give at least one token id")
    return ids


def _check_tensors(weights: object) -> None:
    if not isinstance(weights, Mapping):
        raise ModelError(
            f"weights={shown(weights)}: give a dict of tensors by name, as trainer.weights() does"
        )
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            raise ModelError(f"{name}={shown(tensor)} is no tensor: use torch.tensor(...)")


def _check_weights(
    weights: Mapping[str, torch.Tensor], forms: Mapping[str, tuple[str, Sequence[int]]]
) -> None:
    """Compare names, shapes and dtypes with the model's, which are `forms`."""
    unknown = [name for name in weights if name not in forms]
    if unknown:
        raise ModelError(
            f"the model has no weights named {unknown[:5]}; its names are those of "
            f"nn.Sequential(*blocks), for example {sorted(forms)[:3]}"
        )
    for name, tensor in weights.items():
        dtype, shape = forms[name]
        if list(tensor.shape) != list(shape):
            raise ModelError(f"{name} has shape {list(shape)}, not {list(tensor.shape)}")
        if str(tensor.dtype) != dtype:
            raise ModelError(f"{name} is {dtype}, not {tensor.dtype}: use tensor.to({dtype})")


def _with_copies(
    weights: Mapping[str, torch.Tensor], ties: Sequence[m.TieSpec]
) -> dict[str, torch.Tensor]:
    """Give a tied weight one value, whichever of its names it was given under.

    Raises:
        ModelError: two names of one weight were given different values.
    """
    given = dict(weights)
    names: dict[str, list[str]] = {}
    for tie in ties:
        owner = f"{tie.owner_block}.{tie.owner_name}"
        names.setdefault(owner, [owner]).append(f"{tie.user_block}.{tie.user_name}")
    for together in names.values():
        values = [given[name] for name in together if name in given]
        if any(not torch.equal(value, values[0]) for value in values):
            raise ModelError(f"{' and '.join(together)} are one weight: give them one value")
        given |= dict.fromkeys(together, values[0]) if values else {}
    return given


def _sizes(rows: int, parts: int) -> list[int]:
    """Return how many rows each part has; as `torch.tensor_split` has it."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def _natural(name: str) -> tuple[int, str]:
    block, _, rest = name.partition(".")
    return int(block), rest
