"""The trainer as a caller sees it: data in, results out, batches refused before they start."""

import asyncio
import gc
import re
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from myelin import SGD, Cluster, Model, Plan, Trainer
from myelin.errors import BatchError, ClusterError, DataError, OpError, RunCancelled, RunError
from myelin.models.gpt import GPT
from myelin.models.model import Description
from myelin.testing import models
from myelin.testing.reference import PlainLoop, differing

TINY = GPT(layers=3, hidden=12, heads=3, vocab=13, context=9)
MLP = Model(models.mlp)
OPTIMIZER = SGD(lr=0.1)

Batch = tuple[torch.Tensor, torch.Tensor]


def vectors(step: int = 0, rows: int = 7) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 4, generator=generator)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 13, shape, generator=torch.Generator().manual_seed(0))


async def trainer_of(
    cluster: Cluster, model: Description = MLP, *, in_flight: int = 2, microbatches: int = 3
) -> Trainer:
    plan = Plan(pipeline=2, microbatches=microbatches, steps_in_flight=in_flight)
    return await cluster.trainer(model, plan=plan, optimizer=OPTIMIZER)


def plain_losses(steps: int) -> list[float]:
    loop = PlainLoop(MLP, OPTIMIZER, microbatches=3)
    return [loop.step(vectors(step)) for step in range(steps)]


# fit


def generated() -> Iterator[Batch]:
    yield from map(vectors, range(5))


async def arriving() -> AsyncIterator[Batch]:
    for step in range(5):
        await asyncio.sleep(0)
        yield vectors(step)


def loaded() -> "DataLoader[tuple[torch.Tensor, ...]]":
    rows = [torch.cat(parts) for parts in zip(*map(vectors, range(5)), strict=True)]
    return DataLoader(TensorDataset(*rows), batch_size=7)


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: [vectors(step) for step in range(5)],
    "list of lists": lambda: [list(vectors(step)) for step in range(5)],
    "generator": generated,
    "async generator": arriving,
    "DataLoader": loaded,
}


@pytest.mark.parametrize("ahead", [0, 1, 7])
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
async def test_fit_trains_on_any_source_in_order(source: Callable[[], Any], ahead: int) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster)
        results = [step async for step in trainer.fit(source(), ahead=ahead)]
    assert [result.index for result in results] == [0, 1, 2, 3, 4]
    assert [result.loss for result in results] == plain_losses(5)
    assert trainer.steps_done == 5


@pytest.mark.parametrize("ahead", [0, 1, 7])
@pytest.mark.parametrize(("steps", "done"), [(0, 0), (1, 1), (3, 3), (9, 5), (None, 5)])
async def test_fit_ends_after_so_many_steps_or_with_its_data(
    steps: int | None, done: int, ahead: int
) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster)
        results = [step async for step in trainer.fit(generated(), steps, ahead=ahead)]
        assert [result.loss for result in results] == plain_losses(done)
        assert (await trainer.step(vectors(9))).index == done


async def test_fit_shows_the_weights_after_the_step_it_yields() -> None:
    loop = PlainLoop(MLP, OPTIMIZER, microbatches=3)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster)
        async for step in trainer.fit(generated()):
            loop.step(vectors(step.index))
            assert differing(await trainer.weights(), loop.weights()) == []


async def test_fit_may_be_left_and_taken_up_again() -> None:
    data = generated()
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster)
        async with aclosing(trainer.fit([*data][:3])) as steps:
            async for step in steps:
                if step.index == 1:
                    break
        more = [step async for step in trainer.fit([vectors(2), vectors(3)])]
    assert [(step.index, step.loss) for step in more] == [
        (index, plain_losses(4)[index]) for index in (2, 3)
    ]


async def test_an_error_of_the_data_comes_after_the_steps_before_it() -> None:
    def broken() -> Iterator[Batch]:
        yield vectors(0)
        yield vectors(1)
        raise OSError("the disk is gone")

    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster)
        steps = trainer.fit(broken())
        assert [(await anext(steps)).index, (await anext(steps)).index] == [0, 1]
        with pytest.raises(OSError, match="disk"):
            await anext(steps)
        assert (await trainer.step(vectors(2))).loss == plain_losses(3)[2]


@pytest.mark.parametrize("source", [[vectors()[0]], [(1, 2, 3)], 7, "text.txt", torch.zeros(3)])
async def test_data_that_gives_no_pairs_is_refused(source: object) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster)
        with pytest.raises(DataError):
            async for _ in trainer.fit(source):
                pass
        assert trainer.steps_done == 0


