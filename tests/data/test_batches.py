import json
import random
import re
import warnings
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from myelin.data.batches import Batch, TextData
from myelin.data.tokens import TokenFile, TokenHeader, unnamed_tokens
from myelin.data.vocabulary import ByteVocabulary, Ids
from myelin.errors import DataError


class Numbers:
    """The vocabulary of a corpus 0, 1, 2, ..., where a token tells its own place."""

    fingerprint = "numbers"
    size = 2**32

    def encode(self, text: str) -> Ids:
        return np.array(text.split(), dtype=np.int64)

    def decode(self, ids: object) -> str:
        return " ".join(map(str, np.asarray(ids).tolist()))


def numbers(
    count: int,
    *,
    context: int | None = 4,
    batch_size: int = 3,
    validation: float = 0.0,
    seed: int = 0,
    digest: str = "",
) -> TextData:
    header = TokenHeader("uint32", count, "numbers", "corpus", digest or f"0..{count - 1}")
    file = TokenFile(header, np.arange(count, dtype=np.uint32))
    return TextData(
        file,
        Numbers(),
        context=context,
        batch_size=batch_size,
        validation=validation,
        seed=seed,
    )


def starts(batch: Batch) -> list[int]:
    """Return where each row begins, after checking that rows are whole and targets shifted."""
    inputs, targets = batch
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(inputs.shape[1]))
    assert torch.equal(targets, inputs + 1)
    first: list[int] = inputs[:, 0].tolist()
    return first


def rows(data: TextData, batches: int) -> list[int]:
    return [start for batch in islice(data, batches) for start in starts(batch)]


