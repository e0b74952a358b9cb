"""What a worker was doing when it was killed: a few bytes in a file that both processes map.

Written before and after every op and at every block, by plain stores into shared memory, so that it
survives SIGKILL. Read by the coordinator once the worker is gone.
"""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

from myelin.runtime.graph import Stream

_RECORD = struct.Struct("<qii")  # run, op, block
_NOTHING = -1
_PLACE = {stream: _RECORD.size * place for place, stream in enumerate(Stream)}


class Doing(NamedTuple):
    """An op that was begun and not over."""

    run: int
    op: int
    block: int | None


class BlackBox:
    """One worker's record, with a place for each stream; only the stream's own thread writes there.

    Args:
        path: the file; made by the worker, in the private directory of the cluster.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(_RECORD.pack(0, _NOTHING, _NOTHING) * len(_PLACE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size * len(_PLACE))
        self._run, self._op = 0, _NOTHING  # of the compute stream

    def begin(self, run: int, op: int, stream: Stream = Stream.COMPUTE) -> None:
        """Record that an op begins."""
        if stream is Stream.COMPUTE:
            self._run, self._op = run, op
        _RECORD.pack_into(self._map, _PLACE[stream], run, op, _NOTHING)

    def block(self, block: int | None) -> None:
        """Record which block of the compute stream's op is running."""
        number = _NOTHING if block is None else block
        _RECORD.pack_into(self._map, _PLACE[Stream.COMPUTE], self._run, self._op, number)

    def end(self, stream: Stream = Stream.COMPUTE) -> None:
        """Record that no op is running."""
        _RECORD.pack_into(self._map, _PLACE[stream], 0, _NOTHING, _NOTHING)


def read(path: Path) -> Doing | None:
    """Return what the worker was doing, or None if it was idle or never got so far.

    Where several streams were at an op it is that of the compute stream.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) != _RECORD.size * len(_PLACE):
        return None
    for run, op, block in _RECORD.iter_unpack(content):
        if op != _NOTHING:
            return Doing(run, op, None if block == _NOTHING else block)
    return None
