"""The folder of a run: its name, and the files in it."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from myelin.command import report
from myelin.command.options import SettingsError
from myelin.command.record import Record, Sample
from myelin.command.settings import TrainSettings
from myelin.data import TextData
from myelin.trainer import StepResult

NOW = datetime(2026, 2, 3, 4, 5, 6)


def small(tmp_path: Path, **changes: object) -> TrainSettings:
    text = tmp_path / "corpus.txt"
    text.write_text("the quick brown fox\n" * 40)
    known: dict[str, object] = {
        "paths": (str(text),),
        "out": str(tmp_path / "runs"),
        "context": 8,
        "hidden": 8,
        "heads": 2,
        "layers": 2,
    }
    return TrainSettings(**known | changes).resolved(cores=2)  # type: ignore[arg-type]


def recorded(folder: Path, losses: list[float], validations: dict[int, float]) -> Record:
    with Record(folder / "losses.csv", [0, 1]) as record:
        for index, loss in enumerate(losses):
            busy = {0: 0.9, 1: 0.5}
            record.step(StepResult(index, loss, 1000, 0.5, 0.3, busy), (index + 1) * 1.0)
            if index + 1 in validations:
                record.validated(validations[index + 1])
    return record


def test_a_run_is_named_by_date_and_time_and_numbered_if_that_is_taken(tmp_path: Path) -> None:
    settings = small(tmp_path)
    found = [report.claim_folder(settings, NOW).name for _ in range(3)]
    assert found == ["2026-02-03_04-05-06", "2026-02-03_04-05-06_2", "2026-02-03_04-05-06_3"]


def test_a_run_has_the_name_that_was_asked_for(tmp_path: Path) -> None:
    folder = report.claim_folder(small(tmp_path, name="first"), NOW)
    assert folder == tmp_path / "runs" / "first"
    assert folder.is_dir()


def test_a_run_of_the_same_name_is_never_overwritten(tmp_path: Path) -> None:
    settings = small(tmp_path, name="first")
    report.check_name(settings)
    (report.claim_folder(settings, NOW) / "precious").touch()
    for refuse in (report.check_name, lambda again: report.claim_folder(again, NOW)):
        with pytest.raises(SettingsError, match=r"first exists.*choose another --name"):
            refuse(settings)
    assert (tmp_path / "runs" / "first" / "precious").exists()


def test_where_no_folder_can_be_made_the_error_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in ("file", "file/below"):
        settings = small(tmp_path, out=str(tmp_path / out))
        with pytest.raises(SettingsError, match=r"--out .*name another"):
            report.claim_folder(settings, NOW)


def test_a_released_folder_is_gone_and_its_name_free(tmp_path: Path) -> None:
    settings = small(tmp_path, name="first")
    folder = report.claim_folder(settings, NOW)
    report.write_settings(folder, settings, settings.data())
    report.release_folder(folder)
    report.check_name(settings)


def test_the_settings_tell_all_that_decides_the_numbers(tmp_path: Path) -> None:
    settings = small(tmp_path)
    data = settings.data()
    report.write_settings(tmp_path, settings, data)
    found = json.loads((tmp_path / "settings.json").read_text())
    assert found["settings"] == settings.plain()
    assert found["settings"]["workers"] == 2
    assert found["parameters"] == settings.model(256).parameters
    assert found["vocabulary"] == 256
    assert found["corpus"] == {
        "paths": [str(tmp_path / "corpus.txt")],
        "files": 1,
        "bytes": 800,
        "empty": 0,
        "binary": 0,
        "not_utf8": 0,
        "unreadable": 0,
        "tokens": 800,
        "rows_of_an_epoch": data.windows,
    }
    assert {"myelin", "python", "torch", "pyzmq"} <= set(found["versions"])
    assert found["machine"]["cores"] >= 1


@pytest.mark.slow
def test_the_results_are_a_picture_and_a_sample(tmp_path: Path) -> None:
    settings = small(tmp_path)
    record = recorded(tmp_path, [3.0, 2.0], {2: 2.5})
    record.sample = Sample("the quick\n", "brown f\ufffd\u00f6x")
    report.write_results(tmp_path, settings, settings.data(), record)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sample.txt").read_text(encoding="utf-8") == (
        "--- prompt, from text that was held out\nthe quick\n\n"
        "--- what the model wrote\nbrown f\ufffd\u00f6x\n"
    )


@pytest.mark.slow
def test_without_a_sample_there_is_no_file_for_it(tmp_path: Path) -> None:
    settings = small(tmp_path)
    report.write_results(tmp_path, settings, settings.data(), recorded(tmp_path, [3.0], {}))
    assert not (tmp_path / "sample.txt").exists()


def test_the_summary_says_how_good_how_much_how_fast_and_how_busy(tmp_path: Path) -> None:
    settings = small(tmp_path)
    data = settings.data()
    record = recorded(tmp_path, [3.0, 2.0], {2: 2.5})
    assert report.describe_losses(settings, data, record) == (
        "loss 2.500 nats a byte (mean of the last 2 steps), validation 2.500"
    )
    assert report.describe_pace(record) == "2 steps and 2 k tokens in 0:02: 1,000 tokens/s"
    assert report.describe_busy(record) == "busy: worker 0 90%, worker 1 50%"
    assert report.describe_model(settings, data) == (
        "3.87 k parameters (2 layers of 8), 2 stages on 2 workers"
    )


def test_the_summary_says_when_all_runs_in_one_process(tmp_path: Path) -> None:
    settings = small(tmp_path, workers=0, pipeline=1)
    assert report.describe_model(settings, settings.data()).endswith("1 stage in this process")


def test_one_step_without_validation_is_described(tmp_path: Path) -> None:
    settings = small(tmp_path)
    record = recorded(tmp_path, [3.0], {})
    assert report.describe_losses(settings, settings.data(), record) == "loss 3.000 nats a byte"
    assert report.describe_pace(record) == "1 step and 1 k tokens in 0:01: 1,000 tokens/s"


def test_losses_of_byte_pairs_are_given_per_byte_as_well(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    settings = small(tmp_path, vocabulary="bpe", vocabulary_size=270)
    data: TextData = settings.data()
    assert data.report is not None
    record = recorded(tmp_path, [3.0], {1: 2.0})
    per_byte = 2.0 * data.tokens / data.report.bytes
    assert per_byte < 2.0
    assert report.describe_losses(settings, data, record) == (
        f"loss 3.000 nats a token, validation 2.000 ({per_byte:.3f} nats a byte)"
    )