# Results


async def test_a_result_tells_what_the_step_was_like() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, TINY)
        targets = tokens(5, 7)
        targets[1, 2:] = -100
        result = await trainer.step((tokens(5, 7), targets))
    assert (result.index, result.tokens) == (0, 30)
    assert result.elapsed_s > 0
    assert result.tokens_per_s == 30 / result.elapsed_s
    assert result.busy.keys() == {0, 1}
    assert all(0 < share <= 1 for share in result.busy.values())
    assert 0 <= result.idle_fraction < 1


@pytest.mark.parametrize("in_flight", [1, 2, 5])
async def test_steps_can_be_awaited_in_any_order_and_again(in_flight: int) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, in_flight=in_flight)
        pending = [trainer.step(vectors(step)) for step in range(5)]
        results = {index: await pending[index] for index in (3, 0, 4, 2, 1)}
        assert await pending[3] is not None
        assert (await pending[3]).loss == results[3].loss
    assert [results[index].loss for index in range(5)] == plain_losses(5)
    assert [results[index].index for index in range(5)] == [0, 1, 2, 3, 4]


async def test_many_tasks_may_await_one_step() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster)
        step = trainer.step(vectors())

        async def loss() -> float:
            return (await step).loss

        assert set(await asyncio.gather(loss(), loss(), loss())) == set(plain_losses(1))


async def test_cancelling_who_awaits_a_step_leaves_the_step() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster)
        step = trainer.step(vectors())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await step
        assert (await step).loss == plain_losses(1)[0]


async def test_repr_is_a_status_line() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, in_flight=1)
        assert re.fullmatch(r"<Trainer of Model\(.*mlp'\): 2 stages, 0 steps>", repr(trainer))
        first, second = trainer.step(vectors()), trainer.step(vectors())
        assert repr(first) == "<train of step 0, queued>"
        assert repr(trainer.evaluate(vectors())) == "<evaluate of step 2, queued>"
        await first
        assert repr(first) == "<train of step 0, done>"
        assert repr(second).startswith("<train of step 1, ")
        await second
        assert "2 steps" in repr(trainer)


# Failed and cancelled steps


async def test_the_step_after_a_failed_one_takes_its_number() -> None:
    """So its random numbers are those that the failed step would have drawn."""
    async with Cluster(workers=0, threads=1) as cluster:
        model = Model(models.failing, block=2, microbatch=1, step=2, microbatches=3)
        trainer = await trainer_of(cluster, model)
        pending = [trainer.step(vectors(step)) for step in range(5)]
        assert [(await step).index for step in pending[:2]] == [0, 1]
        with pytest.raises(OpError, match="planted"):
            await pending[2]
        for later in pending[3:]:
            with pytest.raises(RunError, match="planted"):
                await later
        assert repr(pending[2]).startswith("<train of step 2, failed: ")
        assert trainer.steps_done == 2
        again = [trainer.step(vectors(step)) for step in (2, 3)]
        assert [(await step).index for step in again] == [2, 3]
        assert [(await step).loss for step in again] == plain_losses(4)[2:]
        assert trainer.steps_done == 4


@pytest.mark.parametrize("awaited", [True, False])
async def test_the_number_of_a_cancelled_step_is_free_at_once(awaited: bool) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster)
        await trainer.step(vectors())
        queued = [trainer.step(vectors()) for _ in range(2)]
        queued[0].cancel()
        if awaited:
            with pytest.raises(RunCancelled):
                await queued[0]
        results = [await step for step in [trainer.step(vectors()) for _ in range(3)]]
        assert [result.index for result in results] == [1, 2, 3]
        assert trainer.steps_done == 4
        for step in queued:
            with pytest.raises(RunError):
                await step


async def test_a_closed_trainer_is_freed_and_refuses_everything() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster)
        step = trainer.step(vectors())
        (worker, *_) = cluster._members._workers  # type: ignore[attr-defined]
        executors = worker._worker._holdings._trainers
        alive = [weakref.ref(executor) for executor in executors.values()]
        assert len(alive) == 1
        await trainer.close()
        await trainer.close()
        assert (await step).index == 0
        for use in (trainer.step, trainer.evaluate):
            with pytest.raises(ClusterError, match="this trainer was closed"):
                use(vectors())
        with pytest.raises(ClusterError, match="this trainer was closed"):
            trainer.predict(vectors()[0])
        for call in (trainer.weights(), trainer.gradients(vectors()), trainer.assign({})):
            with pytest.raises(ClusterError, match="this trainer was closed"):
                await call
        other = await trainer_of(cluster)  # by then the order to discard has been carried out
        gc.collect()
        assert [ref() for ref in alive] == [None]
        assert (await other.step(vectors())).index == 0


