"""Carries out `myelin train`: the text, the workers, the steps, the report.

`train_and_report` is the whole job; its only asynchronous part is `Training.run`. The report is
written when the workers are gone, whatever ended them, of the steps that were done.
"""

import asyncio
import math
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from myelin.cluster import Cluster
from myelin.command import report
from myelin.command.interrupt import Interrupt
from myelin.command.meter import Meter
from myelin.command.progress import Progress, progress_for
from myelin.command.record import Record, Sample
from myelin.command.settings import TrainSettings
from myelin.data import Batch, TextData
from myelin.entry import run
from myelin.errors import MyelinError, RunError
from myelin.trainer import StepResult, Trainer

DONE: Final = 0
FAILED: Final = 1
INTERRUPTED: Final = 130
TERMINATED: Final = 143

_TEMPERATURE: Final = 0.9  # a little below the model's own; with less it may write only spaces
_PROMPT_LINES: Final = 4
_PROMPT_WIDTH: Final = 200  # characters, where a text has no lines


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a training ended.

    Attributes:
        code: the command's exit code.
        trouble: what to tell the user, or "".
    """

    code: int
    trouble: str = ""


def train_and_report(settings: TrainSettings) -> int:
    """Train, write the run's folder, print where things are; return the exit code.

    Raises:
        MyelinError: settings or data cannot be used; nothing was started and nothing is left.
    """
    settings = settings.resolved()
    report.check_name(settings)
    with progress_for(sys.stdout) as progress:
        progress.say("reading the text")
        data = settings.data()
        folder = report.claim_folder(settings, datetime.now())
        report.write_settings(folder, settings, data)
        if data.report is not None:
            progress.note(data.report.summary())
        workers = list(range(settings.plan.workers))
        with Record(folder / report.LOSSES, workers) as record:
            outcome = carry_out(Training(settings, data, record, progress))
    if record.rows:
        report.write_results(folder, settings, data, record)
        _summarise(folder, settings, data, record)
    else:
        report.release_folder(folder)
    if outcome.trouble:
        print(f"myelin train: {outcome.trouble}", file=sys.stderr)
    return outcome.code


def carry_out(training: "Training") -> Outcome:
    """Run a training to its end, whatever that is."""
    try:
        run(training.run)
    except MyelinError as error:
        return Outcome(FAILED, str(error))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return Outcome(INTERRUPTED, "interrupted")
    except SystemExit:  # what a cluster raises after SIGTERM, once it has been left in order
        return Outcome(TERMINATED, "terminated")
    return Outcome(INTERRUPTED, "ended early") if training.ended_early else Outcome(DONE)


class Training:
    """The asynchronous part: workers, steps, validations and the sample.

    Args:
        settings: resolved ones.
        data: gives the batches.
        record: takes what is measured.
        progress: is told how far it is.
    """

    def __init__(
        self, settings: TrainSettings, data: TextData, record: Record, progress: Progress
    ) -> None:
        self._settings, self._data = settings, data
        self._record, self._progress = record, progress
        self._limit_s = None if settings.minutes is None else 60 * settings.minutes
        self._meter = Meter(steps=settings.steps, limit_s=self._limit_s)
        self._held_out: list[Batch] = list(data.validation_batches(settings.validation_batches))
        self._began_s = 0.0
        self.ended_early = False

    async def run(self) -> None:
        """Do it all.

        Raises:
            MyelinError: what failed; the steps before it are in the record.
            CancelledError: Ctrl-C before or after the steps, or a second one.
        """
        settings = self._settings
        self._progress.note(report.describe_model(settings, self._data))
        self._progress.say("starting")
        with Interrupt() as interrupt:
            async with Cluster(settings.workers or 0, threads=settings.threads) as cluster:
                trainer = await cluster.trainer(
                    settings.model(self._data.vocab_size),
                    plan=settings.plan,
                    optimizer=settings.optimizer,
                    seed=settings.seed,
                )
                with interrupt.patient(self._end_early):
                    await self._learn(trainer)
                self._progress.last(self._meter.status(self._record.rows[-1].seconds))
                await self._write_sample(trainer)

    async def _learn(self, trainer: Trainer) -> None:
        self._began_s = time.monotonic()
        results = trainer.fit(self._data, self._settings.steps)
        async with aclosing(results):
            async for result in results:
                self._take(result)
                over = self._over()
                if over or len(self._record.rows) % self._settings.validate_every == 0:
                    await self._validate(trainer)
                if over:
                    return

    def _take(self, result: StepResult) -> None:
        now_s = self._elapsed_s()
        self._record.step(result, now_s)
        self._meter.step(result, now_s)
        self._progress.show(lambda: self._meter.status(self._elapsed_s()))
        if not math.isfinite(result.loss):
            raise RunError(
                f"the loss of step {result.index + 1} is {result.loss}: the training has diverged; "
                f"use a lower --lr than {self._settings.lr:g}"
            )

    def _over(self) -> bool:
        if self.ended_early or len(self._record.rows) == self._settings.steps:
            return True
        return self._limit_s is not None and self._elapsed_s() >= self._limit_s

    async def _validate(self, trainer: Trainer) -> None:
        if not self._held_out:
            return
        results = await asyncio.gather(*(trainer.evaluate(batch) for batch in self._held_out))
        tokens = sum(result.tokens for result in results)
        loss = sum(result.loss * result.tokens for result in results) / tokens
        self._record.validated(loss)
        self._meter.validated(loss, self._elapsed_s())

    async def _write_sample(self, trainer: Trainer) -> None:
        if not self._settings.sample:
            return
        self._progress.say("writing a sample")
        prompt = self._prompt()
        ids = await trainer.generate(
            [int(token) for token in self._data.encode(prompt)],
            tokens=self._settings.sample,
            temperature=_TEMPERATURE,
            seed=self._settings.seed,
        )
        self._record.sample = Sample(prompt, self._data.decode(ids))

    def _prompt(self) -> str:
        """Return some whole lines of text that was held out, where there is such."""
        inputs, _ = self._held_out[0] if self._held_out else self._data.batch_at(0)
        text = self._data.decode(inputs[0])
        whole = "".join(text.splitlines(keepends=True)[1:-1][-_PROMPT_LINES:])
        return whole if whole.strip() else text[-_PROMPT_WIDTH:]

    def _end_early(self) -> None:
        self.ended_early = True
        self._progress.say("ending after this step; Ctrl-C again to end at once")

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s


def _summarise(folder: Path, settings: TrainSettings, data: TextData, record: Record) -> None:
    """Print what came of it, where things are, and the sample."""
    console = Console(highlight=False, soft_wrap=True)
    files = {
        report.CURVE: "training and validation loss",
        report.LOSSES: "every step",
        report.SETTINGS: "settings, versions, corpus",
        report.SAMPLE: "text that the model wrote",
    }
    console.print()
    console.print(Text(report.describe_losses(settings, data, record), style="bold"))
    console.print(Text(f"{report.describe_pace(record)}; {report.describe_busy(record)}"))
    console.print()
    width = max(len(str(folder / name)) for name in files)
    for name, what in files.items():
        if (folder / name).exists():
            console.print(Text.assemble(f"{folder / name}".ljust(width), (f"  {what}", "dim")))
    if record.sample is not None:
        console.print()
        console.print(Text(shown(record.sample.prompt), style="dim"), end="")
        console.print(Text(shown(record.sample.continuation), style="green"))


def shown(text: str) -> str:
    """Make a model's text safe for a terminal: only what can be seen, and line ends."""
    plain = text.expandtabs(4)
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in plain
    )
