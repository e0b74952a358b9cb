"""Keeps what a training measured, in memory and, step by step, in a CSV file."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from myelin.trainer import StepResult

COLUMNS: Final = ("step", "seconds", "loss", "validation", "tokens", "tokens_per_s", "idle")


@dataclass(slots=True)
class Row:
    """One step.

    Attributes:
        step: how many steps were done with it, from 1.
        seconds: since the training began.
        loss: of the step, on the weights before it.
        tokens: that were trained on.
        tokens_per_s: of this step alone.
        idle: share of the workers' time in which they did not compute.
        busy: for each worker the share of the time in which it computed.
        validation: loss on the text held out, with the weights after the step; None where it was
            not measured.
    """

    step: int
    seconds: float
    loss: float
    tokens: int
    tokens_per_s: float
    idle: float
    busy: dict[int, float]
    validation: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A text that the model wrote.

    Attributes:
        prompt: what it was given.
        continuation: what it wrote.
    """

    prompt: str
    continuation: str


class Record:
    """What was measured. Use it as `with Record(path) as record:`.

    A step reaches the file when the next one is recorded, since its validation comes after it, and
    at the end of the block. So a program that is killed loses one step of it.
    """

    def __init__(self, path: Path, workers: Sequence[int]) -> None:
        self._path, self._workers = path, tuple(workers)
        self.rows: list[Row] = []
        self.sample: Sample | None = None
        self._written = 0

    def __enter__(self) -> "Record":
        self._file = self._path.open("w", newline="", encoding="utf-8")
        self._csv = csv.writer(self._file)
        self._csv.writerow([*COLUMNS, *(f"busy_{worker}" for worker in self._workers)])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._write()
        self._file.close()

    def step(self, result: StepResult, at_s: float) -> None:
        """Take in a step that ended `at_s` seconds after the training began."""
        self._write()
        self.rows.append(
            Row(
                step=len(self.rows) + 1,
                seconds=at_s,
                loss=result.loss,
                tokens=result.tokens,
                tokens_per_s=result.tokens_per_s,
                idle=result.idle_fraction,
                busy=dict(result.busy),
            )
        )

    def validated(self, loss: float) -> None:
        """Take in a validation made after the last step."""
        self.rows[-1].validation = loss

    @property
    def validations(self) -> list[tuple[int, float]]:
        """Steps done and loss of each validation."""
        return [(row.step, row.validation) for row in self.rows if row.validation is not None]

    def _write(self) -> None:
        for row in self.rows[self._written :]:
            fields = [
                row.step,
                f"{row.seconds:.3f}",
                f"{row.loss:.6f}",
                "" if row.validation is None else f"{row.validation:.6f}",
                row.tokens,
                f"{row.tokens_per_s:.1f}",
                f"{row.idle:.4f}",
            ]
            busy = (row.busy.get(worker) for worker in self._workers)
            self._csv.writerow([*fields, *("" if b is None else f"{b:.4f}" for b in busy)])
        self._written = len(self.rows)
        self._file.flush()
