"""What each frame means, decided without a socket."""

from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import pytest

from myelin.errors import FrameError, HandshakeError
from myelin.transports.frames import MAX_TEXT, Codec, Goodbye, Heartbeat, Hello, Reject
from myelin.transports.peers import Claim, Gone
from myelin.transports.reception import (
    Answer,
    Deliver,
    Departed,
    Fault,
    Outcome,
    Reception,
    Settled,
)


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    text: str = ""


CODEC = Codec((Note,), max_frame_bytes=9000)


def hello(node: int = 1, incarnation: str = "a", **changes: Any) -> Hello:
    usual: dict[str, Any] = {
        "node": node,
        "incarnation": incarnation,
        "inbox": f"inproc://{node}",
        "protocol": 1,
        "torch": "2",
        "python": "3",
        "pid": 1,
    }
    return Hello(**usual | changes)


def reception(judge: Callable[[Hello], str | None] = lambda hello: None) -> Reception:
    return Reception(CODEC, silence_s=5, judge=judge)


def take(desk: Reception, sender: bytes, sequence: int, message: msgspec.Struct) -> list[Outcome]:
    return desk.take(sender, [CODEC.encode(sequence, message)], now=1.0)


def foreign(sequence: int, **body: Any) -> list[bytes]:
    return [msgpack.packb([9, sequence, body])]


def faults(outcomes: list[Outcome]) -> list[tuple[int | None, str]]:
    return [(o.error.peer, o.error.reason) for o in outcomes if isinstance(o, Fault)]


def answers(outcomes: list[Outcome]) -> list[Answer]:
    return [o for o in outcomes if isinstance(o, Answer)]


def admitted() -> Reception:
    desk = reception()
    assert take(desk, b"1:a", 0, hello()) == [Settled(1)]
    return desk


def test_a_hello_is_judged_and_then_admits() -> None:
    judged: list[Hello] = []
    desk = reception(judged.append)
    assert take(desk, b"1:a", 0, hello()) == [Settled(1)]
    assert judged == [hello()]
    assert desk.handshake(1).result() == hello()
    assert take(desk, b"1:a", 1, Note("x")) == [Deliver(1, Note("x"))]


def test_who_is_admitted_beforehand_is_not_judged() -> None:
    desk = reception(lambda hello: "nobody else, please")
    desk.roster.admit(Claim(1, "a"), now=0)
    assert take(desk, b"1:a", 0, hello()) == [Settled(1)]
    assert desk.handshake(1).result() == hello()


def test_a_hello_that_is_judged_badly_is_answered_with_the_reason() -> None:
    desk = reception(lambda hello: "x" * 10_000)
    outcomes = take(desk, b"1:a", 0, hello())
    assert outcomes == [Settled(1), Answer(1, "inproc://1", Reject(reason="x" * MAX_TEXT))]
    with pytest.raises(HandshakeError, match="xxx"):
        desk.handshake(1).result()
    assert faults(take(desk, b"1:a", 1, Note())) == [(None, "stranger")]


def test_each_claim_is_answered_once_and_only_so_many_are() -> None:
    desk = reception(lambda hello: "no")
    first = [take(desk, b"%d:a" % n, 0, hello(node=n)) for n in range(200)]
    again = [take(desk, b"%d:a" % n, 0, hello(node=n)) for n in range(200)]
    assert [bool(answers(outcomes)) for outcomes in first] == [True] * 64 + [False] * 136
    assert all(faults(outcomes) == [(None, "stranger")] for outcomes in again)


def test_messages_of_a_stranger_are_not_delivered() -> None:
    for sender in (b"1:a", b"\x00\x01\x02\x03\x04", b"not a bus"):
        for message in (Note(), Heartbeat(), Goodbye(), Reject(reason="away with you")):
            assert faults(take(reception(), sender, 0, message)) == [(None, "stranger")]
        unreadable = reception().take(sender, [b"\xc1"], now=0)
        assert faults(unreadable) == [(None, "stranger")]


