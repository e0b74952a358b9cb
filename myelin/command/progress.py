"""Shows how a training gets on: a live panel on a terminal, a line every few seconds elsewhere."""

import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Final, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from myelin.command.meter import Status

LINE_EVERY_S: Final = 5.0
_REFRESHES_PER_S: Final = 8
_BAR_WIDTH: Final = 12


class Progress(Protocol):
    """What a training tells of itself; used as `with progress:`."""

    def __enter__(self) -> "Progress": ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def say(self, text: str) -> None:
        """Tell what is being done now."""
        ...

    def note(self, text: str) -> None:
        """Tell a fact that is worth keeping on the screen."""
        ...

    def show(self, status: Callable[[], Status]) -> None:
        """Tell that there is something new; `status` may be called at any time, in any thread."""
        ...

    def last(self, status: Status) -> None:
        """Show the last figures of the training."""
        ...


def progress_for(file: TextIO) -> Progress:
    """Return what suits `file`: live on a terminal that can move its cursor, lines otherwise."""
    console = Console(file=file, highlight=False)
    if file.isatty() and not console.is_dumb_terminal:
        return LiveProgress(console)
    return LineProgress(file)


class LineProgress:
    """Plain lines: one for the first step, then one every few seconds, and one for the last.

    Args:
        file: where they go; flushed after every line.
        every_s: how often.
        clock: for tests.
    """

    def __init__(
        self,
        file: TextIO,
        *,
        every_s: float = LINE_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file, self._every_s, self._clock = file, every_s, clock
        self._shown_s: float | None = None
        self._told: int | None = None  # the step whose validation has been printed

    def __enter__(self) -> "LineProgress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.flush()

    def say(self, text: str) -> None:
        """Print it."""
        print(text, file=self._file, flush=True)

    def note(self, text: str) -> None:
        """Print it."""
        self.say(text)

    def show(self, status: Callable[[], Status]) -> None:
        """Print a line if the last one was long enough ago."""
        now = self._clock()
        if self._shown_s is None or now - self._shown_s >= self._every_s:
            self._shown_s = now
            self._print(status())

    def last(self, status: Status) -> None:
        """Print a line."""
        self._print(status)

    def _print(self, status: Status) -> None:
        """Print a line; a validation stands only in the first one after it was measured."""
        if status.validated == self._told:
            status = replace(status, validation=None)
        self._told = status.validated
        self.say(line(status))


class LiveProgress:
    """A panel of three lines that is drawn again and again in place.

    Args:
        console: a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._doing = ""
        self._status: Callable[[], Status] | None = None
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(
            get_renderable=self._panel, console=console, refresh_per_second=_REFRESHES_PER_S
        )

    def __enter__(self) -> "LiveProgress":
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._doing = ""
        self._live.stop()

    def say(self, text: str) -> None:
        """Show it beside the spinner."""
        self._doing = text

    def note(self, text: str) -> None:
        """Print it above the panel."""
        self._live.console.print(Text(text))

    def show(self, status: Callable[[], Status]) -> None:
        """Show these figures from now on."""
        self._doing, self._status = "", status

    def last(self, status: Status) -> None:
        """Keep these figures on the screen."""
        self._status = lambda: status

    def _panel(self) -> RenderableType:
        parts: list[RenderableType] = [] if self._status is None else [panel(self._status())]
        if self._doing:
            self._spinner.update(text=Text(self._doing, style="dim"))
            parts.append(self._spinner)
        return Group(*parts)


def line(status: Status) -> str:
    """Say everything in one line of plain text."""
    parts = [f"step {status.steps:>5,}", f"loss {_loss(status.loss)}"]
    if status.validation is not None:
        of_step = "" if status.validated is None else f" (step {status.validated:,})"
        parts.append(f"validation {_loss(status.validation)}{of_step}")
    parts.append(f"{status.tokens_per_s:,.0f} tokens/s")
    parts.append(" ".join(["busy", *(f"w{w} {share:.0%}" for w, share in status.busy.items())]))
    parts.append(f"{clock(status.elapsed_s)} gone")
    if status.left_s is not None:
        parts.append(f"{clock(status.left_s)} left")
    return "  ".join(parts)


def panel(status: Status) -> RenderableType:
    """Show everything in three lines."""
    rows = Table.grid(padding=(0, 2))
    left = "" if status.left_s is None else f"{clock(status.left_s)} left"
    rows.add_row(
        Text.assemble(("step ", "dim"), f"{status.steps:,}"),
        Text.assemble(("loss ", "dim"), (_loss(status.loss), "bold green")),
        Text.assemble(("validation ", "dim"), (_loss(status.validation), "bold magenta")),
        Text.assemble(f"{status.tokens_per_s:,.0f}", (" tokens/s", "dim")),
    )
    workers = Text()
    for worker, share in status.busy.items():
        filled = round(min(1.0, share) * _BAR_WIDTH)
        workers.append(f"worker {worker} ", "dim")
        workers.append("█" * filled, "cyan").append("░" * (_BAR_WIDTH - filled), "dim")
        workers.append(f" {share:4.0%}   ")
    bar = ProgressBar(
        total=1.0, completed=status.share, width=48, complete_style="cyan", finished_style="green"
    )
    time_row = Table.grid(padding=(0, 2))
    time_row.add_row(clock(status.elapsed_s), bar, left)
    return Group(time_row, rows, workers)


def clock(seconds: float) -> str:
    """Write a time as minutes and seconds, with hours where there are any."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"
