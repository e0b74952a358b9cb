"""Builds the op graph of one training step, evaluation or prediction; pure.

Three kinds of edges do all the ordering that a step needs:
- data: an activation to the next stage, a gradient to the previous one;
- chains: forwards of a stage in microbatch order, and backwards likewise, so that gradients are
  summed in the same order whatever the timing (channels are FIFO, so a chain costs nothing);
- the limit: the first forward of microbatch m comes after microbatch m - limit has been retired.

No weight changes before the COMMIT. It follows every stage's NORM, which looks at that stage's
gradients once its last backward is over: an op that raises, or a gradient that is not a number, on
any stage leaves all weights untouched. The verdict (whether to update, and what to scale gradients
with) is the COMMIT's value. That costs two short messages a worker and step, most of them while the
first stage still computes.

Source: the inter-layer phase of arXiv 2110.13005, Alg. 2. Departures: the limit is a parameter; the
commit.
"""

from dataclasses import dataclass

from myelin.runtime.graph import COORDINATOR, Graph, Kind, Op, Phase, Stream

INPUTS, TARGETS = 0, 1  # slots of the two LOAD ops


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the graph of a step depends on.

    Attributes:
        placement: for each stage the worker that runs it.
        microbatches: how many microbatches the batch is split into.
        limit: at most so many microbatches in flight.
        ties: for each weight shared across stages (owner's stage, user's stage).
    """

    placement: tuple[int, ...]
    microbatches: int
    limit: int
    ties: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.placement or self.microbatches < 1 or self.limit < 1:
            raise ValueError(
                f"a step needs a stage, a microbatch and a limit of at least 1: {self}"
            )
        if any(owner >= user for owner, user in self.ties):
            raise ValueError(f"ties={self.ties}: an owner's stage must come before its user's")

    @property
    def last(self) -> int:
        """Index of the last stage."""
        return len(self.placement) - 1


def build_step(shape: StepShape, phase: Phase) -> Graph:
    """Build the graph of one step of `phase`: TRAIN, GRADIENTS, EVALUATE or PREDICT."""
    return _Builder(shape, phase).build()


class _Builder:
    def __init__(self, shape: StepShape, phase: Phase) -> None:
        self.shape = shape
        self.backward = phase in (Phase.TRAIN, Phase.GRADIENTS)
        self.graph = Graph(phase, shape.microbatches)
        self.loads: dict[int, int] = {}
        self.forwards: dict[tuple[int, int], int] = {}
        self.backwards: dict[tuple[int, int], int] = {}

    def build(self) -> Graph:
        self.loads[INPUTS] = self._load(0, INPUTS)
        if self.graph.phase is not Phase.PREDICT:
            self.loads[TARGETS] = self._load(self.shape.last, TARGETS)
        for microbatch in range(self.shape.microbatches):
            self._add_forwards(microbatch)
            if self.backward:
                self._add_backwards(microbatch)
        if self.graph.phase is Phase.TRAIN:
            self._add_updates(self._add_commit())
        return self.graph

    def _op(self, kind: Kind, stage: int, **marks: object) -> int:
        op = Op(kind, self.shape.placement[stage], stage=stage, **marks)  # type: ignore[arg-type]
        return self.graph.add(op)

    def _load(self, stage: int, slot: int) -> int:
        return self._op(Kind.LOAD, stage, slot=slot, peer=COORDINATOR, stream=Stream.COMM)

    def _add_forwards(self, m: int) -> None:
        last = self.shape.last
        for stage in range(last + 1):
            inputs = [self.forwards[stage - 1, m] if stage else self.loads[INPUTS]]
            if stage == last and TARGETS in self.loads:
                inputs.append(self.loads[TARGETS])
            after = [self.forwards[stage, m - 1]] if m else []
            if stage == 0 and m >= self.shape.limit:
                after.append(self._retired(m - self.shape.limit))
            self.forwards[stage, m] = self._op(
                Kind.FORWARD, stage, microbatch=m, inputs=tuple(inputs), after=tuple(after)
            )

    def _retired(self, m: int) -> int:
        """Return the op after which microbatch `m` no longer counts as in flight."""
        return self.backwards[0, m] if self.backward else self.forwards[self.shape.last, m]

    def _add_backwards(self, m: int) -> None:
        tied: dict[int, list[int]] = {}
        for stage in reversed(range(self.shape.last + 1)):
            inputs = [self.backwards[stage + 1, m]] if stage < self.shape.last else []
            after = [self.forwards[stage, m]] + ([self.backwards[stage, m - 1]] if m else [])
            self.backwards[stage, m] = backward = self._op(
                Kind.BACKWARD,
                stage,
                microbatch=m,
                inputs=(*inputs, *tied.get(stage, ())),
                after=tuple(after),
            )
            for slot, (owner, user) in enumerate(self.shape.ties):
                if user == stage:
                    gradient = self._op(
                        Kind.TIE_GRADIENT, stage, microbatch=m, slot=slot, after=(backward,)
                    )
                    tied.setdefault(owner, []).append(gradient)

    def _add_commit(self) -> int:
        """Add the COMMIT, after what tells it whether there is anything to commit."""
        last = self.shape.microbatches - 1
        norms = [
            self._op(Kind.NORM, stage, after=(self.backwards[stage, last],))
            for stage in range(self.shape.last + 1)
        ]
        return self._op(Kind.COMMIT, 0, inputs=tuple(norms))

    def _add_updates(self, commit: int) -> None:
        updates = [
            self._op(Kind.UPDATE, stage, inputs=(commit,)) for stage in range(self.shape.last + 1)
        ]
        for slot, (owner, user) in enumerate(self.shape.ties):
            self._op(
                Kind.REFRESH, user, slot=slot, inputs=(updates[owner],), after=(updates[user],)
            )
