"""What a node knows of its peers: who is admitted, what was heard and when; no I/O, no clock.

A peer is one *incarnation* of a node. A process that was started again is another peer, whose
frames count only once the old one is forgotten and it is admitted itself. `Inbound` checks the
order of a peer's frames, `Roster` holds the admitted peers, `Handshake` is the way to become one.
"""

import enum
import re
from dataclasses import dataclass

from myelin.errors import FrameError, HandshakeError, TransportError
from myelin.transports.frames import Hello

_IDENTITY = re.compile(
    rb"(-1|0|[1-9][0-9]{0,8})"  # the node
    rb":([0-9A-Za-z._-]{1,64})"  # its incarnation
    rb"(:reject[0-9]{1,9})?"  # set on a connection that brings a rejection only
)


class Gone(enum.Enum):
    """How a peer ceased to be there."""

    GOODBYE = enum.auto()  # it closed its bus
    CONNECTION_LOST = enum.auto()  # it died, hung for long, forgot us, or sent far too long a frame


class Presence(enum.Enum):
    """What is known of an admitted peer's being there."""

    HEARD = enum.auto()
    SILENT = enum.auto()  # reported, and not heard since
    CUT_OFF = enum.auto()  # its connection ended without a goodbye, and it was not heard since
    LEFT = enum.auto()  # said goodbye


@dataclass(frozen=True, slots=True)
class Claim:
    """Who a connection says it is; that alone proves nothing.

    Attributes:
        node: the node.
        incarnation: names the process among all that were ever this node.
        rejecting: the connection brings a rejection only.
    """

    node: int
    incarnation: str
    rejecting: bool = False

    @classmethod
    def parse(cls, identity: bytes) -> "Claim | None":
        """Return what a socket's identity claims, or None if no bus makes such identities."""
        found = _IDENTITY.fullmatch(identity)
        return cls(int(found[1]), found[2].decode(), found[3] is not None) if found else None

    def identity(self) -> bytes:
        """Return the identity of this node's ordinary sockets.

        Raises:
            ValueError: the node or the incarnation cannot stand in an identity.
        """
        identity = f"{self.node}:{self.incarnation}".encode()
        if _IDENTITY.fullmatch(identity) is None:
            raise ValueError(
                f"node={self.node}, incarnation={self.incarnation!r}: use a node of -1 or more and "
                "an incarnation of 1 to 64 characters A-Z a-z 0-9 . _ -"
            )
        return identity


class Inbound:
    """Checks that the frames of one connection arrive once each and in order.

    After a gap the count goes on behind it, so that one loss is reported once.
    """

    __slots__ = ("_next", "_peer", "_unreadable")

    def __init__(self, peer: int) -> None:
        self._peer, self._next, self._unreadable = peer, 0, 0

    def accept(self, sequence: int) -> None:
        """Take the number of a frame that could be read.

        Raises:
            FrameError: the number was used ("replayed"), or others before it are missing ("gap").
        """
        missing = sequence - self._next
        if missing < 0:
            raise FrameError(
                f"node {self._peer} sent frame {sequence} again or too late, where {self._next} is "
                "next; it was dropped: end the run",
                peer=self._peer,
                reason="replayed",
            )
        missing -= min(missing, self._unreadable)
        self._next, self._unreadable = sequence + 1, 0
        if missing:
            raise FrameError(
                f"{missing} frames of node {self._peer} are missing before frame {sequence}, which "
                "was dropped too: messages are lost, end the run",
                peer=self._peer,
                reason="gap",
            )

    def skip(self) -> None:
        """Take note of a frame whose number could not be read; it will be missing."""
        self._unreadable += 1


@dataclass(slots=True)
class Peer:
    """An admitted incarnation of a node."""

    claim: Claim
    heard_at: float
    inbound: Inbound
    presence: Presence = Presence.HEARD

    @property
    def node(self) -> int:
        """The node of which this is an incarnation."""
        return self.claim.node

    def hear(self, now: float) -> None:
        """Take note of a frame from this peer, good or bad."""
        self.heard_at = now
        if self.presence is not Presence.LEFT:
            self.presence = Presence.HEARD


class Roster:
    """The admitted peers, at most one incarnation per node.

    Args:
        silence_s: a peer that was not heard of for so long is silent.
    """

    def __init__(self, *, silence_s: float) -> None:
        self._silence_s = silence_s
        self._by_identity: dict[bytes, Peer] = {}
        self._identities: dict[int, bytes] = {}

    def objection(self, claim: Claim) -> str | None:
        """Return why a claim cannot be admitted, or None."""
        present = self.at(claim.node)
        if present is None or present.claim == claim:
            return None
        return (
            f"node {claim.node} is here as incarnation {present.claim.incarnation} and cannot also "
            f"be {claim.incarnation}; forget({claim.node}) comes first"
        )

    def admit(self, claim: Claim, now: float) -> None:
        """Admit a peer, which counts as heard of now; one that is admitted stays what it is.

        Raises:
            TransportError: another incarnation of the node is admitted.
            ValueError: the claim cannot be the identity of a socket.
        """
        identity = claim.identity()
        if (objection := self.objection(claim)) is not None:
            raise TransportError(objection)
        if identity not in self._by_identity:
            self._by_identity[identity] = Peer(claim, now, Inbound(claim.node))
            self._identities[claim.node] = identity

    def forget(self, node: int) -> None:
        """Take a node's frames no more, until it is admitted again."""
        self._by_identity.pop(self._identities.pop(node, b""), None)

    def of(self, identity: bytes) -> Peer | None:
        """Return the admitted peer whose sockets have this identity."""
        return self._by_identity.get(identity)

    def at(self, node: int) -> Peer | None:
        """Return the admitted incarnation of a node."""
        return self._by_identity.get(self._identities.get(node, b""))

    def peers(self) -> tuple[Peer, ...]:
        """Return all admitted peers, also those that left."""
        return tuple(self._by_identity.values())

    def excuse(self, late_s: float, now: float) -> None:
        """Count a time in which this node itself did nothing as nobody's silence."""
        for peer in self._by_identity.values():
            peer.heard_at = min(now, peer.heard_at + late_s)

    def silent(self, now: float) -> list[tuple[int, float]]:
        """Return each peer that has become silent and for how many seconds; each silence once."""
        found = []
        for peer in self._by_identity.values():
            silent_s = now - peer.heard_at
            if peer.presence is Presence.HEARD and silent_s >= self._silence_s:
                peer.presence = Presence.SILENT
                found.append((peer.node, silent_s))
        return found


@dataclass(slots=True)
class Handshake:
    """How far a node has come with being admitted.

    Attributes:
        node: the node.
        hello: what it said, once it was admitted.
        refusal: why one side will not talk to the other; stays until the node is forgotten.
        heard: the last that came from somebody who claims to be the node.
    """

    node: int
    hello: Hello | None = None
    refusal: str | None = None
    heard: str = "nothing"

    def refuse(self, reason: str) -> None:
        """Note why there will be no hello; the first reason stays."""
        self.refusal = self.refusal or reason

    def result(self) -> Hello | None:
        """Return the hello, or None as long as none has come.

        Raises:
            HandshakeError: one side has refused the other.
        """
        if self.refusal is not None:
            raise HandshakeError(self.refusal)
        return self.hello

    def expired(self, deadline_s: float) -> HandshakeError:
        """Return the error for a hello that did not come in time."""
        return HandshakeError(
            f"node {self.node} did not say hello within {deadline_s:g} s; heard from it: "
            f"{self.heard}. See whether its process is alive, and what it wrote last"
        )