@pytest.mark.parametrize(
    ("sender", "sequence", "message"),
    [
        (b"1:a", 1, hello()),
        (b"2:a", 0, hello()),
        (b"1:b", 0, hello()),
        (b"1:a:reject0", 0, hello()),
        (b"1:a:x", 0, hello()),
    ],
)
def test_a_hello_must_be_first_and_name_its_own_sender(
    sender: bytes, sequence: int, message: Hello
) -> None:
    desk = reception()
    assert faults(take(desk, sender, sequence, message)) == [(None, "stranger")]
    assert desk.roster.peers() == ()


def test_what_a_stranger_sent_is_told_to_who_waits_for_its_hello() -> None:
    desk = reception()
    handshake = desk.handshake(1)
    take(desk, b"1:a", 3, Note())
    assert handshake.heard == "a Note with number 3"
    desk.take(b"1:a", [b"\xc1"], now=0)
    assert "1 bytes that are not MessagePack" in handshake.heard


def test_another_incarnation_is_refused_and_does_the_first_no_harm() -> None:
    desk = admitted()
    outcomes = take(desk, b"1:b", 0, hello(incarnation="b"))
    (answer,) = answers(outcomes)
    assert outcomes == [answer]
    assert "node 1 is here as incarnation a" in answer.reject.reason
    assert desk.handshake(1).result() == hello()
    desk.forget(1)
    assert take(desk, b"1:b", 0, hello(incarnation="b")) == [Settled(1)]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([b"\xc1"], "malformed"),
        ([b""], "malformed"),
        ([CODEC.encode(1, Note("cut"))[:-1]], "malformed"),
        ([CODEC.encode(1, Note()), b""], "malformed"),
        ([CODEC.encode(1, Note())] * 5, "malformed"),
        ([b"\x00" * 9001], "oversized"),
        ([msgpack.packb([1, 1, {"type": "Other"}])], "unknown"),
        ([CODEC.encode(1, hello(node=2))], "malformed"),
        ([CODEC.encode(1, hello(incarnation="b"))], "malformed"),
        ([CODEC.encode(0, Note())], "replayed"),
        ([CODEC.encode(5, Note())], "gap"),
    ],
)
def test_a_bad_frame_of_a_peer_is_its_fault_and_the_next_is_delivered(
    parts: list[bytes], reason: str
) -> None:
    desk = admitted()
    outcomes = desk.take(b"1:a", parts, now=1)
    assert faults(outcomes) == [(1, reason)]
    assert len(outcomes) == 1
    following = {"replayed": 1, "gap": 6}.get(reason, 2)
    assert take(desk, b"1:a", following, Note("ok")) == [Deliver(1, Note("ok"))]


def test_a_heartbeat_is_only_heard() -> None:
    desk = admitted()
    assert desk.take(b"1:a", [CODEC.encode(1, Heartbeat())], now=77) == []
    assert [peer.heard_at for peer in desk.roster.peers()] == [77]


def test_a_goodbye_is_told_and_the_end_of_the_connection_then_is_not() -> None:
    desk = admitted()
    assert take(desk, b"1:a", 1, Goodbye()) == [Departed(1, Gone.GOODBYE)]
    assert desk.ended(b"1:a") == []


def test_the_end_of_a_connection_is_told_for_peers_only() -> None:
    desk = admitted()
    assert desk.ended(b"1:b") == []
    assert desk.ended(b"1:a") == [Departed(1, Gone.CONNECTION_LOST)]


def test_another_version_in_a_hello_is_answered_with_both_versions() -> None:
    desk = reception()
    outcomes = take(desk, b"1:a", 0, hello(protocol=9))
    assert faults(outcomes) == [(1, "version")]
    (answer,) = answers(outcomes)
    assert answer.inbox == "inproc://1"
    assert "protocol version 9" in answer.reject.reason
    assert "version 1 is spoken" in answer.reject.reason
    with pytest.raises(HandshakeError, match=r"protocol version 9 .* version 1 is spoken"):
        desk.handshake(1).result()


