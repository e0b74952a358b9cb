"""The simulator and the explorer themselves: others build on them."""

import random
from collections.abc import Callable, Sequence

import pytest

from myelin.runtime.graph import Graph, Kind, Op, Phase, Stream
from myelin.runtime.scheduler import Aborted, Drained, Failed, Launch, StepDone, Transmit
from myelin.runtime.step import StepShape, build_step
from myelin.testing.exploration import explore
from myelin.testing.simulation import (
    Conditions,
    History,
    Ran,
    Stuck,
    WorkerHistory,
    durations,
    simulate,
)


def train(placement: Sequence[int], microbatches: int, limit: int | None = None) -> Graph:
    shape = StepShape(tuple(placement), microbatches, limit or 2 * len(placement))
    return build_step(shape, Phase.TRAIN)


def calls(*ops: Op) -> Graph:
    graph = Graph(Phase.CALLS)
    for op in ops:
        graph.add(op)
    return graph


def call(
    worker: int, *inputs: int, stream: Stream = Stream.COMPUTE, after: tuple[int, ...] = ()
) -> Op:
    return Op(Kind.CALL, worker, stream, inputs=inputs, after=after)


def seconds(worker: WorkerHistory, *kinds: Kind) -> list[tuple[str, float, float]]:
    """Return name, start and end of the ops of these kinds, in the order in which they ended."""
    return [
        (str(worker.program.ops[index]), ran.started, ran.ended)
        for index, ran in worker.ran.items()
        if worker.program.ops[index].kind in kinds
    ]


def every_second(op: Op) -> float:
    return 1.0


def newest(n: int) -> int:
    return n - 1


def oldest(n: int) -> int:
    return 0


# The simulator


def test_ops_run_one_after_the_other_and_messages_take_their_time() -> None:
    graph = calls(call(0), call(1, 0), call(0, 1))
    history = simulate(graph, 2, Conditions(duration_s=every_second, message_s=0.25))
    assert [history.ran(index) for index in range(3)] == [
        Ran(0, issued=0.0, started=0.0, ended=1.0),
        Ran(1, issued=1.25, started=1.25, ended=2.25),
        Ran(3, issued=2.5, started=2.5, ended=3.5),
    ]
    assert history.span == 3.5
    assert [worker.busy for worker in history.workers] == [2.0, 1.0]


def test_a_step_on_two_workers_takes_these_times() -> None:
    history = simulate(train((0, 1), microbatches=2), 2, Conditions(message_s=0.5))
    first, last = history.workers
    assert seconds(first, Kind.FORWARD, Kind.BACKWARD) == [
        ("forward stage=0 microbatch=0", 0.5, 1.5),
        ("forward stage=0 microbatch=1", 1.5, 2.5),
        ("backward stage=0 microbatch=0", 5.5, 7.5),
        ("backward stage=0 microbatch=1", 8.5, 10.5),
    ]
    assert seconds(last, Kind.FORWARD, Kind.BACKWARD) == [
        ("forward stage=1 microbatch=0", 2.0, 3.0),
        ("backward stage=1 microbatch=0", 3.0, 5.0),
        ("forward stage=1 microbatch=1", 5.0, 6.0),
        ("backward stage=1 microbatch=1", 6.0, 8.0),
    ]
    assert [op.kind for op in first.order(Kind.COMMIT, Kind.UPDATE)] == [Kind.COMMIT, Kind.UPDATE]


def test_the_log_has_every_event_with_what_the_scheduler_answered() -> None:
    history = simulate(calls(call(0), call(1, 0)), 2, Conditions(duration_s=every_second))
    told = [
        [(handled.at, handled.event, handled.commands) for handled in worker.handled]
        for worker in history.workers
    ]
    assert told[0][0] == (0.0, None, (Launch(0, Stream.COMPUTE),))
    assert told[0][1][2] == (Transmit(1),)
    assert told[0][2][2] == (StepDone(),)
    assert [at for at, _, _ in told[1]] == [0.0, 1.0, 2.0]
    assert history.workers[1].commands == [Launch(1, Stream.COMPUTE), StepDone()]


def test_the_same_seed_gives_the_same_history_and_another_seed_another() -> None:
    def once(seed: int) -> History:
        conditions = Conditions(message_s=0.1, jitter=0.3, seed=seed)
        return simulate(train((0, 1, 0), microbatches=6), 2, conditions)

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_jitter_lengthens_and_shortens_each_op_by_at_most_its_share() -> None:
    history = simulate(train((0, 1), microbatches=20), 2, Conditions(jitter=0.15, seed=3))
    took = [end - start for _, start, end in seconds(history.workers[0], Kind.FORWARD)]
    assert 0.85 <= min(took) < 0.9
    assert 1.1 < max(took) <= 1.15


def test_messages_between_two_workers_never_overtake_each_other() -> None:
    graph = calls(*(call(0) for _ in range(20)), *(call(1, index) for index in range(20)))
    history = simulate(graph, 2, Conditions(message_s=5.0, jitter=0.9, seed=1))
    receives = history.workers[1].order(Kind.RECEIVE)
    arrivals = [
        ran.ended
        for index, ran in history.workers[1].ran.items()
        if history.workers[1].program.ops[index].kind is Kind.RECEIVE
    ]
    assert len(receives) == 20
    assert arrivals == sorted(arrivals)
    sent = [ran.op for ran in history.workers[0].ran.values() if ran.op % 2]
    assert sent == sorted(sent)


def test_a_device_that_runs_ahead_is_told_early_and_runs_no_earlier_than_it_can() -> None:
    graph = calls(call(0), call(0, 0), call(0, 1))
    history = simulate(graph, 1, Conditions(duration_s=every_second, run_ahead=3))
    assert [history.ran(index) for index in range(3)] == [
        Ran(0, issued=0.0, started=0.0, ended=1.0),
        Ran(1, issued=0.0, started=1.0, ended=2.0),
        Ran(2, issued=0.0, started=2.0, ended=3.0),
    ]


