"""Programs with a cluster that are ended from outside, and what they leave behind: nothing."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from myelin.testing.ops import Gate
from myelin.testing.scripts import command
from myelin.testing.watching import is_alive, until

pytestmark = [pytest.mark.slow, pytest.mark.processes]
DEADLINE_S = 60.0  # far more than it should take
INTERRUPTED, TERMINATED = -signal.SIGINT, 128 + signal.SIGTERM


@dataclass
class Program:
    """A running program and the worker processes that it has named."""

    process: subprocess.Popen[str]
    workers: list[int]

    def end(self) -> tuple[int, str]:
        """Wait for the program's end; return its exit code, and what it wrote after its start."""
        output, errors = self.process.communicate(timeout=DEADLINE_S)
        sys.stderr.write(errors)
        return self.process.returncode, output

    @property
    def is_gone(self) -> bool:
        """Whether all processes have ended."""
        return not any(map(is_alive, [self.process.pid, *self.workers]))


Start = Callable[..., Program]


@pytest.fixture
def start(directory: Path, gate: Gate) -> Iterator[Start]:
    """Start a program whose clusters make their directories in `directory`."""
    programs: list[Program] = []

    def start(name: str, workers: int, *options: str) -> Program:
        process = subprocess.Popen(
            command(name, workers, gate.path, *options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(directory)},
        )
        program = Program(process, [])
        programs.append(program)
        assert process.stdout is not None
        program.workers = json.loads(process.stdout.readline())
        assert len(program.workers) == workers
        return program

    yield start
    gate.open()
    for program in programs:
        program.process.kill()
        program.process.communicate()


def left(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("myelin-*")]


# Ctrl-C


@pytest.mark.parametrize(
    ("name", "workers", "options"),
    [("stepping", 2, ()), ("stepping", 0, ("stock",)), ("at_gate", 2, ("stock",))],
)
def test_ctrl_c_leaves_nothing_behind(
    start: Start, directory: Path, name: str, workers: int, options: tuple[str, ...]
) -> None:
    program = start(name, workers, *options)
    program.process.send_signal(signal.SIGINT)
    code, output = program.end()
    assert code == INTERRUPTED
    assert output == ("leaving\n" if name == "stepping" else "")
    assert program.is_gone
    assert left(directory) == []


def test_ctrl_c_while_workers_start_leaves_nothing_behind(start: Start, directory: Path) -> None:
    program = start("starting", 2)
    program.process.send_signal(signal.SIGINT)
    assert program.end()[0] == INTERRUPTED
    assert program.is_gone
    assert left(directory) == []


@pytest.mark.parametrize("workers", [0, 2])
async def test_a_second_ctrl_c_ends_a_program_that_waits_for_an_op(
    start: Start, directory: Path, workers: int
) -> None:
    program = start("at_gate", workers)
    async with asyncio.timeout(DEADLINE_S):
        while program.process.poll() is None:
            program.process.send_signal(signal.SIGINT)
            await asyncio.sleep(0)
    assert program.end()[0] == INTERRUPTED
    await until(lambda: program.is_gone)
    await until(lambda: not left(directory))


def test_ctrl_c_in_the_terminal_reaches_workers_through_the_coordinator_only(
    start: Start, directory: Path
) -> None:
    program = start("idle", 2)
    assert len({os.getsid(pid) for pid in (program.process.pid, *program.workers)}) == 3
    for worker in program.workers:
        os.kill(worker, signal.SIGINT)
    program.process.send_signal(signal.SIGTERM)
    assert program.end()[0] == TERMINATED
    assert left(directory) == []


# SIGTERM


@pytest.mark.parametrize(
    ("name", "workers", "options"),
    [("at_gate", 2, ()), ("stepping", 0, ()), ("idle", 1, ("stock",))],
)
def test_sigterm_leaves_nothing_behind_and_tells_so_in_the_exit_code(
    start: Start, directory: Path, name: str, workers: int, options: tuple[str, ...]
) -> None:
    program = start(name, workers, *options)
    program.process.send_signal(signal.SIGTERM)
    code, output = program.end()
    assert code == TERMINATED
    assert output == ("leaving\n" if name == "stepping" else "")
    assert program.is_gone
    assert left(directory) == []


def test_sigterm_while_workers_start_tells_so_in_the_exit_code(
    start: Start, directory: Path
) -> None:
    program = start("starting", 2)
    program.process.send_signal(signal.SIGTERM)
    assert program.end()[0] == TERMINATED
    assert program.is_gone
    assert left(directory) == []


def test_sigterm_again_and_again_changes_nothing(start: Start, directory: Path) -> None:
    program = start("at_gate", 2)
    for _ in range(20):
        program.process.send_signal(signal.SIGTERM)
    assert program.end()[0] in (TERMINATED, -signal.SIGTERM)  # the last ones may come very late
    assert program.is_gone
    assert left(directory) == []


def test_a_program_may_handle_sigterm_itself(start: Start, directory: Path) -> None:
    program = start("deaf", 1)
    program.process.send_signal(signal.SIGTERM)
    assert program.end() == (0, "handled\n")
    assert program.is_gone
    assert left(directory) == []


# SIGKILL


@pytest.mark.parametrize("name", ["idle", "stepping", "at_gate", "forked", "starting"])
async def test_workers_end_and_clear_up_when_the_coordinator_is_killed(
    start: Start, directory: Path, name: str
) -> None:
    program = start(name, 2)
    program.process.kill()
    program.process.wait()
    await until(lambda: program.is_gone, deadline_s=DEADLINE_S)
    await until(lambda: not left(directory))


# Scripts


def run_script(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path.write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd="/",
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )


def test_functions_and_models_of_a_script_run_on_its_workers(tmp_path: Path) -> None:
    done = run_script(
        tmp_path / "script.py",
        """
        import torch
        from torch import nn
        import myelin
        from myelin.errors import GraphError

        def double(x):
            return 2 * x

        def build(width):
            blocks = [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)]
            return blocks, nn.functional.mse_loss

        async def main():
            async with myelin.Cluster(workers=2) as cluster:
                graph = cluster.graph()
                print(await graph.op(double, graph.op(double, 3, worker=0), worker=1))
                trainer = await cluster.trainer(
                    myelin.Model(build, width=4), plan=myelin.Plan(pipeline=2)
                )
                print((await trainer.step((torch.ones(2, 4), torch.ones(2, 4)))).index)
                try:
                    graph.op(lambda: 1)
                except GraphError as error:
                    print("refused:", "Cluster(workers=0)" in str(error))

        if __name__ == "__main__":
            myelin.run(main)
        """,
    )
    assert (done.stdout, done.returncode) == ("12\n0\nrefused: True\n", 0), done.stderr
    assert done.stderr == ""


def test_a_script_that_does_its_work_when_imported_is_told_what_is_wrong(tmp_path: Path) -> None:
    done = run_script(
        tmp_path / "script.py",
        """
        import myelin

        def double(x):
            return 2 * x

        async def main():
            async with myelin.Cluster(workers=1) as cluster:
                await cluster.graph().op(double, 3)

        myelin.run(main)
        """,
    )
    assert done.returncode == 1
    assert "GraphError: the worker cannot import" in done.stderr
    assert "worker 0 of a cluster cannot have a cluster of its own" in done.stderr
    assert 'under `if __name__ == "__main__":`' in done.stderr
