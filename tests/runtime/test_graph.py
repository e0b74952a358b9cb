from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myelin.runtime.graph import (
    ARRIVALS,
    Graph,
    Kind,
    Op,
    Phase,
    Program,
    Split,
    Stream,
    edges,
    readers,
    split,
)


def calls(*ops: Op) -> Graph:
    graph = Graph(Phase.CALLS)
    for op in ops:
        graph.add(op)
    return graph


def call(
    worker: int, *inputs: int, after: tuple[int, ...] = (), stream: Stream = Stream.COMPUTE
) -> Op:
    return Op(Kind.CALL, worker, inputs=inputs, after=after, stream=stream)


def send(worker: int, peer: int, target: int, *, value: int | None = None, after: int = -1) -> Op:
    inputs, behind = ((), (after,)) if value is None else ((value,), ())
    return Op(Kind.SEND, worker, Stream.COMM, inputs=inputs, after=behind, peer=peer, target=target)


def receive(worker: int, peer: int) -> Op:
    return Op(Kind.RECEIVE, worker, Stream.COMM, peer=peer)


def programs(graph: Graph, workers: int) -> list[tuple[Op, ...]]:
    return [program.ops for program in split(graph, workers).programs.values()]


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (Op(Kind.FORWARD, 0, stage=0, microbatch=3), "forward stage=0 microbatch=3"),
        (Op(Kind.UPDATE, 1, stage=2), "update stage=2"),
        (Op(Kind.COMMIT, 1), "commit"),
        (Op(Kind.CALL, 1, slot=0), "call call=0"),
    ],
)
def test_an_op_is_named_by_its_kind_and_marks(op: Op, text: str) -> None:
    assert str(op) == text


def test_ops_are_numbered_in_the_order_in_which_they_are_added() -> None:
    graph = Graph(Phase.CALLS)
    assert [graph.add(call(0)), graph.add(call(1, 0)), graph.add(call(0, 1, after=(0,)))] == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize("op", [call(0, 1), call(0, after=(1,)), call(0, 7), call(0, -1)])
def test_an_op_that_names_one_not_added_before_it_is_refused(op: Op) -> None:
    graph = calls(call(0))
    with pytest.raises(ValueError, match=r"op 1 \(call call=0\) names op -?\d.*add inputs first"):
        graph.add(op)
    assert len(graph.ops) == 1


def test_find_returns_the_first_op_with_the_marks_or_none() -> None:
    graph = Graph(Phase.TRAIN)
    graph.add(Op(Kind.BACKWARD, 0, stage=1, microbatch=0))
    graph.add(Op(Kind.FORWARD, 0, stage=1, microbatch=0))
    graph.add(Op(Kind.FORWARD, 1, stage=1, microbatch=0))
    graph.add(Op(Kind.UPDATE, 1, stage=1))
    assert graph.find(Kind.FORWARD, stage=1, microbatch=0) == 1
    assert graph.find(Kind.UPDATE, stage=1, microbatch=None) == 3
    assert graph.find(Kind.UPDATE, stage=1, microbatch=0) is None


def test_a_graph_of_one_worker_is_not_changed_by_the_split() -> None:
    graph = calls(call(0), call(0, 0), call(0, 0, after=(1,)))
    assert split(graph, 1) == Split(
        {0: Program(0, Phase.CALLS, 1, tuple(graph.ops))}, ((0, 0), (0, 1), (0, 2))
    )


def test_an_input_from_another_worker_becomes_a_send_and_a_receive() -> None:
    graph = calls(call(0), call(1, 0))
    assert split(graph, 2) == Split(
        {
            0: Program(0, Phase.CALLS, 1, (call(0), send(0, 1, 0, value=0))),
            1: Program(1, Phase.CALLS, 1, (receive(1, 0), call(1, 0))),
        },
        ((0, 0), (1, 1)),
    )


