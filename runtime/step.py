"""Builds the op graph of one training step, evaluation or prediction; pure.

Three kinds of edges do all the ordering that a step needs:
- data: an activation to the next stage, a gradient to the previous one;
- chains: forwards of a stage in microbatch order, and backwards likewise, so that gradients are
  summed in the same order whatever the timing (channels are FIFO, so a chain costs nothing);
- the limit: the first forward of microbatch m comes after microbatch m - limit has been retired.

Replicas are copies of the pipeline on workers of their own, each with its own microbatches, which
are numbered through the whole batch. Once a stage's gradients are whole on every replica they are
summed, in the order of the replicas: chunk by chunk, each chunk on one of the replicas (FLATTEN,
REDUCE), and the sum goes back to all of them (UNFLATTEN). Messages do it, as they do all else, so
the last stage's sums travel while the first stage still computes.

No weight changes before the COMMIT. It follows every stage's NORM, which looks at that stage's
gradients once they are whole: an op that raises, or a gradient that is not a number, on any stage
of any replica leaves all weights untouched. The verdict (whether to update, and what to scale
gradients with) is the COMMIT's value. That costs two short messages a worker and step, most of them
while the first stage still computes.

Source: the inter-layer and the data-parallel phase of arXiv 2110.13005, Alg. 2. Departures: the
limit is a parameter; the commit; gradients are summed by messages instead of a collective call.
"""

from dataclasses import dataclass

from myelin.runtime.graph import COORDINATOR, Graph, Kind, Op, Phase, Stream

TARGETS = 1  # slot of the LOAD of the whole batch's targets


def inputs_slot(replica: int) -> int:
    """Return the slot of the LOAD of a replica's share of the inputs."""
    return 0 if replica == 0 else replica + 1


INPUTS = inputs_slot(0)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the graph of a step depends on.

    Attributes:
        placement: for each stage the worker that runs it, in the first replica.
        microbatches: how many microbatches each replica's share of the batch is split into.
        limit: at most so many microbatches in flight in each replica.
        ties: for each weight shared across stages (owner's stage, user's stage).
        replicas: how many copies of the pipeline there are.
        chunks: for each stage how many chunks its gradients are summed in; needed for replicas.
    """

    placement: tuple[int, ...]
    microbatches: int
    limit: int
    ties: tuple[tuple[int, int], ...] = ()
    replicas: int = 1
    chunks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.placement or min(self.microbatches, self.limit, self.replicas) < 1:
            raise ValueError(
                f"a step needs a stage, a microbatch, a replica and a limit of at least 1: {self}"
            )
        if any(owner >= user for owner, user in self.ties):
            raise ValueError(f"ties={self.ties}: an owner's stage must come before its user's")
        if self.replicas > 1 and len(self.chunks) != len(self.placement):
            raise ValueError(f"chunks={self.chunks}: one number for each stage is needed")

    @property
    def last(self) -> int:
        """Index of the last stage."""
        return len(self.placement) - 1

    def worker(self, replica: int, stage: int) -> int:
        """Return the worker of a stage: replicas are on consecutive groups of workers."""
        return replica * (max(self.placement) + 1) + self.placement[stage]


def build_step(shape: StepShape, phase: Phase) -> Graph:
    """Build the graph of one step of `phase`: TRAIN, GRADIENTS, EVALUATE or PREDICT."""
    graph = Graph(phase, shape.replicas * shape.microbatches)
    pipelines = [_Pipeline(graph, shape, replica) for replica in range(shape.replicas)]
    for pipeline in pipelines:
        pipeline.build()
    if phase in (Phase.TRAIN, Phase.GRADIENTS):
        whole = _Reduction(graph, shape, pipelines).build()
        _add_ending(graph, shape, whole)
    return graph


class _Pipeline:
    """The forwards and backwards of one replica."""

    def __init__(self, graph: Graph, shape: StepShape, replica: int) -> None:
        self.graph, self.shape, self.replica = graph, shape, replica
        self.microbatches = range(replica * shape.microbatches, (replica + 1) * shape.microbatches)
        self.backward = graph.phase in (Phase.TRAIN, Phase.GRADIENTS)
        self.loads: dict[int, int] = {}
        self.forwards: dict[tuple[int, int], int] = {}
        self.backwards: dict[tuple[int, int], int] = {}

    def build(self) -> None:
        self.loads[INPUTS] = self._load(0, inputs_slot(self.replica))
        if self.graph.phase is not Phase.PREDICT:
            self.loads[TARGETS] = self._load(self.shape.last, TARGETS)
        for microbatch in self.microbatches:
            self._add_forwards(microbatch)
            if self.backward:
                self._add_backwards(microbatch)

    def whole(self, stage: int) -> int:
        """Return the op after which this replica's gradients of a stage are whole."""
        return self.backwards[stage, self.microbatches[-1]]

    def _op(self, kind: Kind, stage: int, **marks: object) -> int:
        worker = self.shape.worker(self.replica, stage)
        return self.graph.add(Op(kind, worker, stage=stage, **marks))  # type: ignore[arg-type]

    def _load(self, stage: int, slot: int) -> int:
        return self._op(Kind.LOAD, stage, slot=slot, peer=COORDINATOR, stream=Stream.COMM)

    def _add_forwards(self, m: int) -> None:
        last, first = self.shape.last, self.microbatches[0]
        for stage in range(last + 1):
            inputs = [self.forwards[stage - 1, m] if stage else self.loads[INPUTS]]
            if stage == last and TARGETS in self.loads:
                inputs.append(self.loads[TARGETS])
            after = [self.forwards[stage, m - 1]] if m > first else []
            if stage == 0 and m - first >= self.shape.limit:
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
            before = [self.backwards[stage, m - 1]] if m > self.microbatches[0] else []
            self.backwards[stage, m] = backward = self._op(
                Kind.BACKWARD,
                stage,
                microbatch=m,
                inputs=(*inputs, *tied.get(stage, ())),
                after=(self.forwards[stage, m], *before),
            )
            for slot, (owner, user) in enumerate(self.shape.ties):
                if user == stage:
                    gradient = self._op(
                        Kind.TIE_GRADIENT, stage, microbatch=m, slot=slot, after=(backward,)
                    )
                    tied.setdefault(owner, []).append(gradient)


