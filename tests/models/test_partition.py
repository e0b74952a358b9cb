from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myelin.errors import PlanError
from myelin.models.partition import checkpoint_every, cut, cut_at

COSTS = st.one_of(
    st.integers(0, 5).map(float),
    st.floats(0, 1e6, allow_nan=False),
    st.sampled_from([0.0, 0.1, 0.2, 0.3, 1e-300, 1e15]),
)


def stage_costs(costs: Sequence[float], stages: Sequence[range]) -> list[Fraction]:
    return [sum((Fraction(costs[block]) for block in stage), Fraction()) for stage in stages]


def every_cut(blocks: int, stages: int) -> list[tuple[range, ...]]:
    return [
        tuple(range(a, b) for a, b in pairwise((0, *inner, blocks)))
        for inner in combinations(range(1, blocks), stages - 1)
    ]


@settings(deadline=None)
@given(st.data(), st.lists(COSTS, min_size=1, max_size=9))
def test_no_other_cut_has_a_cheaper_largest_stage_nor_as_cheap_with_a_lighter_last_one(
    data: st.DataObject, costs: list[float]
) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def rank(chosen: tuple[range, ...]) -> tuple[Fraction, Fraction]:
        per_stage = stage_costs(costs, chosen)
        return max(per_stage), per_stage[-1]

    best = min(rank(candidate) for candidate in every_cut(len(costs), stages))
    assert rank(cut(costs, stages)) == best


@settings(deadline=None)
@given(st.data(), st.lists(COSTS, min_size=1, max_size=60))
def test_stages_are_contiguous_cover_all_blocks_and_none_is_empty(
    data: st.DataObject, costs: list[float]
) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    chosen = cut(costs, stages)
    assert len(chosen) == stages
    assert all(chosen)
    assert [block for stage in chosen for block in stage] == list(range(len(costs)))
    assert cut(costs, stages) == chosen


def test_equal_blocks_leave_the_last_stage_lightest() -> None:
    assert cut([1.0] * 9, 4) == (range(3), range(3, 6), range(6, 8), range(8, 9))


def test_a_heavy_head_gets_a_stage_with_fewer_blocks() -> None:
    costs = [0.01, 1, 1, 1, 1, 1, 1, 2.5]
    assert cut(costs, 2) == (range(5), range(5, 8))
    assert cut(costs, 3) == (range(4), range(4, 7), range(7, 8))


def test_costs_that_rounded_sums_would_confuse_are_told_apart() -> None:
    # In floats 1e16 + 1 == 1e16, so that both cuts would look alike.
    assert 1e16 + 1.0 == 1e16
    assert cut([1e16, 1.0, 1.0, 1.0, 1e16], 2) == (range(3), range(3, 5))
    assert cut([1.0, 1e16, 1e16, 1.0, 1.0], 2) == (range(2), range(2, 5))


def test_a_hundred_blocks_in_fortyeight_stages_are_cut_at_once() -> None:
    costs = [1.0, *([1e9] * 96), 5e8]
    assert max(stage_costs(costs, cut(costs, 48))) == Fraction(10**9) * 2 + Fraction(5 * 10**8)


def test_more_stages_than_blocks_are_refused_with_the_largest_possible_number() -> None:
    with pytest.raises(PlanError) as caught:
        cut([1.0, 2.0, 3.0], 5)
    assert str(caught.value) == (
        "pipeline=5 stages for 3 blocks: each stage needs at least one block; use pipeline<=3"
    )


@pytest.mark.parametrize("stages", [0, -1])
def test_fewer_than_one_stage_is_refused(stages: int) -> None:
    with pytest.raises(PlanError, match="use at least 1"):
        cut([1.0], stages)


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1.0])
def test_a_cost_that_is_no_cost_is_refused_by_block(cost: float) -> None:
    with pytest.raises(PlanError, match="block 1"):
        cut([1.0, cost], 1)


def test_cuts_by_hand_name_the_first_block_of_each_next_stage() -> None:
    assert cut_at([2, 3], 6) == (range(2), range(2, 3), range(3, 6))
    assert cut_at([], 6) == (range(6),)


@pytest.mark.parametrize("cuts", [[0], [6], [7], [-1], [3, 3], [4, 2]])
def test_cuts_by_hand_that_leave_a_stage_empty_are_refused(cuts: list[int]) -> None:
    with pytest.raises(PlanError, match="at least 1 to at most 5"):
        cut_at(cuts, 6)


def test_no_blocks_cannot_be_cut_by_hand() -> None:
    with pytest.raises(PlanError, match="for 0 blocks"):
        cut_at([], 0)


@pytest.mark.parametrize(
    ("blocks", "all_blocks", "every"),
    [(8, 48, 8), (12, 48, 6), (24, 48, 6), (48, 48, 6), (12, 96, 12), (13, 48, 1), (1, 9, 1)],
)
def test_the_papers_rule_takes_the_divisor_nearest_to_the_root(
    blocks: int, all_blocks: int, every: int
) -> None:
    assert checkpoint_every(blocks, all_blocks) == every
