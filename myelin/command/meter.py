"""Turns results of steps into the figures that somebody watching wants; reads no clock.

Rates and busy shares are those of the last steps, weighted by time, without the time that
validation took. Times are seconds of any monotonic clock, counted from the first step's order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from myelin.trainer import StepResult

WINDOW: Final = 32  # steps over which rates are taken
SMOOTHING: Final = 0.9  # of the loss: the weight of what came before


class Smoothed:
    """An exponential mean that is unbiased from its first value on."""

    def __init__(self, smoothing: float = SMOOTHING) -> None:
        self._smoothing, self._sum, self._weight = smoothing, 0.0, 0.0

    def add(self, value: float) -> float:
        """Take in a value and return the mean."""
        self._sum = self._smoothing * self._sum + (1 - self._smoothing) * value
        self._weight = self._smoothing * self._weight + (1 - self._smoothing)
        return self._sum / self._weight


@dataclass(frozen=True, slots=True)
class Status:
    """How far a training is.

    Attributes:
        steps: steps done.
        loss: smoothed, or None before the first step.
        validation: the last one, or None.
        validated: the steps done when it was measured, or None.
        tokens_per_s: tokens trained on per second.
        busy: for each worker the share of the time during which it computed.
        elapsed_s: since the training began.
        left_s: until its end, or None where that cannot be told yet.
        share: how much of it is done, from 0 to 1.
    """

    steps: int
    loss: float | None
    validation: float | None
    tokens_per_s: float
    busy: Mapping[int, float]
    elapsed_s: float
    left_s: float | None
    share: float
    validated: int | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    tokens: int
    took_s: float
    computing_s: Mapping[int, float]
    elapsed_s: float


class Meter:
    """Follows one training; `status` may be called in any thread while steps are taken in.

    Args:
        steps: how many steps it has at most, or None.
        limit_s: how long it lasts at most, or None.
    """

    def __init__(self, *, steps: int | None, limit_s: float | None) -> None:
        self._most_steps, self._limit_s = steps, limit_s
        self._recent: tuple[_Step, ...] = ()  # replaced as a whole: another thread may read it
        self._smoothed = Smoothed()
        self._steps, self._since_s = 0, 0.0
        self._loss: float | None = None
        self._validation: float | None = None
        self._validated: int | None = None

    def step(self, result: StepResult, at_s: float) -> None:
        """Take in a step that ended at `at_s`."""
        computing = {w: share * result.elapsed_s for w, share in result.busy.items()}
        took_s = at_s - self._since_s
        step = _Step(result.tokens, took_s, computing, result.elapsed_s)
        self._recent = (*self._recent, step)[-WINDOW:]
        self._loss = self._smoothed.add(result.loss)
        self._steps += 1
        self._since_s = at_s

    def validated(self, loss: float, at_s: float) -> None:
        """Take in a validation that ended at `at_s`; it began when the last step ended."""
        self._validation, self._validated = loss, self._steps
        self._since_s = at_s

    def status(self, at_s: float) -> Status:
        """Return the figures as of `at_s`."""
        recent = self._recent
        took_s = sum(step.took_s for step in recent)
        left_s, share = self._left(at_s, took_s / len(recent) if recent else None)
        return Status(
            steps=self._steps,
            loss=self._loss,
            validation=self._validation,
            tokens_per_s=sum(step.tokens for step in recent) / took_s if took_s else 0.0,
            busy=_busy(recent),
            elapsed_s=at_s,
            left_s=left_s,
            share=share,
            validated=self._validated,
        )

    def _left(self, at_s: float, step_s: float | None) -> tuple[float | None, float]:
        """Return the time left and the share done, by whichever limit is reached first."""
        ways: list[tuple[float | None, float]] = []
        if self._limit_s is not None:
            ways.append((max(0.0, self._limit_s - at_s), min(1.0, at_s / self._limit_s)))
        if self._most_steps is not None:
            missing = self._most_steps - self._steps
            left_s = None if step_s is None else missing * step_s
            ways.append((left_s, self._steps / self._most_steps))
        if not ways:
            return None, 0.0
        known = [way for way in ways if way[0] is not None]
        return min(known, key=lambda way: way[0] or 0.0) if known else ways[0]


def _busy(steps: Sequence[_Step]) -> dict[int, float]:
    elapsed_s = sum(step.elapsed_s for step in steps)
    workers = sorted({worker for step in steps for worker in step.computing_s})
    return {
        worker: sum(step.computing_s.get(worker, 0.0) for step in steps) / elapsed_s
        for worker in workers
        if elapsed_s
    }
