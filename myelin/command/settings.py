"""The settings of one `myelin train`: typed, checked when made, and written as JSON.

Every field is also an option of the command. What is None is decided by `resolved`, from the other
settings and the machine. Nothing here starts anything.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Literal

import myelin.data
from myelin.command.options import (
    SettingsError,
    as_plain,
    check_ranges,
    in_options,
    number_or_paper,
    option,
    patterns,
    two_numbers,
    whole_numbers,
)
from myelin.data import PYTHON_SOURCES, Selection, TextData
from myelin.data.prepare import skipping
from myelin.errors import DataError, ModelError, PlanError
from myelin.models import GPT
from myelin.plan import Plan
from myelin.runtime.optimizer import AdamW, Schedule

DEFAULT_MINUTES: Final = 2.0  # where no number of steps is asked for
MOST_THREADS: Final = 4  # by default: a model that fits the default run gains nothing from more

_SAME: Final = (
    *("layers", "hidden", "heads", "context", "dropout"),
    *("pipeline", "placement", "cuts", "microbatches", "checkpoint"),
    *("validation", "vocabulary_size", "vocabulary", "cache"),
)
_OPTIONS: Final = {name: name for name in _SAME} | {
    "pipeline_limit": "limit",
    "batch_size": "batch",
    "data": "replicas",
}
"""For each argument of GPT, Plan and `myelin.data.text` the field of its option."""
_DATA = "data"
_MODEL = "model (a GPT)"
_PLAN = "plan"
_TRAINING = "training"
_OUTPUT = "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What one training run is told.

    Raises:
        SettingsError: a value is out of range or does not fit another; the text names the option.
        PlanError: the plan's parts do not fit each other.
        ModelError: the model's parts do not fit each other.
    """

    paths: tuple[str, ...] = option(
        (),
        _DATA,
        "text files and folders to learn from (default: the sources of this Python's standard "
        "library, so nothing is downloaded)",
        metavar="PATH",
        positional=True,
    )
    files: tuple[str, ...] | None = option(
        None,
        _DATA,
        'which files of the folders: patterns such as "*.py,*.md" (default: all that hold text)',
        parse=patterns,
        metavar="PATTERNS",
    )
    vocabulary: Literal["bytes", "bpe"] = option(
        "bytes",
        _DATA,
        "a token for each byte, or byte pairs learnt from the text",
        choices=("bytes", "bpe"),
    )
    vocabulary_size: int | None = option(
        None,
        _DATA,
        "tokens of the bpe vocabulary (default: 4096)",
        parse=int,
        metavar="N",
        at_least=256,
    )
    validation: float = option(
        0.05,
        _DATA,
        "share of the text that is held out for validation",
        parse=float,
        metavar="SHARE",
        at_least=0,
        below=1,
    )
    cache: str | None = option(
        None,
        _DATA,
        "keep tokens and vocabulary in this folder for the next time (default: do not)",
        metavar="FOLDER",
    )

    layers: int = option(4, _MODEL, "transformer blocks", parse=int, metavar="N", at_least=1)
    hidden: int = option(
        128, _MODEL, "width, a multiple of --heads", parse=int, metavar="N", at_least=1
    )
    heads: int = option(4, _MODEL, "attention heads", parse=int, metavar="N", at_least=1)
    context: int = option(128, _MODEL, "tokens of a row", parse=int, metavar="N", at_least=1)
    untied: bool = option(False, _MODEL, "give the head weights of its own, not the embedding's")
    dropout: float = option(
        0.0, _MODEL, "chance of a zero", parse=float, metavar="SHARE", at_least=0, below=1
    )

    pipeline: int = option(
        2, _PLAN, "stages that the model is cut into", parse=int, metavar="N", at_least=1
    )
    replicas: int = option(
        1,
        _PLAN,
        "copies of the pipeline, on workers of their own; each takes its share of a step's rows",
        parse=int,
        metavar="N",
        at_least=1,
    )
    workers: int | None = option(
        None,
        _PLAN,
        "worker processes; 0 runs everything in this process (default: as many as the copies of "
        "the pipeline need)",
        parse=int,
        metavar="N",
        at_least=0,
    )
    placement: tuple[int, ...] | None = option(
        None,
        _PLAN,
        "for each stage its worker, such as 0,1,0,1 (default: a worker for each stage)",
        parse=whole_numbers,
        metavar="W,W,...",
    )
    cuts: tuple[int, ...] | None = option(
        None,
        _PLAN,
        "first block of every stage but the first; block 0 is the embedding (default: cut by "
        "estimated cost)",
        parse=whole_numbers,
        metavar="B,B,...",
    )
    microbatches: int = option(
        8,
        _PLAN,
        "microbatches that each copy's share of a batch is split into, at most its rows",
        parse=int,
        metavar="N",
        at_least=1,
    )
    limit: int | str | None = option(
        None,
        _PLAN,
        'microbatches in flight: a number, or "paper" for the number of stages (default: twice '
        "the stages)",
        parse=number_or_paper,
        metavar="N",
    )
    checkpoint: int | str | None = option(
        None,
        _PLAN,
        "keep the output of every so many blocks only, and compute the rest again: a number, or "
        '"paper" for one that fits each stage (default: keep everything)',
        parse=number_or_paper,
        metavar="N",
    )
    threads: int | None = option(
        None,
        _PLAN,
        f"threads of each worker (default: its share of the cores, at most {MOST_THREADS})",
        parse=int,
        metavar="N",
        at_least=1,
        below=1025,  # as a cluster has it
    )

    batch: int = option(16, _TRAINING, "rows of a step", parse=int, metavar="N", at_least=1)
    steps: int | None = option(
        None, _TRAINING, "stop after so many steps", parse=int, metavar="N", at_least=1
    )
    minutes: float | None = option(
        None,
        _TRAINING,
        f"stop after so many minutes (default: {DEFAULT_MINUTES:g}, or no limit where --steps is "
        "given)",
        parse=float,
        metavar="X",
        above=0,
    )
    lr: float = option(2e-3, _TRAINING, "learning rate", parse=float, metavar="X", above=0)
    warmup: int = option(
        20,
        _TRAINING,
        "steps over which the learning rate rises to its value",
        parse=int,
        metavar="N",
        at_least=0,
    )
    schedule: str = option(
        "constant",
        _TRAINING,
        "learning rate after the warm-up; linear and cosine fall to 0 at the end of --steps",
        choices=("constant", "linear", "cosine"),
    )
    max_norm: float = option(
        1.0,
        _TRAINING,
        "largest norm of all gradients together; larger ones are scaled down",
        parse=float,
        metavar="X",
        above=0,
    )
    betas: tuple[float, float] = option(
        (0.9, 0.95),
        _TRAINING,
        "decay rates of AdamW's two averages",
        parse=two_numbers,
        metavar="X,X",
    )
    weight_decay: float = option(
        0.01, _TRAINING, "AdamW's weight decay", parse=float, metavar="X", at_least=0
    )
    seed: int = option(
        0,
        _TRAINING,
        "decides initial weights, dropout, order of the text and the sample",
        parse=int,
        metavar="N",
        at_least=0,
        below=2**63,
    )
    validate_every: int = option(
        50, _TRAINING, "steps from one validation to the next", parse=int, metavar="N", at_least=1
    )
    validation_batches: int = option(
        4, _TRAINING, "batches of one validation", parse=int, metavar="N", at_least=1
    )

    name: str | None = option(
        None, _OUTPUT, "name of the run's folder (default: date and time)", metavar="NAME"
    )
    out: str = option("runs", _OUTPUT, "where the run's folder is made", metavar="FOLDER")
    sample: int = option(
        200,
        _OUTPUT,
        "tokens to write at the end, for a look at what was learnt",
        parse=int,
        metavar="N",
        at_least=0,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.vocabulary_size is not None and self.vocabulary != "bpe":
            raise SettingsError(
                f"--vocabulary-size {self.vocabulary_size} is for --vocabulary bpe; "
                "leave it out for bytes"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise SettingsError(
                f"--betas {self.betas[0]:g},{self.betas[1]:g}: use two numbers of at least 0 "
                "and below 1, such as 0.9,0.95"
            )
        _check_name(self.name)
        self._check_schedule()
        with _said_in_options():
            self.model(256)
            self._check_cuts()
            self._check_workers()
        if self.batch < self.replicas:
            raise SettingsError(
                f"--batch {self.batch} rows for --replicas {self.replicas} copies: use --batch "
                f"{self.replicas} or more"
            )

    @property
    def plan(self) -> Plan:
        """How the model is cut and run."""
        return Plan(
            pipeline=self.pipeline,
            data=self.replicas,
            microbatches=self.microbatches,
            checkpoint=self.checkpoint,
            pipeline_limit=self.limit,
            placement=self.placement,
            cuts=self.cuts,
        )

    @property
    def optimizer(self) -> AdamW:
        """What updates the weights."""
        return AdamW(
            lr=self.lr,
            betas=self.betas,
            weight_decay=self.weight_decay,
            max_norm=self.max_norm,
            schedule=Schedule(self.schedule, self.warmup, self._schedule_steps),  # type: ignore[arg-type]
        )

    def model(self, vocab: int) -> GPT:
        """Describe the model for a vocabulary of so many tokens."""
        return GPT(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            vocab=vocab,
            context=self.context,
            tied=not self.untied,
            dropout=self.dropout,
        )

    def data(self) -> TextData:
        """Find the text and turn it into tokens; takes a second for every few ten megabytes.

        Raises:
            DataError: there is no text, or not enough.
        """
        select = None if self.files is None else Selection(patterns=self.files)
        if not self.paths:
            select = select or PYTHON_SOURCES
        with _said_in_options(), _told_otherwise(skipping):
            return myelin.data.text(
                self.paths or myelin.data.standard_library(),
                context=self.context,
                batch_size=self.batch,
                vocabulary=self.vocabulary,
                vocabulary_size=self.vocabulary_size,
                validation=self.validation,
                seed=self.seed,
                cache=self.cache,
                select=select,
            )

    def resolved(self, cores: int | None = None) -> "TrainSettings":
        """Return the settings with what follows from the others and the machine filled in."""
        used = self.plan.workers
        share = (cores or os.cpu_count() or 1) // used
        minutes = DEFAULT_MINUTES if self.steps is None else None
        return replace(
            self,
            workers=used if self.workers is None else self.workers,
            threads=self.threads or max(1, min(share, MOST_THREADS)),
            minutes=minutes if self.minutes is None else self.minutes,
        )

    def plain(self) -> dict[str, object]:
        """Return the settings as values that JSON can hold."""
        return dict(as_plain(self))

    @property
    def _schedule_steps(self) -> int | None:
        return None if self.schedule == "constant" else self.steps

    def _check_schedule(self) -> None:
        if self.schedule == "constant":
            return
        if self.steps is None or self.steps <= self.warmup:
            raise SettingsError(
                f"--schedule {self.schedule} needs --steps, more than the --warmup {self.warmup}; "
                f"here it is {self.steps}"
            )

    def _check_cuts(self) -> None:
        blocks = self.layers + 2
        if self.pipeline > blocks:
            raise SettingsError(
                f"--pipeline {self.pipeline} stages for {blocks} blocks (embedding, {self.layers} "
                f"layers, head): use --pipeline {blocks} or fewer, or more --layers"
            )
        self.plan.stages([1.0] * blocks)

    def _check_workers(self) -> None:
        used = self.plan.workers
        if not self.workers or self.workers == used:
            return
        stages = f"{self.pipeline} stage{'s' * (self.pipeline > 1)}"
        copies = "" if self.replicas == 1 else f"{self.replicas} copies of "
        where = f"{copies}{stages} on {used} worker{'s' * (used > 1)}"
        remedy = f"use --workers {used}, or leave it out"
        if self.replicas == 1 and self.workers < self.pipeline:
            fitting = ",".join(str(stage % self.workers) for stage in range(self.pipeline))
            remedy += f", or --placement {fitting}"
        elif self.replicas == 1:
            remedy += f", or --pipeline {self.workers}"
        raise SettingsError(f"--workers {self.workers} for {where}: {remedy}")


@contextmanager
def _said_in_options() -> Iterator[None]:
    """Have errors of the library speak of the options that were typed."""
    try:
        yield
    except (PlanError, ModelError, DataError) as error:
        raise type(error)(in_options(str(error), _OPTIONS)) from error


@contextmanager
def _told_otherwise(logger: logging.Logger) -> Iterator[None]:
    """Keep a logger silent about what the command shows by itself."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _check_name(name: str | None) -> None:
    if name is None:
        return
    if name in ("", ".", "..") or any(c in "/\\" or not c.isprintable() for c in name):
        raise SettingsError(
            f"--name {name!r} is no name for a folder: use one without slashes, and --out for where"
        )
