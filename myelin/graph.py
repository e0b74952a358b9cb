"""Graphs of a user's own ops: callables on workers, whose values travel as messages.

The same scheduler, worker and data path as for training; what is built here is only the graph.
"""

import asyncio
import builtins
import inspect
import math
import operator
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from myelin.errors import GraphError, ModelError
from myelin.members import Members
from myelin.models.checks import shown
from myelin.models.factories import path_of
from myelin.run import InstalledProgram, Run, RunReport, look_at
from myelin.runtime.graph import COORDINATOR, Graph, Kind, Op, Phase, Stream
from myelin.transports.datapath import spec_of
from myelin.transports.packing import tensors_of

_ADVICE = (
    "define the op with `def` at the top level of a module or of a script's file, and give it what "
    "it needs as inputs; or use Cluster(workers=0), where an op may be anything that can be called"
)
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

    __slots__ = ("call", "graph", "inputs", "stream", "worker")

    def __init__(
        self, graph: "CallGraph", call: int, inputs: tuple[Any, ...], worker: int, stream: Stream
    ) -> None:
        self.graph, self.call, self.inputs = graph, call, inputs
        self.worker, self.stream = worker, stream

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the value; it belongs to the caller.

        Raises:
            OpError: an op of the run raised.
            ValueReleased: the run did not keep this op's value; name it in `keep`.
        """
        return self.graph.latest(self).__await__()


@dataclass(frozen=True, slots=True)
class _Installed:
    """The graph as the workers have it.

    Attributes:
        program: what they have.
        indices: the place of each op in the program's graph.
        sinks: the ops that no other op reads.
    """

    program: InstalledProgram
    indices: dict[CallOp, int]
    sinks: tuple[CallOp, ...]

    def index(self, op: CallOp) -> int:
        """Return the place of an op.

        Raises:
            GraphError: it has none.
        """
        if op not in self.indices:
            raise GraphError("this run has no such op: it is another graph's, or was added later")
        return self.indices[op]


class GraphRun:
    """One run of a graph. `run[op]` is a future value; `await run` waits for the whole run.

    Cancelling a task that awaits either does not end the run; `cancel` does.
    """

    def __init__(self, run: Run, installed: _Installed) -> None:
        self._run, self._installed = run, installed

    def __getitem__(self, op: CallOp) -> "asyncio.Future[Any]":
        """Return a future of the value of `op` in this run; the value belongs to the caller.

        Raises:
            GraphError: the run has no such op.
        """
        value = self._run.value(self._installed.index(op))
        self._run.done.add_done_callback(look_at)  # the value tells of a failure as well
        return value

    def __await__(self) -> Generator[Any, None, RunReport]:
        """Wait for the run's end and return its report.

        Raises:
            RunError: what ended the run.
        """
        return asyncio.shield(self._run.done).__await__()

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
        self._names: list[str] = []  # of the calls, for errors
        self._installed: _Installed | None = None
        self._installing = asyncio.Lock()
        self._latest: GraphRun | None = None
        self._starting = asyncio.Lock()  # of the latest run
        self._awaited: list[CallOp] = []
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
        """End what is under way and free the graph on all workers.

        Waits for ops that are running, unless the block is left because it was cancelled.
        """
        self._closed = True
        runs = self._lane.all()
        for run in runs:
            run.cancel()
        try:
            if kind is None or issubclass(kind, Exception):
                for run in runs:
                    await run.settled.wait()
        finally:
            self._grew()
            self._members.coordinator.retire(self._lane)
            if self._local_calls is not None:
                for path in self._calls:
                    self._local_calls.pop(path, None)

    def input(self, name: str, default: Any = _MISSING) -> Input:
        """Declare a value that runs are given by keyword; without a default it must be given.

        Raises:
            GraphError: the name cannot be used, or the default cannot travel.
        """
        self._check_open()
        if not isinstance(name, str) or not name:
            raise GraphError(
                f'input({shown(name)}) has no name: give one, such as graph.input("x"); a plain '
                f"value can be given to op(...) as it is"
            )
        if name in self._inputs or name in ("keep", "self"):
            raise GraphError(f"the name {name!r} is taken: choose another for this input")
        if default is not _MISSING:
            _check_value(default, f"the default of input {name!r}")
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
        if not isinstance(worker, int) or isinstance(worker, bool) or worker < 0:
            raise GraphError(f"worker={worker!r}: workers are numbered 0, 1, ...")
        arguments = tuple(map(self._argument, inputs))
        op = CallOp(self, len(self._calls), arguments, worker, _stream(stream))
        path = self._path(function)
        self._calls.append(path)
        self._names.append(getattr(function, "__qualname__", repr(function)))
        self._ops.append(op)
        self._grew()
        return op

    async def run(self, *, keep: Sequence[CallOp] | None = None, **inputs: Any) -> GraphRun:
        """Start a run and return its handle; does not wait for it to end.

        Args:
            keep: ops whose values will be wanted; by default those that no other op reads.
            inputs: values of the declared inputs; they must not change until the run is over.

        Raises:
            GraphError: an input is missing, unknown or cannot travel, or a worker cannot import a
                function.
            ClusterError: an op is placed on a worker that does not exist.
        """
        self._check_open()
        _check_kept(keep)
        installed = await self._compiled()
        wanted = [installed.index(op) for op in (installed.sinks if keep is None else keep)]
        run = self._members.coordinator.submit(
            self._lane, installed.program, self._values(inputs), step=0
        )
        for index in wanted:
            run.want(index)  # before the run is dispatched
        self._latest = GraphRun(run, installed)
        return self._latest

    async def latest(self, op: CallOp) -> Any:
        """Return the value of `op` in the latest run, which is started if there is none."""
        self._awaited.append(op)  # others may be awaited before the run has been started
        async with self._starting:
            run = self._latest or await self.run(keep=[*self._sinks(), *self._awaited])
        return await run[op]

    def _grew(self) -> None:
        """Forget what was made of the graph before."""
        if self._installed is not None:
            self._members.coordinator.discard(self._installed.program)
        self._installed = self._latest = None
        self._awaited.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise GraphError("this graph was left already: use it inside its `async with` block")

    def _argument(self, value: Any) -> CallOp | Input:
        if isinstance(value, CallOp):
            if value.graph is not self:
                raise GraphError("an input op belongs to another graph; add it to this one")
            return value
        if isinstance(value, Input):
            if self._inputs.get(value.name) is not value:
                raise GraphError(f"input {value.name!r} belongs to another graph")
            return value
        _check_value(value, "an argument of the op")
        self._defaults.append(value)
        return Input(f"constant {len(self._defaults) - 1}", len(self._defaults) - 1)

    def _path(self, function: Callable[..., Any]) -> str:
        _check_function(function)
        if self._local_calls is not None:
            path = f"local:{id(self)}:{len(self._calls)}"
            self._local_calls[path] = function
            return path
        try:
            return path_of(function, advice=_ADVICE)
        except ModelError as error:
            known = _library_path(function)
            if known is None:
                raise GraphError(str(error)) from error
            return known

    def _values(self, given: dict[str, Any]) -> dict[int, Any]:
        unknown = sorted(set(given) - set(self._inputs))
        if unknown:
            raise GraphError(f"unknown inputs {unknown}; this graph has {sorted(self._inputs)}")
        for name, value in given.items():
            _check_value(value, f"input {name!r}")
        values = dict(enumerate(self._defaults))
        values |= {self._inputs[name].slot: value for name, value in given.items()}
        missing = [name for name, i in self._inputs.items() if values[i.slot] is _MISSING]
        if missing:
            raise GraphError(f"inputs {missing} have no value: give them to run(...)")
        return values

    def _sinks(self) -> tuple[CallOp, ...]:
        read = {op for other in self._ops for op in other.inputs if isinstance(op, CallOp)}
        return tuple(op for op in self._ops if op not in read)

    async def _compiled(self) -> _Installed:
        """Return the graph as the workers have it, which is as it is now."""
        async with self._installing:
            while self._installed is None:
                if not self._ops:
                    raise GraphError("the graph has no op yet: add one with .op(function, ...)")
                await self._members.ensure(1 + max(op.worker for op in self._ops))
                await self._install(tuple(self._ops))
            return self._installed

    async def _install(self, ops: tuple[CallOp, ...]) -> None:
        coordinator, sinks = self._members.coordinator, self._sinks()
        graph, indices = _compile(ops)
        program = await coordinator.install_calls(graph, self._calls, self._names)
        if ops == tuple(self._ops) and not self._closed:
            self._installed = _Installed(program, indices, sinks)
        else:  # it has grown, or was left, meanwhile
            coordinator.discard(program)
            self._check_open()


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


def _check_value(value: Any, what: str) -> None:
    try:
        for tensor in tensors_of(value):
            spec_of(tensor)
    except (TypeError, ValueError) as error:
        raise GraphError(f"{what} cannot be sent to a worker: {error}") from error


def _check_function(function: object) -> None:
    """Refuse what cannot be called, and what would give a coroutine that nobody awaits."""
    if not callable(function):
        raise GraphError(f"{shown(function)} cannot be called: give a function")
    called = type(function).__call__ if not inspect.isroutine(function) else function
    for each in (function, called):
        if inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each):
            raise GraphError(
                f"{shown(function)} is async, and a worker calls an op without awaiting it: define "
                f"it with plain `def`; it may block, as each stream has a thread of its own"
            )


def _check_kept(keep: object) -> None:
    """Refuse what is no list of ops, an op by itself above all."""
    if isinstance(keep, CallOp):
        raise GraphError("keep is a list of ops: write keep=[op]")
    if keep is None:
        return
    if not isinstance(keep, Collection) or not all(isinstance(op, CallOp) for op in keep):
        raise GraphError(f"keep={shown(keep)}: list ops of this graph, such as keep=[op]")


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