def test_a_value_that_several_ops_of_a_worker_read_is_sent_there_once() -> None:
    graph = calls(call(0), call(1, 0), call(1, 0, 1), call(1, 0, 0), call(1, after=(0,)))
    home, away = programs(graph, 2)
    assert home == (call(0), send(0, 1, 0, value=0))
    assert away == (receive(1, 0), call(1, 0), call(1, 0, 1), call(1, 0, 0), call(1, after=(0,)))


def test_a_value_that_two_workers_read_is_sent_to_each() -> None:
    graph = calls(call(0), call(1, 0), call(2, 0))
    assert programs(graph, 3)[0] == (
        call(0),
        send(0, 1, 0, value=0),
        send(0, 2, 0, value=0),
    )


def test_waiting_for_an_op_of_another_worker_sends_a_message_without_its_value() -> None:
    graph = calls(call(0), call(1, after=(0,)), call(1, after=(0, 1)))
    home, away = programs(graph, 2)
    assert home == (call(0), send(0, 1, 0, after=0))
    assert away == (receive(1, 0), call(1, after=(0,)), call(1, after=(0, 1)))


def test_a_value_that_is_read_after_it_was_waited_for_needs_a_message_of_its_own() -> None:
    graph = calls(call(0), call(1, after=(0,)), call(1, 0))
    home, away = programs(graph, 2)
    assert home == (call(0), send(0, 1, 0, after=0), send(0, 1, 2, value=0))
    assert away == (receive(1, 0), call(1, after=(0,)), receive(1, 0), call(1, 2))


def test_messages_carry_the_marks_of_the_op_whose_value_they_bring() -> None:
    graph = Graph(Phase.TRAIN, microbatches=4)
    graph.add(Op(Kind.FORWARD, 0, stage=0, microbatch=3))
    graph.add(Op(Kind.FORWARD, 1, stage=1, microbatch=3, inputs=(0,)))
    cut = split(graph, 2)
    sent, received = cut.programs[0].ops[1], cut.programs[1].ops[0]
    assert (sent.stage, sent.microbatch, received.stage, received.microbatch) == (0, 3, 0, 3)
    assert str(sent) == "send stage=0 microbatch=3"
    assert {p.microbatches for p in cut.programs.values()} == {4}


def test_a_worker_without_ops_gets_an_empty_program() -> None:
    graph = calls(call(2))
    assert programs(graph, 4) == [(), (), (call(2),), ()]
    assert programs(calls(), 1) == [()]


def test_readers_counts_every_reading_and_no_waiting() -> None:
    program = split(calls(call(0), call(0, 0, 0), call(0, 0, after=(1,)), call(1, 2)), 2).programs
    assert readers(program[0]) == [3, 0, 1, 0]
    assert readers(program[1]) == [1, 0]


def test_an_edge_that_is_named_twice_counts_once() -> None:
    program = split(calls(call(0), call(0, 0, 0, after=(0,)), call(0, after=(1, 0))), 1).programs[0]
    assert list(edges(program)) == [(0, 1), (1, 2), (0, 2)]


# Any graph


@dataclass(frozen=True, slots=True)
class Case:
    workers: int
    ops: tuple[Op, ...]

    @property
    def graph(self) -> Graph:
        return calls(*self.ops)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    workers = draw(st.integers(1, 4))
    ops: list[Op] = []
    for index in range(draw(st.integers(0, 20))):
        earlier = st.lists(st.integers(0, index - 1), max_size=3) if index else st.just([])
        worker = draw(st.integers(0, workers - 1))
        stream = draw(st.sampled_from(Stream))
        ops.append(call(worker, *draw(earlier), after=tuple(draw(earlier)), stream=stream))
    return Case(workers, tuple(ops))


