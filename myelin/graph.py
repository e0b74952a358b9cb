"""Graphs of a user's own ops: callables on workers, whose values travel as messages.

The same scheduler, worker and data path as for training; what is built here is only the graph.
"""

import builtins
import math
import operator
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from myelin.errors import GraphError, ModelError
from myelin.members import Members
from myelin.models.factories import path_of
from myelin.run import Distributed, Run, RunReport
from myelin.runtime.graph import COORDINATOR, Graph, Kind, Op, Phase, Stream

_MISSING = object()
_SEARCHED = (torch, torch.nn.functional, operator, math, builtins)


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """A value that is given anew for every run."""

    name: str
    slot: int


class CallOp:
    """One op of a `CallGraph`. Awaiting it gives its value in the latest run.

    If there has been no run since the graph last grew, awaiting it starts one, with every input's
    default.
    """

    __slots__ = ("_graph", "call", "inputs", "stream", "worker")

    def __init__(
        self, graph: "CallGraph", call: int, inputs: tuple[Any, ...], worker: int, stream: Stream
    ) -> None:
        self._graph, self.call, self.inputs = graph, call, inputs
        self.worker, self.stream = worker, stream

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the value; it belongs to the caller.

        Raises:
            OpError: an op of the run raised.
            ValueReleased: the run did not keep this op's value; name it in `keep`.
        """
        return self._graph.latest(self).__await__()


class GraphRun:
    """One run of a graph. `run[op]` is a future value; `await run` waits for the whole run."""

    def __init__(self, run: Run, indices: dict[CallOp, int]) -> None:
        self._run, self._indices = run, indices

    def __getitem__(self, op: CallOp) -> Any:
        """Return a future of the value of `op` in this run; the value belongs to the caller."""
        return self._run.value(self._indices[op])

    def __await__(self) -> Generator[Any, None, RunReport]:
        """Wait for the run's end and return its report.

        Raises:
            RunError: what ended the run.
        """
        return self._run.done.__await__()

    def cancel(self) -> None:
        """End the run on all workers; values that are not there yet raise `RunCancelled`."""
        self._run.cancel()


class CallGraph:
    """Ops of your own on the workers of a cluster; made by `Cluster.graph`.

    Add ops, then run the graph as often as you like. Leaving the `async with` block frees it on all
    workers; runs that are under way then are ended.

    Args:
        members: the cluster's nodes.
        limit: how many runs may be in flight; further ones wait.
        local_calls: where to put callables without an import path, or None if workers are
            processes.
    """

    def __init__(
        self,
        members: Members,
        *,
        limit: int,
        local_calls: dict[str, Callable[..., Any]] | None,
    ) -> None:
        self._members, self._local_calls = members, local_calls
        self._lane = members.coordinator.lane(limit=limit, dependent=False)
        self._inputs: dict[str, Input] = {}
        self._defaults: list[Any] = []
        self._ops: list[CallOp] = []
        self._calls: list[str] = []
        self._program: Distributed | None = None
        self._indices: dict[CallOp, int] = {}
        self._latest: GraphRun | None = None
        self._closed = False

    async def __aenter__(self) -> "CallGraph":
        """Start building."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End what is under way and free the graph on all workers."""
        self._closed = True
        runs = self._lane.all()
        for run in runs:
            run.cancel()
        for run in runs:
            await run.settled.wait()
        self._forget_program()
        for path in self._calls:
            if self._local_calls is not None:
                self._local_calls.pop(path, None)

    def input(self, name: str, default: Any = _MISSING) -> Input:
        """Declare a value that runs are given by keyword; without a default it must be given."""
        if name in self._inputs:
            raise GraphError(f"there is an input {name!r} already; choose another name")
        made = Input(name, len(self._defaults))
        self._inputs[name] = made
        self._defaults.append(default)
        self._grew()
        return made

    def op(
        self,
        function: Callable[..., Any],
        *inputs: Any,
        worker: int = 0,
        stream: str | Stream = Stream.COMPUTE,
    ) -> CallOp:
        """Add an op that calls `function` with the values of `inputs`, on `worker`.

        Args:
            function: a function that workers can import: at the top level of a module or of the
                script itself. With `Cluster(workers=0)` it may be anything that can be called. It
                must not write into its arguments.
            inputs: other ops, inputs, or plain values: tensors, numbers, text, and tuples, lists or
                dicts of them. Values of ops on other workers travel over the data path, detached.
            worker: where it runs.
            stream: "compute", "h2d", "d2h" or "comm"; ops on one stream run one after the other.

        Raises:
            GraphError: the function cannot be imported, or an argument makes no sense.
        """
        self._check_open()
        if not isinstance(worker, int) or worker < 0:
            raise GraphError(f"worker={worker!r}: workers are numbered 0, 1, ...")
        op = CallOp(
            self, len(self._calls), tuple(map(self._argument, inputs)), worker, _stream(stream)
        )
        self._calls.append(self._path(function))
        self._ops.append(op)
        self._grew()
        return op

    async def run(self, *, keep: Sequence[CallOp] | None = None, **inputs: Any) -> GraphRun:
        """Start a run and return its handle; does not wait for it to end.

        Args:
            keep: ops whose values will be wanted; by default those that no other op reads.
            inputs: values of the declared inputs; they must not change until the run is over.

        Raises:
            GraphError: an input is missing or unknown, or a worker cannot import a function.
            ClusterError: an op is placed on a worker that does not exist.
        """
        self._check_open()
        values = self._values(inputs)
        program = await self._compiled()
        run = self._members.coordinator.submit(self._lane, program, values, step=0)
        self._latest = GraphRun(run, self._indices)
        for op in self._sinks() if keep is None else keep:
            self._latest[op]  # asks for the value before the run is dispatched
        return self._latest

    async def latest(self, op: CallOp) -> Any:
        """Return the value of `op` in the latest run, which is started if there is none."""
        if self._latest is None:
            await self.run(keep=[*self._sinks(), op])
        assert self._latest is not None
        return await self._latest[op]

    def _grew(self) -> None:
        self._forget_program()
        self._latest = None

    def _forget_program(self) -> None:
        if self._program is not None:
            self._members.coordinator.discard(self._program)
            self._program = None

    def _check_open(self) -> None:
        if self._closed:
            raise GraphError("this graph was left already: use it inside its `async with` block")

    def _argument(self, value: Any) -> CallOp | Input:
        if isinstance(value, CallOp):
            if value not in self._ops:
                raise GraphError("an input op belongs to another graph; add it to this one")
            return value
        if isinstance(value, Input):
            if self._inputs.get(value.name) is not value:
                raise GraphError(f"input {value.name!r} belongs to another graph")
            return value
        self._defaults.append(value)
        return Input(f"constant {len(self._defaults) - 1}", len(self._defaults) - 1)

    def _path(self, function: Callable[..., Any]) -> str:
        if not callable(function):
            raise GraphError(f"{function!r} cannot be called")
        if self._local_calls is not None:
            path = f"local:{id(self)}:{len(self._calls)}"
            self._local_calls[path] = function
            return path
        try:
            return path_of(function)
        except ModelError as error:
            known = _library_path(function)
            if known is None:
                raise GraphError(f"{error}; or use Cluster(workers=0)") from error
            return known

    def _values(self, given: dict[str, Any]) -> dict[int, Any]:
        unknown = sorted(set(given) - set(self._inputs))
        if unknown:
            raise GraphError(f"unknown inputs {unknown}; this graph has {sorted(self._inputs)}")
        values = dict(enumerate(self._defaults))
        values |= {self._inputs[name].slot: value for name, value in given.items()}
        missing = [name for name, i in self._inputs.items() if values[i.slot] is _MISSING]
        if missing:
            raise GraphError(f"inputs {missing} have no value: give them to run(...)")
        return values

    def _sinks(self) -> list[CallOp]:
        read = {op for other in self._ops for op in other.inputs if isinstance(op, CallOp)}
        return [op for op in self._ops if op not in read]

    async def _compiled(self) -> Distributed:
        if self._program is None:
            if not self._ops:
                raise GraphError("the graph has no op yet: add one with .op(function, ...)")
            await self._members.ensure(1 + max(op.worker for op in self._ops))
            graph, self._indices = _compile(self._ops)
            self._program = await self._members.coordinator.install_calls(graph, self._calls)
        return self._program


