from itertools import pairwise

import pytest

from myelin.runtime.graph import COORDINATOR, Graph, Kind, Op, Phase, Stream, split
from myelin.runtime.step import INPUTS, TARGETS, StepShape, build_step, inputs_slot

PHASES = [Phase.TRAIN, Phase.GRADIENTS, Phase.EVALUATE, Phase.PREDICT]


def only(graph: Graph, kind: Kind) -> list[Op]:
    return [op for op in graph.ops if op.kind is kind]


def names(graph: Graph, indices: tuple[int, ...]) -> list[str]:
    return [str(graph.ops[index]) for index in indices]


def found(graph: Graph, kind: Kind, stage: int, microbatch: int | None) -> Op:
    index = graph.find(kind, stage=stage, microbatch=microbatch)
    assert index is not None
    return graph.ops[index]


def lines(graph: Graph) -> list[str]:
    """Write each op as "name @worker < inputs | after"."""
    return [
        f"{op} @{op.worker} < {', '.join(map(str, op.inputs))} | {', '.join(map(str, op.after))}"
        for op in graph.ops
    ]


def test_the_graph_of_a_small_training_step_is_exactly_this() -> None:
    shape = StepShape(placement=(0, 1), microbatches=2, limit=1)
    assert lines(build_step(shape, Phase.TRAIN)) == [
        "load stage=0 @0 <  | ",
        "load stage=1 @1 <  | ",
        "forward stage=0 microbatch=0 @0 < 0 | ",
        "forward stage=1 microbatch=0 @1 < 2, 1 | ",
        "backward stage=1 microbatch=0 @1 <  | 3",
        "backward stage=0 microbatch=0 @0 < 4 | 2",
        "forward stage=0 microbatch=1 @0 < 0 | 2, 5",
        "forward stage=1 microbatch=1 @1 < 6, 1 | 3",
        "backward stage=1 microbatch=1 @1 <  | 7, 4",
        "backward stage=0 microbatch=1 @0 < 8 | 6, 5",
        "norm stage=0 @0 <  | 9",
        "norm stage=1 @1 <  | 8",
        "commit stage=0 @0 < 10, 11 | ",
        "update stage=0 @0 < 12 | ",
        "update stage=1 @1 < 12 | ",
    ]


@pytest.mark.parametrize(
    ("phase", "kinds"),
    [
        (
            Phase.TRAIN,
            {
                Kind.LOAD: 2,
                Kind.FORWARD: 15,
                Kind.BACKWARD: 15,
                Kind.NORM: 3,
                Kind.COMMIT: 1,
                Kind.UPDATE: 3,
            },
        ),
        (Phase.GRADIENTS, {Kind.LOAD: 2, Kind.FORWARD: 15, Kind.BACKWARD: 15, Kind.NORM: 3}),
        (Phase.EVALUATE, {Kind.LOAD: 2, Kind.FORWARD: 15}),
        (Phase.PREDICT, {Kind.LOAD: 1, Kind.FORWARD: 15}),
    ],
)
def test_every_phase_has_just_the_ops_that_it_needs(phase: Phase, kinds: dict[Kind, int]) -> None:
    graph = build_step(StepShape((0, 1, 0), microbatches=5, limit=2), phase)
    assert graph.phase is phase
    assert graph.microbatches == 5
    assert {kind: len(only(graph, kind)) for kind in Kind if only(graph, kind)} == kinds


def test_inputs_are_loaded_where_the_first_stage_is_and_targets_where_the_last_is() -> None:
    graph = build_step(StepShape((2, 0, 1), microbatches=1, limit=1), Phase.EVALUATE)
    inputs, targets = only(graph, Kind.LOAD)
    assert (inputs.worker, inputs.slot, inputs.peer) == (2, INPUTS, COORDINATOR)
    assert (targets.worker, targets.slot, targets.peer) == (1, TARGETS, COORDINATOR)
    assert inputs.stream is targets.stream is Stream.COMM
    first, last = found(graph, Kind.FORWARD, 0, 0), found(graph, Kind.FORWARD, 2, 0)
    assert names(graph, first.inputs) == ["load stage=0"]
    assert names(graph, last.inputs) == ["forward stage=1 microbatch=0", "load stage=2"]


def test_a_prediction_has_no_targets() -> None:
    graph = build_step(StepShape((0, 1), microbatches=1, limit=1), Phase.PREDICT)
    last = found(graph, Kind.FORWARD, 1, 0)
    assert names(graph, last.inputs) == ["forward stage=0 microbatch=0"]


def test_one_stage_reads_inputs_and_targets_and_its_backward_reads_nothing() -> None:
    graph = build_step(StepShape((0,), microbatches=1, limit=1), Phase.GRADIENTS)
    assert lines(graph) == [
        "load stage=0 @0 <  | ",
        "load stage=0 @0 <  | ",
        "forward stage=0 microbatch=0 @0 < 0, 1 | ",
        "backward stage=0 microbatch=0 @0 <  | 2",
        "norm stage=0 @0 <  | 3",
    ]


