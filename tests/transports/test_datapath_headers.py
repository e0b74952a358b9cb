import asyncio
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from myelin.errors import ChannelClosed, ChannelError, ChannelTimeout
from myelin.transports.datapath import (
    COORDINATOR,
    DTYPES,
    HEADER,
    Direction,
    TensorSpec,
    Transfer,
    begin_receive,
    begin_send,
    check_header,
    describe,
    node_name,
    pack_header,
    spec_of,
)

LOOP = asyncio.new_event_loop()
LOOP.close()

shapes = st.lists(st.integers(0, 2**9), max_size=5).map(tuple)
tensor_specs = st.builds(TensorSpec, shape=shapes, dtype=st.sampled_from(sorted(DTYPES)))
spec_lists = st.lists(tensor_specs, max_size=6).map(tuple)


def receive_of(specs: tuple[TensorSpec, ...], label: str = "forward") -> Transfer:
    """Return a receive whose loop has ended."""
    return Transfer(Direction.RECEIVE, 3, label, specs, (), LOOP, asyncio.Future(loop=LOOP))


@given(specs=spec_lists, sequence=st.integers(0, 2**63), label=st.text(max_size=300))
def test_a_header_passes_the_check_of_its_own_announcement(
    specs: tuple[TensorSpec, ...], sequence: int, label: str
) -> None:
    raw = pack_header(receive_of(specs, label), sequence % 2**62)
    assert len(raw) == HEADER.size
    bytes_total = check_header(raw, receive_of(specs, "another label"), sequence % 2**62)
    assert bytes_total == sum(spec.bytes_total for spec in specs)


@given(came=spec_lists, announced=spec_lists, step=st.integers(0, 2))
def test_a_header_of_any_other_message_is_refused_with_both_in_the_text(
    came: tuple[TensorSpec, ...], announced: tuple[TensorSpec, ...], step: int
) -> None:
    raw = pack_header(receive_of(came, "backward"), 5 + step)
    if came == announced and step == 0:
        return
    with pytest.raises(ChannelError, match="'forward' from worker 3 was announced as") as caught:
        check_header(raw, receive_of(announced), 5)
    assert f"message 5 with {describe(announced)}" in str(caught.value)
    assert f"message {5 + step}, 'backward'" in str(caught.value)
    assert caught.value.peer == 3


@given(raw=st.binary(min_size=HEADER.size, max_size=HEADER.size))
def test_bytes_that_are_no_header_are_refused(raw: bytes) -> None:
    with pytest.raises(ChannelError, match="no header"):
        check_header(raw, receive_of(()), 0)


def test_a_text_too_long_for_the_header_is_cut_even_within_a_letter() -> None:
    for length in range(200, 216):
        raw = pack_header(receive_of((), "é" * length), 1)
        with pytest.raises(ChannelError, match="what came is message 1, 'éééé"):
            check_header(raw, receive_of(()), 0)


def test_a_header_with_another_version_is_refused() -> None:
    raw = bytearray(pack_header(receive_of(()), 0))
    raw[7] += 1
    with pytest.raises(ChannelError, match="no header"):
        check_header(bytes(raw), receive_of(()), 0)


def test_the_digest_tells_apart_what_count_and_size_do_not() -> None:
    raw = pack_header(receive_of((TensorSpec((2, 3), "float32"),)), 0)
    assert struct.unpack_from("<IQ", raw, 16) == (1, 24)
    with pytest.raises(ChannelError):
        check_header(raw, receive_of((TensorSpec((3, 2), "float32"),)), 0)


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - {"complex32"}))
def test_a_spec_says_what_its_tensor_is(dtype: str) -> None:
    tensor = torch.empty(3, 2, dtype=DTYPES[dtype])
    spec = spec_of(tensor)
    assert spec == TensorSpec((3, 2), dtype)
    assert spec.bytes_total == tensor.nbytes
    assert str(spec) == f"{dtype}[3, 2]"
    assert spec_of(spec.empty()) == spec


@pytest.mark.parametrize(
    "spec",
    [TensorSpec((2, -1), "float32"), TensorSpec((), "save"), TensorSpec((), "torch.float32")],
)
def test_a_spec_that_describes_no_tensor_has_no_size(spec: TensorSpec) -> None:
    with pytest.raises(ValueError, match="describes no tensor"):
        _ = spec.bytes_total


def test_nodes_and_specs_have_names_in_words() -> None:
    assert node_name(COORDINATOR) == "the coordinator"
    assert node_name(2) == "worker 2"
    assert describe([]) == "no tensors"
    assert describe([TensorSpec((), "bool"), TensorSpec((1,), "int8")]) == "bool[], int8[1]"


async def test_a_transfer_is_finished_once_and_on_its_own_loop() -> None:
    transfer = begin_send(1, [torch.zeros(1)], "forward")
    await asyncio.to_thread(transfer.finish, None)
    await asyncio.to_thread(transfer.finish, transfer.closed("too late"))
    assert await transfer.future is None
    await asyncio.sleep(0)


async def test_a_transfer_that_was_cancelled_can_still_be_finished() -> None:
    transfer = begin_send(1, [torch.zeros(1)], "forward")
    transfer.future.cancel()
    transfer.finish(None)
    await asyncio.sleep(0)
    assert transfer.future.cancelled()


def test_finishing_after_the_loop_has_closed_does_nothing() -> None:
    receive_of(()).finish([])


async def test_errors_of_a_transfer_name_label_peer_and_remedy() -> None:
    send = begin_send(COORDINATOR, [], "loss")
    receive = begin_receive(4, [], "forward stage=1 microbatch=0")
    assert str(send.timed_out(1.5)).startswith(
        "'loss' to the coordinator was not taken within 1.5 s"
    )
    assert isinstance(receive.timed_out(1), ChannelTimeout)
    assert "from worker 4 was not delivered" in str(receive.timed_out(1))
    assert isinstance(receive.closed("it is gone"), ChannelClosed)
    assert str(receive.closed("it is gone")).endswith("did not get across: it is gone")


async def test_a_transfer_without_memory_for_it_fails_with_the_size_in_the_text() -> None:
    receive = begin_receive(1, [TensorSpec((2**45,), "float64")], "forward")
    with pytest.raises(ChannelError, match=r"no memory for 'forward' from worker 1, float64\["):
        receive.allocate()
