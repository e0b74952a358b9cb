"""What one frame of the control bus says, and how it is written; does no I/O and keeps no state.

A frame is MessagePack: `[protocol version, sequence number, message]`, the message a map whose
"type" names one of a closed set of structs. Whatever bytes come in, `Codec.decode` returns a
message of that set or raises `FrameError`, and nothing else.

`Hello` and `Reject` are a promise to other versions: that these are their names, and that they have
`node` and `inbox`, and `reason`. So two versions can still tell each other why they do not talk.
"""

from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import msgpack
import msgspec

from myelin.errors import FrameError

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 64 << 20
MAX_TEXT = 8192  # characters in a peer's own words
MAX_ITEMS = 1 << 18  # in one array or map: 1,024 nested claims of it cost 2 GiB of untouched memory
_MAX_SEQUENCE = (1 << 63) - 1
_QUOTED = 80  # characters of a peer's bytes that an error repeats
_Message = TypeVar("_Message", bound=msgspec.Struct)

_Node = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
_Word = Annotated[str, msgspec.Meta(max_length=128)]
_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The first frame on every connection: who speaks, and where it listens."""

    node: _Node
    incarnation: _Word
    inbox: _Word
    protocol: int
    torch: _Word
    python: _Word
    pid: int


class Reject(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The answer to a `Hello`, or to a frame of another version, that is not accepted."""

    reason: _Text


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The sender's event loop is alive."""