def test_replicas_have_workers_and_microbatches_of_their_own_and_sum_their_gradients() -> None:
    shape = StepShape((0,), microbatches=1, limit=1, replicas=2, chunks=(2,))
    assert lines(build_step(shape, Phase.TRAIN)) == [
        "load stage=0 @0 <  | ",
        "load stage=0 @0 <  | ",
        "forward stage=0 microbatch=0 @0 < 0, 1 | ",
        "backward stage=0 microbatch=0 @0 <  | 2",
        "load stage=0 @1 <  | ",
        "load stage=0 @1 <  | ",
        "forward stage=0 microbatch=1 @1 < 4, 5 | ",
        "backward stage=0 microbatch=1 @1 <  | 6",
        "flatten stage=0 chunk=0 @0 <  | 3",
        "flatten stage=0 chunk=0 @1 <  | 7",
        "reduce stage=0 chunk=0 @0 < 8, 9 | ",
        "unflatten stage=0 chunk=0 @0 < 10 | ",
        "unflatten stage=0 chunk=0 @1 < 10 | ",
        "flatten stage=0 chunk=1 @0 <  | 3",
        "flatten stage=0 chunk=1 @1 <  | 7",
        "reduce stage=0 chunk=1 @1 < 13, 14 | ",
        "unflatten stage=0 chunk=1 @0 < 15 | ",
        "unflatten stage=0 chunk=1 @1 < 15 | ",
        "norm stage=0 @0 <  | 11, 16",
        "commit stage=0 @0 < 18 | 12, 17",
        "update stage=0 @0 < 19 | ",
        "update stage=0 @1 < 19 | ",
    ]


def test_each_replica_loads_its_own_inputs_and_all_targets() -> None:
    shape = StepShape((0, 1), microbatches=2, limit=4, replicas=3, chunks=(1, 1))
    loads = only(build_step(shape, Phase.EVALUATE), Kind.LOAD)
    assert [(op.worker, op.slot) for op in loads] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 1),
        (4, 3),
        (5, 1),
    ]
    assert [inputs_slot(replica) for replica in range(3)] == [0, 2, 3]


def test_replicas_without_the_number_of_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="one number for each stage is needed"):
        StepShape((0, 1), microbatches=1, limit=1, replicas=2, chunks=(1,))


@pytest.mark.parametrize("phase", PHASES)
def test_microbatches_of_a_stage_are_chained_in_order(phase: Phase) -> None:
    graph = build_step(StepShape((0, 1, 0), microbatches=4, limit=9), phase)
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for stage in range(3):
            chain = [i for i, op in enumerate(graph.ops) if (op.kind, op.stage) == (kind, stage)]
            assert [graph.ops[i].microbatch for i in chain] == [*range(4)][: len(chain)]
            assert all(earlier in graph.ops[later].after for earlier, later in pairwise(chain))


@pytest.mark.parametrize(
    ("phase", "retired"),
    [
        (Phase.TRAIN, "backward stage=0 microbatch={}"),
        (Phase.GRADIENTS, "backward stage=0 microbatch={}"),
        (Phase.EVALUATE, "forward stage=2 microbatch={}"),
        (Phase.PREDICT, "forward stage=2 microbatch={}"),
    ],
)
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6])
def test_a_microbatch_enters_once_the_one_that_makes_room_for_it_is_retired(
    phase: Phase, retired: str, limit: int
) -> None:
    graph = build_step(StepShape((0, 1, 2), microbatches=5, limit=limit), phase)
    for microbatch in range(5):
        first = found(graph, Kind.FORWARD, 0, microbatch)
        chain = [f"forward stage=0 microbatch={microbatch - 1}"] if microbatch else []
        room = [retired.format(microbatch - limit)] if microbatch >= limit else []
        assert names(graph, first.after) == [*chain, *room]


@pytest.mark.parametrize("ties", [(), ((0, 3), (1, 2))])
def test_the_commit_comes_after_every_forward_and_backward(
    ties: tuple[tuple[int, int], ...],
) -> None:
    graph = build_step(StepShape((1, 0, 1, 2), 3, limit=8, ties=ties), Phase.TRAIN)
    (commit,) = only(graph, Kind.COMMIT)
    before, unseen = set[int](), list(commit.inputs)
    while unseen:
        index = unseen.pop()
        before.add(index)
        unseen += [
            i for i in (*graph.ops[index].inputs, *graph.ops[index].after) if i not in before
        ]
    work = {Kind.LOAD, Kind.FORWARD, Kind.BACKWARD, Kind.TIE_GRADIENT, Kind.NORM}
    assert before == {index for index, op in enumerate(graph.ops) if op.kind in work}


