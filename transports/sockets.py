"""The two kinds of ZeroMQ socket of the control bus, their options, and where they may listen.

An `Inbox` is a bound ROUTER, an `Outbox` a DEALER connected to one; frames go one way. Options are
set here and nowhere else. Nothing in here blocks, and nothing knows what a frame says.

`ZMQ_IMMEDIATE` stays off: the first frames, the hello among them, wait in the outbox until the peer
listens. No frame reaches a wrong process that way, since no address is used twice.
`ZMQ_ROUTER_HANDOVER` stays off: nobody can take over the connection of another. The price is that
libzmq ignores a second connection of the same identity for ever, if it comes before the end of the
first was noticed: after a loss of connection a peer may stay silent, and is reported as that.
"""

import itertools
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from myelin.errors import TransportError

MAX_ADDRESS = 128  # characters, as in a hello
_MAX_PATH = 107  # bytes of a Unix socket's path
_WATCHED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_Options = Mapping[zmq.SocketOption, int | bytes]
_LIVENESS: _Options = {  # libzmq's own thread sees to these, also when the loop is busy
    zmq.HEARTBEAT_IVL: 1000,
    zmq.HEARTBEAT_TIMEOUT: 5000,
    zmq.HEARTBEAT_TTL: 5000,
    zmq.HANDSHAKE_IVL: 5000,
}
_monitors = itertools.count()

Context = zmq.Context[zmq.Socket[bytes]]


class Outbox:
    """The way to one peer's inbox.

    Args:
        context: where the socket lives.
        address: the peer's inbox, which need not exist yet.
        identity: what the peer's inbox calls the sender.
        high_water: frames that may wait here.

    Raises:
        TransportError: the address cannot be connected to.
    """

    def __init__(self, context: Context, address: str, *, identity: bytes, high_water: int) -> None:
        self.address, self.sequence = address, 0
        self._socket = context.socket(zmq.DEALER)
        options: _Options = {
            **_LIVENESS,
            zmq.LINGER: 0,
            zmq.SNDHWM: high_water,
            zmq.RCVHWM: 1,  # nothing is ever received
            zmq.MAXMSGSIZE: 1024,
            zmq.RECONNECT_IVL: 20,
            zmq.RECONNECT_IVL_MAX: 2000,
            zmq.ROUTING_ID: identity,
        }
        try:
            _apply(self._socket, options)
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise TransportError(f"cannot connect to {address}: {error.strerror}") from error

    def send(self, frame: bytes) -> bool:
        """Hand over the frame of number `sequence`, or return False if it does not fit.

        Raises:
            TransportError: the socket can send no more, since its context was ended.
        """
        try:
            sent = self._try(frame)
            if not sent and _number(self._socket, zmq.EVENTS) & zmq.POLLOUT:
                # libzmq looks for room that came free once a millisecond only, or when asked
                sent = self._try(frame)
        except zmq.ZMQError as error:
            raise TransportError(f"cannot send to {self.address}: {error.strerror}") from error
        self.sequence += sent
        return sent

    def _try(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, *, linger_s: float) -> None:
        """Close without waiting; what was sent still goes out for `linger_s` seconds.

        Ending the context waits for that.
        """
        self._socket.close(linger=round(linger_s * 1000))


