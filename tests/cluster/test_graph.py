"""Graphs of a user's own ops: inside this process, and on two worker processes that all share."""

import asyncio
import builtins
import functools
import math
import operator
import random
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import pytest
import pytest_asyncio
import torch
from torch.nn import functional

import myelin
from myelin.errors import ClusterError, GraphError, OpError, RunCancelled, ValueReleased
from myelin.testing import ops
from myelin.testing.ops import Gate
from myelin.testing.watching import until

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def graph(cluster: myelin.Cluster) -> myelin.Graph:
    """A graph on each of the clusters; freed with them."""
    return cluster.graph()


# Values


async def test_a_value_goes_from_worker_to_worker_and_to_the_caller(graph: myelin.Graph) -> None:
    first = graph.op(ops.plus, torch.ones(3), 1, worker=0)
    second = graph.op(ops.scaled, first, 10, worker=1)
    third = graph.op(ops.plus, second, first, worker=0)
    assert (await third).tolist() == [22, 22, 22]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        -(2**63),
        0.1,
        math.inf,
        "text",
        b"bytes",
        (),
        [],
        {},
        (1, [2, (3, None)], {"four": {"five": "six"}}),
    ],
    ids=repr,
)
async def test_values_arrive_as_they_are(graph: myelin.Graph, value: Any) -> None:
    given = graph.input("given")
    there = graph.op(ops.echo, given, worker=0)
    back = graph.op(ops.echo, there, value, worker=1)
    found = await (await graph.run(given=value))[back]
    assert found == (value, value)
    assert [type(each) for each in found] == [type(value)] * 2


