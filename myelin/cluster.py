"""The cluster: workers for as long as an `async with` block lasts, and what is made with them."""

import asyncio
import contextlib
import enum
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from myelin.errors import ClusterError, GraphError
from myelin.graph import CallGraph
from myelin.members import Members, ProcessMembers, Settings, ThreadMembers, to_the_end
from myelin.models.checks import check_number, check_seed, check_whole
from myelin.models.model import Description, check_description
from myelin.plan import Plan, checked_plan
from myelin.runtime import messages as m
from myelin.runtime.jitter import Jitter
from myelin.runtime.optimizer import AdamW, Optimizer, check_optimizer
from myelin.runtime.process import own_index
from myelin.trainer import Trainer

log = logging.getLogger(__name__)

_MOST_THREADS = 1024  # more than any machine's cores would be a slip
_TERMINATED = 128 + signal.SIGTERM


class _State(enum.Enum):
    NEW = "not entered yet"
    OPEN = "open"
    CLOSED = "left already"


class Cluster:
    """Workers that train models and run graphs.

    Use it as `async with myelin.Cluster(workers=2) as cluster:`. Leaving the block, however it is
    left, ends every worker, thread, task and socket file. SIGTERM leaves it too, where the program
    has no handler of its own; the program then exits with code 143.

    Args:
        workers: how many worker processes to start on this machine; 0 runs everything inside the
            calling process, on as many threads as the plan asks for workers.
        threads: intra-op threads of each worker; by default the machine's cores divided by the
            workers, and torch's own setting inside the calling process.
        hello_deadline_s: how long a worker may take to start.
        silence_s: a worker not heard of for so long counts as lost.
        data_timeout_s: how long a tensor may be under way.
        jitter: random delays to inject, for tests.
    """

    def __init__(
        self,
        workers: int,
        *,
        threads: int | None = None,
        hello_deadline_s: float = 120.0,
        silence_s: float = 20.0,
        data_timeout_s: float = 600.0,
        jitter: Jitter | None = None,
    ) -> None:
        check_whole("workers", workers, least=0, instead="; 0 is the calling process")
        if threads is not None:
            cores = f", or None: this machine has {os.cpu_count()} cores"
            check_whole("threads", threads, least=1, below=_MOST_THREADS + 1, instead=cores)
        waits = {
            "hello_deadline_s": hello_deadline_s,
            "silence_s": silence_s,
            "data_timeout_s": data_timeout_s,
        }
        for name, seconds in waits.items():
            check_number(name, seconds, above=0, what="a number of seconds")
        if jitter is not None and not isinstance(jitter, Jitter):
            raise ValueError(f"jitter={jitter!r}: use myelin.Jitter(...), or None")
        self.workers = workers
        self._local_calls: dict[str, Callable[..., Any]] = {}
        settings = Settings(workers, threads, hello_deadline_s, silence_s, data_timeout_s, jitter)
        self._members: Members = (
            ProcessMembers(settings) if workers else ThreadMembers(settings, self._local_calls)
        )
        self._state = _State.NEW
        self._terminated = False
        self._watching_sigterm = False

    async def __aenter__(self) -> "Cluster":
        """Start the workers.

        Raises:
            HandshakeError: a worker did not start; the message has its last words.
            ClusterError: this object was used before, or this process is itself a worker.
        """
        if self._state is not _State.NEW:
            raise ClusterError(f"this cluster was {self._state.value}; make a new one")
        _check_no_worker()
        self._state = _State.OPEN
        self._watch_sigterm()
        try:
            await self._members.open()
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the workers; cancelling this waits until it is done, then raises the cancellation."""
        ended = self._members.coordinator.under_way()
        if ended and kind is None:
            log.warning("the cluster was left with %d runs under way; await them first", ended)
        try:
            await to_the_end(self._members.close())
        finally:
            self._leave()

    def __repr__(self) -> str:
        where = f"{self.workers} processes" if self.workers else "the calling process"
        return f"<Cluster in {where}, {self._state.value}>"

    async def trainer(
        self,
        model: Description,
        *,
        plan: Plan | None = None,
        optimizer: Optimizer | None = None,
        seed: int = 0,
    ) -> Trainer:
        """Cut a model into stages and build each on its worker.

        Args:
            model: a description: `GPT(...)`, or `Model("my_pkg.models:build", width=512)`.
            plan: how to run it; by default one stage on one worker.
            optimizer: by default `AdamW()`.
            seed: decides initial weights and all dropout, whatever the plan.

        Raises:
            PlanError: the plan, or a group of the optimizer, does not fit the model.
            ClusterError: the plan needs more workers than there are.
            ModelError: the model cannot be built, or is no description.
            ValueError: `optimizer` describes no optimizer, or `seed` is none.
        """
        self._check_open()
        check_description(model)
        plan = checked_plan(plan)
        optimizer = check_optimizer(AdamW() if optimizer is None else optimizer)
        check_seed(seed)
        await self._members.ensure(plan.workers)
        coordinator = self._members.coordinator
        described = await coordinator.requests.ask(
            0, m.Describe(coordinator.number(), model.factory, model.arguments)
        )
        stages = plan.stages([block.cost for block in described.blocks])
        every = plan.keeps_every(stages)
        ties = _ties(described.ties, stages)
        crossing = tuple(tie for tie in ties if tie.crosses)
        number = coordinator.number()
        builders = sorted({worker for workers in plan.grid for worker in workers})

        def build(worker: int, request: int) -> m.Build:
            replica = worker // (plan.workers // plan.data)
            own = tuple(
                m.StageSpec(stage, blocks[0], blocks[-1], every[stage])
                for stage, blocks in enumerate(stages)
                if plan.grid[replica][stage] == worker
            )
            return m.Build(
                request,
                number,
                model.factory,
                model.arguments,
                own,
                plan.pipeline - 1,
                crossing,
                optimizer,
                seed,
                replica,
                plan.data,
                plan.chunk,
            )

        try:
            built = await coordinator.requests.ask_all(build, builders)
            elements = {int(stage): size for part in built for stage, size in part.elements.items()}
            trainer = Trainer(
                coordinator,
                number,
                model=model,
                plan=plan,
                optimizer=optimizer,
                stages=stages,
                elements=[elements[stage] for stage in range(plan.pipeline)],
                ties=ties,
            )
            await trainer.check_groups()
        except BaseException:
            coordinator.discard_trainer(number, builders)  # others may have built their part
            raise
        return trainer

    def graph(self, *, limit: int = 8) -> CallGraph:
        """Return an empty graph for ops of your own; use it as `async with cluster.graph() as g:`.

        Args:
            limit: how many runs of it may be in flight.

        Raises:
            GraphError: `limit` is no whole number of at least 1.
        """
        self._check_open()
        check_whole("limit", limit, least=1, error=GraphError)
        local = self._local_calls if not self.workers else None
        return CallGraph(self._members, limit=limit, local_calls=local)

    def _check_open(self) -> None:
        if self._state is not _State.OPEN:
            raise ClusterError(
                f"this cluster was {self._state.value}: use it inside its "
                f"`async with Cluster(...) as cluster:` block"
            )
        self._members.coordinator.check()

    def _watch_sigterm(self) -> None:
        """Have SIGTERM cancel the task that entered, unless the program handles it itself."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            self._terminated = True
            task.cancel("SIGTERM")

        with contextlib.suppress(NotImplementedError, RuntimeError):  # loops without signals
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
            self._watching_sigterm = True

    def _leave(self) -> None:
        """Take note that all is closed; where SIGTERM was the reason, have the program end."""
        self._state = _State.CLOSED
        if self._watching_sigterm:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
            self._watching_sigterm = False
        if self._terminated:
            raise SystemExit(_TERMINATED)


def _check_no_worker() -> None:
    """Keep a script that a worker imports from starting workers that import it, and so on."""
    index = own_index()
    if index is not None:
        raise ClusterError(
            f"worker {index} of a cluster cannot have a cluster of its own; if it has imported "
            'your script, have that do its work under `if __name__ == "__main__":`'
        )


def _ties(
    ties: tuple[tuple[int, str, int, str], ...], stages: tuple[range, ...]
) -> tuple[m.TieSpec, ...]:
    """Return the ties as the stages have them, each weight owned by its first block.

    A backward reaches the first block last, so that is where all gradients can meet. Which block
    the model calls the owner decides the initial value only, which all have by then.
    """
    stage_of = {block: stage for stage, blocks in enumerate(stages) for block in blocks}
    places: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for owner, owner_name, user, user_name in ties:
        known = places.setdefault((owner, owner_name), [(owner, owner_name)])
        known.append((user, user_name))
    specs = []
    for together in places.values():
        first, *others = sorted(together)
        specs += [
            m.TieSpec(stage_of[first[0]], *first, stage_of[other[0]], *other) for other in others
        ]
    return tuple(specs)
