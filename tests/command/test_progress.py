"""What is shown of a training, on a terminal and elsewhere."""

import io
from dataclasses import replace
from functools import partial

import pytest
from rich.console import Console

from myelin.command.meter import Status
from myelin.command.progress import (
    LineProgress,
    LiveProgress,
    clock,
    line,
    panel,
    progress_for,
)

STATUS = Status(
    steps=1234,
    loss=2.3456,
    validation=2.5,
    tokens_per_s=20123.4,
    busy={0: 0.914, 1: 0.5},
    elapsed_s=61.0,
    left_s=59.0,
    share=0.5,
    validated=1200,
)
FIRST = Status(0, None, None, 0.0, {}, 0.0, None, 0.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Seconds:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def drawn(renderable: object, *, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_line_says_everything() -> None:
    assert line(STATUS) == (
        "step 1,234  loss 2.346  validation 2.500 (step 1,200)  20,123 tokens/s  "
        "busy w0 91% w1 50%  1:01 gone  0:59 left"
    )


def test_a_line_leaves_out_what_is_not_known() -> None:
    assert line(FIRST) == "step     0  loss -  0 tokens/s  busy  0:00 gone"


def test_the_panel_says_everything() -> None:
    text = drawn(panel(STATUS))
    for part in ("1:01", "0:59 left", "step 1,234", "loss 2.346", "validation 2.500"):
        assert part in text
    assert "20,123 tokens/s" in text
    assert "worker 0 ███████████░  91%" in text
    assert "worker 1 ██████░░░░░░  50%" in text


def test_the_panel_can_be_drawn_before_anything_is_known() -> None:
    assert "loss -" in drawn(panel(FIRST))


@pytest.mark.parametrize("width", [20, 60, 200])
def test_the_panel_can_be_drawn_at_any_width(width: int) -> None:
    assert all(len(row) <= width for row in drawn(panel(STATUS), width=width).splitlines())


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3599, "59:59"), (3600, "1:00:00")],
)
def test_times_are_written_as_a_clock_shows_them(seconds: float, written: str) -> None:
    assert clock(seconds) == written


def test_lines_come_at_the_first_step_then_every_few_seconds_then_at_the_end() -> None:
    file, now = io.StringIO(), Seconds()
    with LineProgress(file, every_s=5.0, clock=now) as progress:
        progress.note("facts")
        progress.say("starting")
        for second in (0.0, 1.0, 4.9, 5.0, 6.0, 9.9, 10.0):
            now.now = second
            progress.show(lambda: STATUS)
        progress.last(STATUS)
    later = [line(replace(STATUS, validation=None))] * 3
    assert file.getvalue().splitlines() == ["facts", "starting", line(STATUS), *later]


def test_a_validation_stands_only_in_the_first_line_after_it_was_measured() -> None:
    file = io.StringIO()
    progress = LineProgress(file, every_s=0.0)
    for validated in (None, 50, 50, 100, 100):
        loss = None if validated is None else 2.5
        status = replace(STATUS, validation=loss, validated=validated)
        progress.show(partial(replace, status))
    progress.last(replace(STATUS, validated=150))
    said = [text.split("validation ")[1:] for text in file.getvalue().splitlines()]
    steps = [part[0].split("  ")[0] if part else "" for part in said]
    assert steps == ["", "2.500 (step 50)", "", "2.500 (step 100)", "", "2.500 (step 150)"]


def test_a_status_is_not_worked_out_for_nothing() -> None:
    file, now = io.StringIO(), Seconds()
    asked = []

    def status() -> Status:
        asked.append(now.now)
        return STATUS

    progress = LineProgress(file, every_s=5.0, clock=now)
    for _ in range(100):
        progress.show(status)
    assert asked == [0.0]


def test_plain_lines_hold_no_control_characters() -> None:
    file = io.StringIO()
    with LineProgress(file) as progress:
        progress.show(lambda: STATUS)
    assert all(c.isprintable() or c == "\n" for c in file.getvalue())


def test_a_terminal_gets_the_live_panel_and_a_pipe_gets_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(progress_for(Terminal()), LiveProgress)
    assert isinstance(progress_for(io.StringIO()), LineProgress)


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress_for(Terminal()), LineProgress)


def test_the_live_panel_keeps_its_last_figures_and_its_notes_on_the_screen() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with LiveProgress(console) as progress:
        progress.note("facts")
        progress.say("starting")
        progress.show(lambda: FIRST)
        progress.last(STATUS)
        progress.say("writing a sample")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "facts" in shown
    last = shown[shown.rindex("step ") :]
    assert "step 1,234" in last
    assert "writing" not in last


def test_the_live_panel_ends_with_nothing_when_nothing_was_done() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with LiveProgress(console) as progress:
        progress.say("starting")
    assert isinstance(console.file, io.StringIO)
    assert "step" not in console.file.getvalue()
