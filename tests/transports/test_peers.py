"""Who is admitted, in which order frames must come, and when a peer counts as silent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.errors import FrameError, HandshakeError, TransportError
from myelin.transports.frames import Hello
from myelin.transports.peers import Claim, Handshake, Inbound, Presence, Roster

HELLO = Hello(node=1, incarnation="a", inbox="inproc://1", protocol=1, torch="2", python="3", pid=1)


def refused(inbound: Inbound, sequence: int) -> str:
    with pytest.raises(FrameError) as caught:
        inbound.accept(sequence)
    assert caught.value.peer == 4
    return caught.value.reason


def test_frames_in_order_are_accepted() -> None:
    inbound = Inbound(4)
    for sequence in range(1000):
        inbound.accept(sequence)


def test_a_frame_that_came_before_is_a_replay() -> None:
    inbound = Inbound(4)
    inbound.accept(0)
    inbound.accept(1)
    assert refused(inbound, 1) == "replayed"
    assert refused(inbound, 0) == "replayed"
    inbound.accept(2)


def test_missing_frames_are_a_gap_that_is_reported_once() -> None:
    inbound = Inbound(4)
    inbound.accept(0)
    with pytest.raises(FrameError, match="3 frames of node 4 are missing before frame 4"):
        inbound.accept(4)
    inbound.accept(5)
    assert refused(inbound, 2) == "replayed"


def test_the_number_of_an_unreadable_frame_may_be_missing() -> None:
    inbound = Inbound(4)
    inbound.accept(0)
    inbound.skip()
    inbound.accept(2)
    assert refused(inbound, 4) == "gap"
    inbound.skip()
    inbound.skip()
    assert refused(inbound, 8) == "gap"


@given(st.lists(st.integers(0, 30), max_size=60))
def test_whatever_arrives_each_number_is_accepted_at_most_once_and_upwards(
    arrivals: list[int],
) -> None:
    inbound, accepted = Inbound(4), []
    for sequence in arrivals:
        try:
            inbound.accept(sequence)
        except FrameError:
            continue
        accepted.append(sequence)
    assert accepted == sorted(set(accepted))


@pytest.mark.parametrize("claim", [Claim(-1, "a"), Claim(0, "x-1_y.Z"), Claim(10**9 - 1, "f" * 64)])
def test_an_identity_says_node_and_incarnation(claim: Claim) -> None:
    assert Claim.parse(claim.identity()) == claim


def test_an_identity_may_say_that_a_rejection_is_all_that_comes() -> None:
    assert Claim.parse(b"3:a:reject12") == Claim(3, "a", rejecting=True)


@pytest.mark.parametrize(
    "identity",
    [
        b"",
        b"\x00\x01",
        b"3",
        b"3:",
        b":a",
        b"-2:a",
        b"03:a",
        b"3:a:b",
        b"3:a b",
        b"3:a\n",
        b"9" * 300,
    ],
)
def test_other_identities_claim_nothing(identity: bytes) -> None:
    assert Claim.parse(identity) is None


@pytest.mark.parametrize("claim", [Claim(-2, "a"), Claim(1, ""), Claim(1, "a:b"), Claim(1, "ü")])
def test_an_impossible_claim_has_no_identity(claim: Claim) -> None:
    with pytest.raises(ValueError, match="use a node of -1 or more and an incarnation of 1 to 64"):
        claim.identity()


def test_an_admitted_peer_is_known_by_node_and_by_identity() -> None:
    roster = Roster(silence_s=5)
    roster.admit(Claim(1, "a"), now=0)
    peer = roster.at(1)
    assert peer is not None
    assert peer is roster.of(b"1:a")
    assert roster.peers() == (peer,)
    assert roster.of(b"1:b") is None
    assert roster.at(2) is None


def test_admitting_again_keeps_what_is_known() -> None:
    roster = Roster(silence_s=5)
    roster.admit(Claim(1, "a"), now=0)
    before = roster.at(1)
    roster.admit(Claim(1, "a"), now=9)
    assert roster.at(1) is before


def test_another_incarnation_waits_until_the_first_is_forgotten() -> None:
    roster = Roster(silence_s=5)
    roster.admit(Claim(1, "a"), now=0)
    with pytest.raises(TransportError, match=r"node 1 is here as incarnation a .* forget\(1\)"):
        roster.admit(Claim(1, "b"), now=0)
    roster.forget(1)
    roster.forget(1)
    assert roster.of(b"1:a") is None
    roster.admit(Claim(1, "b"), now=0)
    assert roster.of(b"1:b") is not None


def test_each_silence_is_told_once() -> None:
    roster = Roster(silence_s=5)
    roster.admit(Claim(1, "a"), now=0)
    roster.admit(Claim(2, "a"), now=3)
    assert roster.silent(4.9) == []
    assert roster.silent(5.5) == [(1, 5.5)]
    assert roster.silent(6) == []
    peer = roster.at(1)
    assert peer is not None
    peer.hear(7)
    assert roster.silent(8) == [(2, 5)]
    assert roster.silent(12) == [(1, 5)]


@pytest.mark.parametrize("presence", [Presence.LEFT, Presence.CUT_OFF])
def test_who_is_known_to_be_gone_is_not_silent(presence: Presence) -> None:
    roster = Roster(silence_s=5)
    roster.admit(Claim(1, "a"), now=0)
    peer = roster.at(1)
    assert peer is not None
    peer.presence = presence
    assert roster.silent(100) == []


def test_who_said_goodbye_stays_gone_and_who_was_cut_off_may_come_back() -> None:
    roster = Roster(silence_s=5)
    roster.admit(Claim(1, "a"), now=0)
    peer = roster.at(1)
    assert peer is not None
    for presence, later in [
        (Presence.CUT_OFF, Presence.HEARD),
        (Presence.SILENT, Presence.HEARD),
        (Presence.LEFT, Presence.LEFT),
    ]:
        peer.presence = presence
        peer.hear(1)
        assert peer.presence is later


def test_a_stall_of_this_node_is_nobody_elses_silence() -> None:
    roster = Roster(silence_s=5)
    roster.admit(Claim(1, "a"), now=0)
    roster.excuse(late_s=60, now=61)
    assert roster.silent(61) == []
    roster.excuse(late_s=60, now=62)  # nobody is heard in the future
    assert roster.silent(66) == []
    assert roster.silent(67) == [(1, 5)]


def test_a_handshake_ends_with_a_hello_or_the_first_refusal() -> None:
    handshake = Handshake(1)
    assert handshake.result() is None
    handshake.hello = HELLO
    assert handshake.result() == HELLO
    handshake.refuse("too old")
    handshake.refuse("later")
    with pytest.raises(HandshakeError, match="too old"):
        handshake.result()


def test_a_handshake_that_expires_says_what_was_heard() -> None:
    handshake = Handshake(7)
    assert "node 7 did not say hello within 2.5 s; heard from it: nothing" in str(
        handshake.expired(2.5)
    )
    handshake.heard = "93 bytes that are not MessagePack"
    assert "heard from it: 93 bytes" in str(handshake.expired(1))