class Inbox:
    """The bound socket to which all peers send, and its monitor.

    Args:
        context: where the sockets live.
        address: where to listen.
        high_water: frames of one peer that may wait here.
        max_bytes: libzmq ends a connection that brings a longer frame.

    Raises:
        TransportError: the address cannot be used.
    """

    def __init__(self, context: Context, address: str, *, high_water: int, max_bytes: int) -> None:
        self._file = _socket_file(address)
        self._socket = context.socket(zmq.ROUTER)
        self._monitor = context.socket(zmq.PAIR)
        options: _Options = {
            **_LIVENESS,
            zmq.LINGER: 0,
            zmq.RCVHWM: high_water,
            zmq.MAXMSGSIZE: max_bytes,
        }
        watch = f"inproc://myelin-monitor-{next(_monitors)}"
        try:
            _apply(self._socket, options)
            self._monitor.setsockopt(zmq.LINGER, 0)
            self._socket.monitor(watch, _WATCHED)
            self._monitor.connect(watch)
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._file = None  # not ours
            self.close()
            raise TransportError(f"cannot listen at {address}: {error.strerror}") from error
        self.descriptor = _number(self._socket, zmq.FD)
        self.monitor_descriptor = _number(self._monitor, zmq.FD)
        self._connections: dict[bytes, int] = {}
        self._senders: dict[int, bytes] = {}

    def take(self) -> tuple[bytes, list[bytes]] | None:
        """Return the sender's identity and the parts of the next message, or None."""
        try:
            sender = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if sender in self._connections:
            return sender, self._socket.recv_multipart(zmq.NOBLOCK)
        parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        self._remember(sender, parts[0])
        return sender, [part.bytes for part in parts]

    def ended(self) -> list[bytes | None]:
        """Return the sender of each connection that has ended since the last call.

        None stands for a connection that did not speak ZeroMQ's protocol. `inproc` has no ends.
        """
        ended: list[bytes | None] = []
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return ended
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                ended.append(None)
            elif (sender := self._senders.pop(event["value"], None)) is not None:
                self._connections.pop(sender, None)
                ended.append(sender)

    def close(self) -> None:
        """Close both sockets and remove the socket's file."""
        if not self._socket.closed:
            self._socket.monitor(None, 0)
        self._monitor.close()
        self._socket.close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _remember(self, sender: bytes, part: zmq.Frame) -> None:
        """Note on which connection a sender's messages come, which its end will be told by."""
        try:
            connection = int(part.get("__fd"))
        except zmq.ZMQError:  # inproc
            connection = -1
        else:
            self._connections.pop(self._senders.get(connection, b""), None)
            self._senders[connection] = sender
        self._connections[sender] = connection


def _apply(socket: zmq.Socket[bytes], options: _Options) -> None:
    for option, value in options.items():
        socket.setsockopt(option, value)


def _number(socket: zmq.Socket[bytes], option: zmq.SocketOption) -> int:
    value = socket.getsockopt(option)
    assert isinstance(value, int), (option, value)
    return value


def _socket_file(address: str) -> Path | None:
    """Return the file that listening at `address` will make; None for `inproc`.

    libzmq takes over a file or an endpoint that is there already, without a word: we look first.

    Raises:
        TransportError: the address is of another kind, too long, taken, or where others may enter.
    """
    scheme, _, rest = address.partition("://")
    usable = (scheme == "inproc" and rest) or (scheme == "ipc" and rest.startswith("/"))
    if not usable or len(address) > MAX_ADDRESS:
        raise TransportError(
            f"cannot listen at {address!r}: use inproc://name or ipc:///absolute/path, of at most "
            f"{MAX_ADDRESS} characters"
        )
    if scheme == "inproc":
        return None
    path, length = Path(rest), len(os.fsencode(rest))
    if length > _MAX_PATH:
        raise TransportError(
            f"cannot listen at {address}: the path has {length} bytes and the system allows "
            f"{_MAX_PATH}; use a shorter directory, for example by setting TMPDIR=/tmp"
        )
    if not path.parent.is_dir() or stat.S_IMODE(path.parent.stat().st_mode) & 0o077:
        raise TransportError(
            f"cannot listen at {address}: {path.parent} must be a directory that only its owner "
            "may enter; make one with mode 0700, as tempfile.mkdtemp does"
        )
    if os.path.lexists(path):
        raise TransportError(
            f"cannot listen at {address}: {path} exists, so another process listens there, or did; "
            "use a fresh address for each process"
        )
    return path
