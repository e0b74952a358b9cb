"""Local worker processes: started, watched, ended; the only file that knows how.

A worker's stdin is a pipe that stays open as long as we live, so that it notices our end however it
comes. What it prints is passed on to our stderr with its number, and its last words are kept.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from myelin.runtime.process import WorkerConfig

_KEPT_BYTES = 4096
_READ_BYTES = 65536
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class LocalProcess:
    """One worker process.

    Args:
        config: what the worker is told.
        on_exit: called once on the loop when the process has ended, with how it ended, in words.
    """

    def __init__(self, config: WorkerConfig, on_exit: Callable[[str], None]) -> None:
        self.index, self._on_exit = config.index, on_exit
        self._loop = asyncio.get_running_loop()
        self._last_words = self._line = b""
        self.exited = asyncio.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from myelin.runtime.process import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours alone
            env=os.environ | {"PYTHONPATH": os.pathsep.join(config.sys_path)},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._output = self._process.stdin, self._process.stdout.fileno()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(msgspec.json.encode(config) + b"\n")
            self._stdin.flush()
        os.set_blocking(self._output, False)
        self._loop.add_reader(self._output, self._pass_on)
        self._watch_exit()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def kill(self) -> None:
        """End the process now; safe if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL) if not self.exited.is_set() else None

    def close(self) -> None:
        """Give back descriptors; call once the process has exited."""
        self._loop.remove_reader(self._output)
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _watch_exit(self) -> None:
        handle = _handle_of(self._process.pid)
        if handle is not None:
            self._loop.add_reader(handle, self._exited_handle, handle)
            return
        thread = threading.Thread(target=self._wait, name=f"worker-{self.index}-exit", daemon=True)
        thread.start()

    def _wait(self) -> None:
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._ended)

    def _exited_handle(self, handle: int) -> None:
        self._loop.remove_reader(handle)
        os.close(handle)
        self._process.wait()
        self._ended()

    def _ended(self) -> None:
        self.exited.set()
        self._pass_on()
        if self._line:
            self._show(self._line)
        self._on_exit(self._how())

    def _how(self) -> str:
        code = self._process.returncode
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        words = self._last_words.decode(errors="replace").strip()
        if not words or code == 0 or -code in _FROM_OUTSIDE:
            return how
        return f"{how}; its last words:\n{words}\n"

    def _pass_on(self) -> None:
        try:
            data = os.read(self._output, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._output)
            return
        self._last_words = (self._last_words + data)[-_KEPT_BYTES:]
        *lines, self._line = re.split(rb"\r\n|\r|\n", self._line + data)
        for line in lines:
            self._show(line)
        if len(self._line) > _READ_BYTES:
            self._show(self._line)
            self._line = b""

    def _show(self, line: bytes) -> None:
        """Write one line to our stderr, if there still is one."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"[worker {self.index}] {line.decode(errors='replace')}\n")


def _handle_of(pid: int) -> int | None:
    """Return a descriptor that can be read once the process has ended, where there is such."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
