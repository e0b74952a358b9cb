"""The op graph: what depends on what, on which worker and stream; never when.

A `Graph` is built by the coordinator, for all workers together. `split` cuts it at the borders
between workers: every edge across becomes a `SEND` on one side and a `RECEIVE` on the other, and
each worker is given its own `Program`, in which ops are numbered from 0 in an order that respects
every edge. Pure: no I/O, no clock, no torch.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

COORDINATOR = -1


class Kind(enum.Enum):
    """What an op does."""

    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    TIE_GRADIENT = "tie_gradient"
    FLATTEN = "flatten"
    REDUCE = "reduce"
    UNFLATTEN = "unflatten"
    NORM = "norm"
    COMMIT = "commit"
    UPDATE = "update"
    REFRESH = "refresh"
    CALL = "call"
    SEND = "send"
    RECEIVE = "receive"


class Stream(enum.Enum):
    """A queue of a device; ops on one stream run in the order in which they were launched."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    COMM = "comm"


class Phase(enum.Enum):
    """What a program is for; tells the stages what their forward must keep and return.

    GRADIENTS is TRAIN without the update: the gradients stay where they are.
    """

    TRAIN = "train"
    GRADIENTS = "gradients"
    EVALUATE = "evaluate"
    PREDICT = "predict"
    CALLS = "calls"


CHUNKED = frozenset({Kind.FLATTEN, Kind.REDUCE, Kind.UNFLATTEN})
ARRIVALS = frozenset({Kind.LOAD, Kind.RECEIVE})


class Op(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One op of a graph or a program; all references to other ops are indices.

    Attributes:
        kind: what it does.
        worker: where it runs.
        stream: the device stream on which it runs.
        inputs: ops whose values it reads, in order.
        after: ops that must be over before it starts, whose values it does not read.
        stage: its pipeline stage, where it has one.
        microbatch: its microbatch, where it has one.
        slot: `LOAD`: which input of the run; `CALL`: which callable; `REFRESH`, `TIE_GRADIENT`:
            which tie; `FLATTEN`, `REDUCE`, `UNFLATTEN`: which chunk of the stage's gradients.
        peer: `SEND`: the receiving node; `RECEIVE` and `LOAD`: the sending node.
        target: `SEND`: index of the `RECEIVE` in the peer's program.
    """

    kind: Kind
    worker: int
    stream: Stream = Stream.COMPUTE
    inputs: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    stage: int | None = None
    microbatch: int | None = None
    slot: int = 0
    peer: int | None = None
    target: int | None = None

    def __str__(self) -> str:
        """Name the op as errors and labels do, for example "forward stage=0 microbatch=3"."""
        parts = [self.kind.value]
        if self.stage is not None:
            parts.append(f"stage={self.stage}")
        if self.microbatch is not None:
            parts.append(f"microbatch={self.microbatch}")
        if self.kind is Kind.CALL:
            parts.append(f"call={self.slot}")
        if self.kind in CHUNKED:
            parts.append(f"chunk={self.slot}")
        return " ".join(parts)


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker's part of a graph: sent once, run as often as one likes."""

    worker: int
    phase: Phase
    microbatches: int
    ops: tuple[Op, ...]


@dataclass(slots=True)
class Graph:
    """Ops of all workers. An op may only name ops that were added before it: no cycles."""

    phase: Phase
    microbatches: int = 1
    ops: list[Op] = field(default_factory=list)

    def add(self, op: Op) -> int:
        """Add one op and return its index.

        Raises:
            ValueError: the op names an op that is not in the graph yet.
        """
        for other in (*op.inputs, *op.after):
            if not 0 <= other < len(self.ops):
                raise ValueError(
                    f"op {len(self.ops)} ({op}) names op {other}, which is not in the graph yet; "
                    f"add inputs first"
                )
        self.ops.append(op)
        return len(self.ops) - 1

    def find(self, kind: Kind, *, stage: int | None, microbatch: int | None) -> int | None:
        """Return the index of the first op with these marks, or None."""
        for index, op in enumerate(self.ops):
            if op.kind is kind and op.stage == stage and op.microbatch == microbatch:
                return index
        return None


@dataclass(frozen=True, slots=True)
class Split:
    """A graph cut by worker: the programs, and where each op of the graph went."""

    programs: dict[int, Program]
    place: tuple[tuple[int, int], ...]  # graph index -> (worker, index in that worker's program)


def split(graph: Graph, workers: int) -> Split:
    """Cut the graph into one program per worker, with a SEND and a RECEIVE for every edge across.

    A value that several ops of another worker read is sent there once. An `after` edge across
    workers becomes a message without tensors. Every worker gets a program, if only an empty one.

    Raises:
        ValueError: an op is on a worker that does not exist.
    """
    cut = _Cut(workers)
    for index, op in enumerate(graph.ops):
        if not 0 <= op.worker < workers:
            raise ValueError(f"op {index} ({op}) is on worker {op.worker} of {workers}")
        cut.place(op)
    return cut.result(graph)


class _Cut:
    """The state of one `split`: each worker's ops so far, and what was sent where already."""

    def __init__(self, workers: int) -> None:
        self._local: list[list[Op]] = [[] for _ in range(workers)]
        self._place: list[tuple[int, int]] = []
        self._sent: dict[
            tuple[int, int, bool], int
        ] = {}  # (op, worker, with value) -> RECEIVE there

    def place(self, op: Op) -> None:
        inputs = tuple(self._bring(i, op.worker, value=True) for i in op.inputs)
        after = tuple(self._bring(i, op.worker, value=False) for i in op.after)
        ops = self._local[op.worker]
        ops.append(msgspec.structs.replace(op, inputs=inputs, after=after))
        self._place.append((op.worker, len(ops) - 1))

    def _bring(self, index: int, worker: int, *, value: bool) -> int:
        """Return the local index on `worker` of the op that stands for graph op `index`."""
        home, local = self._place[index]
        if home == worker:
            return local
        for with_value in (True,) if value else (True, False):
            known = self._sent.get((index, worker, with_value))
            if known is not None:
                return known
        receive = self._transfer(home, local, worker, value=value)
        self._sent[(index, worker, value)] = receive
        return receive

    def _transfer(self, home: int, local: int, worker: int, *, value: bool) -> int:
        source, there, here = self._local[home][local], self._local[worker], self._local[home]
        marks = {"stage": source.stage, "microbatch": source.microbatch, "stream": Stream.COMM}
        there.append(Op(Kind.RECEIVE, worker, peer=home, **marks))  # type: ignore[arg-type]
        edge = {"inputs": (local,)} if value else {"after": (local,)}
        here.append(Op(Kind.SEND, home, peer=worker, target=len(there) - 1, **edge, **marks))  # type: ignore[arg-type]
        return len(there) - 1

    def result(self, graph: Graph) -> Split:
        programs = {
            worker: Program(worker, graph.phase, graph.microbatches, tuple(ops))
            for worker, ops in enumerate(self._local)
        }
        return Split(programs, tuple(self._place))


def readers(program: Program) -> list[int]:
    """Return for each op how many other ops of the program read its value."""
    counts = [0] * len(program.ops)
    for op in program.ops:
        for index in op.inputs:
            counts[index] += 1
    return counts


def edges(program: Program) -> Iterator[tuple[int, int]]:
    """Yield (earlier, later) for every dependency inside the program, each pair once."""
    for later, op in enumerate(program.ops):
        for earlier in dict.fromkeys((*op.inputs, *op.after)):
            yield earlier, later
