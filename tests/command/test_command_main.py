"""The command's options, help, errors and exit codes, before anything is started."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

import myelin
from myelin.command.main import main, settings_of
from myelin.command.settings import TrainSettings


def help_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*argv, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return what is printed by a command that refuses to start."""
    assert main(["train", *argv]) == 2
    return capsys.readouterr().err


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("the quick brown fox\n" * 40)
    return path


def test_the_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "train a small GPT on text" in help_of(capsys)


def test_the_help_of_train_shows_groups_defaults_and_examples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = help_of(capsys, "train")
    assert text.startswith("usage: myelin train [PATH ...] [options]\n")
    for group in ("data:", "model (a GPT):", "plan:", "training:", "output:", "examples:"):
        assert f"\n{group}\n" in text
    for option in ("--pipeline N", "--workers N", "--placement W,W,...", "--minutes X", "--untied"):
        assert f"  {option} " in text
    assert "stages that the model is cut into (default: 2)" in text
    assert "None" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"myelin {myelin.__version__}\n"


def test_without_a_command_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "usage: myelin" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["--steps", "few"], ["--no-such-option"], ["--pipe", "2"], ["--vocabulary", "words"]]
)
def test_what_cannot_be_parsed_ends_with_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", *argv])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: myelin")
    assert argv[0] in error


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--stepz", "3"], "there is no option --stepz; did you mean --steps?"),
        (["--stepz=3"], "there is no option --stepz; did you mean --steps?"),
        (["--batch-size", "3"], "there is no option --batch-size; did you mean --batch?"),
        (["--xyzzy"], "there is no option --xyzzy; see myelin train --help"),
        (["a", "--steps", "3", "b"], "b: give all paths one after the other, before the options"),
    ],
)
def test_an_unknown_option_shows_the_usage_of_train_and_the_nearest_option(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", *argv])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"usage: myelin train [PATH ...] [options]\nmyelin train: error: {said}\n"
    )


@pytest.mark.slow
def test_the_package_can_be_run_as_a_module() -> None:
    command = [sys.executable, "-m", "myelin", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"myelin {myelin.__version__}\n"


def test_what_argparse_reads_becomes_settings() -> None:
    arguments = vars(argparse.Namespace(**TrainSettings().plain()))
    assert settings_of(arguments | {"paths": ["a", "b"], "betas": (0.5, 0.6)}) == TrainSettings(
        paths=("a", "b"), betas=(0.5, 0.6)
    )


def test_bad_settings_are_told_in_one_line_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert error_of(capsys, "--layers", "0") == (
        "myelin train: --layers 0: use a whole number of at least 1\n"
    )
    assert "use --heads 5 or --hidden 102" in error_of(capsys, "--hidden", "100", "--heads", "6")
    assert "--workers 3" in error_of(capsys, "--workers", "3")


def test_a_path_that_does_not_exist_is_told_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    error = error_of(capsys, str(tmp_path / "nowhere"), "--out", str(out))
    assert error == (
        f"myelin train: {tmp_path / 'nowhere'} does not exist; "
        "give the path of a text file or a folder (a text itself must be in a file)\n"
    )
    assert not out.exists()


def test_a_text_shorter_than_a_row_is_told_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    error = error_of(capsys, str(corpus), "--context", "5000", "--out", str(out))
    assert "the corpus has 800 tokens" in error
    assert not out.exists()


def test_a_run_that_exists_is_not_begun_again(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    error = error_of(capsys, str(corpus), "--out", str(tmp_path / "runs"), "--name", "first")
    assert "exists" in error
    assert "choose another --name" in error
    assert list((tmp_path / "runs" / "first").iterdir()) == []