async def test_tensors_inside_containers_arrive_too(graph: myelin.Graph) -> None:
    apart = graph.op(ops.parts, torch.arange(3.0), worker=0)
    together = graph.op(ops.joined, apart, worker=1)
    run = await graph.run(keep=[apart, together])
    assert (await run[together]).tolist() == [3, 6, 9]
    assert (await run[apart])["both"][1].tolist() == [0, 2, 4]
    await run


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, 3),
        torch.tensor(5),
        torch.arange(6).reshape(2, 3).T,
        torch.ones(2, 2, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
async def test_tensors_of_any_kind_arrive_bit_by_bit(
    graph: myelin.Graph, tensor: torch.Tensor
) -> None:
    back = await graph.op(ops.echo, graph.op(ops.echo, tensor, worker=1), worker=0)
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


async def test_a_tensor_that_wants_a_gradient_arrives_without(graph: myelin.Graph) -> None:
    back = await graph.op(ops.plus, torch.ones(1, requires_grad=True), 1, worker=1)
    assert not back.requires_grad


@pytest.mark.slow
async def test_large_values_arrive(graph: myelin.Graph) -> None:
    made = graph.op(ops.zeros, 64, worker=0)
    back = await graph.op(ops.echo, made, worker=1)
    assert back.numel() == 64 << 20
    assert (back[:-1].any().item(), back[-1].item()) == (False, 1)


async def test_one_op_may_read_another_twice_and_many_may_read_one(graph: myelin.Graph) -> None:
    source = graph.op(ops.plus, 1, 1, worker=0)
    readers = [graph.op(ops.plus, source, source, i, worker=i % 2) for i in range(6)]
    run = await graph.run()
    assert [await run[reader] for reader in readers] == [4, 5, 6, 7, 8, 9]


async def test_functions_of_libraries_are_found_on_workers(graph: myelin.Graph) -> None:
    a = torch.arange(4.0).reshape(2, 2)
    product = graph.op(torch.matmul, a, a, worker=1)
    positive = graph.op(functional.relu, product, worker=0)
    summed = graph.op(torch.sum, positive, worker=1)
    number = graph.op(operator.mul, summed, 2, worker=0)
    root = graph.op(math.sqrt, number, worker=1)
    text = graph.op(builtins.repr, root, worker=0)
    assert await text == repr(math.sqrt(2 * torch.matmul(a, a).relu().sum()))


@pytest.mark.parametrize("seed", range(6))
async def test_any_graph_gives_what_plain_calls_give(cluster: myelin.Cluster, seed: int) -> None:
    draw = random.Random(seed)
    async with cluster.graph() as graph:
        expected: list[torch.Tensor] = [torch.tensor([float(i)]) for i in range(3)]
        made: list[Any] = [graph.input(f"x{i}", default=expected[i]) for i in range(3)]
        for _ in range(draw.randrange(5, 40)):
            chosen = [draw.randrange(len(made)) for _ in range(draw.randrange(1, 4))]
            worker, stream = draw.randrange(2), draw.choice(["compute", "comm", "h2d"])
            arguments = (*(made[i] for i in chosen), draw.randrange(5))
            made.append(graph.op(ops.plus, *arguments, worker=worker, stream=stream))
            expected.append(sum(expected[i] for i in chosen) + arguments[-1])
        run = await graph.run(keep=made[3:])
        order = list(range(3, len(made)))
        draw.shuffle(order)
        for i in order:
            assert torch.equal(await run[made[i]], expected[i])


# Inputs and runs


async def test_a_graph_runs_again_with_other_inputs_and_with_defaults(graph: myelin.Graph) -> None:
    x = graph.input("x")
    y = graph.input("y", default=torch.ones(1))
    out = graph.op(ops.plus, graph.op(ops.scaled, x, 2, worker=0), y, worker=1)
    one = await graph.run(x=torch.tensor([1.0]))
    two = await graph.run(x=torch.tensor([2.0]), y=torch.tensor([5.0]))
    three = await graph.run(x=torch.tensor([3.0]))
    assert [(await run[out]).item() for run in (three, one, two)] == [7, 3, 9]
    assert (await out).item() == 7  # awaiting an op gives its value in the latest run
    assert (await out).item() == 7


async def test_many_runs_can_be_in_flight_and_each_keeps_to_its_own_values(
    cluster: myelin.Cluster,
) -> None:
    async with cluster.graph(limit=4) as graph:
        x = graph.input("x")
        a = graph.op(ops.plus, x, 1, worker=0)
        b = graph.op(ops.scaled, a, 10, worker=1)
        c = graph.op(ops.plus, b, x, worker=0)
        runs = [await graph.run(x=torch.tensor([float(i)])) for i in range(40)]
        order = list(range(40))
        random.Random(0).shuffle(order)
        assert [(await runs[i][c]).item() for i in order] == [(i + 1) * 10 + i for i in order]
        reports = [await run for run in runs]
        assert all(set(report.busy_s) == {0, 1} for report in reports)


async def test_no_more_runs_than_the_limit_are_in_flight(
    cluster: myelin.Cluster, gate: Gate
) -> None:
    async with cluster.graph(limit=3) as graph, cluster.graph() as probe:
        began = graph.input("began")
        first = graph.op(ops.pass_gate, began, worker=0)
        graph.op(ops.pass_gate, gate.path, first, worker=1)
        gates = [Gate(f"{gate.path}.{i}") for i in range(5)]
        for each in gates:
            each.open()
        runs = [await graph.run(began=each.path) for each in gates]
        await until(lambda: gates[2].reached)
        await probe.op(ops.nothing, worker=0)  # what worker 0 may begin before, it has begun
        assert [each.reached for each in gates] == [True, True, True, False, False]
        gate.open()
        for run in runs:
            await run


async def test_a_graph_can_grow_after_a_run_and_with_runs_that_still_wait(
    cluster: myelin.Cluster,
) -> None:
    async with cluster.graph(limit=1) as graph:
        x = graph.input("x")
        a = graph.op(ops.plus, x, 1, worker=0)
        early = [await graph.run(x=i) for i in range(5)]
        b = graph.op(ops.scaled, a, 10, worker=1)
        late = await graph.run(x=5)
        assert await late[b] == 60
        assert [await run[a] for run in early] == [1, 2, 3, 4, 5]
        with pytest.raises(GraphError, match="no such op"):
            early[0][b]


async def test_a_graph_can_grow_while_it_is_being_sent(cluster: myelin.Cluster) -> None:
    async with cluster.graph() as graph:
        a = graph.op(ops.plus, 1, 1, worker=0)
        starting = asyncio.create_task(graph.run())
        await asyncio.sleep(0)
        b = graph.op(ops.plus, a, 1, worker=1)
        run = await starting
        assert await run[b] == 3
        assert await (await graph.run())[b] == 3


async def test_ops_awaited_together_for_the_first_time_give_their_values(
    cluster: myelin.Cluster,
) -> None:
    async with cluster.graph() as graph:
        a = graph.op(ops.plus, 1, 1, worker=0)
        b = graph.op(ops.plus, a, 1, worker=1)
        c = graph.op(ops.plus, b, 1, worker=0)
        assert list(await asyncio.gather(c, a, b)) == [4, 2, 3]


async def test_ops_awaited_together_for_the_first_time_run_once(
    inside: myelin.Cluster,
) -> None:
    called: list[str] = []
    async with inside.graph() as graph:
        a = graph.op(lambda: called.append("a"), worker=0)
        b = graph.op(lambda _: called.append("b"), a, worker=1)
        c = graph.op(lambda _: called.append("c"), b, worker=0)
        await asyncio.gather(c, a, b)
        await asyncio.gather(a, c)
    assert called == ["a", "b", "c"]


async def test_a_value_of_none_can_be_asked_for_as_long_as_somebody_reads_it(
    graph: myelin.Graph, gate: Gate
) -> None:
    none = graph.op(ops.nothing, worker=0)
    gated = graph.op(ops.pass_gate, gate.path, none, worker=0)
    run = await graph.run(keep=[gated])
    await until(lambda: gate.reached)
    value = run[none]
    gate.open()
    assert await value is None


async def test_values_that_are_not_kept_are_released(graph: myelin.Graph) -> None:
    a = graph.op(ops.plus, torch.ones(1), 1, worker=0)
    b = graph.op(ops.plus, a, 1, worker=0)
    run = await graph.run()
    await run
    with pytest.raises(ValueReleased, match="name the op in `keep`"):
        await run[a]
    assert (await run[b]).item() == 3
    kept = await graph.run(keep=[a])
    await kept
    assert (await kept[a]).item() == 2
    with pytest.raises(ValueReleased):
        await kept[b]
    none = await graph.run(keep=())
    assert (await none).outputs == {}


async def test_awaiting_an_inner_op_first_keeps_its_value(graph: myelin.Graph) -> None:
    a = graph.op(ops.plus, 1, 1, worker=1)
    b = graph.op(ops.plus, a, 1, worker=0)
    assert (await a, await b) == (2, 3)


async def test_streams_run_beside_each_other(graph: myelin.Graph, gate: Gate) -> None:
    waiting = graph.op(ops.pass_gate, gate.path, worker=0)
    beside = graph.op(ops.plus, 1, 1, worker=0, stream="comm")
    behind = graph.op(ops.plus, beside, 1, worker=0, stream="d2h")
    run = await graph.run(keep=[waiting, behind])
    assert await run[behind] == 3
    assert not run[waiting].done()
    gate.open()
    assert await run[waiting] is None


# What a caller may do to a future


async def test_giving_up_a_run_or_a_value_does_not_end_it(graph: myelin.Graph, gate: Gate) -> None:
    op = graph.op(ops.pass_gate, gate.path, 7, worker=1)
    run = await graph.run()

    async def wait(awaited: Any) -> Any:
        return await awaited

    waiting = [asyncio.create_task(wait(awaited)) for awaited in (run, run[op], op)]
    await until(lambda: gate.reached)
    for task in waiting:
        task.cancel()
    run[op].cancel()
    await asyncio.wait(waiting)
    gate.open()
    assert await run[op] == 7
    assert (await run).outputs == {}
    assert await op == 7


async def test_a_cancelled_run_ends_at_once_and_others_go_on(
    cluster: myelin.Cluster, gate: Gate
) -> None:
    async with cluster.graph(limit=1) as graph:
        path = graph.input("path")
        op = graph.op(ops.pass_gate, path, worker=1)
        after = graph.op(ops.echo, op, worker=0)
        flying, queued, third = [await graph.run(path=gate.path) for _ in range(3)]
        await until(lambda: gate.reached)
        queued.cancel()
        flying.cancel()
        flying.cancel()
        for run in (flying, queued):
            for awaited in (run, run[after], run[op]):
                with pytest.raises(RunCancelled):
                    await awaited
        gate.open()
        await third
        third.cancel()  # too late to change anything
        assert await third[after] is None


# Failures


async def test_an_op_that_raises_names_worker_function_and_place(graph: myelin.Graph) -> None:
    first = graph.op(ops.plus, torch.ones(1), 1, worker=0)
    bad = graph.op(ops.fail, first, worker=1)
    last = graph.op(ops.echo, bad, worker=0)
    with pytest.raises(OpError) as caught:
        await last
    error = caught.value
    assert str(error).startswith("call of fail on worker 1 raised ValueError: planted\n")
    assert (error.worker, error.kind, error.stage, error.block) == (1, "call", None, None)
    assert "in fail\n" in error.remote_traceback
    assert "ops.py" in error.remote_traceback


async def test_a_failed_run_ends_alone(cluster: myelin.Cluster) -> None:
    async with cluster.graph(limit=5) as graph:
        x = graph.input("x")
        a = graph.op(ops.fail_if, x, 100.0, worker=0)
        b = graph.op(ops.fail_if, graph.op(ops.scaled, a, 10, worker=0), 100.0, worker=1)
        runs = [await graph.run(x=torch.tensor([float(x)])) for x in (1, 2, 1000, 3, 50, 4, 5)]
        found: list[Any] = []
        for run in runs:
            try:
                found.append((await run[b]).item())
            except OpError as error:
                found.append(error.worker)
        assert found == [10, 20, 0, 30, 1, 40, 50]
        for run in runs[2], runs[4]:
            with pytest.raises(OpError):
                await run


async def test_nobody_need_await_a_run_of_whose_values_one_was_awaited(
    graph: myelin.Graph,
) -> None:
    op = graph.op(ops.fail, worker=0)
    run = await graph.run()
    with pytest.raises(OpError):
        await run[op]
    with pytest.raises(OpError):
        await op


async def test_a_failure_does_not_wait_for_what_others_are_at(
    graph: myelin.Graph, gate: Gate
) -> None:
    waiting = graph.op(ops.pass_gate, gate.path, worker=0)
    graph.op(ops.fail, worker=1)
    run = await graph.run(keep=[waiting])
    with pytest.raises(OpError, match="planted"):
        await run
    assert not run[waiting].cancelled()
    gate.open()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (ops.fail_unspeakably, "raised Unspeakable: <exception str() failed>"),
        (ops.fail_in_half_a_character, r"raised ValueError: a file called \udcff"),
        (ops.leave, "raised SystemExit: 3"),
    ],
)
async def test_whatever_is_raised_is_told(graph: myelin.Graph, function: Any, text: str) -> None:
    with pytest.raises(OpError) as caught:
        await graph.op(function, worker=1)
    assert text in str(caught.value)