def _compile(ops: Sequence[CallOp]) -> tuple[Graph, dict[CallOp, int]]:
    """Build the op graph; an input is loaded once on every worker that reads it."""
    graph = Graph(Phase.CALLS)
    indices: dict[CallOp, int] = {}
    loads: dict[tuple[int, int], int] = {}
    for op in ops:
        inputs = []
        for value in op.inputs:
            if isinstance(value, CallOp):
                inputs.append(indices[value])
                continue
            place = (value.slot, op.worker)
            if place not in loads:
                load = Op(Kind.LOAD, op.worker, Stream.COMM, slot=value.slot, peer=COORDINATOR)
                loads[place] = graph.add(load)
            inputs.append(loads[place])
        call = Op(Kind.CALL, op.worker, op.stream, inputs=tuple(inputs), slot=op.call)
        indices[op] = graph.add(call)
    return graph, indices


def _stream(stream: str | Stream) -> Stream:
    try:
        return Stream(stream)
    except ValueError:
        names = ", ".join(repr(known.value) for known in Stream)
        raise GraphError(f"stream={stream!r}: use one of {names}") from None


def _library_path(function: Callable[..., Any]) -> str | None:
    """Return the import path of a built-in function of torch or Python, such as `torch.matmul`."""
    name = getattr(function, "__name__", "")
    for module in _SEARCHED:
        if name and getattr(module, name, None) is function:
            return f"{module.__name__}:{name}"
    return None