async def test_closing_that_is_cancelled_goes_on_and_others_wait_for_its_end() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster)
        step = trainer.step(vectors())
        cancelled, waiting = (asyncio.create_task(trainer.close()) for _ in range(2))
        await asyncio.sleep(0)
        cancelled.cancel()
        await waiting
        assert cancelled.cancelled()
        assert (await step).index == 0
        await trainer_of(cluster)  # by then the order to discard has been carried out
        (worker, *_) = cluster._members._workers  # type: ignore[attr-defined]
        assert len(worker._worker._holdings._trainers) == 1
    await trainer.close()


async def test_closing_after_the_cluster_was_left_is_harmless() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster)
    await trainer.close()


async def test_dropout_of_a_step_that_is_done_again_is_the_same() -> None:
    model = Model(models.dropping)
    loop = PlainLoop(model, OPTIMIZER, microbatches=3)
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, model, in_flight=1)
        assert (await trainer.step(vectors())).loss == loop.step(vectors())
        first, cancelled, behind = (trainer.step(vectors(step)) for step in (1, 2, 3))
        cancelled.cancel()
        assert (await first).loss == loop.step(vectors(1))
        for ended, error in ((cancelled, RunCancelled), (behind, RunError)):
            with pytest.raises(error):
                await ended
        result = await trainer.step(vectors(2))
        assert (result.index, result.loss) == (2, loop.step(vectors(2)))
        assert differing(await trainer.weights(), loop.weights()) == []


@pytest.mark.parametrize("in_flight", [1, 2, 5])
async def test_what_is_asked_for_between_steps_happens_between_them(in_flight: int) -> None:
    loop = PlainLoop(MLP, OPTIMIZER, microbatches=3)
    start = loop.weights()
    loop.step(vectors(0))
    after_one, gradients = loop.weights(), loop.gradients(vectors(9))
    for step in (1, 2):
        loop.step(vectors(step))
    after_three = loop.weights()
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, in_flight=in_flight)
        async with asyncio.TaskGroup() as group:
            first = trainer.step(vectors(0))
            between = group.create_task(trainer.weights())
            wanted = group.create_task(trainer.gradients(vectors(9)))
            await asyncio.sleep(0)
            second, third = trainer.step(vectors(1)), trainer.step(vectors(2))
            last = group.create_task(trainer.weights())
            back = group.create_task(trainer.assign(start))
            await asyncio.sleep(0)
            again = trainer.step(vectors(0))
        assert differing(between.result(), after_one) == []
        assert differing(wanted.result(), gradients) == []
        assert differing(last.result(), after_three) == []
        assert back.done()
        assert (await again).loss == (await first).loss
        assert ((await second).index, (await third).index) == (1, 2)


# Prediction and generation


async def test_generation_is_decided_by_its_seed() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, TINY)
        prompt = [3, 1, 4]
        drawn = [
            await trainer.generate(prompt, tokens=20, seed=seed, temperature=1.0)
            for seed in (1, 1, 2)
        ]
        assert drawn[0] == drawn[1] != drawn[2]
        assert all(len(ids) == 20 and set(ids) <= set(range(13)) for ids in drawn)
        assert prompt == [3, 1, 4]


async def test_generation_without_temperature_takes_the_likeliest_token_each_time() -> None:
    loop = PlainLoop(TINY, OPTIMIZER)
    loop.model.eval()
    ids = [3, 1, 4]
    with torch.no_grad():
        for _ in range(10):  # longer than the context of 9
            ids.append(int(loop.model(torch.tensor([ids[-9:]]))[0, -1].argmax()))
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, TINY)
        assert await trainer.generate([3, 1, 4], tokens=10, temperature=0) == ids[3:]
        assert await trainer.generate((3, 1, 4), tokens=1, top_k=1) == ids[3:4]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [([], "empty"), ([13], "vocabulary of 13"), ([-1], "from -1"), ([1.5], "no token id")],
)
async def test_a_prompt_that_is_no_list_of_ids_is_refused(prompt: Sequence[Any], text: str) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, TINY)
        with pytest.raises(BatchError, match=text):
            await trainer.generate(prompt, tokens=2)


# Bad batches are refused when they are asked for, and nothing is started