async def test_the_middle_of_a_long_message_is_left_out(graph: myelin.Graph) -> None:
    with pytest.raises(OpError) as caught:
        await graph.op(ops.fail_at_length, 10_000_000)
    assert len(str(caught.value)) < 1_000_000
    assert "ValueError: begin..." in str(caught.value)
    assert "characters left out" in str(caught.value)
    assert "...end" in str(caught.value)


async def test_what_cannot_travel_between_workers_is_told_with_its_maker(
    graph: myelin.Graph,
) -> None:
    made = graph.op(ops.a_set, worker=0)
    away = graph.op(ops.size, made, worker=1)
    with pytest.raises(OpError, match="send of a_set on worker 0 raised TypeError") as caught:
        await away
    assert "the value at the top is a set" in str(caught.value)


async def test_an_error_with_the_name_of_one_of_ours_is_the_ops_own(graph: myelin.Graph) -> None:
    with pytest.raises(OpError, match="call of fail_like_us on worker 1 raised ChannelClosed"):
        await graph.op(ops.fail_like_us, graph.op(ops.plus, 1, 1, worker=0), worker=1)
    assert await graph.op(ops.plus, 1, 1, worker=1) == 2


async def test_too_long_a_list_is_refused_and_harms_nobody(graph: myelin.Graph) -> None:
    with pytest.raises(GraphError, match=r"there are 262145 items .* send numbers as a tensor"):
        graph.input("numbers", [0] * (2**18 + 1))
    longest = graph.op(ops.long_list, 2**18, worker=0)
    assert await graph.op(ops.size, longest, worker=1) == 2**18
    with pytest.raises(OpError, match=r"there are 262145 items"):
        await graph.op(ops.size, graph.op(ops.long_list, 2**18 + 1, worker=0), worker=1)


