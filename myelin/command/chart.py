"""Draws the loss curve of a run as a PNG, without a display."""

import math
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
_AREA: Final = (0.085, 0.115, 0.845, 0.70)  # left, bottom, width and height of the axes
_ROOM: Final = 0.01  # of the figure's width, left of everything
_FLATTEST: Final = 0.01  # the least range of losses that is shown: less would be noise
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

    What comes after the first loss that is no number is left out, and the picture says so.

    Args:
        path: where the PNG goes.
        losses: one for each step, at least one.
        validations: (steps done, loss).
        title: the first line.
        subtitle: the second line, smaller.
        unit: of the losses, such as "nats per byte".
    """
    figure = figure_of(losses, validations, unit=unit)
    left = figure.axes[0].get_position().x0
    figure.text(left, 0.935, title, fontsize=13, color=_INK, fontweight="bold", parse_math=False)
    figure.text(left, 0.885, subtitle, fontsize=9, color=_GREY, parse_math=False)
    figure.savefig(path, dpi=_DPI)


def figure_of(
    losses: Sequence[float], validations: Sequence[tuple[int, float]], *, unit: str
) -> Figure:
    """Return the picture without its title; see `draw_losses`."""
    figure = Figure(figsize=(8, 4.8), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes(_AREA)
    before = next((n for n, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    measured = [(step, loss) for step, loss in validations if math.isfinite(loss)]
    if before:
        _draw_training(axes, losses[:before])
    if measured:
        _draw_validation(axes, measured)
    _dress(axes, len(losses), unit)
    if before < len(losses):
        _say_diverged(axes, before + 1, losses[before])
    if before or measured:
        _show_range(axes)
        _add_legend(axes)
    else:
        axes.set_yticks([])
    _make_room(axes, figure)
    return figure


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


def _say_diverged(axes: Axes, step: int, loss: float) -> None:
    axes.text(
        0.5,
        0.5,
        f"diverged: the loss of step {step:,} is {loss}",
        transform=axes.transAxes,
        ha="center",
        va="center",
        color=_INK,
        fontsize=11,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        zorder=5,
    )


def _show_range(axes: Axes) -> None:
    """Show no narrower range than makes sense, so that the ticks need few digits."""
    low, high = axes.get_ylim()
    missing = (_FLATTEST - (high - low)) / 2
    if missing > 0:
        axes.set_ylim(low - missing, high + missing)
    axes.ticklabel_format(axis="y", useOffset=False)


def _add_legend(axes: Axes) -> None:
    """Put it above the axes, where it covers no curve."""
    axes.legend(
        frameon=False,
        labelcolor=_INK,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        borderaxespad=0.2,
        ncols=3,
    )


def _make_room(axes: Axes, figure: Figure) -> None:
    """Move the left edge as far as the labels of the ticks need it."""
    box = axes.get_tightbbox()
    left, bottom, width, height = _AREA
    missing = _ROOM - (left if box is None else box.x0 / figure.bbox.width)
    if missing > 0:
        axes.set_position((left + missing, bottom, width - missing, height))
