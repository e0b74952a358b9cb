"""Where an inbox may listen, and what the sockets do at their limits."""

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from myelin.errors import TransportError
from myelin.transports.sockets import Context, Inbox, Outbox


@pytest.fixture
def context() -> Iterator[Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="m-") as name:
        yield Path(name)


def inbox(context: Context, address: str, *, max_bytes: int = 1000) -> Inbox:
    return Inbox(context, address, high_water=100, max_bytes=max_bytes)


def outbox(context: Context, address: str, *, high_water: int = 100) -> Outbox:
    return Outbox(context, address, identity=b"1:a", high_water=high_water)


def wait(descriptor: int) -> None:
    """Block until there is something new to look for."""
    poller = zmq.Poller()
    poller.register(descriptor, zmq.POLLIN)
    assert poller.poll(5000)


def next_message(box: Inbox) -> tuple[bytes, list[bytes]]:
    while (message := box.take()) is None:
        wait(box.descriptor)
    return message


def next_ended(box: Inbox) -> bytes | None:
    while not (ended := box.ended()):
        wait(box.monitor_descriptor)
    (sender,) = ended
    return sender


@pytest.mark.parametrize(
    "address",
    [
        "",
        "ipc://",
        "ipc://*",
        "ipc://@abstract",
        "ipc://relative/path",
        "inproc://",
        "inproc://" + "x" * 120,
        "tcp://127.0.0.1:5555",
        "tcp://*:*",
        "/tmp/x",
    ],
)
def test_only_private_kinds_of_address_are_listened_at(context: Context, address: str) -> None:
    with pytest.raises(TransportError, match=r"use inproc://name or ipc:///absolute/path"):
        inbox(context, address)


def test_a_path_that_the_system_would_cut_is_refused_with_a_remedy(
    context: Context, place: Path
) -> None:
    longest = str(place / ("x" * (107 - len(str(place)) - 1)))
    inbox(context, f"ipc://{longest}").close()
    with pytest.raises(TransportError, match=r"has 108 bytes and the system allows 107; .* TMPDIR"):
        inbox(context, f"ipc://{longest}y")
    umlauts = str(place / ("ü" * 50))
    with pytest.raises(TransportError, match="the system allows 107"):
        inbox(context, f"ipc://{umlauts}")


def test_what_stands_at_the_path_is_left_alone(context: Context, place: Path) -> None:
    path = place / "file"
    path.write_text("precious")
    with pytest.raises(TransportError, match="exists"):
        inbox(context, f"ipc://{path}")
    assert path.read_text() == "precious"
    path.unlink()
    path.symlink_to(place / "nowhere")
    with pytest.raises(TransportError, match="exists"):
        inbox(context, f"ipc://{path}")


def test_an_address_in_use_is_not_stolen(context: Context, place: Path) -> None:
    for address in (f"ipc://{place}/a", "inproc://a"):
        first = inbox(context, address)
        with pytest.raises(TransportError, match="cannot listen at"):
            inbox(context, address)
        sender = outbox(context, address)
        assert sender.send(b"x")
        assert next_message(first) == (b"1:a", [b"x"])
        sender.close(linger_s=0)
        first.close()


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_a_directory_that_others_may_enter_is_refused(
    context: Context, place: Path, mode: int
) -> None:
    place.chmod(mode)
    with pytest.raises(TransportError, match="only its owner may enter; make one with mode 0700"):
        inbox(context, f"ipc://{place}/a")
    assert os.listdir(place) == []


def test_a_directory_that_is_not_there_is_refused(context: Context, place: Path) -> None:
    with pytest.raises(TransportError, match="must be a directory"):
        inbox(context, f"ipc://{place}/none/a")


def test_closing_an_inbox_removes_its_file(context: Context, place: Path) -> None:
    box = inbox(context, f"ipc://{place}/a")
    assert os.listdir(place) == ["a"]
    box.close()
    assert os.listdir(place) == []
    box.close()


def test_an_outbox_needs_an_address_that_can_be_connected_to(context: Context) -> None:
    for address in ("", "nonsense", "carrier-pigeon://coop"):
        with pytest.raises(TransportError, match="cannot connect to"):
            outbox(context, address)


def test_frames_wait_for_an_inbox_that_comes_later(context: Context, place: Path) -> None:
    for address in (f"ipc://{place}/a", "inproc://a"):
        sender = outbox(context, address)
        assert sender.send(b"first")
        assert sender.send(b"second")
        assert sender.sequence == 2
        box = inbox(context, address)
        assert next_message(box) == (b"1:a", [b"first"])
        assert next_message(box) == (b"1:a", [b"second"])
        assert box.take() is None
        sender.close(linger_s=0)
        box.close()


def test_an_outbox_takes_no_more_than_its_high_water(context: Context, place: Path) -> None:
    sender = outbox(context, f"ipc://{place}/nobody", high_water=5)
    assert [sender.send(b"x") for _ in range(7)] == [True] * 5 + [False] * 2
    assert sender.sequence == 5
    sender.close(linger_s=0)


def test_room_that_came_free_is_seen_at_once(context: Context) -> None:
    box = Inbox(context, "inproc://a", high_water=5, max_bytes=1000)
    sender = outbox(context, "inproc://a", high_water=5)
    for _ in range(200):
        while sender.send(b"x"):
            pass
        while box.take() is not None:
            pass
        assert sender.send(b"x")
    sender.close(linger_s=0)
    box.close()


def test_the_end_of_a_connection_is_told_with_its_sender(context: Context, place: Path) -> None:
    box, address = inbox(context, f"ipc://{place}/a"), f"ipc://{place}/a"
    senders = [
        Outbox(context, address, identity=name, high_water=9) for name in (b"1:a", b"2:a", b"3:a")
    ]
    for sender in senders:
        sender.send(b"x")
        next_message(box)
    for sender, name in zip(senders, (b"1:a", b"2:a", b"3:a"), strict=True):
        sender.close(linger_s=0)
        assert next_ended(box) == name
    box.close()


def test_a_connection_that_brings_far_too_long_a_frame_is_ended(
    context: Context, place: Path
) -> None:
    box, address = inbox(context, f"ipc://{place}/a", max_bytes=1000), f"ipc://{place}/a"
    sender = outbox(context, address)
    sender.send(b"x" * 1000)
    assert next_message(box) == (b"1:a", [b"x" * 1000])
    sender.send(b"y" * 1001)
    assert next_ended(box) == b"1:a"
    sender.send(b"z")  # by a new connection
    assert next_message(box) == (b"1:a", [b"z"])
    sender.close(linger_s=0)
    assert next_ended(box) == b"1:a"
    box.close()


def test_a_connection_that_does_not_speak_zeromq_is_told(context: Context, place: Path) -> None:
    box = inbox(context, f"ipc://{place}/a")
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(place / "a"))
        stranger.send(b"\xff" * 100)
        assert next_ended(box) is None
    assert box.take() is None
    box.close()


def test_a_second_connection_of_the_same_name_takes_over_nothing(
    context: Context, place: Path
) -> None:
    box, address = inbox(context, f"ipc://{place}/a"), f"ipc://{place}/a"
    first = outbox(context, address)
    first.send(b"first")
    assert next_message(box) == (b"1:a", [b"first"])
    impostor = outbox(context, address)
    impostor.send(b"impostor")
    third = Outbox(context, address, identity=b"3:a", high_water=9)
    third.send(b"third")
    assert next_message(box) == (b"3:a", [b"third"])
    first.send(b"still first")
    assert next_message(box) == (b"1:a", [b"still first"])
    for sender in (first, impostor, third):
        sender.close(linger_s=0)
    box.close()