async def test_what_cannot_travel_may_stay_where_it_is(graph: myelin.Graph) -> None:
    made = graph.op(ops.a_set, worker=1)
    assert await graph.op(ops.size, made, worker=1) == 2


async def test_what_cannot_travel_to_the_caller_is_told(graph: myelin.Graph) -> None:
    with pytest.raises(OpError, match=r"call of a_set on worker 1 raised TypeError: .* is a set"):
        await graph.op(ops.a_set, worker=1)


# Bad use


@pytest.mark.parametrize("value", [{1, 2}, object(), {3: 4}, torch.eye(2).to_sparse(), 2**64])
async def test_what_cannot_travel_is_refused_before_anything_starts(
    graph: myelin.Graph, value: Any
) -> None:
    with pytest.raises(GraphError, match="an argument of the op cannot be sent to a worker"):
        graph.op(ops.echo, value)
    with pytest.raises(GraphError, match="the default of input 'x' cannot be sent"):
        graph.input("x", value)
    op = graph.op(ops.echo, graph.input("x", 1))
    with pytest.raises(GraphError, match="input 'x' cannot be sent to a worker"):
        await graph.run(x=value)
    assert await op == 1


async def test_ops_inside_containers_are_refused(graph: myelin.Graph) -> None:
    with pytest.raises(GraphError, match=r"at \[0\] is a CallOp"):
        graph.op(ops.echo, [graph.op(ops.plus, 1)])