def origin(cut: Split, worker: int, index: int) -> tuple[int, int]:
    """Return the op whose value the op of this place has: itself, or what a RECEIVE brings."""
    ops = cut.programs[worker].ops
    if ops[index].kind is not Kind.RECEIVE:
        return worker, index
    peer = ops[index].peer
    assert peer is not None
    (sent,) = [
        op
        for op in cut.programs[peer].ops
        if op.kind is Kind.SEND and (op.peer, op.target) == (worker, index)
    ]
    (source,) = (*sent.inputs, *sent.after)
    return peer, source


@settings(deadline=None)
@given(cases())
def test_every_op_goes_to_its_worker_unchanged_but_for_the_numbers_of_its_inputs(
    case: Case,
) -> None:
    cut = split(case.graph, case.workers)
    assert len(set(cut.place)) == len(cut.place) == len(case.ops)
    for op, (worker, index) in zip(case.ops, cut.place, strict=True):
        placed = cut.programs[worker].ops[index]
        assert worker == op.worker
        assert msgspec.structs.replace(placed, inputs=op.inputs, after=op.after) == op


@settings(deadline=None)
@given(cases())
def test_every_input_is_the_same_value_as_before_the_split_and_in_the_same_position(
    case: Case,
) -> None:
    cut = split(case.graph, case.workers)
    for op, (worker, index) in zip(case.ops, cut.place, strict=True):
        placed = cut.programs[worker].ops[index]
        came = [origin(cut, worker, i) for i in placed.inputs]
        waited = [origin(cut, worker, i) for i in placed.after]
        assert came == [cut.place[i] for i in op.inputs]
        assert waited == [cut.place[i] for i in op.after]


@settings(deadline=None)
@given(cases())
def test_sends_and_receives_belong_together_and_no_value_is_sent_to_a_worker_twice(
    case: Case,
) -> None:
    cut = split(case.graph, case.workers)
    by_worker = cut.programs.items()
    sends = [(w, op) for w, program in by_worker for op in program.ops if op.kind is Kind.SEND]
    receives = {
        (w, i): op
        for w, program in by_worker
        for i, op in enumerate(program.ops)
        if op.kind is Kind.RECEIVE
    }
    assert {(op.peer, op.target): w for w, op in sends} == {
        place: op.peer for place, op in receives.items()
    }
    values = [(w, op.inputs, op.peer) for w, op in sends if op.inputs]
    signals = [(w, op.after, op.peer) for w, op in sends if not op.inputs]
    assert len(set(values)) == len(values)
    assert len(set(signals)) == len(signals)


@settings(deadline=None)
@given(cases())
def test_every_program_numbers_its_ops_in_an_order_that_respects_every_edge(case: Case) -> None:
    for program in split(case.graph, case.workers).programs.values():
        assert all(earlier < later for earlier, later in edges(program))
        messages = [op for op in program.ops if op.kind in ARRIVALS]
        assert not any((*op.inputs, *op.after) for op in messages)


@settings(deadline=None)
@given(cases())
def test_a_program_crosses_the_bus_unchanged(case: Case) -> None:
    for program in split(case.graph, case.workers).programs.values():
        frame = msgspec.msgpack.encode(program)
        assert msgspec.msgpack.decode(frame, type=Program) == program
        assert msgspec.convert(msgspec.to_builtins(program), Program) == program


def test_a_program_with_something_unknown_in_it_is_refused() -> None:
    (program,) = split(calls(call(0)), 1).programs.values()
    plain = msgspec.to_builtins(program)
    plain["ops"][0]["surprise"] = 1
    with pytest.raises(msgspec.ValidationError, match="surprise"):
        msgspec.convert(plain, Program)


@pytest.mark.parametrize("worker", [-1, 2])
def test_an_op_on_a_worker_that_does_not_exist_cannot_be_split(worker: int) -> None:
    graph = Graph(Phase.CALLS)
    graph.add(Op(Kind.CALL, worker=worker))
    with pytest.raises(ValueError, match=f"on worker {worker} of 2"):
        split(graph, 2)