class _Reduction:
    """The sums of gradients over replicas."""

    def __init__(self, graph: Graph, shape: StepShape, pipelines: list[_Pipeline]) -> None:
        self.graph, self.shape, self.pipelines = graph, shape, pipelines

    def build(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Add all ops; return for (replica, stage) those after which its gradients are whole."""
        if self.shape.replicas == 1:
            return {(0, s): (self.pipelines[0].whole(s),) for s in range(self.shape.last + 1)}
        whole: dict[tuple[int, int], tuple[int, ...]] = {}
        for stage in reversed(range(self.shape.last + 1)):
            for chunk in range(self.shape.chunks[stage]):
                for replica, op in enumerate(self._add_chunk(stage, chunk)):
                    whole[replica, stage] = (*whole.get((replica, stage), ()), op)
        return whole

    def _add_chunk(self, stage: int, chunk: int) -> list[int]:
        replicas = range(self.shape.replicas)
        flat = tuple(
            self._op(Kind.FLATTEN, r, stage, chunk, after=(self.pipelines[r].whole(stage),))
            for r in replicas
        )
        total = self._op(Kind.REDUCE, chunk % len(replicas), stage, chunk, inputs=flat)
        return [self._op(Kind.UNFLATTEN, r, stage, chunk, inputs=(total,)) for r in replicas]

    def _op(
        self,
        kind: Kind,
        replica: int,
        stage: int,
        chunk: int,
        *,
        inputs: tuple[int, ...] = (),
        after: tuple[int, ...] = (),
    ) -> int:
        worker = self.shape.worker(replica, stage)
        return self.graph.add(Op(kind, worker, Stream.COMPUTE, inputs, after, stage, slot=chunk))


def _add_ending(
    graph: Graph, shape: StepShape, whole: dict[tuple[int, int], tuple[int, ...]]
) -> None:
    """Add what comes once the gradients are whole: for TRAIN the commit and the updates."""
    stages, replicas = range(shape.last + 1), range(shape.replicas)

    def add(kind: Kind, replica: int, stage: int, **marks: object) -> int:
        op = Op(kind, shape.worker(replica, stage), stage=stage, **marks)  # type: ignore[arg-type]
        return graph.add(op)

    if graph.phase is Phase.GRADIENTS:
        for replica in replicas:
            for stage in stages:
                add(Kind.NORM, replica, stage, after=whole[replica, stage])
        return
    norms = [add(Kind.NORM, 0, stage, after=whole[0, stage]) for stage in stages]
    others = [op for (replica, _), ops in whole.items() if replica for op in ops]
    commit = add(Kind.COMMIT, 0, 0, inputs=tuple(norms), after=tuple(others))
    for replica in replicas:
        updates = [add(Kind.UPDATE, replica, stage, inputs=(commit,)) for stage in stages]
        for slot, (owner, user) in enumerate(shape.ties):
            add(
                Kind.REFRESH,
                replica,
                user,
                slot=slot,
                inputs=(updates[owner],),
                after=(updates[user],),
            )
