"""Draws the loss curve of a run as a PNG, without a display."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

_TRAINING: Final = "#2a6f97"
_VALIDATION: Final = "#d9651a"
_INK: Final = "#2b2b2b"
_GREY: Final = "#7d7d7d"
_LINES: Final = "#e4e4e4"
_DPI: Final = 160
_SMOOTHED: Final = 1 / 40  # of the steps: half the width over which the training loss is averaged
_MARKED: Final = 40  # more validations than this are drawn as a line without marks


def draw_losses(
    path: Path,
    losses: Sequence[float],
    validations: Sequence[tuple[int, float]],
    *,
    title: str,
    subtitle: str,
    unit: str,
) -> None:
    """Draw the loss of every step, its smoothed course, and the validations.

    Args:
        path: where the PNG goes.
        losses: one for each step, at least one.
        validations: (steps done, loss).
        title: the first line.
        subtitle: the second line, smaller.
        unit: of the losses, such as "nats per byte".
    """
    figure = Figure(figsize=(8, 4.8), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.085, 0.115, 0.845, 0.74))
    _draw_training(axes, losses)
    if validations:
        _draw_validation(axes, validations)
    _dress(axes, len(losses), unit)
    figure.text(0.085, 0.935, title, fontsize=13, color=_INK, fontweight="bold", parse_math=False)
    figure.text(0.085, 0.885, subtitle, fontsize=9, color=_GREY, parse_math=False)
    figure.savefig(path, dpi=_DPI)


def smoothed(losses: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return the mean around each step, over as many steps before as after.

    Near the beginning, where the loss falls steeply, over fewer steps on both sides; near the end
    over those that there are.
    """
    count = len(losses)
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    steps = np.arange(count)
    half = np.minimum(round(count * _SMOOTHED), steps)
    first, end = steps - half, np.minimum(steps + half + 1, count)
    means: npt.NDArray[np.float64] = (sums[end] - sums[first]) / (end - first)
    return means


def _draw_training(axes: Axes, losses: Sequence[float]) -> None:
    steps = range(1, len(losses) + 1)
    marker = "o" if len(losses) == 1 else ""
    axes.plot(steps, losses, color=_TRAINING, linewidth=0.6, alpha=0.35, label="each step")
    axes.plot(
        steps,
        smoothed(losses),
        color=_TRAINING,
        linewidth=1.9,
        marker=marker,
        label="training, smoothed",
    )


def _draw_validation(axes: Axes, validations: Sequence[tuple[int, float]]) -> None:
    steps, losses = zip(*validations, strict=True)
    axes.plot(
        steps,
        losses,
        color=_VALIDATION,
        linewidth=1.5,
        marker="o" if len(steps) <= _MARKED else "",
        markersize=4,
        markeredgecolor="white",
        markeredgewidth=0.6,
        label="validation",
        clip_on=False,
        zorder=4,
    )
    axes.annotate(
        f"{losses[-1]:.2f}",
        (steps[-1], losses[-1]),
        xytext=(7, 0),
        textcoords="offset points",
        color=_VALIDATION,
        fontsize=10,
        fontweight="bold",
        va="center",
        annotation_clip=False,
    )


def _dress(axes: Axes, steps: int, unit: str) -> None:
    axes.set_xlim(0, max(steps, 2))
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel(f"loss ({unit})", color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8))
    axes.grid(color=_LINES, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_GREY, labelcolor=_INK, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_LINES)
    axes.legend(frameon=False, labelcolor=_INK, loc="upper right")
