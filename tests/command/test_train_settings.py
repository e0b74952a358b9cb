"""The settings of `myelin train`: checked when made, resolved, written."""

import dataclasses
import json
from pathlib import Path

import pytest

from myelin.command.options import flag_name, options_of
from myelin.command.settings import TrainSettings
from myelin.data.prepare import skipping
from myelin.errors import DataError, MyelinError
from myelin.models import GPT
from myelin.runtime.optimizer import AdamW, Schedule


def test_the_defaults_are_two_stages_on_two_workers_for_two_minutes() -> None:
    settings = TrainSettings().resolved(cores=2)
    assert (settings.pipeline, settings.workers, settings.threads) == (2, 2, 1)
    assert (settings.minutes, settings.steps) == (2.0, None)
    assert settings.plan.stage_workers == (0, 1)


def test_every_field_is_an_option_with_a_help_text() -> None:
    names = [field.name for field in dataclasses.fields(TrainSettings)]
    assert list(options_of(TrainSettings)) == names
    assert all(declared.help for declared in options_of(TrainSettings).values())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"validation": 1.0}, "--validation 1.0: use a number of at least 0 and below 1"),
        ({"vocabulary": "words"}, "--vocabulary words: use bytes or bpe"),
        ({"vocabulary": "bpe", "vocabulary_size": 255}, "--vocabulary-size 255: use"),
        ({"vocabulary_size": 300}, "--vocabulary-size 300 is for --vocabulary bpe; leave it out"),
        ({"layers": 0}, "--layers 0: use a whole number of at least 1"),
        ({"hidden": 0}, "--hidden 0: use"),
        ({"heads": 0}, "--heads 0: use"),
        ({"hidden": 100, "heads": 6}, "--hidden 100 is not a multiple of --heads 6: "),
        ({"hidden": 100, "heads": 6}, "use --heads 5 or --hidden 102"),
        ({"context": 0}, "--context 0: use"),
        ({"dropout": 1.0}, "--dropout 1.0: use a number of at least 0 and below 1"),
        ({"pipeline": 0}, "--pipeline 0: use"),
        ({"pipeline": 7}, "use --pipeline 6 or fewer, or more --layers"),
        ({"workers": -1}, "--workers -1: use"),
        ({"workers": 1}, "use --workers 2, or leave it out, or --placement 0,0"),
        ({"workers": 2, "pipeline": 3}, "or --placement 0,1,0"),
        ({"workers": 3}, "use --workers 2, or leave it out, or --pipeline 3"),
        ({"workers": 2, "placement": (0, 0)}, "--workers 2 for 2 stages on 1 worker: use"),
        ({"placement": (0,)}, "--placement 0 places 1 stage, and --pipeline 2: name"),
        ({"placement": (0, 2)}, "--placement 0,2: workers are numbered from 0 without gaps"),
        (
            {"cuts": (1, 2)},
            "--cuts 1,2 make 3 stages, and --pipeline 2: name the first block of every stage",
        ),
        ({"cuts": (9,)}, "--cuts 9 for 6 blocks: each"),
        ({"cuts": (9,)}, "cuts must rise from at least 1 to at most 5"),
        ({"microbatches": 0}, "--microbatches 0: use"),
        ({"limit": 0}, "--limit 0: use a whole number of at least 1, "),
        ({"limit": 0}, '"paper" (= pipeline), or leave it out'),
        ({"limit": "book"}, "--limit book: use"),
        ({"threads": 0}, "--threads 0: use"),
        ({"replicas": 0}, "--replicas 0: use"),
        (
            {"replicas": 2, "workers": 2},
            "2 copies of 2 stages on 4 workers: use --workers 4, or leave",
        ),
        (
            {"replicas": 5, "batch": 4},
            "--batch 4 rows for --replicas 5 copies: use --batch 5 or more",
        ),
        ({"checkpoint": 0}, "--checkpoint 0: use a whole number of at least 1"),
        ({"threads": 1025}, "--threads 1025: use a whole number of at least 1 and below 1025"),
        ({"batch": 0}, "--batch 0: use"),
        ({"steps": 0}, "--steps 0: use"),
        ({"minutes": 0.0}, "--minutes 0.0: use a number above 0"),
        ({"lr": 0.0}, "--lr 0.0: use a number above 0"),
        ({"lr": float("inf")}, "--lr inf: use a number above 0"),
        ({"betas": (0.9, 1.0)}, "--betas 0.9,1: use two numbers of at least 0 and below 1"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1: use"),
        ({"warmup": -1}, "--warmup -1: use"),
        ({"max_norm": 0.0}, "--max-norm 0.0: use a number above 0"),
        ({"schedule": "steep"}, "--schedule steep: use constant or linear or cosine"),
        ({"schedule": "cosine"}, "--schedule cosine needs --steps, more than the --warmup 20"),
        ({"schedule": "linear", "steps": 20}, "more than the --warmup 20; here it is 20"),
        ({"seed": -1}, "--seed -1: use a whole number of at least 0 and below 2**63"),
        ({"validate_every": 0}, "--validate-every 0: use"),
        ({"validation_batches": 0}, "--validation-batches 0: use"),
        ({"name": "a/b"}, "--name 'a/b' is no name for a folder: use one without slashes"),
        ({"name": ""}, "--name '' is no name"),
        ({"name": ".."}, "--name '..' is no name"),
        ({"name": "a\nb"}, "is no name for a folder"),
        ({"sample": -1}, "--sample -1: use"),
    ],
)
def test_a_wrong_value_is_refused_with_its_option_and_a_remedy(
    wrong: dict[str, object], said: str
) -> None:
    with pytest.raises(MyelinError) as caught:
        TrainSettings(**wrong)  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_every_option_can_be_parsed() -> None:
    for name, declared in options_of(TrainSettings).items():
        assert callable(declared.parse), name  # a field with the name of a parser would hide it


