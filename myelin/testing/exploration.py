"""Drives the real schedulers of all workers of a graph in an order that the caller chooses.

There is no clock: at every moment the caller picks one of all the things that can happen next, also
that a message overtakes another, as injected delays make it. For tests of what must hold in every
legal order; `myelin.testing.simulation` has the order that durations and latencies give.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from myelin.runtime.graph import Graph, Split, Stream, split
from myelin.runtime.scheduler import Launch
from myelin.testing.simulation import History, Shell


def explore(
    graph: Graph,
    workers: int,
    choose: Callable[[int], int],
    *,
    run_ahead: int = 1,
    mishaps: Collection[int] = (),
) -> History:
    """Run a graph once in an order that the caller chooses among all that are possible.

    Args:
        graph: what to run.
        workers: on how many workers.
        choose: given n, returns which of n possible things happens; 0 has waited longest.
        run_ahead: see `Schedule`.
        mishaps: numbers of events that are not to go well: an op fails that is running or under
            way to a peer, or a worker is told to abort; `choose` says which.

    Raises:
        ScheduleError: a scheduler broke an invariant.
        Stuck: not all workers ended.
    """
    machine = _Chosen(split(graph, workers), choose, run_ahead, mishaps)
    return machine.run()


@dataclass(frozen=True, slots=True, eq=False)
class _Possible:
    """Something that can happen next, and how it can go wrong, if it can."""

    happens: Callable[[], None]
    fails: Callable[[], None] | None = None


class _Chosen:
    """No clock: whatever is possible may happen next. Time is the number of events so far."""

    def __init__(
        self,
        programs: Split,
        choose: Callable[[int], int],
        run_ahead: int,
        mishaps: Collection[int],
    ) -> None:
        self._split, self._choose, self._mishaps = programs, choose, mishaps
        self._events = 0
        self._possible: list[_Possible] = []
        self._workers = {
            node: Shell(program, self, run_ahead=run_ahead)
            for node, program in programs.programs.items()
        }
        self._lanes = {
            node: {stream: deque[Launch]() for stream in Stream} for node in self._workers
        }
        self._begun: dict[tuple[int, int], float] = {}
        self._completed: set[tuple[int, int]] = set()

    def run(self) -> History:
        for worker in self._workers.values():
            self._possible += [_Possible(partial(worker.arrived, op)) for op in worker.start()]
        while self._possible:
            going_wrong = self._what_can_go_wrong() if self._events in self._mishaps else []
            if going_wrong:
                going_wrong[self._choose(len(going_wrong))]()
            else:
                self._possible.pop(self._choose(len(self._possible))).happens()
            self._events += 1
        return History(self._split, tuple(worker.history() for worker in self._workers.values()))

    def now(self) -> float:
        return float(self._events)

    def launch(self, worker: Shell, launch: Launch) -> None:
        stream = worker.program.ops[launch.op].stream
        self._lanes[worker.program.worker][stream].append(launch)
        self._begin_heads(worker)

    def transmit(self, worker: Shell, op: int) -> None:
        peer, target = worker.target(op)
        self._possible.append(_Possible(partial(self._workers[peer].arrived, target)))
        taken, lost = partial(worker.finished, op), partial(self._fail, worker, op)
        self._possible.append(_Possible(taken, lost))

    def _begin_heads(self, worker: Shell) -> None:
        """Begin the first op of every stream that is not held back by another stream."""
        node = worker.program.worker
        for lane in self._lanes[node].values():
            if not lane or (node, lane[0].op) in self._begun:
                continue
            if all((node, earlier) in self._completed for earlier in lane[0].after):
                self._begun[node, lane[0].op] = self.now()
                fail = partial(self._raise, worker, lane)
                skipped = worker.ending_since is not None
                end = fail if skipped else partial(self._finish, worker, lane)
                self._possible.append(_Possible(end, None if skipped else fail))

    def _finish(self, worker: Shell, lane: deque[Launch]) -> None:
        op = self._pop(worker, lane)
        worker.finished(op, self._begun[worker.program.worker, op])
        self._begin_heads(worker)

    def _raise(self, worker: Shell, lane: deque[Launch]) -> None:
        self._fail(worker, self._pop(worker, lane))
        self._begin_heads(worker)

    def _pop(self, worker: Shell, lane: deque[Launch]) -> int:
        op = lane.popleft().op
        self._completed.add((worker.program.worker, op))
        return op

    def _fail(self, worker: Shell, op: int) -> None:
        if worker.ending_since is None:
            self._abort_others(worker)
        worker.failed(op)

    def _abort_others(self, worker: Shell) -> None:
        others = [other for other in self._workers.values() if other is not worker]
        self._possible += [_Possible(other.abort) for other in others]

    def _abort(self, worker: Shell) -> None:
        self._abort_others(worker)
        worker.abort()

    def _what_can_go_wrong(self) -> list[Callable[[], None]]:
        failures = [
            partial(self._go_wrong, possible) for possible in self._possible if possible.fails
        ]
        going_on = [
            worker
            for worker in self._workers.values()
            if worker.ending_since is None and not worker.scheduler.over
        ]
        return [*failures, *(partial(self._abort, worker) for worker in going_on)]

    def _go_wrong(self, possible: _Possible) -> None:
        self._possible.remove(possible)
        assert possible.fails is not None
        possible.fails()