async def test_inputs_must_be_known_given_and_named_differently(graph: myelin.Graph) -> None:
    graph.op(ops.plus, graph.input("x"), graph.input("y", 1))
    for name in ("x", "keep"):
        with pytest.raises(GraphError, match=f"the name '{name}' is taken"):
            graph.input(name)
    with pytest.raises(GraphError, match=r"inputs \['x'\] have no value"):
        await graph.run()
    with pytest.raises(GraphError, match=r"unknown inputs \['z'\]; this graph has \['x', 'y'\]"):
        await graph.run(x=1, z=2)


async def test_parts_of_another_graph_are_refused(
    graph: myelin.Graph, cluster: myelin.Cluster
) -> None:
    other = cluster.graph()
    op, x = other.op(ops.plus, 1), other.input("x")
    for foreign in (op, x):
        with pytest.raises(GraphError, match="belongs to another graph"):
            graph.op(ops.plus, foreign)
    graph.op(ops.plus, 1)
    with pytest.raises(GraphError, match="no such op"):
        await graph.run(keep=[op])
    with pytest.raises(GraphError, match="no such op"):
        (await graph.run(keep=[]))[op]


async def test_an_empty_graph_cannot_run(graph: myelin.Graph) -> None:
    graph.input("x", 1)
    with pytest.raises(GraphError, match="no op yet"):
        await graph.run()


@pytest.mark.parametrize("worker", [-1, 1.0, None, True])
async def test_a_worker_that_cannot_be_is_refused(graph: myelin.Graph, worker: Any) -> None:
    with pytest.raises(GraphError, match="workers are numbered 0, 1"):
        graph.op(ops.plus, 1, worker=worker)


async def test_a_stream_that_is_none_is_refused(graph: myelin.Graph) -> None:
    with pytest.raises(GraphError, match="'compute', 'h2d', 'd2h', 'comm'"):
        graph.op(ops.plus, 1, stream="cuda")


@pytest.mark.parametrize("limit", [0, -3, "x", 1.5, True, None])
async def test_a_limit_without_room_is_refused(cluster: myelin.Cluster, limit: Any) -> None:
    with pytest.raises(GraphError, match=f"limit={limit!r}: use a whole number of at least 1"):
        cluster.graph(limit=limit)


async def test_what_cannot_be_called_is_refused(graph: myelin.Graph) -> None:
    with pytest.raises(GraphError, match="'plus' cannot be called"):
        graph.op("plus")  # type: ignore[arg-type]


async def sleeps() -> None: ...


async def counts() -> AsyncIterator[int]:
    yield 1


class Waits:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize("function", [sleeps, counts, functools.partial(sleeps), Waits()])
async def test_an_async_function_is_refused_as_an_op(graph: myelin.Graph, function: Any) -> None:
    with pytest.raises(GraphError, match=r"is async, .*define it with plain `def`"):
        graph.op(function)


@pytest.mark.parametrize("name", [3, None, "", torch.ones(1)])
async def test_an_input_without_a_name_is_refused(graph: myelin.Graph, name: Any) -> None:
    with pytest.raises(GraphError, match=r"has no name: give one, such as graph\.input\(\"x\"\)"):
        graph.input(name)


async def test_what_is_kept_must_be_a_list_of_ops(graph: myelin.Graph) -> None:
    op = graph.op(ops.plus, 1)
    with pytest.raises(GraphError, match=r"keep is a list of ops: write keep=\[op\]"):
        await graph.run(keep=op)  # type: ignore[arg-type]
    wrong: Any
    for wrong in ("op", 3, [3], [op, "op"]):
        with pytest.raises(GraphError, match="list ops of this graph, such as"):
            await graph.run(keep=wrong)
    assert await (await graph.run(keep=[op]))[op] == 1