X, Y = vectors()
BAD: dict[str, tuple[Any, str]] = {
    "a tensor": (X, r"is a pair .* not a tensor of shape \(7, 4\)"),
    "one part": ((X,), "not a tuple of 1"),
    "three parts": ((X, Y, Y), "not a tuple of 3"),
    "nothing": (None, "not a NoneType"),
    "different rows": ((X, Y[:5]), "inputs have 7 rows and targets 5"),
    "different rows inside": (({"a": X, "b": X[:5]}, Y), r"found \[5, 7\]"),
    "no rows": ((X[:0], Y[:0]), r"at least 1; found \[0\]"),
    "no dimension": ((torch.tensor(1.0), Y), r"found \[0\]"),
    "no tensors": (({}, Y), r"inputs \(a dict of 0\)"),
    "text": (("x", Y), "inputs"),
    "a list of numbers": ((X, [1.0] * 7), "targets"),
    "an array": ((X, Y.numpy()), "targets cannot be sent.*ndarray"),
    "a key that is no text": (({1: X}, Y), "inputs cannot be sent.*key"),
    "a number of 65 bits": (([X, 2**64], Y), "inputs cannot be sent.*bits"),
    "a sparse tensor": ((X.to_sparse(), Y), "inputs cannot be sent.*dense CPU tensor"),
    "a tensor without memory": ((X, Y.to("meta")), "targets cannot be sent.*meta"),
}


async def assert_refused(trainer: Trainer, batch: Any, text: str) -> None:
    for ask in (trainer.step, trainer.evaluate):
        with pytest.raises(BatchError, match=text):
            ask(batch)
    with pytest.raises(BatchError, match=text):
        await trainer.gradients(batch)


@pytest.mark.parametrize(("batch", "text"), BAD.values(), ids=BAD.keys())
async def test_a_bad_batch_is_refused_at_once(batch: Any, text: str) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster)
        await assert_refused(trainer, batch, text)
        assert (await trainer.step(vectors())).loss == plain_losses(1)[0]


T = tokens(5, 7)
BAD_TOKENS: dict[str, tuple[Any, str]] = {
    "an id above the vocabulary": ((T + 9, T), r"to 21 for a vocabulary of 13: use GPT\(vocab=22"),
    "an id below 0": ((T - 1, T), "from -1 to 11 .* use other data"),
    "a target above the vocabulary": ((T, T + 9), "to 21 for a vocabulary of 13"),
    "a target below 0": ((T, T - 1), "from -1 to 11"),
    "too long a context": ((tokens(5, 10), tokens(5, 10)), "10 tokens for a context of 9"),
    "numbers with a fraction": ((T.float(), T), "whole-number tokens.*not torch.float32"),
    "targets with a fraction": ((T, T.float()), "whole-number targets.*not torch.float32"),
    "one dimension": ((T[0], T[0]), r"shape \[batch, tokens\]"),
    "a dict": (({"tokens": T}, T), "not a dict"),
    "targets of another length": ((T, T[:, :6]), r"targets of shape \(5, 7\).*shape \(5, 6\)"),
    "only ignored targets": ((T, torch.full_like(T, -100)), "all 35 targets .* leave the batch"),
    "no tokens": ((T[:, :0], T[:, :0]), "all 0 targets"),
}


@pytest.mark.parametrize(("batch", "text"), BAD_TOKENS.values(), ids=BAD_TOKENS.keys())
async def test_a_batch_that_does_not_fit_a_gpt_is_refused_at_once(batch: Any, text: str) -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster, TINY)
        await assert_refused(trainer, batch, text)
        assert (await trainer.step((T, T))).index == 0


async def test_tokens_of_any_whole_type_give_the_same_step() -> None:
    types = (torch.int64, torch.int32, torch.uint8, torch.uint16, torch.uint32)
    async with Cluster(workers=0, threads=1) as cluster:
        losses = set()
        for dtype in types:
            trainer = await trainer_of(cluster, TINY)
            losses.add((await trainer.step((T.to(dtype), T.to(dtype)))).loss)
    assert len(losses) == 1


async def test_a_bad_batch_leaves_the_steps_around_it_alone() -> None:
    async with Cluster(workers=0, threads=1) as cluster:
        trainer = await trainer_of(cluster)
        first = trainer.step(vectors(0))
        with pytest.raises(BatchError):
            trainer.step((X, Y[:1]))
        second = trainer.step(vectors(1))
        assert [(await first).loss, (await second).loss] == plain_losses(2)
