"""`myelin train` from end to end, on a tiny corpus and a tiny model."""

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from myelin.command.main import main
from myelin.command.train import shown

FILES = ["loss.png", "losses.csv", "sample.txt", "settings.json"]
TINY = [
    *("--layers=2", "--hidden=16", "--heads=2", "--context=16", "--lr=3e-3"),
    *("--batch=8", "--microbatches=4", "--validate-every=2", "--validation-batches=2"),
    "--sample=12",
]

# A shell may have started the tests with Ctrl-C ignored, which children inherit.
CHILD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from myelin.command.main import main
sys.exit(main())
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus"
    path.mkdir()
    for name in ("a", "b"):
        (path / f"{name}.txt").write_text("".join(f"{name} counts {n}\n" for n in range(300)))
    (path / "empty.txt").touch()
    return path


def arguments(corpus: Path, *more: str, name: str = "run") -> list[str]:
    return ["train", str(corpus), *TINY, f"--out={corpus.parent / 'runs'}", f"--name={name}", *more]


def losses(folder: Path) -> list[dict[str, str]]:
    with (folder / "losses.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def check_run(folder: Path, *, steps: int) -> None:
    """Check that all files of a run are there and agree."""
    assert sorted(path.name for path in folder.iterdir()) == FILES
    rows = losses(folder)
    assert [row["step"] for row in rows] == [str(n + 1) for n in range(steps)]
    assert rows[-1]["validation"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "counts" in (folder / "sample.txt").read_text(encoding="utf-8")
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["corpus"]["files"] == 2
    assert settings["corpus"]["empty"] == 1


def descendants(pid: int) -> set[int]:
    """Return the processes that a process has started and that are still there."""
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


@contextmanager
def started(argv: list[str]) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_to(process: "subprocess.Popen[str]", beginning: str) -> str:
    """Read the process's output up to a line that begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return line
    raise AssertionError(f"no line began with {beginning!r}")


@pytest.mark.slow
def test_a_run_in_one_process_leaves_all_its_files_and_says_where(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(corpus, "--workers=0", "--steps=5")) == 0
    folder = corpus.parent / "runs" / "run"
    check_run(folder, steps=5)
    validated = [row["step"] for row in losses(folder) if row["validation"]]
    assert validated == ["2", "4", "5"]
    out = capsys.readouterr().out
    assert "2 files, " in out
    assert "skipped 1 empty" in out
    assert "2 stages in this process" in out
    assert "5 steps and 640 tokens in 0:" in out
    assert "nats a byte (mean of the last 5 steps), validation" in out
    assert all(str(folder / name) in out for name in FILES)
    assert (folder / "sample.txt").read_text(encoding="utf-8").splitlines()[1] in out


@pytest.mark.slow
def test_output_that_is_no_terminal_is_plain_lines(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(corpus, "--workers=0", "--steps=3")) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    assert "\r" not in out
    lines = out.splitlines()
    assert lines[0] == "reading the text"
    steps = [line for line in lines if line.startswith("step ")]
    assert steps[0].startswith("step     1  loss ")
    assert steps[-1].startswith("step     3  loss ")
    assert all("tokens/s  busy" in line for line in steps)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses_and_the_same_sample(corpus: Path) -> None:
    for name in ("one", "two"):
        assert main(arguments(corpus, "--workers=0", "--threads=1", "--steps=4", name=name)) == 0
    one, two = (corpus.parent / "runs" / name for name in ("one", "two"))
    assert [row["loss"] for row in losses(one)] == [row["loss"] for row in losses(two)]
    assert (one / "sample.txt").read_bytes() == (two / "sample.txt").read_bytes()


@pytest.mark.slow
def test_the_loss_falls(corpus: Path) -> None:
    assert main(arguments(corpus, "--workers=0", "--steps=60", "--sample=0")) == 0
    rows = losses(corpus.parent / "runs" / "run")
    assert float(rows[0]["loss"]) > 5
    assert float(rows[-1]["validation"]) < 3.2
    assert not (corpus.parent / "runs" / "run" / "sample.txt").exists()


@pytest.mark.slow
def test_time_ends_a_run_that_has_no_number_of_steps(corpus: Path) -> None:
    assert main(arguments(corpus, "--workers=0", "--minutes=0.001")) == 0
    rows = losses(corpus.parent / "runs" / "run")
    assert rows[-1]["validation"]
    assert all(float(row["seconds"]) <= 0.06 for row in rows[:-1])


@pytest.mark.slow
def test_without_validation_the_prompt_is_text_that_was_learnt(corpus: Path) -> None:
    assert main(arguments(corpus, "--workers=0", "--steps=2", "--validation=0")) == 0
    folder = corpus.parent / "runs" / "run"
    assert all(not row["validation"] for row in losses(folder))
    assert "counts" in (folder / "sample.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_byte_pairs_are_learnt_and_kept_for_the_next_time(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    more = ["--vocabulary=bpe", "--vocabulary-size=300", f"--cache={corpus.parent / 'cache'}"]
    for name in ("one", "two"):
        assert main(arguments(corpus, "--workers=0", "--steps=2", *more, name=name)) == 0
    settings = json.loads((corpus.parent / "runs" / "two" / "settings.json").read_text())
    assert settings["vocabulary"] == 300
    assert "nats a token" in capsys.readouterr().out
    assert len(list((corpus.parent / "cache").glob("*-bpe300.json"))) == 1


@pytest.mark.slow
def test_a_training_that_diverges_ends_with_1_and_a_report_and_a_remedy(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = arguments(corpus, "--workers=0", "--steps=50", "--lr=1e30")
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert err.startswith("myelin train: the loss of step ")
    assert "has diverged; use a lower --lr than 1e+30" in err
    assert "Traceback" not in err
    folder = corpus.parent / "runs" / "run"
    assert 1 <= len(losses(folder)) < 50
    assert str(folder / "loss.png") in out


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_on_worker_processes_leaves_all_its_files(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(corpus, "--steps=5", "--workers=2", "--threads=1")) == 0
    folder = corpus.parent / "runs" / "run"
    check_run(folder, steps=5)
    assert {"busy_0", "busy_1"} <= set(losses(folder)[0])
    assert "2 stages on 2 workers" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.processes
def test_processes_and_threads_give_the_same_losses(corpus: Path) -> None:
    for name, workers in (("processes", "2"), ("threads", "0")):
        more = (f"--workers={workers}", "--threads=1", "--steps=4")
        assert main(arguments(corpus, *more, name=name)) == 0
    runs = corpus.parent / "runs"
    one, two = (
        [(row["loss"], row["validation"]) for row in losses(runs / name)]
        for name in ("processes", "threads")
    )
    assert one == two


@pytest.mark.slow
@pytest.mark.processes
def test_ctrl_c_ends_training_early_with_130_a_whole_report_and_no_process_left(
    corpus: Path,
) -> None:
    with started(arguments(corpus, "--minutes=10")) as process:
        read_to(process, "step ")
        workers = descendants(process.pid)
        assert len(workers) >= 2
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "ending after this step; Ctrl-C again to end at once" in out
    assert err == "myelin train: ended early\n"
    folder = corpus.parent / "runs" / "run"
    check_run(folder, steps=len(losses(folder)))
    assert all(str(folder / name) in out for name in FILES)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


@pytest.mark.slow
@pytest.mark.processes
def test_a_second_ctrl_c_ends_at_once_and_still_reports_the_steps(corpus: Path) -> None:
    # Every step is validated on all there is, so that the second one meets something to end.
    slow = ["--validate-every=1", "--validation-batches=100000", "--validation=0.9"]
    with started(arguments(corpus, "--minutes=10", *slow)) as process:
        read_to(process, "step ")
        workers = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        read_to(process, "ending after this step")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "myelin train: interrupted\n"
    folder = corpus.parent / "runs" / "run"
    assert len(losses(folder)) >= 1
    assert (folder / "loss.png").exists()
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


@pytest.mark.slow
@pytest.mark.processes
def test_ctrl_c_before_the_first_step_leaves_no_folder(corpus: Path) -> None:
    with started(arguments(corpus, "--minutes=10")) as process:
        read_to(process, "starting")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "myelin train: interrupted\n"
    assert list((corpus.parent / "runs").iterdir()) == []


@pytest.mark.slow
@pytest.mark.processes
def test_sigterm_ends_with_143_and_a_report(corpus: Path) -> None:
    with started(arguments(corpus, "--minutes=10")) as process:
        read_to(process, "step ")
        workers = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert err == "myelin train: terminated\n"
    folder = corpus.parent / "runs" / "run"
    assert len(losses(folder)) >= 1
    assert (folder / "loss.png").exists()
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


@pytest.mark.slow
@pytest.mark.processes
def test_a_worker_that_is_killed_ends_the_run_with_1_and_a_report(corpus: Path) -> None:
    with started(arguments(corpus, "--minutes=10")) as process:
        read_to(process, "step ")
        workers = descendants(process.pid)
        os.kill(min(workers), signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "myelin train: " in err
    assert "SIGKILL" in err
    assert "Traceback" not in err
    assert (corpus.parent / "runs" / "run" / "loss.png").exists()
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_a_text_of_any_bytes_is_safe_on_a_terminal() -> None:
    assert shown("a\x1b[31m\tb\r\nc\x00\u2028") == "a\ufffd[31m  b\ufffd\nc\ufffd\ufffd"
