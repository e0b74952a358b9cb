"""Decides what each frame means and who is admitted; does no I/O, reads no clock, has no loop.

The shell (`myelin.transports.bus`) gives `Reception.take` every message with the identity of the
socket that sent it, and carries out what is returned, in order. Only an admitted peer's frames are
delivered. A stranger can say hello, or reject a hello of ours; whatever else it sends is a fault
that counts for nobody. A frame of another version is answered, so that both sides can say why they
do not talk.
"""

from collections.abc import Callable

import msgspec

from myelin.errors import FrameError
from myelin.transports.frames import (
    MAX_TEXT,
    PROTOCOL_VERSION,
    TRANSPORT_MESSAGES,
    Codec,
    ForeignFrame,
    ForeignHello,
    ForeignReject,
    Goodbye,
    Hello,
    Reject,
)
from myelin.transports.peers import Claim, Gone, Handshake, Peer, Presence, Roster

_MAX_REFUSALS = 64  # each costs the shell a socket for a moment, and anybody can cause one
_OWN = frozenset(TRANSPORT_MESSAGES)


class Deliver(msgspec.Struct, frozen=True, gc=False):
    """Hand `message` to the owner."""

    node: int
    message: msgspec.Struct


class Fault(msgspec.Struct, frozen=True):
    """Count, log and report `error`."""

    error: FrameError


class Answer(msgspec.Struct, frozen=True):
    """Send `reject` to `node`, which listens at `inbox` if that is known."""

    node: int
    inbox: str | None
    reject: Reject


class Settled(msgspec.Struct, frozen=True):
    """Somebody may wait for this: a handshake has come to its end."""

    node: int


class Departed(msgspec.Struct, frozen=True):
    """Tell the owner that `node` is gone."""

    node: int
    how: Gone


Outcome = Deliver | Fault | Answer | Settled | Departed


