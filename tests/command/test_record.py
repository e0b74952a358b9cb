"""What was measured, in memory and in the CSV file."""

import csv
from contextlib import suppress
from pathlib import Path

from myelin.command.record import COLUMNS, Record
from myelin.trainer import StepResult


def result(index: int, loss: float) -> StepResult:
    return StepResult(index, loss, 100, 0.5, 0.25, {0: 0.75, 1: 0.5})


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_step_is_a_row_with_the_validation_that_followed_it(tmp_path: Path) -> None:
    path = tmp_path / "losses.csv"
    with Record(path, [0, 1]) as record:
        record.step(result(0, 3.0), 1.0)
        record.step(result(1, 2.0), 2.0)
        record.validated(2.5)
        record.step(result(2, 1.0), 3.5)
    assert rows(path) == [
        {
            "step": step,
            "seconds": seconds,
            "loss": loss,
            "validation": validation,
            "tokens": "100",
            "tokens_per_s": "200.0",
            "idle": "0.2500",
            "busy_0": "0.7500",
            "busy_1": "0.5000",
        }
        for step, seconds, loss, validation in [
            ("1", "1.000", "3.000000", ""),
            ("2", "2.000", "2.000000", "2.500000"),
            ("3", "3.500", "1.000000", ""),
        ]
    ]
    assert record.validations == [(2, 2.5)]


def test_steps_are_in_the_file_as_soon_as_the_next_one_is_done(tmp_path: Path) -> None:
    path = tmp_path / "losses.csv"
    with Record(path, [0]) as record:
        record.step(result(0, 3.0), 1.0)
        record.validated(4.0)
        record.step(result(1, 2.0), 2.0)
        assert [(row["step"], row["validation"]) for row in rows(path)] == [("1", "4.000000")]


def test_the_last_step_is_in_the_file_also_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "losses.csv"
    with suppress(KeyError), Record(path, [0]) as record:
        record.step(result(0, 3.0), 1.0)
        raise KeyError
    assert [row["step"] for row in rows(path)] == ["1"]


def test_a_worker_that_took_no_part_has_an_empty_field(tmp_path: Path) -> None:
    path = tmp_path / "losses.csv"
    with Record(path, [0, 1, 2]) as record:
        record.step(result(0, 3.0), 1.0)
    assert rows(path)[0]["busy_2"] == ""


def test_without_steps_the_file_has_its_heading(tmp_path: Path) -> None:
    path = tmp_path / "losses.csv"
    with Record(path, [0]) as record:
        pass
    assert path.read_text().strip() == ",".join([*COLUMNS, "busy_0"])
    assert record.validations == []
