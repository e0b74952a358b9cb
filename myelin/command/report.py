"""The folder of a run: claimed before anything starts, and what is written into it at the end."""

import dataclasses
import json
import os
import platform
import shutil
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Final

import myelin
from myelin.command.options import SettingsError
from myelin.command.progress import clock
from myelin.command.record import Record, Sample
from myelin.command.settings import TrainSettings
from myelin.data import TextData, standard_library

SETTINGS: Final = "settings.json"
LOSSES: Final = "losses.csv"
CURVE: Final = "loss.png"
SAMPLE: Final = "sample.txt"

_LIBRARIES: Final = ("torch", "numpy", "pyzmq", "msgspec", "uvloop", "tokenizers", "matplotlib")
_LAST_STEPS: Final = 50  # over which the final training loss is taken


def check_name(settings: TrainSettings) -> None:
    """Check that the name asked for is still free.

    Raises:
        SettingsError: there is a run of this name.
    """
    if settings.name is not None and os.path.lexists(Path(settings.out, settings.name)):
        raise _taken(Path(settings.out, settings.name))


def claim_folder(settings: TrainSettings, now: datetime) -> Path:
    """Make the run's folder, which did not exist before.

    Without a name it is named by date and time, and numbered if that was taken.

    Raises:
        SettingsError: there is a run of this name, or no folder can be made.
    """
    try:
        Path(settings.out).mkdir(parents=True, exist_ok=True)
        if settings.name is not None:
            return _make(Path(settings.out, settings.name))
        return _make_numbered(Path(settings.out), f"{now:%Y-%m-%d_%H-%M-%S}")
    except FileExistsError as error:
        if settings.name is None:
            raise SettingsError(f"--out {settings.out} is no folder: name another") from error
        raise _taken(Path(settings.out, settings.name)) from error
    except OSError as error:
        raise SettingsError(
            f"--out {settings.out}: no folder can be made there ({error}); name another"
        ) from error


def release_folder(folder: Path) -> None:
    """Remove a folder that was claimed and in which nothing came about."""
    shutil.rmtree(folder)


def write_settings(folder: Path, settings: TrainSettings, data: TextData) -> None:
    """Write down all that decides the run's numbers."""
    found: dict[str, object] = {
        "settings": settings.plain(),
        "parameters": settings.model(data.vocab_size).parameters,
        "vocabulary": data.vocab_size,
        "corpus": _corpus(settings, data),
        "versions": _versions(),
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
    }
    _write(folder / SETTINGS, json.dumps(found, indent=2, ensure_ascii=False) + "\n")


def write_results(folder: Path, settings: TrainSettings, data: TextData, record: Record) -> None:
    """Draw the loss curve and write the sample, if there is one."""
    # Where matplotlib is used for the first time it looks for fonts, which may take a while.
    from myelin.command.chart import draw_losses

    draw_losses(
        folder / CURVE,
        [row.loss for row in record.rows],
        record.validations,
        title=f"GPT on {_source(settings)}",
        subtitle=", ".join([describe_model(settings, data), describe_pace(record)]),
        unit="nats per byte" if settings.vocabulary == "bytes" else "nats per token",
    )
    if record.sample is not None:
        _write(folder / SAMPLE, sample_text(record.sample))


def describe_model(settings: TrainSettings, data: TextData) -> str:
    """Say in one line what is trained and where."""
    parameters = settings.model(data.vocab_size).parameters
    used = settings.plan.workers
    where = f"on {used} worker{'s' * (used > 1)}" if settings.workers else "in this process"
    copies = f"{settings.replicas} copies of " if settings.replicas > 1 else ""
    layers = f"{settings.layers} layer{'s' * (settings.layers > 1)} of {settings.hidden}"
    return (
        f"{_short(parameters)} parameters ({layers}), "
        f"{copies}{settings.pipeline} stage{'s' * (settings.pipeline > 1)} {where}"
    )


def describe_pace(record: Record) -> str:
    """Say in one line how much was done, and how fast."""
    last, tokens = record.rows[-1], sum(row.tokens for row in record.rows)
    return (
        f"{last.step:,} step{'s' * (last.step > 1)} and {_short(tokens)} tokens in "
        f"{clock(last.seconds)}: {tokens / last.seconds:,.0f} tokens/s"
    )


def describe_losses(settings: TrainSettings, data: TextData, record: Record) -> str:
    """Say in one line how good the model has become, in nats per byte as well."""
    unit = "byte" if settings.vocabulary == "bytes" else "token"
    last = [row.loss for row in record.rows[-_LAST_STEPS:]]
    text = f"loss {sum(last) / len(last):.3f} nats a {unit}"
    text += f" (mean of the last {len(last)} steps)" if len(last) > 1 else ""
    if not record.validations:
        return text
    validation = record.validations[-1][1]
    text += f", validation {validation:.3f}"
    if unit == "token" and data.report is not None:
        text += f" ({validation * data.tokens / data.report.bytes:.3f} nats a byte)"
    return text


def describe_busy(record: Record) -> str:
    """Say in one line how busy each worker was."""
    total_s = sum(row.tokens / row.tokens_per_s for row in record.rows if row.tokens_per_s)
    shares = []
    for worker in sorted({worker for row in record.rows for worker in row.busy}):
        busy_s = sum(
            row.busy.get(worker, 0.0) * row.tokens / row.tokens_per_s
            for row in record.rows
            if row.tokens_per_s
        )
        shares.append(f"worker {worker} {busy_s / total_s:.0%}" if total_s else "")
    return f"busy: {', '.join(shares)}"


def sample_text(sample: Sample) -> str:
    """Return the sample as it is written to its file."""
    return (
        f"--- prompt, from text that was held out\n{sample.prompt}\n"
        f"--- what the model wrote\n{sample.continuation}\n"
    )


def _make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _make_numbered(out: Path, name: str) -> Path:
    number = 1
    while True:
        try:
            return _make(out / (name if number == 1 else f"{name}_{number}"))
        except FileExistsError:
            number += 1


def _taken(folder: Path) -> SettingsError:
    return SettingsError(
        f"{folder} exists, and a run never overwrites another: choose another --name, "
        "or leave it out to have the run named by date and time"
    )


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="replace")


def _corpus(settings: TrainSettings, data: TextData) -> Mapping[str, object]:
    paths = settings.paths or (str(standard_library()),)
    report = {} if data.report is None else dataclasses.asdict(data.report)
    windows = {"tokens": data.tokens, "rows_of_an_epoch": data.windows}
    return {"paths": [os.path.abspath(path) for path in paths], **report, **windows}


def _versions() -> dict[str, str]:
    found = {"myelin": myelin.__version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _source(settings: TrainSettings) -> str:
    if not settings.paths:
        return "the Python standard library"
    first = Path(settings.paths[0]).resolve().name or settings.paths[0]
    more = len(settings.paths) - 1
    return first if not more else f"{first} and {more} more"


def _short(number: float) -> str:
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:g}"