def test_a_planted_failure_aborts_all_workers_and_leaves_no_trace_of_what_it_prevented() -> None:
    history = simulate(
        train((0, 1), microbatches=4),
        2,
        Conditions(message_s=0.25, run_ahead=2),
        fails=lambda op: str(op) == "forward stage=1 microbatch=0",
    )
    failed = [
        [str(worker.program.ops[h.event.op]) for h in worker.handled if isinstance(h.event, Failed)]
        for worker in history.workers
    ]
    assert failed == [
        ["forward stage=0 microbatch=3"],  # issued, and not begun when the abort came
        ["forward stage=1 microbatch=0", "backward stage=1 microbatch=0"],
    ]
    assert all(worker.commands.count(Drained()) == 1 for worker in history.workers)
    assert not any(worker.order(Kind.UPDATE) for worker in history.workers)
    assert [op.microbatch for op in history.workers[0].order(Kind.FORWARD)] == [0, 1, 2]


def test_a_failure_after_a_worker_is_done_leaves_that_worker_alone() -> None:
    graph = calls(call(0), call(1))
    conditions = Conditions(duration_s=lambda op: 1.0 + op.worker)
    history = simulate(graph, 2, conditions, fails=lambda op: op.worker == 1)
    assert history.workers[0].commands[-1] == StepDone()
    assert history.workers[1].commands[-1] == Drained()


@pytest.mark.parametrize("run", [simulate, lambda graph, n: explore(graph, n, oldest)])
def test_a_message_that_nobody_sends_is_noticed_and_the_stories_are_told(
    run: Callable[[Graph, int], History],
) -> None:
    graph = calls(Op(Kind.RECEIVE, 0, Stream.COMM, peer=0), call(0, 0))
    with pytest.raises(Stuck) as caught:
        run(graph, 1)
    assert str(caught.value) == (
        "nothing can happen any more, and 2 ops are left:\n"
        "op 0 (receive) of worker 0 is waiting, waits for [], run going on\n"
        "op 1 (call call=0) of worker 0 is waiting, waits for [0], run going on"
    )


def test_a_graph_without_ops_takes_no_time() -> None:
    for history in (simulate(calls(), 2), explore(calls(), 2, oldest)):
        assert history.span == 0
        assert [worker.commands for worker in history.workers] == [[StepDone()], [StepDone()]]


def test_durations_are_those_of_forward_and_backward() -> None:
    of = durations(forward_s=0.5, backward_s=1.5)
    assert of(Op(Kind.FORWARD, 0)) == 0.5
    assert of(Op(Kind.BACKWARD, 0)) == 1.5
    assert of(Op(Kind.UPDATE, 0)) == 0.0


# The explorer


def test_the_oldest_first_is_arrival_order_and_time_is_the_number_of_events() -> None:
    history = explore(calls(call(0), call(1, 0)), 2, oldest)
    assert history.ran(0) == Ran(0, issued=0.0, started=0.0, ended=0.0)
    # event 0: the call ends; 1: its message arrives; 2: the sender is told so; 3: the second call
    assert history.ran(1) == Ran(1, issued=1.0, started=1.0, ended=3.0)
    assert history.span == 3.0


def test_the_newest_first_lets_messages_overtake_each_other() -> None:
    graph = calls(call(0), call(0), call(1, 0), call(1, 1))
    history = explore(graph, 2, lambda n: 0 if n == 1 else (1 if n == 2 else n - 2))
    arrivals = [op for op in history.workers[1].ran if op in (0, 2)]
    assert arrivals == [2, 0]


@pytest.mark.parametrize("choose", [oldest, newest])
def test_exploring_runs_everything_once(choose: Callable[[int], int]) -> None:
    history = explore(train((0, 1, 0, 2), microbatches=3), 3, choose, run_ahead=2)
    for worker in history.workers:
        assert set(worker.ran) == set(range(len(worker.program.ops)))
        assert worker.commands[-1] == StepDone()


def test_a_mishap_fails_an_op_or_aborts_a_worker_and_all_others_follow() -> None:
    numbers = random.Random(4)
    graph = train((0, 1, 2), microbatches=3)
    causes = set()
    for moment in range(50):
        history = explore(graph, 3, numbers.randrange, mishaps={moment})
        events = [h.event for worker in history.workers for h in worker.handled]
        causes |= {type(event) for event in events if isinstance(event, Failed | Aborted)}
        endings = [worker.commands[-1] for worker in history.workers]
        assert Drained() in endings
        assert set(endings) <= {Drained(), StepDone()}
    assert causes == {Failed, Aborted}


def test_a_mishap_after_the_end_changes_nothing() -> None:
    graph = train((0, 1), microbatches=1)
    assert explore(graph, 2, oldest, mishaps={10_000}) == explore(graph, 2, oldest)


def test_what_is_issued_and_not_begun_when_a_run_ends_is_skipped() -> None:
    graph = calls(call(0), call(0, 0), call(0, 1))
    history = explore(graph, 1, oldest, run_ahead=3, mishaps={0})
    (worker,) = history.workers
    assert [h.event for h in worker.handled] == [None, Failed(0), Failed(1), Failed(2)]
    assert worker.ran == {}


def test_an_op_waits_for_the_other_streams_ops_that_it_was_issued_behind() -> None:
    graph = calls(call(0, stream=Stream.H2D), call(0, 0), call(0, stream=Stream.D2H))
    history = explore(graph, 1, newest, run_ahead=2)
    assert list(history.workers[0].ran) == [2, 0, 1]