def test_a_hello_in_a_frame_of_another_version_is_answered_too() -> None:
    desk = reception()
    parts = foreign(0, type="Hello", node=1, inbox="inproc://1", colour="new")
    outcomes = desk.take(b"1:a", parts, now=0)
    assert faults(outcomes) == [(1, "version")]
    assert [answer.inbox for answer in answers(outcomes)] == ["inproc://1"]


def test_other_frames_of_another_version_are_answered_where_the_peer_listens() -> None:
    desk = admitted()
    outcomes = desk.take(b"1:a", foreign(1, type="Unheard"), now=0)
    assert faults(outcomes) == [(1, "version")]
    assert [answer.inbox for answer in answers(outcomes)] == ["inproc://1"]
    assert take(desk, b"1:a", 2, Note()) == [Deliver(1, Note())]
    strange = desk.take(b"2:a", foreign(1, type="Unheard"), now=0)
    assert faults(strange) == [(None, "stranger")]


def test_a_foreign_hello_for_another_node_is_a_strangers() -> None:
    outcomes = reception().take(b"1:a", foreign(0, type="Hello", node=2, inbox="x"), now=0)
    assert faults(outcomes) == [(None, "stranger")]


def test_an_impostor_of_another_version_counts_for_nobody() -> None:
    desk = admitted()
    outcomes = take(desk, b"1:b", 0, hello(incarnation="b", protocol=9))
    assert faults(outcomes) == [(None, "version")]
    assert desk.handshake(1).result() == hello()


@pytest.mark.parametrize("sender", [b"1:a", b"1:a:reject0"])
def test_a_rejection_counts_where_a_hello_was_sent(sender: bytes) -> None:
    desk = reception()
    desk.greeted(1, "inproc://1")
    outcomes = take(desk, sender, 0, Reject(reason="wrong torch"))
    assert faults(outcomes) == [(1, "malformed")]
    assert Settled(1) in outcomes
    with pytest.raises(HandshakeError, match="node 1 rejected this node's hello: wrong torch"):
        desk.handshake(1).result()


def test_a_rejection_by_an_admitted_peer_counts() -> None:
    outcomes = take(admitted(), b"1:a", 1, Reject(reason="enough"))
    assert faults(outcomes) == [(1, "malformed")]


def test_a_rejection_in_a_frame_of_another_version_is_about_versions() -> None:
    desk = reception()
    desk.greeted(1, "inproc://1")
    outcomes = desk.take(b"1:a:reject0", foreign(0, type="Reject", reason="1 is old"), now=0)
    assert faults(outcomes) == [(1, "version")]
    assert answers(outcomes) == []  # or two versions would reject each other for ever
    with pytest.raises(HandshakeError, match="1 is old"):
        desk.handshake(1).result()


def test_a_rejection_by_an_impostor_is_a_strangers() -> None:
    desk = admitted()
    desk.greeted(1, "inproc://1")
    outcomes = take(desk, b"1:b:reject0", 0, Reject(reason="go"))
    assert faults(outcomes) == [(None, "stranger")]
    assert desk.handshake(1).result() == hello()


def test_forgetting_and_closing_end_what_is_waited_for() -> None:
    desk = reception()
    waited, other = desk.handshake(1), desk.handshake(2)
    desk.forget(1)
    desk.close("closed")
    for handshake, why in [(waited, "node 1 was forgotten"), (other, "closed")]:
        with pytest.raises(HandshakeError, match=why):
            handshake.result()


def test_a_fault_carries_a_whole_error() -> None:
    (outcome,) = admitted().take(b"1:a", [b"\xc1"], now=1)
    assert isinstance(outcome, Fault)
    assert isinstance(outcome.error, FrameError)
    assert str(outcome.error).startswith("node 1 sent 1 bytes that are not MessagePack")
