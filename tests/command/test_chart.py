"""The picture of a run's losses."""

import math
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.command.chart import draw_losses, figure_of, smoothed


def draw(path: Path, losses: list[float], validations: list[tuple[int, float]]) -> tuple[int, int]:
    """Draw, and return the picture's width and height."""
    draw_losses(path, losses, validations, title="GPT on $x_y$", subtitle="small", unit="nats")
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", head[16:])
    return width, height


@pytest.mark.slow
@pytest.mark.parametrize(
    ("losses", "validations"),
    [
        ([3.0, 2.5, 2.0, 1.8], [(2, 2.6), (4, 2.0)]),
        ([3.0, 2.0], []),
        ([3.0], [(1, 3.0)]),
        ([3.0] * 3, []),
        ([3.0, math.nan], [(1, 2.0)]),
        ([math.nan], []),
        ([3.0, math.inf], [(1, math.nan)]),
        ([3.0 / (1 + n) for n in range(3000)], [(n, 1.0) for n in range(1, 3000, 50)]),
    ],
)
def test_any_course_of_a_training_can_be_drawn(
    losses: list[float], validations: list[tuple[int, float]], tmp_path: Path
) -> None:
    assert draw(tmp_path / "loss.png", losses, validations) == (1280, 768)


@pytest.mark.slow
@pytest.mark.parametrize(
    "losses", [[5.5445, 5.5441], [5.5] * 2, [3.0, 1e5], [123456.789, 123456.7891], [3.0, 2.0, 1.0]]
)
def test_every_label_is_inside_the_picture_and_the_legend_outside_the_curves(
    losses: list[float],
) -> None:
    figure = figure_of(losses, [(len(losses), losses[-1])], unit="nats per byte")
    (axes,) = figure.axes
    figure.canvas.draw()
    whole = axes.get_tightbbox()
    assert whole is not None
    assert min(whole.x0, axes.yaxis.label.get_window_extent().x0) >= 0
    legend = axes.get_legend()
    assert legend is not None
    assert legend.get_window_extent().y0 >= axes.get_window_extent().y1


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([math.nan], "the loss of step 1 is nan"),
        ([3.0, 2.0, math.inf], "the loss of step 3 is inf"),
    ],
)
def test_a_training_that_diverged_says_so(losses: list[float], said: str) -> None:
    (axes,) = figure_of(losses, [], unit="nats").axes
    assert [text.get_text() for text in axes.texts] == [f"diverged: {said}"]
    assert (axes.get_legend() is None) == (len(losses) == 1)
    assert len(axes.lines) == (0 if len(losses) == 1 else 2)


def test_smoothing_takes_as_many_steps_before_as_after() -> None:
    losses = [0.0] * 80
    losses[40] = 5.0
    course = smoothed(losses)
    assert course.tolist() == [1.0 if 38 <= n <= 42 else 0.0 for n in range(80)]


def test_smoothing_begins_with_the_first_loss_and_ends_with_a_mean_of_the_last() -> None:
    losses = [float(n * n) for n in range(80)]
    assert smoothed(losses)[0] == 0.0
    assert smoothed(losses)[-1] == (77**2 + 78**2 + 79**2) / 3


@given(st.integers(1, 300), st.floats(-5, 5), st.floats(-5, 5))
def test_smoothing_leaves_a_straight_line_alone_but_for_its_end(
    count: int, start: float, slope: float
) -> None:
    line = start + slope * np.arange(count)
    inner = count - round(count / 40)
    assert smoothed(line.tolist())[:inner] == pytest.approx(line[:inner], abs=1e-8)


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=300))
def test_smoothing_stays_among_the_losses(losses: list[float]) -> None:
    course = smoothed(losses)
    assert len(course) == len(losses)
    assert min(losses) - 1e-9 <= course.min()
    assert course.max() <= max(losses) + 1e-9
