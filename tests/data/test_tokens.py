import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.data import tokens as tokens_module
from myelin.data.tokens import TokenFile, side_file, unnamed_tokens, write_tokens
from myelin.data.vocabulary import ByteVocabulary, Ids
from myelin.errors import DataError


class Numbers:
    """A vocabulary of decimal numbers, which says of itself whatever a test wants."""

    fingerprint = "numbers"

    def __init__(self, size: int, dtype: npt.DTypeLike = np.int64) -> None:
        self.size = size
        self.dtype = dtype

    def encode(self, text: str) -> Ids:
        ids: npt.NDArray[Any] = np.array(text.split(), dtype=self.dtype)
        return ids

    def decode(self, ids: npt.ArrayLike) -> str:
        return " ".join(map(str, np.asarray(ids).tolist()))

    def __repr__(self) -> str:
        return f"Numbers({self.size})"


def write(path: Path, *texts: str) -> TokenFile:
    return write_tokens(path, texts, ByteVocabulary(), corpus="c")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_written_tokens_are_those_that_are_opened(tmp_path: Path) -> None:
    written = write(tmp_path / "t", "hello ", "", "wörld")
    opened = TokenFile.open(tmp_path / "t")
    assert opened.header == written.header
    assert (opened.header.dtype, opened.header.count) == ("uint16", 12)
    assert (opened.header.vocabulary, opened.header.corpus) == ("bytes", "c")
    assert opened.tokens.tolist() == written.tokens.tolist() == list("hello wörld".encode())
    assert names(tmp_path) == ["t", "t.json"]


def test_the_side_file_is_json_that_a_person_can_read(tmp_path: Path) -> None:
    write(tmp_path / "t", "hello")
    described = json.loads(side_file(tmp_path / "t").read_text())
    assert described["count"] == 5
    assert set(described) == {"type", "dtype", "count", "vocabulary", "corpus", "digest"}


def test_tokens_are_mapped_and_cannot_be_written_to(tmp_path: Path) -> None:
    opened = write(tmp_path / "t", "hello")
    assert isinstance(opened.tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        opened.tokens[0] = 1


@pytest.mark.parametrize(
    ("size", "dtype", "item_bytes"),
    [(1000, "uint16", 2), (65_536, "uint16", 2), (65_537, "uint32", 4), (2**32, "uint32", 4)],
)
def test_ids_are_as_wide_as_the_vocabulary_needs(
    tmp_path: Path, size: int, dtype: str, item_bytes: int
) -> None:
    last = size - 1
    written = write_tokens(tmp_path / "t", [f"0 {last}", f"{last} 1"], Numbers(size), corpus="c")
    assert written.header.dtype == dtype
    assert (tmp_path / "t").stat().st_size == 4 * item_bytes
    assert TokenFile.open(tmp_path / "t").tokens.tolist() == [0, last, last, 1]


@pytest.mark.parametrize(
    ("size", "text"),
    [(65_536, "65536"), (65_536, "1 70000 2"), (300, "300"), (300, "-1"), (2**32, "4294967296")],
)
def test_an_id_outside_the_vocabulary_is_refused_and_never_wraps(
    tmp_path: Path, size: int, text: str
) -> None:
    with pytest.raises(DataError, match=rf"gave ids from .* within 0 to {size - 1}"):
        write_tokens(tmp_path / "t", ["1 2", text], Numbers(size), corpus="c")
    assert names(tmp_path) == []


@pytest.mark.parametrize("size", [0, -1, 2**32 + 1])
def test_an_impossible_size_of_a_vocabulary_is_refused(size: int) -> None:
    with pytest.raises(DataError, match=rf"size {size}; it must be from 1"):
        unnamed_tokens(["1"], Numbers(size), corpus="c")


def test_ids_that_are_no_integers_or_no_row_are_refused() -> None:
    with pytest.raises(DataError, match=r"shape \(2,\) and type float64"):
        unnamed_tokens(["1 2"], Numbers(10, np.float64), corpus="c")

    class Table(Numbers):
        def encode(self, text: str) -> Ids:
            return super().encode(text).reshape(1, -1)

    with pytest.raises(DataError, match=r"shape \(1, 2\)"):
        unnamed_tokens(["1 2"], Table(10), corpus="c")


def test_a_vocabulary_may_return_a_list() -> None:
    class Lists(Numbers):
        def encode(self, text: str) -> Ids:
            return super().encode(text).tolist()  # type: ignore[no-any-return]

    assert unnamed_tokens(["3 1", "2"], Lists(10), corpus="c").tokens.tolist() == [3, 1, 2]


@given(st.lists(st.text(max_size=20), min_size=1).filter(any))
def test_tokens_without_a_name_are_the_same_as_those_with_one(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("tokens") / "t"
    named, unnamed = write(path, *texts), unnamed_tokens(texts, ByteVocabulary(), corpus="c")
    assert named.header == unnamed.header
    assert named.tokens.tolist() == unnamed.tokens.tolist() == list("".join(texts).encode())


def test_no_token_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no token"):
        write(tmp_path / "t", "", "")
    assert names(tmp_path) == []


def test_a_file_that_was_cut_or_grew_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "t", "hello world")
    whole = (tmp_path / "t").read_bytes()
    for content in (whole[:-2], whole[:-1], whole + b"\0\0", b""):
        (tmp_path / "t").write_bytes(content)
        with pytest.raises(DataError, match=rf"{len(content)} bytes where 11 ids.*need 22"):
            TokenFile.open(tmp_path / "t")


@given(place=st.integers(0, 21), bit=st.integers(0, 7))
def test_a_single_flipped_bit_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    path = tmp_path_factory.mktemp("tokens") / "t"
    write(path, "hello world")
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(DataError, match="not those that were written"):
        TokenFile.open(path)


def test_a_digest_is_checked_over_all_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_module, "_CHECK_TOKENS", 4)
    write(tmp_path / "t", "hello world")
    assert TokenFile.open(tmp_path / "t").header.count == 11


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"\xff",
        b"{}",
        b'{"type": "other"}',
        b'{"type":"myelin.tokens.1","dtype":"int8","count":1,"vocabulary":"","corpus":"","digest":""}',
        b'{"type":"myelin.tokens.1","dtype":"uint16","count":"1","vocabulary":"","corpus":"","digest":""}',
    ],
)
def test_a_foreign_side_file_is_refused(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "t", "hello")
    side_file(tmp_path / "t").write_bytes(content)
    with pytest.raises(DataError, match="no description of tokens"):
        TokenFile.open(tmp_path / "t")


