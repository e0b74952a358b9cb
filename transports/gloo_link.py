"""One end of one gloo process group of two: meets its peer in a file, connects, can be interrupted.

Used by one channel's thread; see `transports/gloo.py` for what gloo does and does not promise.
"""

import itertools
import math
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    ProcessGroupGloo,
)

TAG, INTERRUPT_TAG = 0, 1
LOOK_EVERY_S = 0.01  # how often a thread looks whether its peer has appeared
HANDSHAKE_S = 1.0  # for one attempt to construct a process group when both ends are there


class Work(Protocol):
    """A transfer that gloo has begun."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Block until it is done, or raise."""
        ...


class _Group(Protocol):
    """What is used of `ProcessGroupGloo`, whose own stubs lack it."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> Work: ...


def device_of(interface_host: str) -> ProcessGroupGloo.Device:
    """Return gloo's handle of an interface, which comes with a thread of its own."""
    try:
        return ProcessGroupGloo.create_device(hostname=interface_host)
    except RuntimeError as error:
        raise ValueError(f"interface_host={interface_host!r} is no interface: {error}") from None


def _make_group(store: PrefixStore, rank: int, interface_host: str) -> _Group:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=HANDSHAKE_S)
    options._threads = 1
    options._devices = [device_of(interface_host)]
    group: _Group = gloo(store, rank, 2, options)
    return group


class Link:
    """The process group of one channel at one end; used by the channel's thread alone.

    Only `interrupt` may be called from another thread.
    """

    def __init__(self, file: Path, *, rank: int, interface_host: str) -> None:
        self._file = file
        self._rank = rank
        self._interface_host = interface_host
        self._group: _Group | None = None
        self._interrupted = threading.Event()

    @property
    def connected(self) -> bool:
        """Whether the two ends have met."""
        return self._group is not None

    def connect(self, deadline: float) -> None:
        """Meet the peer in the file, then connect.

        Raises:
            RuntimeError: the peer did not come before the deadline or has closed its end, or this
                end was interrupted.
        """
        file_store = FileStore(str(self._file), 2)
        file_store.set_timeout(timedelta(seconds=1))
        attempts = itertools.count()
        while self._group is None:
            self._try(PrefixStore(f"{next(attempts)}", file_store), deadline)
            self._stop_if_due(deadline)

    def _try(self, store: PrefixStore, deadline: float) -> None:
        try:
            self._meet(store, deadline)
        except RuntimeError:
            if self._file.parent.exists():
                store.set(f"end{self._rank}", "closed")
            raise
        with suppress(RuntimeError):  # the peer has gone again, or needs longer: meet once more
            self._group = _make_group(store, self._rank, self._interface_host)

    def _meet(self, store: PrefixStore, deadline: float) -> None:
        peer_key = f"end{1 - self._rank}"
        store.set(f"end{self._rank}", "ready")
        while not store.check([peer_key]):
            self._interrupted.wait(LOOK_EVERY_S)
            self._stop_if_due(deadline)
        if store.get(peer_key) != b"ready":
            raise RuntimeError("the peer had closed its end before this one was opened")

    def _stop_if_due(self, deadline: float) -> None:
        if self._interrupted.is_set():
            raise RuntimeError("this end was closed")
        if time.monotonic() > deadline:
            raise RuntimeError("the peer did not come")

    def send(self, data: torch.Tensor) -> Work:
        """Begin to send; the link must be connected."""
        assert self._group is not None
        return self._group.send([data], 1 - self._rank, TAG)

    def receive(self, data: torch.Tensor) -> Work:
        """Begin to receive into `data`; the link must be connected."""
        assert self._group is not None
        return self._group.recv([data], 1 - self._rank, TAG)

    def wait(self, work: Work, deadline: float) -> None:
        """Block until the work is done.

        Raises:
            RuntimeError: the deadline passed, the peer is gone, or this end was interrupted. All
                work of the link fails from then on.
        """
        remaining_ms = math.ceil((deadline - time.monotonic()) * 1000) + 1
        work.wait(timedelta(milliseconds=max(1, remaining_ms)))

    def interrupt(self) -> None:
        """Make the channel's thread return from what it waits for, now and from now on."""
        self._interrupted.set()
        group = self._group
        if group is None:
            return
        try:
            never = group.recv([torch.empty(1, dtype=torch.uint8)], 1 - self._rank, INTERRUPT_TAG)
            never.wait(timedelta(milliseconds=1))
        except RuntimeError:  # it always ends so: that is what closes the connection
            return

    def close(self) -> None:
        """Give the connection up."""
        self.interrupt()
        self._group = None
