"""What an op does: the port between a run and the arithmetic, and plain callables behind it.

An executor is called on the device's threads and knows nothing of scheduling, buses or loops.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from myelin.errors import GraphError, ModelError
from myelin.models.factories import find
from myelin.runtime.graph import Op, Phase


@dataclass(slots=True)
class RunState:
    """What one run of a program keeps on one worker between its ops.

    Attributes:
        phase: what the program is for.
        step: number of the trainer's step; random numbers depend on it.
        microbatches: how many microbatches the batch is split into.
        updated: whether any weight has been changed by this run.
        block: the model block that is running, for reports.
        outputs: small results, reported when the run is over.
        scratch: the executor's own.
    """

    phase: Phase
    step: int
    microbatches: int
    updated: bool = False
    block: int | None = None
    outputs: dict[str, float] = field(default_factory=dict)
    scratch: dict[Any, Any] = field(default_factory=dict)


class Executor(Protocol):
    """Does the arithmetic of one program's ops."""

    def execute(self, op: Op, state: RunState, inputs: Sequence[Any]) -> Any:
        """Do what `op` says with the values it reads, and return its value."""
        ...

    def discard(self, state: RunState) -> None:
        """Undo what a run that ended early has left behind; weights were not touched."""
        ...

    def present(self, op: Op, value: Any) -> Any:
        """Return `value` as a user should see it who asks for the value of `op`."""
        ...


class CallExecutor:
    """Calls a user's own callables.

    Args:
        paths: import path of each callable; `CALL` ops name them by `slot`.
        local: callables that have no import path, by the name used in `paths`; only inside one
            process.

    Raises:
        GraphError: a path leads to nothing that can be called.
    """

    def __init__(self, paths: Sequence[str], local: Mapping[str, Callable[..., Any]]) -> None:
        self._calls = [_find(path, local) for path in paths]

    def execute(self, op: Op, state: RunState, inputs: Sequence[Any]) -> Any:
        """See `Executor`."""
        return self._calls[op.slot](*inputs)

    def discard(self, state: RunState) -> None:
        """See `Executor`; a callable leaves nothing behind that we know of."""

    def present(self, op: Op, value: Any) -> Any:
        """See `Executor`."""
        return value


def _find(path: str, local: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if path in local:
        return local[path]
    try:
        return find(path)
    except ModelError as error:
        raise GraphError(
            f"the worker cannot import {path!r}: {error}; put the function into a module that "
            f"workers can import, or use Cluster(workers=0)"
        ) from error