def test_no_stage_is_updated_before_the_commit() -> None:
    graph = build_step(StepShape((1, 0, 1, 2), microbatches=3, limit=8), Phase.TRAIN)
    (commit,) = only(graph, Kind.COMMIT)
    assert commit.worker == 1  # where the first stage is
    updates = only(graph, Kind.UPDATE)
    assert [(op.stage, op.worker) for op in updates] == [(0, 1), (1, 0), (2, 1), (3, 2)]
    assert all(names(graph, op.inputs) == ["commit stage=0"] for op in updates)


def test_a_stages_gradients_are_looked_at_once_they_are_whole() -> None:
    graph = build_step(StepShape((1, 0), microbatches=3, limit=8), Phase.TRAIN)
    norms = only(graph, Kind.NORM)
    assert [(op.stage, op.worker) for op in norms] == [(0, 1), (1, 0)]
    assert [names(graph, op.after) for op in norms] == [
        ["backward stage=0 microbatch=2"],
        ["backward stage=1 microbatch=2"],
    ]


def test_the_gradient_of_a_tied_weight_goes_to_its_owner_microbatch_by_microbatch() -> None:
    shape = StepShape((0, 1, 2), microbatches=2, limit=6, ties=((0, 2),))
    graph = build_step(shape, Phase.TRAIN)
    for microbatch in range(2):
        owner = found(graph, Kind.BACKWARD, 0, microbatch)
        assert names(graph, owner.inputs) == [
            f"backward stage=1 microbatch={microbatch}",
            f"tie_gradient stage=2 microbatch={microbatch}",
        ]
        tie = graph.ops[owner.inputs[1]]
        assert tie.worker == 2
        assert names(graph, tie.after) == [f"backward stage=2 microbatch={microbatch}"]


def test_the_users_copy_is_refreshed_once_both_stages_are_updated() -> None:
    shape = StepShape((0, 1, 2), microbatches=1, limit=6, ties=((0, 2), (1, 2)))
    graph = build_step(shape, Phase.TRAIN)
    assert [
        (op.slot, op.worker, names(graph, op.inputs), names(graph, op.after))
        for op in only(graph, Kind.REFRESH)
    ] == [
        (0, 2, ["update stage=0"], ["update stage=2"]),
        (1, 2, ["update stage=1"], ["update stage=2"]),
    ]


def test_an_owner_with_several_users_gets_their_gradients_from_the_last_stage_first() -> None:
    shape = StepShape((0, 1, 2), microbatches=1, limit=6, ties=((0, 1), (0, 2), (0, 2)))
    graph = build_step(shape, Phase.GRADIENTS)
    owner = found(graph, Kind.BACKWARD, 0, 0)
    ties = [graph.ops[i] for i in owner.inputs[1:]]
    assert [(op.stage, op.slot) for op in ties] == [(2, 1), (2, 2), (1, 0)]
    assert not only(graph, Kind.REFRESH)  # GRADIENTS changes no weight


def test_ties_leave_a_pass_without_backwards_as_it_is() -> None:
    tied = StepShape((0, 1), microbatches=2, limit=2, ties=((0, 1),))
    plain = StepShape((0, 1), microbatches=2, limit=2)
    for phase in (Phase.EVALUATE, Phase.PREDICT):
        assert lines(build_step(tied, phase)) == lines(build_step(plain, phase))


@pytest.mark.parametrize(
    ("placement", "microbatches", "limit"), [((), 1, 1), ((0,), 0, 1), ((0,), 1, 0)]
)
def test_a_step_without_a_stage_a_microbatch_or_room_for_one_is_refused(
    placement: tuple[int, ...], microbatches: int, limit: int
) -> None:
    with pytest.raises(ValueError, match="needs a stage, a microbatch, a replica and a limit of"):
        StepShape(placement, microbatches, limit)


def test_activations_gradients_norms_and_the_verdict_are_the_only_messages_of_a_training_step() -> (
    None
):
    shape = StepShape((0, 1), microbatches=2, limit=4)
    cut = split(build_step(shape, Phase.TRAIN), 2)
    sent = {w: [str(op) for op in p.ops if op.kind is Kind.SEND] for w, p in cut.programs.items()}
    assert sent == {
        0: ["send stage=0 microbatch=0", "send stage=0 microbatch=1", "send stage=0"],
        1: ["send stage=1 microbatch=0", "send stage=1 microbatch=1", "send stage=1"],
    }


def test_stages_on_one_worker_talk_without_messages() -> None:
    shape = StepShape((0, 0, 0), microbatches=3, limit=6, ties=((0, 2),))
    (program,) = split(build_step(shape, Phase.TRAIN), 1).programs.values()
    assert not {Kind.SEND, Kind.RECEIVE} & {op.kind for op in program.ops}


def test_a_weight_owned_by_a_later_stage_than_its_user_is_refused() -> None:
    with pytest.raises(ValueError, match="must come before"):
        StepShape((0, 1), microbatches=1, limit=2, ties=((1, 0),))