@pytest.mark.parametrize("count", [0, -1, 10**30])
def test_an_impossible_count_is_refused(tmp_path: Path, count: int) -> None:
    write(tmp_path / "t", "hello")
    described = json.loads(side_file(tmp_path / "t").read_text()) | {"count": count}
    side_file(tmp_path / "t").write_text(json.dumps(described))
    (tmp_path / "t").write_bytes(b"")
    with pytest.raises(DataError):
        TokenFile.open(tmp_path / "t")


def test_tokens_need_both_files(tmp_path: Path) -> None:
    write(tmp_path / "t", "hello")
    (tmp_path / "t").rename(tmp_path / "moved")
    with pytest.raises(DataError, match="cannot open the tokens"):
        TokenFile.open(tmp_path / "t")
    with pytest.raises(DataError, match=r"no description of tokens in .*moved\.json"):
        TokenFile.open(tmp_path / "moved")


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    before = write(tmp_path / "t", "hello")

    def texts() -> Iterator[str]:
        yield "other"
        raise OSError("planted")

    with pytest.raises(OSError, match="planted"):
        write_tokens(tmp_path / "t", texts(), ByteVocabulary(), corpus="c")
    assert TokenFile.open(tmp_path / "t").header == before.header
    assert names(tmp_path) == ["t", "t.json"]


def test_whatever_moment_a_write_ends_at_old_tokens_never_pass_for_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "t", "hello")
    replace = os.replace

    def replace_tokens_only(source: str, target: Path) -> None:
        if target.name.endswith(".json"):
            raise OSError("the machine stopped")
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_tokens_only)
    with pytest.raises(OSError, match="stopped"):
        write(tmp_path / "t", "jello")
    with pytest.raises(DataError, match="no description"):
        TokenFile.open(tmp_path / "t")


def test_tokens_in_use_stay_readable_when_they_are_written_anew(tmp_path: Path) -> None:
    used = write(tmp_path / "t", "hello")
    write(tmp_path / "t", "other text")
    assert used.tokens.tolist() == list(b"hello")
    assert TokenFile.open(tmp_path / "t").tokens.tolist() == list(b"other text")


def test_tokens_without_a_name_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        file = unnamed_tokens(["hello"], ByteVocabulary(), corpus="c")
    assert names(tmp_path) == []
    assert file.tokens.tolist() == list(b"hello")
    assert not caplog.records
