"""The plan of a training run: how the model is cut, where stages run, how a batch is split."""

from collections.abc import Sequence
from dataclasses import dataclass

from myelin.errors import PlanError
from myelin.models.checks import check_whole, shown
from myelin.models.partition import checkpoint_every, cut, cut_at

_WHOLE = ("pipeline", "data", "microbatches", "bucket", "coarsening", "steps_in_flight")


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run a model on a cluster. Checked when it is made, and again against the model.

    Attributes:
        pipeline: number of stages.
        data: number of replicas: copies of the pipeline on workers of their own, each of which
            takes its share of every batch.
        microbatches: how many microbatches each replica's share of a batch is split into, at most
            one a row. With 1 no two stages work at once; four times the stages is a good start.
        pipeline_limit: at most so many microbatches in flight; by default twice the stages; "paper"
            means the number of stages, as arXiv 2110.13005 has it.
        placement: for each stage the worker that runs it; by default one stage a worker.
        cuts: the first block of every stage but the first; by default stages are cut by the
            estimated cost of blocks.
        bucket: replicas sum their gradients in pieces of so many elements ...
        coarsening: ... times this, each piece as one message.
        steps_in_flight: how many steps may be under way at once.
        checkpoint: keep the output of every so many blocks only, and compute what lies between
            again in the backward: less memory for about a third more work, and the same bits.
            "paper" chooses the number for each stage; None keeps everything.
    """

    pipeline: int = 1
    data: int = 1
    microbatches: int = 1
    pipeline_limit: int | str | None = None
    placement: Sequence[int] | None = None
    cuts: Sequence[int] | None = None
    bucket: int = 1 << 22
    coarsening: int = 4
    steps_in_flight: int = 2
    checkpoint: int | str | None = None

    def __post_init__(self) -> None:
        for name in _WHOLE:
            check_whole(name, getattr(self, name), least=1, error=PlanError)
        self._check_limit()
        if self.checkpoint is not None and self.checkpoint != "paper":
            instead = ', "paper" (= a number for each stage), or None (= keep everything)'
            check_whole("checkpoint", self.checkpoint, least=1, instead=instead, error=PlanError)
        self._check_placement()
        _check_row("cuts", self.cuts, "the first block of every stage but the first", "[2, 4]")
        if self.cuts is not None and len(self.cuts) != self.pipeline - 1:
            raise PlanError(
                f"cuts={list(self.cuts)} make {_stages(len(self.cuts) + 1)}, and "
                f"pipeline={self.pipeline}: "
                f"name the first block of every stage but the first, {self.pipeline - 1} in all"
            )

    @property
    def stage_workers(self) -> tuple[int, ...]:
        """For each stage the worker that runs it, in the first replica."""
        return tuple(range(self.pipeline)) if self.placement is None else tuple(self.placement)

    @property
    def grid(self) -> tuple[tuple[int, ...], ...]:
        """For each replica the workers of its stages; replicas follow each other."""
        span = max(self.stage_workers) + 1
        return tuple(
            tuple(replica * span + worker for worker in self.stage_workers)
            for replica in range(self.data)
        )

    @property
    def workers(self) -> int:
        """How many workers it needs."""
        return self.data * (max(self.stage_workers) + 1)

    @property
    def chunk(self) -> int:
        """How many elements of a stage's gradients are summed over the replicas at a time."""
        return self.bucket * self.coarsening

    @property
    def limit(self) -> int:
        """How many microbatches may be in flight."""
        if self.pipeline_limit is None:
            return 2 * self.pipeline
        return self.pipeline if isinstance(self.pipeline_limit, str) else self.pipeline_limit

    def keeps_every(self, stages: Sequence[range]) -> tuple[int | None, ...]:
        """Return for each stage after how many blocks an output is kept; None: everything is."""
        if self.checkpoint is None or isinstance(self.checkpoint, int):
            return (self.checkpoint,) * len(stages)
        all_blocks = sum(map(len, stages))
        return tuple(checkpoint_every(len(blocks), all_blocks) for blocks in stages)

    def stages(self, costs: Sequence[float]) -> tuple[range, ...]:
        """Return the blocks of each stage.

        Raises:
            PlanError: there are fewer blocks than stages, or a cut is out of range.
        """
        if self.cuts is None:
            return cut(costs, self.pipeline)
        return cut_at(self.cuts, len(costs))

    def _check_limit(self) -> None:
        limit = self.pipeline_limit
        if limit is None or limit == "paper":
            return
        instead = ', "paper" (= pipeline), or None (= twice the stages)'
        check_whole("pipeline_limit", limit, least=1, instead=instead, error=PlanError)

    def _check_placement(self) -> None:
        _check_row("placement", self.placement, "the worker of every stage", "[0, 1]")
        if self.placement is None:
            return
        placement = list(self.placement)
        if len(placement) != self.pipeline:
            raise PlanError(
                f"placement={placement} places {_stages(len(placement))}, and "
                f"pipeline={self.pipeline}: "
                f"name one worker for each stage"
            )
        if set(placement) != set(range(len(set(placement)))):
            raise PlanError(f"placement={placement}: workers are numbered from 0 without gaps")


def _stages(count: int) -> str:
    return f"{count} stage{'s' * (count != 1)}"


def checked_plan(plan: object) -> Plan:
    """Return the plan as it is, or the one by default if it is None.

    Raises:
        PlanError: it is something else.
    """
    if plan is None:
        return Plan()
    if not isinstance(plan, Plan):
        raise PlanError(f"plan={shown(plan)} is no plan: make one, such as Plan(pipeline=2)")
    return plan


def _check_row(name: str, value: object, what: str, example: str) -> None:
    """Refuse what is no list of whole numbers; None stands for the default."""
    if value is None:
        return
    row = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if not row or not all(isinstance(each, int) and not isinstance(each, bool) for each in value):  # type: ignore[attr-defined]
        raise PlanError(
            f"{name}={shown(value)}: list {what} as whole numbers, such as {name}={example}"
        )