class Goodbye(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The sender closes its bus on purpose; nothing follows."""


TRANSPORT_MESSAGES: tuple[type[msgspec.Struct], ...] = (Hello, Reject, Heartbeat, Goodbye)


class ForeignHello(msgspec.Struct, frozen=True, tag="Hello"):
    """The part of a `Hello` that every version of the protocol has."""

    node: _Node
    inbox: _Word


class ForeignReject(msgspec.Struct, frozen=True, tag="Reject"):
    """The part of a `Reject` that every version of the protocol has."""

    reason: _Text


class ForeignFrame(FrameError):
    """A frame of another version of the protocol.

    Attributes:
        version: the version of the protocol that the frame is of.
        said: what can be understood of it nevertheless: a hello, a rejection or nothing.
    """

    def __init__(self, version: int, said: ForeignHello | ForeignReject | None) -> None:
        super().__init__(
            f"a frame of protocol version {version}, where version {PROTOCOL_VERSION} is spoken; "
            "install the same version of Myelin on all nodes",
            peer=None,
            reason="version",
        )
        self.version, self.said = version, said


class Codec:
    """Frames from messages and back, for the transport's own messages and those given.

    Args:
        messages: structs with `frozen=True`, `tag=True` and `forbid_unknown_fields=True`.
        max_frame_bytes: no frame may be longer, in either direction.

    Raises:
        ValueError: a message type would not be validated strictly, or two share a tag.
    """

    def __init__(
        self, messages: tuple[type[msgspec.Struct], ...], *, max_frame_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        if max_frame_bytes < 1:
            raise ValueError(f"max_frame_bytes={max_frame_bytes}: a frame needs at least one byte")
        self.max_frame_bytes = max_frame_bytes
        self._types = _by_tag((*TRANSPORT_MESSAGES, *messages))
        self._known = frozenset(self._types.values())

    def encode(self, sequence: int, message: msgspec.Struct) -> bytes:
        """Return the frame that carries `message` as number `sequence` of its connection.

        Field values are not checked against their types here; the receiver does that.

        Raises:
            FrameError: `message` is not of the closed set ("unknown"), holds what MessagePack
                cannot express ("malformed"), or makes too long a frame ("oversized").
        """
        if type(message) not in self._known:
            raise _error(
                "unknown",
                f"{type(message).__name__} is not a message of this bus, which knows "
                f"{', '.join(self._types)}; give its type to the codec on all nodes",
            )
        try:
            body = msgspec.to_builtins(message, builtin_types=(bytes,))
            frame: bytes = msgpack.packb((PROTOCOL_VERSION, sequence, body))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise _error(
                "malformed",
                f"a {type(message).__name__} cannot be written as MessagePack: {_why(error)}; "
                "use 64-bit integers, floats, text, bytes and structs of these",
            ) from error
        self._check_length(frame, type(message).__name__)
        return frame

    def decode(self, frame: bytes) -> tuple[int, msgspec.Struct]:
        """Return the sequence number and the validated message of a frame from outside.

        Raises:
            FrameError: with the reason "oversized", "unknown" or "malformed", and no peer.
            ForeignFrame: a `FrameError` with the reason "version".
        """
        self._check_length(frame, "a frame")
        envelope = _unpack(frame)
        if envelope[0] != PROTOCOL_VERSION:
            raise ForeignFrame(envelope[0], _said(envelope))
        sequence, body, tag = _inside(envelope)
        message_type = self._types.get(tag)
        if message_type is None:
            raise _error(
                "unknown",
                f"a message of the unknown type {tag[:_QUOTED]!r}; this bus knows "
                f"{', '.join(self._types)}",
            )
        return sequence, _validated(body, message_type)

    def _check_length(self, frame: bytes, name: str) -> None:
        if len(frame) > self.max_frame_bytes:
            raise _error(
                "oversized",
                f"{name} of {len(frame)} bytes, where {self.max_frame_bytes} are allowed; "
                "send large values over the data path, or raise max_frame_bytes on all nodes",
            )


def _by_tag(types: Iterable[type[msgspec.Struct]]) -> dict[str, type[msgspec.Struct]]:
    by_tag: dict[str, type[msgspec.Struct]] = {}
    for message_type in types:
        config, name = message_type.__struct_config__, message_type.__name__
        if config.tag_field != "type" or not isinstance(config.tag, str):
            raise ValueError(
                f'{name} has no text tag in the field "type": declare it with tag=True'
            )
        if not config.frozen or not config.forbid_unknown_fields:
            raise ValueError(f"declare {name} with frozen=True and forbid_unknown_fields=True")
        if config.tag in by_tag:
            raise ValueError(f"two message types have the tag {config.tag!r}: rename one of them")
        by_tag[config.tag] = message_type
    return by_tag


def _unpack(frame: bytes) -> list[Any]:
    """Return the outer array of a frame, of which only the version is known to be sound."""
    items = min(len(frame), MAX_ITEMS)  # no more can be claimed than there are bytes to fill it
    try:
        envelope = msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            ext_hook=_refuse_ext,
            max_ext_len=0,
            max_array_len=items,
            max_map_len=items,
            max_str_len=len(frame),
            max_bin_len=len(frame),
        )
    except Exception as error:  # hostile bytes may make the library raise anything
        raise _error(
            "malformed", f"{len(frame)} bytes that are not MessagePack: {_why(error)}"
        ) from error
    if type(envelope) is not list or not envelope or type(envelope[0]) is not int:
        raise _error("malformed", "MessagePack that is not [version, sequence, message]")
    return envelope


def _inside(envelope: list[Any]) -> tuple[int, dict[Any, Any], str]:
    """Return sequence number, message and its tag from the outer array of a frame."""
    if len(envelope) != 3:
        raise _error("malformed", f"{len(envelope)} items where [version, sequence, message] are 3")
    _, sequence, body = envelope
    if type(sequence) is not int or not 0 <= sequence <= _MAX_SEQUENCE:
        raise _error("malformed", "a sequence number that is not an integer from 0 to 2**63 - 1")
    if type(body) is not dict or type(tag := body.get("type")) is not str:
        raise _error("malformed", 'a message that is not a map with a text under "type"')
    return sequence, body, tag


def _validated(body: dict[Any, Any], message_type: type[_Message]) -> _Message:
    try:
        return msgspec.convert(body, message_type, strict=True, builtin_types=(bytes,))
    except Exception as error:  # a nested bomb raises RecursionError, a __post_init__ anything
        raise _error(
            "malformed", f"a {message_type.__name__} that is not valid: {_why(error)}"
        ) from error


def _said(envelope: list[Any]) -> ForeignHello | ForeignReject | None:
    """Return what can be understood of a frame of another version."""
    try:
        _, body, tag = _inside(envelope)
        match tag:
            case "Hello":
                return _validated(body, ForeignHello)
            case "Reject":
                return _validated(body, ForeignReject)
    except FrameError:
        pass
    return None


def _refuse_ext(code: int, data: bytes) -> object:
    raise ValueError(f"MessagePack extension {code} of {len(data)} bytes; none is allowed")


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _error(reason: str, text: str) -> FrameError:
    return FrameError(text, peer=None, reason=reason)