@dataclass(frozen=True)
class Case:
    count: int
    context: int
    batch_size: int
    validation: float
    seed: int

    def make(self) -> TextData:
        return numbers(
            self.count,
            context=self.context,
            batch_size=self.batch_size,
            validation=self.validation,
            seed=self.seed,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    context = draw(st.integers(1, 9))
    return Case(
        count=draw(st.integers(2 * (context + 1), 90)),
        context=context,
        batch_size=draw(st.integers(1, 11)),
        validation=draw(st.sampled_from([0.0, 0.05, 0.3, 0.5])),
        seed=draw(st.integers(-5, 5)),
    )


def test_a_batch_is_two_int64_tensors_of_rows_by_context() -> None:
    for batch in islice(numbers(100, context=7, batch_size=5), 10):
        for tensor in batch:
            assert (tensor.shape, tensor.dtype) == ((5, 7), torch.int64)
            assert tensor.device.type == "cpu"
            assert tensor.is_contiguous()
        starts(batch)


@given(cases())
def test_every_window_comes_exactly_once_an_epoch(case: Case) -> None:
    data = case.make()
    order = rows(data, -(-3 * data.windows // case.batch_size))
    for epoch in range(3):
        seen = order[epoch * data.windows : (epoch + 1) * data.windows]
        assert sorted(seen) == [window * case.context for window in range(data.windows)]


@given(cases())
def test_no_row_reaches_into_the_tokens_held_out_and_none_is_wasted(case: Case) -> None:
    data = case.make()
    train = rows(data, -(-data.windows // case.batch_size))
    held_out = [start for batch in data.validation_batches() for start in starts(batch)]
    last_trained = max(train) + case.context
    if case.validation:
        split = held_out[0]
        assert last_trained < split
        assert split - last_trained <= case.context
        assert held_out == list(range(split, held_out[-1] + 1, case.context))
        assert case.count - case.context <= held_out[-1] + case.context < case.count
        assert case.count - split == max(round(case.count * case.validation), case.context + 1)
    else:
        assert held_out == []
        assert case.count - case.context <= last_trained < case.count


@settings(max_examples=40)
@given(case=cases(), before=st.integers(0, 9), after=st.integers(1, 9))
def test_a_restored_position_gives_the_same_continuation(
    case: Case, before: int, after: int
) -> None:
    data = case.make()
    rows(data, before)
    state = json.loads(json.dumps(data.state()))
    expected = rows(data, after)
    again = case.make()
    rows(again, 7)
    again.restore(state)
    assert again.state() == state
    assert rows(again, after) == expected
    again.restore(state)
    assert rows(again, after) == expected


def test_a_position_can_be_restored_with_another_batch_size() -> None:
    data, other = numbers(200, batch_size=3), numbers(200, batch_size=5)
    expected = rows(numbers(200, batch_size=1), 66)
    assert rows(data, 2) == expected[:6]
    other.restore(data.state())
    assert rows(other, 12) == expected[6:66]


def test_epochs_are_shuffled_each_in_its_own_way() -> None:
    data = numbers(401, batch_size=10)
    orders = [tuple(rows(data, 10)) for _ in range(4)]
    assert len({*orders, tuple(sorted(orders[0]))}) == 5


def test_seeds_give_orders_of_their_own() -> None:
    orders = {tuple(rows(numbers(401, seed=seed), 30)) for seed in (-1, 0, 1, 2**70)}
    assert len(orders) == 4


def test_the_order_depends_on_no_global_generator() -> None:
    orders = []
    for seed in (1, 2):
        random.seed(seed)
        torch.manual_seed(seed)
        orders.append(rows(numbers(401), 40))
    assert orders[0] == orders[1]


def test_a_batch_goes_on_into_the_next_epoch() -> None:
    data = numbers(4 * 5 + 1, batch_size=3)
    order = rows(data, 10)
    assert data.windows == 5
    assert data.state()["epoch"] == 6
    assert data.state()["index"] == 0
    assert all(sorted(order[i : i + 5]) == [0, 4, 8, 12, 16] for i in range(0, 30, 5))


def test_a_batch_may_hold_several_epochs() -> None:
    (order,) = [rows(numbers(4 * 2 + 1, batch_size=7), 1)]
    assert [sorted(order[i : i + 2]) for i in (0, 2, 4)] == [[0, 4]] * 3


def test_two_loops_go_on_where_the_other_stopped() -> None:
    data = numbers(401)
    expected = rows(numbers(401), 6)
    seen: list[int] = []
    for batch in data:
        seen += starts(batch)
        if len(seen) == 9:
            break
    seen += rows(data, 2)
    assert iter(data) is data
    seen += starts(next(data))
    assert seen == expected


def test_looking_at_a_batch_moves_nothing_and_skipping_reads_nothing() -> None:
    data = numbers(401)
    expected = rows(numbers(401), 6)
    assert starts(data.batch_at(6)) == expected[6:9]
    assert data.position == 0
    data.skip()
    data.skip(3)
    assert data.position == 12
    assert rows(data, 2) == expected[12:]


def test_tensors_belong_to_the_caller() -> None:
    file = unnamed_tokens(["hello world, how are you"], ByteVocabulary(), corpus="c")
    data = TextData(file, ByteVocabulary(), context=5, batch_size=2, validation=0.3)
    with warnings.catch_warnings(action="error"):
        inputs, targets = data.batch_at(0)
        validation = next(data.validation_batches())
    expected = targets.clone()
    inputs.fill_(-1)
    assert torch.equal(targets, expected)
    targets.fill_(-100)
    assert torch.equal(data.batch_at(0)[1], expected)
    assert validation[0].add_(1).min() > 0


@pytest.mark.parametrize("batch_size", [1, 3, 5, 100])
def test_the_last_validation_batch_may_be_smaller(batch_size: int) -> None:
    data = numbers(101, validation=0.42, batch_size=batch_size)
    sizes = [len(inputs) for inputs, _ in data.validation_batches()]
    assert sum(sizes) == 10
    assert all(size == batch_size for size in sizes[:-1])
    assert sizes[-1] <= batch_size


def test_validation_is_the_same_each_time_and_moves_nothing() -> None:
    data = numbers(201, validation=0.2)
    first = [starts(batch) for batch in data.validation_batches()]
    rows(data, 5)
    state = data.state()
    assert [starts(batch) for batch in data.validation_batches()] == first
    assert data.state() == state


def test_a_limited_validation_is_spread_over_all_tokens_held_out() -> None:
    data = numbers(2001, validation=0.5, batch_size=4)
    whole = [start for batch in data.validation_batches() for start in starts(batch)]
    few = [start for batch in data.validation_batches(limit=5) for start in starts(batch)]
    assert len(set(few)) == 20
    assert set(few) <= set(whole)
    assert few == sorted(few)
    assert few[0] == whole[0]
    assert few[-1] > whole[int(0.9 * len(whole))]


@pytest.mark.parametrize(("limit", "batches"), [(0, 0), (1, 1), (3, 3), (4, 4), (1000, 4)])
def test_a_limit_counts_batches(limit: int, batches: int) -> None:
    data = numbers(101, validation=0.42, batch_size=3)
    assert len(list(data.validation_batches(limit))) == batches


def test_the_smallest_corpus_is_one_window() -> None:
    data = numbers(5, context=4)
    assert data.windows == 1
    assert rows(data, 2) == [0] * 6
    with pytest.raises(DataError, match=r"has 4 tokens.*context=4 takes 5.*below 4"):
        numbers(4, context=4)


def test_what_is_held_out_is_at_least_one_window() -> None:
    data = numbers(100, context=10, validation=0.01)
    (batch,) = data.validation_batches()
    assert starts(batch) == [89]
    assert data.windows == 8


def test_a_corpus_too_short_for_both_parts_is_refused_with_the_numbers() -> None:
    text = r"has 15 tokens; holding out 8 for validation=0.05 leaves 7 .*takes 8 .*validation=0"
    with pytest.raises(DataError, match=text):
        numbers(15, context=7, validation=0.05)
    assert numbers(16, context=7, validation=0.05).windows == 1


@pytest.mark.parametrize("context", [0, -3])
def test_a_row_needs_a_token(context: int) -> None:
    with pytest.raises(DataError, match=f"context={context}"):
        numbers(100, context=context)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch_size": 0}, "batch_size=0: use a whole number of at least 1"),
        ({"batch_size": "4"}, "batch_size='4': use a whole number"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"batch_size": True}, "batch_size=True"),
        ({"validation": -0.1}, "validation=-0.1: use a number of at least 0 and below 1"),
        ({"validation": 1.0}, "validation=1.0"),
        ({"validation": "0.1"}, "validation='0.1'"),
        ({"context": "8"}, "context='8': use a whole number of at least 1, or None for the model"),
        ({"context": 8.0}, "context=8.0"),
        ({"seed": "a"}, "seed='a': use a whole number"),
        ({"seed": True}, "seed=True"),
    ],
)
def test_arguments_of_a_wrong_type_or_out_of_range_are_refused(
    arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(DataError, match=text):
        numbers(100, **arguments)


@pytest.mark.parametrize("validation", [0.0, 0.05, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("count", [4, 5, 15, 100, 1001])
def test_the_context_that_a_refusal_advises_is_the_longest_that_works(
    count: int, validation: float
) -> None:
    data = numbers(count, context=None, validation=validation)
    with pytest.raises(DataError, match=r"give more text") as caught:
        data.bind(count)
    advised = re.search(r"a context below (\d+)", str(caught.value))
    if advised is None:
        with pytest.raises(DataError):
            data.bind(1)
        return
    with pytest.raises(DataError):
        data.bind(int(advised[1]))
    data.bind(int(advised[1]) - 1)
    assert data.windows >= 1


def test_the_model_chooses_the_context_where_none_was_given() -> None:
    data = numbers(100, context=None)
    contexts = [data.context]
    data.bind(9)
    contexts.append(data.context)
    assert contexts == [None, 9]
    assert next(data)[0].shape == (3, 9)
    data.bind(9)
    data.bind(20)
    assert data.context == 9


def test_a_model_with_a_context_too_short_is_refused() -> None:
    data = numbers(100, context=10)
    with pytest.raises(DataError, match=r"context=10 tokens and the model takes 9; use context=9"):
        data.bind(9)


def test_a_model_without_a_context_needs_one_from_the_data() -> None:
    numbers(100, context=10).bind(None)
    with pytest.raises(DataError, match="context="):
        numbers(100, context=None).bind(None)


def test_a_context_too_long_for_the_corpus_is_refused_when_it_is_bound() -> None:
    data = numbers(100, context=None)
    with pytest.raises(DataError, match=r"100 tokens; one row of context=100 takes 101"):
        data.bind(100)
    data.bind(50)
    assert data.context == 50


def test_nothing_is_dealt_out_before_the_context_is_chosen() -> None:
    data = numbers(100, context=None)
    state = numbers(100).state()
    for use in (
        lambda: next(data),
        data.state,
        data.validation_batches,
        lambda: data.windows,
        lambda: data.restore(state),
    ):
        with pytest.raises(DataError, match="not chosen"):
            use()
    assert data.position == 0


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("seed", numbers(100, seed=1)),
        ("context", numbers(100, context=5)),
        ("validation", numbers(100, validation=0.2)),
        ("corpus", numbers(101)),
        ("corpus", numbers(100, digest="other text")),
    ],
)
def test_a_position_of_other_data_is_refused_and_nothing_moves(name: str, other: TextData) -> None:
    data = numbers(100)
    rows(data, 2)
    with pytest.raises(DataError, match=rf"saved with {name}=.*this data has {name}="):
        data.restore(other.state())
    assert data.position == 6


@pytest.mark.parametrize(
    "change",
    [
        {"index": 24},
        {"index": -1},
        {"epoch": -1},
        {"index": "3"},
        {"index": 1.5},
        {"type": "other"},
        {"more": 1},
        {"seed": None},
    ],
)
def test_a_state_that_was_changed_is_refused(change: dict[str, object]) -> None:
    data = numbers(100)
    assert data.windows == 24
    with pytest.raises(DataError, match="position"):
        data.restore(data.state() | change)


@given(st.dictionaries(st.text(), st.one_of(st.none(), st.integers(), st.text())))
def test_what_is_no_state_is_refused(state: dict[str, object]) -> None:
    assume("corpus" not in state)
    with pytest.raises(DataError, match="no position"):
        numbers(100).restore(state)


def test_tokens_of_another_vocabulary_are_refused() -> None:
    file = unnamed_tokens(["hello world"], ByteVocabulary(), corpus="c")
    with pytest.raises(DataError, match=r"made by the vocabulary 'bytes', not by 'numbers'"):
        TextData(file, Numbers(), context=2)


def test_text_goes_in_and_comes_out_through_the_vocabulary() -> None:
    file = unnamed_tokens(["hello world"], ByteVocabulary(), corpus="c")
    data = TextData(file, ByteVocabulary(), context=10, batch_size=1, validation=0)
    assert data.vocab_size == 256
    assert data.decode(data.encode("é!")) == "é!"
    inputs, targets = next(data)
    assert (data.decode(inputs[0]), data.decode(targets[0])) == ("hello worl", "ello world")
    assert repr(data) == "<TextData 11 tokens, context=10, batch_size=1, position=1>"


def test_ids_beyond_16_bits_come_out_whole() -> None:
    class Wide(Numbers):
        size = 70_001

    ids = [70_000, 65_536, 65_535, 0, 70_000]
    file = unnamed_tokens([" ".join(map(str, ids))], Wide(), corpus="c")
    (inputs, targets) = next(TextData(file, Wide(), context=4, batch_size=1, validation=0))
    assert inputs[0].tolist() == ids[:-1]
    assert targets[0].tolist() == ids[1:]