UNNAMED: list[Any] = [lambda: 1, functools.partial(ops.plus, 1), torch.Tensor.add_, [].append]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("function", UNNAMED)
async def test_what_worker_processes_cannot_import_is_refused(
    outside: myelin.Cluster, function: Any
) -> None:
    with pytest.raises(
        GraphError, match=r"cannot be imported by a worker.*Cluster\(workers=0\)"
    ) as caught:
        outside.graph().op(function)
    assert "define the op with `def` at the top level" in str(caught.value)
    assert "factory" not in str(caught.value)
    assert "Model" not in str(caught.value)


async def test_inside_this_process_anything_can_be_called(inside: myelin.Cluster) -> None:
    seen: list[int] = []
    graph = inside.graph()
    x = graph.op(lambda: 1)
    y = graph.op(functools.partial(ops.plus, 1), x, worker=1)
    z = graph.op(seen.append, y)
    with pytest.raises(OpError, match=r"call of .*<lambda> on worker 1 raised ZeroDivisionError"):
        await graph.op(lambda z: 1 // 0, z, worker=1)
    assert seen == [2]


@pytest.mark.slow
@pytest.mark.processes
async def test_more_workers_than_there_are_cannot_be_used(outside: myelin.Cluster) -> None:
    graph = outside.graph()
    graph.op(ops.plus, 1, worker=2)
    with pytest.raises(ClusterError, match=r"3 workers are needed and the cluster has 2"):
        await graph.run()


@pytest.mark.slow
@pytest.mark.processes
async def test_a_function_that_only_we_can_import_is_refused_by_the_worker(
    outside: myelin.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(value: Any) -> Any:
        return value

    late.__qualname__ = "late"
    monkeypatch.setattr(ops, "late", late, raising=False)
    late.__module__ = ops.__name__
    graph = outside.graph()
    graph.op(ops.plus, 1, worker=0)
    graph.op(late, 1, worker=1)
    with pytest.raises(GraphError, match=r"the worker cannot import 'myelin\.testing"):
        await graph.run()
    assert await outside.graph().op(ops.plus, 1, worker=1) == 1


# Leaving, and living together


async def test_leaving_a_graph_ends_what_is_under_way(cluster: myelin.Cluster, gate: Gate) -> None:
    async with cluster.graph(limit=2) as graph:
        op = graph.op(ops.pass_gate, gate.path, worker=1)
        behind = graph.op(ops.echo, op, worker=0)
        runs = [await graph.run() for _ in range(4)]
        await until(lambda: gate.reached)
        asyncio.get_running_loop().call_soon(gate.open)
    for run in runs:
        with pytest.raises(RunCancelled):
            await run
        with pytest.raises(RunCancelled):
            await run[behind]
    assert await cluster.graph().op(ops.plus, 1, worker=1) == 1


async def test_a_graph_that_is_left_cancelled_is_left_at_once(
    cluster: myelin.Cluster, gate: Gate
) -> None:
    async def stay() -> None:
        async with cluster.graph() as graph:
            await graph.op(ops.pass_gate, gate.path, worker=1)

    task = asyncio.create_task(stay())
    await until(lambda: gate.reached)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.open()
    assert await cluster.graph().op(ops.plus, 1, worker=1) == 1


async def test_an_error_in_the_block_leaves_it_unchanged(cluster: myelin.Cluster) -> None:
    async def fail() -> None:
        async with cluster.graph() as graph:
            graph.op(ops.plus, 1, worker=1)
            await graph.run()
            raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        await fail()


async def test_graphs_and_a_trainer_share_a_cluster(cluster: myelin.Cluster, batch: Batch) -> None:
    model, plan = myelin.Model("myelin.testing.models:mlp"), myelin.Plan(pipeline=2, microbatches=2)
    alone = await cluster.trainer(model, plan=plan)
    expected = [(await alone.step(batch)).loss for _ in range(6)]
    trainer = await cluster.trainer(model, plan=plan)

    async def train() -> list[float]:
        return [(await trainer.step(batch)).loss for _ in range(6)]

    async def compute(offset: int) -> list[float]:
        async with cluster.graph(limit=3) as graph:
            x = graph.input("x")
            a = graph.op(ops.plus, x, offset, worker=offset % 2)
            b = graph.op(ops.scaled, a, 2, worker=(offset + 1) % 2)
            runs = [await graph.run(x=torch.tensor([float(i)])) for i in range(20)]
            return [(await run[b]).item() for run in runs]

    losses, *values = await asyncio.gather(train(), *(compute(offset) for offset in range(3)))
    assert losses == expected
    assert values == [[2.0 * (i + offset) for i in range(20)] for offset in range(3)]
