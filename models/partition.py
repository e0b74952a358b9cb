"""Cuts a row of blocks into pipeline stages so that the slowest stage is as fast as it can be.

Pure arithmetic on the blocks' costs; knows nothing of tensors. Exact: costs are turned into
integers over one denominator, since with rounded sums two equal cuts could swap places.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from myelin.errors import PlanError


def cut(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """Cut blocks into contiguous, non-empty stages whose largest cost is the least possible.

    Where several cuts are equally good, the last stage gets as little as possible (it also
    computes the loss), and the blocks before it are cut by the same rule.

    Args:
        costs: one finite cost of at least zero per block, in any unit.
        stages: how many stages to make.

    Returns:
        The blocks of each stage.

    Raises:
        PlanError: there are fewer blocks than stages, or a cost is negative or not finite.
    """
    _check(costs, stages)
    whole = _as_integers(costs)
    ends = [len(whole)]
    for left in range(stages, 1, -1):
        row = whole[: ends[-1]]
        ends.append(_start_of_last(row, left, _least_limit(row, left)))
    edges = [0, *reversed(ends)]
    return tuple(range(start, end) for start, end in pairwise(edges))


def cut_at(cuts: Sequence[int], blocks: int) -> tuple[range, ...]:
    """Cut by hand: `cuts` are the first blocks of the second, third, ... stage.

    Raises:
        PlanError: the cuts do not rise, or leave a stage without a block.
    """
    edges = [0, *cuts, blocks]
    if any(start >= end for start, end in pairwise(edges)):
        raise PlanError(
            f"cuts={list(cuts)} for {blocks} blocks: each cut is the first block of the next "
            f"stage, so cuts must rise from at least 1 to at most {blocks - 1}"
        )
    return tuple(range(start, end) for start, end in pairwise(edges))


def _check(costs: Sequence[float], stages: int) -> None:
    if stages < 1:
        raise PlanError(f"pipeline={stages} stages: use at least 1")
    if stages > len(costs):
        raise PlanError(
            f"pipeline={stages} stages for {len(costs)} blocks: each stage needs at least one "
            f"block; use pipeline<={len(costs)}"
        )
    for block, cost in enumerate(costs):
        if not math.isfinite(cost) or cost < 0:
            raise PlanError(f"cost of block {block} is {cost}: use a finite number of at least 0")


def _as_integers(costs: Sequence[float]) -> list[int]:
    exact = [Fraction(cost) for cost in costs]
    denominator = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * denominator) for cost in exact]


def _stages_needed(costs: Sequence[int], limit: int) -> int:
    """Count the stages that hold `costs` when each is filled up to `limit` from the front."""
    stages, filled = 1, 0
    for cost in costs:
        if filled + cost > limit:
            stages, filled = stages + 1, 0
        filled += cost
    return stages


def _least_limit(costs: Sequence[int], stages: int) -> int:
    """Find the least largest stage; a stage can always be split further, so fewer is feasible."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(costs, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _start_of_last(costs: Sequence[int], stages: int, limit: int) -> int:
    """Find the latest start of the last stage that leaves the others within `limit`."""
    start = len(costs) - 1
    while _stages_needed(costs[:start], limit) > stages - 1:
        start -= 1
    return start


def checkpoint_every(blocks: int, all_blocks: int) -> int:
    """Return after how many blocks of a stage to keep an output, where activations are recomputed.

    It is the divisor of the stage's number of blocks that is nearest to the root of the model's:
    the rule of arXiv 2110.13005, which keeps the sum of what is kept and what is recomputed small.
    """
    divisors = [n for n in range(1, blocks + 1) if blocks % n == 0]
    return min(divisors, key=lambda n: abs(n - math.sqrt(all_blocks)))
