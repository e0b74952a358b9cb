import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from myelin.data.vocabulary import BpeVocabulary, ByteVocabulary, Vocabulary
from myelin.errors import DataError

TEXTS = ["the cat sat on the mat\n", "the cat ate the rat\n", "def the(cat): return cat\n"] * 20


@pytest.fixture(scope="module")
def bpe() -> BpeVocabulary:
    pytest.importorskip("tokenizers")
    return BpeVocabulary.train(TEXTS, 300)


@given(st.text())
def test_bytes_give_any_text_back(text: str) -> None:
    vocabulary = ByteVocabulary()
    ids = vocabulary.encode(text)
    assert ids.tolist() == list(text.encode())
    assert vocabulary.decode(ids) == text


@given(st.lists(st.integers(-10, 400), max_size=30))
def test_bytes_decode_any_ids_and_mark_what_is_no_text(ids: list[int]) -> None:
    decoded = ByteVocabulary().decode(ids)
    known = bytes(i if 0 <= i < 256 else 0xFF for i in ids)
    assert decoded == known.decode(errors="replace")


def test_half_a_character_reads_as_a_replacement() -> None:
    assert ByteVocabulary().decode([65, 0xC3]) == "A\ufffd"
    assert ByteVocabulary().decode([300, 66]) == "\ufffdB"


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, lambda ids: torch.tensor([ids])])
def test_ids_may_be_a_list_an_array_or_a_tensor(make: type, bpe: BpeVocabulary) -> None:
    ids = make([72, 105])
    assert ByteVocabulary().decode(ids) == "Hi"
    assert bpe.decode(make(bpe.encode("the cat").tolist())) == "the cat"


def test_no_ids_are_no_text(bpe: BpeVocabulary) -> None:
    assert ByteVocabulary().decode([]) == bpe.decode([]) == ""
    assert len(ByteVocabulary().encode("")) == len(bpe.encode("")) == 0


def test_all_byte_vocabularies_are_one() -> None:
    one, other = ByteVocabulary(), ByteVocabulary()
    assert one.fingerprint == other.fingerprint
    assert one.size == 256


def test_both_kinds_are_vocabularies(bpe: BpeVocabulary) -> None:
    vocabularies: list[Vocabulary] = [ByteVocabulary(), bpe]
    assert [vocabulary.size for vocabulary in vocabularies] == [256, bpe.size]
    assert repr(bpe) == f"BpeVocabulary(size={bpe.size})"


@given(text=st.text())
def test_byte_pairs_give_any_text_back(bpe: BpeVocabulary, text: str) -> None:
    ids = bpe.encode(text)
    assert ids.ndim == 1
    assert all(0 <= i < bpe.size for i in ids.tolist())
    assert bpe.decode(ids) == text


def test_byte_pairs_are_shorter_than_bytes_on_what_they_learnt(bpe: BpeVocabulary) -> None:
    text = TEXTS[0]
    assert len(bpe.encode(text)) < len(text) / 2
    assert 256 < bpe.size <= 300


def test_byte_pairs_mark_ids_that_they_do_not_know(bpe: BpeVocabulary) -> None:
    cat = bpe.encode(" cat").tolist()
    ids = [-1, *cat, bpe.size, bpe.size + 5, *cat, 2**40]
    assert bpe.decode(ids) == "\ufffd cat\ufffd\ufffd cat\ufffd"


def test_half_a_character_of_byte_pairs_reads_as_a_replacement(bpe: BpeVocabulary) -> None:
    assert bpe.decode(bpe.encode("你")[:1]) == "\ufffd"


def test_the_same_texts_teach_the_same_vocabulary(bpe: BpeVocabulary) -> None:
    again = BpeVocabulary.train(iter(TEXTS), 300)
    other = BpeVocabulary.train(TEXTS, 270)
    assert again.fingerprint == bpe.fingerprint
    assert other.fingerprint != bpe.fingerprint


def test_a_saved_vocabulary_is_the_same_when_loaded(tmp_path: Path, bpe: BpeVocabulary) -> None:
    bpe.save(tmp_path / "vocabulary.json")
    loaded = BpeVocabulary.load(tmp_path / "vocabulary.json")
    assert (loaded.size, loaded.fingerprint) == (bpe.size, bpe.fingerprint)
    assert loaded.encode(TEXTS[2]).tolist() == bpe.encode(TEXTS[2]).tolist()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2]", b'{"model": {"type": "Other"}}'])
def test_what_is_no_vocabulary_is_refused(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "vocabulary.json").write_bytes(content)
    with pytest.raises(DataError, match="no vocabulary"):
        BpeVocabulary.load(tmp_path / "vocabulary.json")


def test_a_vocabulary_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    for name in ("missing.json", "binary.json"):
        with pytest.raises(DataError, match=rf"cannot read the vocabulary .*{name}"):
            BpeVocabulary.load(tmp_path / name)


def test_a_size_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(DataError, match=r"255 tokens has no room.*vocabulary_size>=256"):
        BpeVocabulary.train(TEXTS, 255)


def test_256_tokens_are_the_bytes_alone(bpe: BpeVocabulary) -> None:
    plain = BpeVocabulary.train(TEXTS, 256)
    assert plain.size == 256
    assert len(plain.encode("the cat é")) == len("the cat é".encode())


def test_without_tokenizers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install myelin\[bpe\]"):
        BpeVocabulary.train(TEXTS, 300)
    with pytest.raises(DataError, match=r"pip install myelin\[bpe\]"):
        BpeVocabulary("{}")