class Reception:
    """What comes in at one node, and what is to be done about it.

    Args:
        codec: the messages that are understood.
        silence_s: a peer that was not heard of for so long is silent.
        judge: asked about a node that is not admitted yet; returns None or a reason to reject it.
    """

    def __init__(
        self, codec: Codec, *, silence_s: float, judge: Callable[[Hello], str | None]
    ) -> None:
        self.roster = Roster(silence_s=silence_s)
        self._codec, self._judge = codec, judge
        self._handshakes: dict[int, Handshake] = {}
        self._greeted: dict[int, str] = {}
        self._refused: set[Claim] = set()

    def handshake(self, node: int) -> Handshake:
        """Return how far a node has come with being admitted."""
        return self._handshakes.setdefault(node, Handshake(node))

    def greeted(self, node: int, inbox: str) -> None:
        """Take note that a hello goes to a node, which may now be answered by a rejection."""
        self._greeted[node] = inbox

    def forget(self, node: int) -> None:
        """Drop all that is known of a node; who still waits for its hello is told so."""
        self.roster.forget(node)
        self._greeted.pop(node, None)
        self._refused = {claim for claim in self._refused if claim.node != node}
        if (handshake := self._handshakes.pop(node, None)) is not None:
            handshake.refuse(f"node {node} was forgotten while its hello was awaited")

    def close(self, why: str) -> None:
        """Tell all who wait for a hello that none will come."""
        for handshake in self._handshakes.values():
            handshake.refuse(why)

    def ended(self, sender: bytes) -> list[Outcome]:
        """Take note that the connection of a sender has ended."""
        peer = self.roster.of(sender)
        if peer is None or peer.presence is Presence.LEFT:
            return []
        peer.presence = Presence.CUT_OFF
        return [Departed(peer.node, Gone.CONNECTION_LOST)]

    def take(self, sender: bytes, parts: list[bytes], now: float) -> list[Outcome]:
        """Take one message and return what is to be done about it."""
        peer = self.roster.of(sender)
        if peer is None:
            return self._take_strange(sender, parts, now)
        peer.hear(now)
        try:
            sequence, message = self._decode(parts)
        except FrameError as error:
            peer.inbound.skip()
            return self._take_unreadable(peer, error)
        try:
            peer.inbound.accept(sequence)
        except FrameError as error:
            return [Fault(error)]
        if type(message) in _OWN:
            return self._take_own(peer, message, now)
        return [Deliver(peer.node, message)]

    def _decode(self, parts: list[bytes]) -> tuple[int, msgspec.Struct]:
        if len(parts) != 1:
            text = f"a message of {len(parts)} parts, where a frame is a single one"
            raise FrameError(text, peer=None, reason="malformed")
        return self._codec.decode(parts[0])

    def _take_own(self, peer: Peer, message: msgspec.Struct, now: float) -> list[Outcome]:
        """Take one of the bus's own messages from an admitted peer."""
        match message:
            case Hello() if peer.claim == Claim(message.node, message.incarnation):
                return self._meet(peer.claim, message, now)
            case Hello():
                text = f"node {peer.node} sent a hello of node {message.node}"
                return [Fault(FrameError(text, peer=peer.node, reason="malformed"))]
            case Reject():
                return self._rejected(peer.node, message.reason, "malformed")
            case Goodbye():
                peer.presence = Presence.LEFT
                return [Departed(peer.node, Gone.GOODBYE)]
        return []  # a heartbeat has done its work by coming

    def _take_unreadable(self, peer: Peer, error: FrameError) -> list[Outcome]:
        if not isinstance(error, ForeignFrame):
            text = f"node {peer.node} sent {error}"
            return [Fault(FrameError(text, peer=peer.node, reason=error.reason))]
        hello = self.handshake(peer.node).hello
        inbox = self._greeted.get(peer.node, hello.inbox if hello else None)
        return self._take_foreign(peer.claim, error) or self._mismatch(
            peer.claim, inbox, error.version
        )

    def _take_strange(self, sender: bytes, parts: list[bytes], now: float) -> list[Outcome]:
        """Take a message of somebody who is not admitted."""
        claim = Claim.parse(sender)
        outcomes: list[Outcome] = []
        try:
            sequence, message = self._decode(parts)
        except FrameError as error:
            heard = str(error)
            if claim is not None and isinstance(error, ForeignFrame):
                outcomes = self._take_foreign(claim, error)
        else:
            heard = f"a {type(message).__name__} with number {sequence}"
            if claim is not None and sequence == 0:
                outcomes = self._take_first(claim, message, now)
        return outcomes or self._stranger(sender, claim, heard)

    def _take_first(self, claim: Claim, message: msgspec.Struct, now: float) -> list[Outcome]:
        """Take frame 0 of a stranger; return nothing if it is of no use."""
        match message:
            case Hello() if claim == Claim(message.node, message.incarnation):
                outcomes = self._meet(claim, message, now)
                if (peer := self.roster.of(claim.identity())) is not None:
                    peer.inbound.accept(0)
                return outcomes
            case Reject() if self._may_reject(claim):
                return self._rejected(claim.node, message.reason, "malformed")
        return []

    def _take_foreign(self, claim: Claim, error: ForeignFrame) -> list[Outcome]:
        """Take a frame of another version; return nothing if it is not understood."""
        match error.said:
            case ForeignHello(node=claim.node, inbox=inbox):
                return self._mismatch(claim, inbox, error.version)
            case ForeignReject(reason=reason) if self._may_reject(claim):
                return self._rejected(claim.node, reason, "version")
        return []

    def _stranger(self, sender: bytes, claim: Claim | None, heard: str) -> list[Outcome]:
        if claim is not None and (waited := self._handshakes.get(claim.node)) is not None:
            waited.heard = heard
        text = f"{heard}, from {sender[:80]!r}, which is not admitted: ignored"
        return [Fault(FrameError(text, peer=None, reason="stranger"))]

    def _meet(self, claim: Claim, hello: Hello, now: float) -> list[Outcome]:
        """Admit who said hello, or say why not."""
        if hello.protocol != PROTOCOL_VERSION:
            return self._mismatch(claim, hello.inbox, hello.protocol)
        reason = self.roster.objection(claim)
        if reason is None and self.roster.at(claim.node) is None:
            reason = self._judge(hello)
        if reason is not None:
            return self._refuse(claim, hello.inbox, reason)
        self.roster.admit(claim, now)
        self.handshake(claim.node).hello = hello
        return [Settled(claim.node)]

    def _mismatch(self, claim: Claim, inbox: str | None, version: int) -> list[Outcome]:
        text = (
            f"node {claim.node} speaks protocol version {version} of the control bus, where "
            f"version {PROTOCOL_VERSION} is spoken; install the same version of Myelin on all nodes"
        )
        fault = Fault(FrameError(text, peer=self._blamed(claim), reason="version"))
        return [fault, *self._refuse(claim, inbox, text)]

    def _refuse(self, claim: Claim, inbox: str | None, reason: str) -> list[Outcome]:
        """Reject a claim, once: everybody could say hello, and each answer costs something."""
        if claim in self._refused or len(self._refused) >= _MAX_REFUSALS:
            return []
        self._refused.add(claim)
        answer = Answer(claim.node, inbox, Reject(reason=reason[:MAX_TEXT]))
        if self._blamed(claim) is None:
            return [answer]
        self.handshake(claim.node).refuse(reason)
        return [Settled(claim.node), answer]

    def _rejected(self, node: int, reason: str, word: str) -> list[Outcome]:
        text = f"node {node} rejected this node's hello: {reason}"
        self.handshake(node).refuse(text)
        return [Settled(node), Fault(FrameError(text, peer=node, reason=word))]

    def _may_reject(self, claim: Claim) -> bool:
        """Return whether a rejection by this claim can be meant for a hello of ours."""
        return claim.node in self._greeted and self._blamed(claim) is not None

    def _blamed(self, claim: Claim) -> int | None:
        """Return the node for which what this claim does counts: not for one that it imitates."""
        present = self.roster.at(claim.node)
        imitated = present is not None and present.claim.incarnation != claim.incarnation
        return None if imitated else claim.node
