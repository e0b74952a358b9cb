"""What a process holds and whether others live: for tests that nothing is left behind."""

import asyncio
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_LOOK_EVERY_S = 0.005


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds that a cluster could forget to give back.

    Attributes:
        threads: names of Python's threads.
        files: what the open descriptors lead to, numbers left out.
        workers: ids of its worker processes, those included that nobody has waited for.
    """

    threads: tuple[str, ...]
    files: tuple[str, ...]
    workers: tuple[int, ...]

    @staticmethod
    def now() -> "Held":
        """Look."""
        threads = tuple(sorted(thread.name for thread in threading.enumerate()))
        return Held(threads, tuple(sorted(_files())), tuple(worker_ids()))


def _files() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(re.sub(r"\d+", "N", str(entry.readlink())))
        except OSError:  # the one by which we look
            continue
    return found


def worker_ids(parent: int | None = None) -> list[int]:
    """Return the ids of the worker processes of `parent`, by default of this process."""
    parent = os.getpid() if parent is None else parent
    everybody = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return sorted(pid for pid in everybody if _is_worker_of(pid, parent))


def _is_worker_of(pid: int, parent: int) -> bool:
    fields = _stat(pid)
    if fields is None or int(fields[1]) != parent:
        return False
    try:
        command_line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return not command_line or b"myelin.runtime.process" in command_line  # a dead one has none


def is_alive(pid: int) -> bool:
    """Tell whether a process exists and has not ended."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in ("Z", "X")


def _stat(pid: int) -> list[str] | None:
    """Return what the system tells of a process, from its state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


async def until(condition: Callable[[], object], *, deadline_s: float = 60.0) -> None:
    """Wait until a condition holds, and look often.

    Raises:
        TimeoutError: it does not hold in time.
    """
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - nobody tells of what it looks at
            await asyncio.sleep(_LOOK_EVERY_S)
