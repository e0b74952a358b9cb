import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from myelin.runtime.blackbox import BlackBox, Doing, read
from myelin.runtime.graph import Stream

KILLED = """
import os, signal, sys
from pathlib import Path
from myelin.runtime.blackbox import BlackBox
box = BlackBox(Path(sys.argv[1]))
box.begin(7, 3)
box.block(12)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "worker-0.box"


def test_a_new_box_says_that_nothing_is_running(path: Path) -> None:
    BlackBox(path)
    assert read(path) is None


def test_an_op_is_there_from_its_begin_to_its_end(path: Path) -> None:
    box = BlackBox(path)
    box.begin(3, 5)
    assert read(path) == Doing(run=3, op=5, block=None)
    box.end()
    assert read(path) is None


def test_op_number_zero_is_an_op(path: Path) -> None:
    BlackBox(path).begin(0, 0)
    assert read(path) == Doing(0, 0, None)


def test_the_block_that_is_running_is_named_and_forgotten_with_the_next_op(path: Path) -> None:
    box = BlackBox(path)
    box.begin(1, 5)
    box.block(0)
    assert read(path) == Doing(1, 5, 0)
    box.block(None)
    assert read(path) == Doing(1, 5, None)
    box.block(9)
    box.begin(1, 6)
    assert read(path) == Doing(1, 6, None)


def test_a_box_that_was_made_again_has_forgotten_everything(path: Path) -> None:
    BlackBox(path).begin(1, 5)
    BlackBox(path)
    assert read(path) is None


def test_an_op_of_any_stream_is_recorded_and_the_compute_streams_is_told_first(path: Path) -> None:
    box = BlackBox(path)
    box.begin(1, 8, Stream.COMM)
    assert read(path) == Doing(1, 8, None)
    box.begin(1, 5)
    assert read(path) == Doing(1, 5, None)
    box.end()
    assert read(path) == Doing(1, 8, None)
    box.end(Stream.COMM)
    assert read(path) is None


def test_the_block_belongs_to_the_compute_streams_op_whatever_other_streams_do(path: Path) -> None:
    box = BlackBox(path)
    box.begin(2, 5)
    box.begin(3, 6, Stream.H2D)
    box.block(4)
    box.end(Stream.H2D)
    assert read(path) == Doing(2, 5, 4)


@pytest.mark.parametrize("content", [None, b"", b"\0" * 15, b"\0" * 1000])
def test_a_file_that_is_no_box_says_nothing(path: Path, content: bytes | None) -> None:
    if content is not None:
        path.write_bytes(content)
    assert read(path) is None


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(run=st.integers(0, 2**63 - 1), op=st.integers(0, 2**31 - 1), block=st.integers(0, 2**31 - 1))
def test_numbers_of_any_size_come_back(path: Path, run: int, op: int, block: int) -> None:
    box = BlackBox(path)
    box.begin(run, op)
    box.block(block)
    assert read(path) == Doing(run, op, block)


@pytest.mark.slow
@pytest.mark.processes
def test_what_a_worker_was_doing_is_known_after_it_was_killed(path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)],
        check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert ended.returncode == -signal.SIGKILL
    assert read(path) == Doing(run=7, op=3, block=12)
