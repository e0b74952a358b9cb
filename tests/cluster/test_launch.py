"""`LocalProcess` with programs of the shell in the place of workers, which start in no time."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from myelin.launch import LocalProcess
from myelin.runtime.messages import Peer
from myelin.runtime.process import WorkerConfig
from myelin.testing.watching import Held, is_alive, until

Start = Callable[[str], LocalProcess]
CONFIG = WorkerConfig(
    index=3,
    incarnation="a",
    inbox="ipc:///w",
    coordinator=Peer(-1, "b", "ipc:///c"),
    coordinator_pid=1,
    directory="/nowhere",
    threads=1,
    sys_path=("/one", "/two"),
    jitter=None,
    hello_deadline_s=1.0,
    heartbeat_s=1.0,
    data_timeout_s=1.0,
)


@pytest.fixture
def how() -> list[str]:
    """How processes have ended, in words."""
    return []


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: list[str]) -> Start:
    def start(script: str) -> LocalProcess:
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(program))
        return LocalProcess(CONFIG, how.append)

    return start


async def ended(process: LocalProcess) -> None:
    async with asyncio.timeout(30):
        await process.exited.wait()
    process.close()


async def test_lines_are_passed_on_with_the_workers_number(
    start: Start, how: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    await ended(start("echo one; echo two >&2; echo; printf three"))
    assert capsys.readouterr().err == (
        "[worker 3] one\n[worker 3] two\n[worker 3] \n[worker 3] three\n"
    )
    assert how == ["exited with code 0"]


async def test_a_line_that_comes_in_pieces_is_passed_on_in_one(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go = tmp_path / "go"
    process = start(
        f"printf 'caf\\303'; while [ ! -e {go} ]; do sleep 0.01; done; "
        "printf '\\251 au'; printf ' lait\\nbar\\r\\nfoo\\r'"
    )
    await until(lambda: process._last_words)
    go.touch()
    await ended(process)
    assert capsys.readouterr().err == "[worker 3] café au lait\n[worker 3] bar\n[worker 3] foo\n"


async def test_a_line_without_end_is_passed_on_in_parts(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    await ended(start("head -c 300000 /dev/zero | tr '\\0' x"))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert sum(line.count("x") for line in lines) == 300_000


async def test_bytes_that_are_no_text_are_passed_on_somehow(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    await ended(start("printf 'a\\377b\\n'"))
    assert capsys.readouterr().err == "[worker 3] a\ufffdb\n"


@pytest.mark.parametrize("stderr", ["closed", "none"])
async def test_a_worker_can_speak_and_end_when_we_have_no_stderr_any_more(
    start: Start, how: list[str], stderr: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = None
    if stderr == "closed":
        stream = (tmp_path / "stderr").open("w")
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    await ended(start("echo one; exit 4"))
    assert how == ["exited with code 4; its last words:\none\n"]


async def test_the_last_words_of_a_process_that_failed_are_kept(
    start: Start, how: list[str]
) -> None:
    await ended(
        start("head -c 100000 /dev/zero | tr '\\0' x; echo; echo no such module >&2; exit 1")
    )
    assert how[0].startswith("exited with code 1; its last words:\nxxx")
    assert how[0].endswith("x\nno such module\n")
    assert len(how[0]) < 5000


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (signal.SIGKILL, "was killed by SIGKILL"),
        (signal.SIGTERM, "was killed by SIGTERM"),
        (signal.SIGABRT, "was killed by SIGABRT; its last words:\nterminate called\n"),
        (signal.SIGSEGV, "was killed by SIGSEGV; its last words:\nterminate called\n"),
        (signal.SIGRTMIN + 3, "was killed by signal 37; its last words:\nterminate called\n"),
    ],
)
async def test_a_killed_process_tells_by_what_and_crashes_tell_why(
    start: Start, how: list[str], number: int, text: str
) -> None:
    await ended(start(f"echo terminate called; kill -{int(number)} $$"))
    assert how == [text]


async def test_kill_ends_what_does_not_want_to_end(start: Start, how: list[str]) -> None:
    process = start("trap '' TERM INT HUP; echo on; while :; do sleep 0.05; done")
    await until(lambda: process._last_words)
    process.kill()
    await ended(process)
    process.kill()  # once more is no harm
    assert how == ["was killed by SIGKILL"]


async def test_the_process_is_told_everything_on_stdin_which_stays_open(
    start: Start, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    process = start(
        f'read -r line; echo "$line" > {told}.part; mv {told}.part {told}; read -r more'
    )
    await until(told.exists)
    assert json.loads(told.read_text())["sys_path"] == ["/one", "/two"]
    assert not process.exited.is_set()
    assert process.pid
    process._stdin.close()
    await ended(process)


async def test_the_process_imports_from_where_we_do_and_has_a_session_of_its_own(
    start: Start, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    await ended(
        start(f'echo "$PYTHONPATH" > {told}; ps -o sid= -p $$ >> {told} || echo $$ >> {told}')
    )
    path, session = told.read_text().split()
    assert path == "/one:/two"
    assert int(session) != os.getsid(0)


async def test_a_process_that_reads_nothing_and_ends_at_once_is_noticed(
    start: Start, how: list[str]
) -> None:
    await ended(start("exec <&-; exit 9"))
    assert how == ["exited with code 9"]


async def test_a_process_that_closes_its_output_is_watched_all_the_same(
    start: Start, how: list[str], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    process = start(f"exec >&- 2>&-; while [ ! -e {go} ]; do sleep 0.01; done; exit 2")
    await asyncio.sleep(0)
    go.touch()
    await ended(process)
    assert how == ["exited with code 2"]


async def test_nothing_is_held_any_more_once_a_process_was_closed(start: Start) -> None:
    before = Held.now()
    process = start("echo one; exit 1")
    await ended(process)
    assert Held.now() == before
    assert not is_alive(process.pid)


async def test_without_handles_of_processes_a_thread_waits(
    start: Start, how: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pidfd_open(pid: int) -> int:
        raise OSError("not here")

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    before = Held.now()
    process = start("echo one; exit 5")
    await ended(process)
    assert how == ["exited with code 5; its last words:\none\n"]
    await until(lambda: Held.now() == before)
