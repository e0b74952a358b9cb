"""What a worker was doing when it was killed: a few bytes in a file that both processes map.

Written before and after every op and at every block, by plain stores into shared memory, so that it
survives SIGKILL. Read by the coordinator once the worker is gone.
"""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

_RECORD = struct.Struct("<qii")
_NOTHING = -1


class Doing(NamedTuple):
    """The last op that was begun and not over."""

    run: int
    op: int
    block: int | None


class BlackBox:
    """One worker's record.

    Args:
        path: the file; made by the worker, in the private directory of the cluster.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(_RECORD.pack(0, _NOTHING, _NOTHING))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size)
        self._run, self._op = 0, _NOTHING

    def begin(self, run: int, op: int) -> None:
        """Record that an op begins."""
        self._run, self._op = run, op
        _RECORD.pack_into(self._map, 0, run, op, _NOTHING)

    def block(self, block: int | None) -> None:
        """Record which block of the op is running."""
        _RECORD.pack_into(self._map, 0, self._run, self._op, _NOTHING if block is None else block)

    def end(self) -> None:
        """Record that no op is running."""
        _RECORD.pack_into(self._map, 0, 0, _NOTHING, _NOTHING)


def read(path: Path) -> Doing | None:
    """Return what the worker was doing, or None if it was idle or never got so far."""
    try:
        run, op, block = _RECORD.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return None if op == _NOTHING else Doing(run, op, None if block == _NOTHING else block)
