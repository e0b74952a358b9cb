"""A plan is checked when it is made, and says what it wants."""

from typing import Any

import pytest

from myelin import Plan
from myelin.errors import PlanError
from myelin.plan import checked_plan


@pytest.mark.parametrize(
    "name", ["pipeline", "data", "microbatches", "bucket", "coarsening", "steps_in_flight"]
)
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3", None])
def test_numbers_must_be_whole_and_at_least_one(name: str, value: Any) -> None:
    with pytest.raises(PlanError, match=f"{name}=.*: use a whole number of at least 1"):
        Plan(**{name: value})


@pytest.mark.parametrize("limit", [0, "papers", 1.5, True])
def test_a_limit_is_a_whole_number_or_paper(limit: Any) -> None:
    with pytest.raises(PlanError, match=r'at least 1, "paper" \(= pipeline\), or None'):
        Plan(pipeline_limit=limit)


@pytest.mark.parametrize("every", [0, "papers", 1.5, True])
def test_checkpoints_are_a_whole_number_or_paper(every: Any) -> None:
    with pytest.raises(PlanError, match=r'at least 1, "paper" \(= a number for each stage\), or N'):
        Plan(checkpoint=every)


@pytest.mark.parametrize(
    ("every", "kept"), [(None, (None, None)), (3, (3, 3)), ("paper", (2, 3)), (99, (99, 99))]
)
def test_checkpoints_are_the_same_everywhere_or_fit_each_stage(
    every: int | str | None, kept: tuple[int | None, ...]
) -> None:
    assert Plan(pipeline=2, checkpoint=every).keeps_every((range(4), range(4, 7))) == kept


@pytest.mark.parametrize("placement", [1, "01", [0, 1.0], [0, True], {0, 1}, ["0", "1"], [0, None]])
def test_a_placement_is_a_list_of_whole_numbers(placement: Any) -> None:
    with pytest.raises(PlanError, match=r"list the worker of every stage .*placement=\[0, 1\]"):
        Plan(pipeline=2, placement=placement)


@pytest.mark.parametrize("cuts", [2, ["1"], [1.5], "1", [True]])
def test_cuts_are_a_list_of_whole_numbers(cuts: Any) -> None:
    with pytest.raises(PlanError, match=r"list the first block of .*cuts=\[2, 4\]"):
        Plan(pipeline=2, cuts=cuts)


@pytest.mark.parametrize("row", [[0, 1], (0, 1), range(2)])
def test_any_row_of_whole_numbers_will_do(row: Any) -> None:
    assert Plan(pipeline=2, placement=row).stage_workers == (0, 1)
    assert len(Plan(pipeline=3, cuts=[1, 2]).stages([1.0] * 4)) == 3


@pytest.mark.parametrize("plan", [{"pipeline": 2}, 2, "paper", Plan])
def test_what_is_no_plan_is_refused(plan: Any) -> None:
    with pytest.raises(PlanError, match=r"is no plan: make one, such as Plan\(pipeline=2\)"):
        checked_plan(plan)


def test_no_plan_is_the_one_by_default() -> None:
    assert checked_plan(None) == Plan()
    assert checked_plan(Plan(pipeline=2)) == Plan(pipeline=2)