def test_every_numeric_option_has_a_range() -> None:
    for name, declared in options_of(TrainSettings).items():
        if declared.parse in (int, float):
            bounds = (declared.at_least, declared.above)
            assert any(bound is not None for bound in bounds), flag_name(name)


def test_workers_follow_the_placement() -> None:
    assert TrainSettings(pipeline=4).resolved().workers == 4
    assert TrainSettings(pipeline=4, placement=(0, 1, 0, 1)).resolved().workers == 2
    assert TrainSettings(pipeline=4, placement=(0, 1, 0, 1), workers=2).resolved().workers == 2


def test_no_worker_process_stays_none() -> None:
    assert TrainSettings(workers=0).resolved().workers == 0


def test_threads_are_a_share_of_the_cores_within_reason() -> None:
    assert TrainSettings().resolved(cores=6).threads == 3
    assert TrainSettings().resolved(cores=1).threads == 1
    assert TrainSettings().resolved(cores=128).threads == 4
    assert TrainSettings(threads=7).resolved(cores=2).threads == 7


def test_a_number_of_steps_lifts_the_limit_of_time_unless_both_are_given() -> None:
    assert TrainSettings(steps=5).resolved().minutes is None
    assert TrainSettings(steps=5, minutes=0.5).resolved().minutes == 0.5


def test_resolving_twice_changes_nothing() -> None:
    once = TrainSettings(pipeline=3).resolved(cores=4)
    assert once.resolved(cores=4) == once


def test_model_plan_and_optimizer_are_those_that_were_asked_for() -> None:
    settings = TrainSettings(
        layers=3,
        hidden=12,
        heads=2,
        context=7,
        untied=True,
        dropout=0.25,
        pipeline=3,
        cuts=(1, 4),
        microbatches=5,
        limit="paper",
        lr=0.5,
        betas=(0.5, 0.75),
        weight_decay=0.125,
        warmup=3,
        schedule="cosine",
        steps=9,
        max_norm=2.0,
        replicas=2,
        checkpoint="paper",
    )
    assert settings.model(300) == GPT(3, 12, 2, 300, 7, tied=False, dropout=0.25)
    assert settings.optimizer == AdamW(
        lr=0.5,
        betas=(0.5, 0.75),
        weight_decay=0.125,
        max_norm=2.0,
        schedule=Schedule("cosine", warmup=3, steps=9),
    )
    plan = settings.plan
    assert (plan.pipeline, plan.microbatches, plan.limit, plan.cuts) == (3, 5, 3, (1, 4))
    assert (plan.data, plan.checkpoint, settings.resolved().workers) == (2, "paper", 6)


def test_plain_settings_survive_json() -> None:
    plain = TrainSettings(placement=(0, 0), paths=("a", "b")).plain()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["placement"] == [0, 0]
    assert plain["paths"] == ["a", "b"]


def test_data_are_read_as_the_settings_say(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("alpha " * 50)
    (tmp_path / "b.md").write_text("beta " * 50)
    settings = TrainSettings(
        paths=(str(tmp_path),), files=("*.txt",), context=8, batch=3, validation=0.1
    )
    data = settings.data()
    assert data.report is not None
    assert (data.report.files, data.tokens, data.context, data.batch_size) == (1, 301, 8, 3)


def test_what_the_data_refuse_is_said_in_options(tmp_path: Path) -> None:
    path = tmp_path / "lang=en.txt"
    path.write_text("alpha " * 10)
    with pytest.raises(DataError) as caught:
        TrainSettings(paths=(str(path),), context=40, validation=0.2).data()
    assert "holding out 41 for --validation 0.2 leaves" in str(caught.value)
    assert "a context below 30, or --validation 0" in str(caught.value)
    path.write_bytes(b"\0")
    with pytest.raises(DataError, match=r"lang=en\.txt is no text but binary"):
        TrainSettings(paths=(str(path),)).data()


def test_files_that_are_left_out_are_not_told_a_second_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.txt").write_text("alpha " * 50)
    (tmp_path / "b.txt").write_bytes(b"\0")
    data = TrainSettings(paths=(str(tmp_path),), context=8).data()
    assert data.report is not None
    assert data.report.skipped() == "1 binary"
    assert not caplog.records
    assert not skipping.disabled


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        TrainSettings(paths=(str(tmp_path / "nowhere"),)).data()


@pytest.mark.slow
def test_without_a_path_the_standard_library_is_read() -> None:
    data = TrainSettings().data()
    assert data.report is not None
    assert data.report.files > 100
    text = data.decode(data.batch_at(0)[0].flatten())
    assert "self" in text or "def " in text or "import" in text
