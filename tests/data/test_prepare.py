import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import myelin.data
from myelin.data import BpeVocabulary, ByteVocabulary, CorpusReport, Selection, TextData, text
from myelin.data.corpus import Corpus
from myelin.errors import DataError, MyelinError

LINES = "".join(f"line {number} of a small corpus\n" for number in range(200))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text(LINES)
    (folder / "b.md").write_text("# Title\n" * 50)
    (folder / "empty.txt").write_text("")
    (folder / "image.png").write_bytes(b"\x89PNG\0")
    return folder


def first_rows(data: TextData) -> list[list[int]]:
    rows: list[list[int]] = next(data)[0].tolist()
    return rows


def cached(cache: Path) -> list[str]:
    return sorted(path.name.rsplit("-", 1)[-1] for path in cache.iterdir())


def test_a_folder_of_text_becomes_batches(folder: Path) -> None:
    data = text(folder, context=16, batch_size=4)
    assert data.report == CorpusReport(files=2, bytes=len(LINES) + 400, empty=1, binary=1)
    assert data.tokens == len(LINES) + 400
    inputs, targets = next(data)
    assert inputs.shape == targets.shape == (4, 16)
    whole = LINES + "# Title\n" * 50
    assert all(data.decode(row) in whole for row in inputs)


def test_a_file_and_a_list_of_files_are_taken_as_well(folder: Path) -> None:
    assert text(folder / "a.txt").tokens == len(LINES)
    assert text([str(folder / "b.md"), folder / "a.txt"]).tokens == len(LINES) + 400
    assert text(str(folder), select=Selection(patterns=("*.md",))).tokens == 400


def test_the_context_is_left_to_the_model_unless_it_is_given(folder: Path) -> None:
    data = text(folder)
    assert data.context is None
    data.bind(32)
    assert next(data)[0].shape == (16, 32)


def test_arguments_reach_the_sampler(folder: Path) -> None:
    one = text(folder, context=8, seed=1, validation=0.5, batch_size=2)
    other = text(folder, context=8, seed=2, validation=0.5, batch_size=2)
    assert one.state()["validation"] == 0.5
    assert first_rows(one) != first_rows(other)


def test_a_missing_path_an_empty_folder_and_a_short_corpus_are_data_errors(
    tmp_path: Path, folder: Path
) -> None:
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match="does not exist"):
        text(tmp_path / "nowhere")
    with pytest.raises(DataError, match="0 files"):
        text(tmp_path / "bare")
    with pytest.raises(DataError, match=r"has 400 tokens; one row of context=400 takes 401"):
        text(folder / "b.md", context=400)
    assert issubclass(DataError, MyelinError)
    assert issubclass(DataError, ValueError)


def test_without_a_cache_nothing_is_left_anywhere(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = tmp_path / "tmp"
    private.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(private))
    before = sorted(tmp_path.rglob("*"))
    data = text(folder, context=8)
    assert sorted(tmp_path.rglob("*")) == before
    next(data)


def test_a_cache_is_filled_once_and_then_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "deep" / "cache"
    first = text(folder, context=8, cache=cache)
    assert cached(cache) == ["bytes.tokens", "bytes.tokens.json"]
    monkeypatch.setattr(Corpus, "texts", lambda _: pytest.fail("read although it is cached"))
    again = text(folder, context=8, cache=str(cache))
    assert first.state() == again.state()
    assert first_rows(first) == first_rows(again)
    assert again.report == first.report


def test_cached_and_uncached_tokens_are_the_same(folder: Path, tmp_path: Path) -> None:
    one, other = text(folder, context=8), text(folder, context=8, cache=tmp_path / "cache")
    assert one.state() == other.state()
    other.restore(one.state())
    assert first_rows(one) == first_rows(other)


def test_a_changed_corpus_is_read_anew(folder: Path, tmp_path: Path) -> None:
    first = text(folder, context=8, cache=tmp_path / "cache")
    (folder / "b.md").write_text("# Other\n" * 50)
    second = text(folder, context=8, cache=tmp_path / "cache")
    assert first.state()["corpus"] != second.state()["corpus"]
    with pytest.raises(DataError, match="corpus="):
        second.restore(first.state())


def test_corpora_share_a_cache_without_meeting(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    sizes = [text(path, cache=cache).tokens for path in (folder, folder / "b.md")] * 2
    assert sizes == [len(LINES) + 400, 400] * 2
    assert len(list(cache.iterdir())) == 4


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def damage_bit(path: Path) -> None:
    path.write_bytes(b"\1" + path.read_bytes()[1:])


def damage_side(path: Path) -> None:
    path.with_name(path.name + ".json").write_text("{}")


def damage_foreign(path: Path) -> None:
    side = path.with_name(path.name + ".json")
    side.write_text(side.read_text().replace('"vocabulary": "bytes"', '"vocabulary": "other"'))


@pytest.mark.parametrize("damage", [damage_cut, damage_bit, damage_side, damage_foreign])
def test_damaged_tokens_are_made_anew_and_it_is_said(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object
) -> None:
    expected = first_rows(text(folder, context=8, cache=tmp_path / "cache"))
    (path,) = (tmp_path / "cache").glob("*.tokens")
    assert callable(damage)
    damage(path)
    with caplog.at_level(logging.WARNING):
        assert first_rows(text(folder, context=8, cache=tmp_path / "cache")) == expected
    assert "made anew" in caplog.text
    caplog.clear()
    assert first_rows(text(folder, context=8, cache=tmp_path / "cache")) == expected
    assert "made anew" not in caplog.text


def test_a_cache_inside_the_corpus_is_no_part_of_it(folder: Path) -> None:
    first = text(folder, context=8, cache=folder / "cache")
    second = text(folder, context=8, cache=folder / "cache")
    assert first.state() == second.state()
    assert second.tokens == len(LINES) + 400


def test_a_corpus_folder_cannot_be_its_own_cache(folder: Path) -> None:
    with pytest.raises(DataError, match=r"corpus is the corpus and the cache at once"):
        text(folder, cache=folder)
    with pytest.raises(DataError, match=r"cache=.*a\.txt cannot be used as a folder"):
        text(folder, cache=folder / "a.txt")


def test_byte_pairs_are_learnt_from_the_corpus(folder: Path) -> None:
    pytest.importorskip("tokenizers")
    data = text(folder, context=8, vocabulary="bpe", vocabulary_size=300)
    assert data.vocab_size <= 300
    assert data.tokens < len(LINES) / 2
    assert data.decode(data.encode("line 7 of é")) == "line 7 of é"


def test_a_learnt_vocabulary_is_cached(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    cache = tmp_path / "cache"
    first = text(folder, context=8, vocabulary="bpe", vocabulary_size=300, cache=cache)
    assert len(list(cache.iterdir())) == 3
    with monkeypatch.context() as patch:
        patch.setattr(BpeVocabulary, "train", lambda *_: pytest.fail("learnt although cached"))
        again = text(folder, context=8, vocabulary="bpe", vocabulary_size=300, cache=cache)
    assert first.state() == again.state()
    (vocabulary,) = cache.glob("*bpe300.json")
    vocabulary.write_text("{}")
    assert text(folder, context=8, vocabulary="bpe", vocabulary_size=300, cache=cache).state() == (
        first.state()
    )
    other = text(folder, context=8, vocabulary="bpe", vocabulary_size=280, cache=cache)
    assert other.vocab_size < first.vocab_size


def test_a_vocabulary_of_ones_own_is_used(folder: Path, tmp_path: Path) -> None:
    class Capitals(ByteVocabulary):
        @property
        def fingerprint(self) -> str:
            return "../capitals of/mine"

        def encode(self, text: str) -> myelin.data.vocabulary.Ids:
            return super().encode(text.upper())

    data = text(folder, context=8, vocabulary=Capitals(), cache=tmp_path / "cache")
    assert data.decode(next(data)[0]).isupper()
    assert cached(tmp_path / "cache") == [
        "___capitals_of_mine.tokens",
        "___capitals_of_mine.tokens.json",
    ]


def test_an_unknown_vocabulary_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"vocabulary='words'; use 'bytes', 'bpe'"):
        text(folder, vocabulary="words")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"select": "*.txt"}, r"select='\*\.txt': use a Selection"),
        ({"batch_size": "4"}, "batch_size='4': use a whole number of at least 1"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"context": "8"}, "context='8': use a whole number"),
        ({"context": 8.0}, "context=8.0"),
        ({"validation": "a"}, "validation='a': use a number"),
        ({"seed": "a"}, "seed='a': use a whole number"),
        ({"vocabulary": None}, "vocabulary=None; use 'bytes', 'bpe', or an object with size"),
        ({"vocabulary": ByteVocabulary}, "vocabulary=<class .*; use 'bytes'"),
        ({"vocabulary_size": "300"}, "vocabulary_size='300': use a whole number"),
        ({"vocabulary": "bpe", "vocabulary_size": 300.0}, "vocabulary_size=300.0"),
        ({"cache": 3}, "cache=3: give the path of a folder, or None"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused_before_anything_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], text: str
) -> None:
    monkeypatch.setattr("myelin.data.corpus._judge", None)  # calling it would raise a TypeError
    with pytest.raises(DataError, match=text):
        myelin.data.text(folder, **arguments)


def test_files_that_were_left_out_are_warned_of_once_with_counts_by_reason(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text(folder, context=16)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "2 files, " in record.getMessage()
    assert record.getMessage().endswith("skipped 1 empty, 1 binary")
    caplog.clear()
    text(folder / "a.txt", context=16)
    assert not caplog.records


@pytest.mark.slow
def test_a_script_without_any_logging_shows_what_was_left_out(folder: Path) -> None:
    script = f"import myelin.data; myelin.data.text({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert len(done.stderr.splitlines()) == 1
    assert "skipped 1 empty, 1 binary" in done.stderr


def test_a_size_for_a_vocabulary_that_has_its_own_is_refused(folder: Path) -> None:
    for vocabulary in ("bytes", ByteVocabulary()):
        with pytest.raises(DataError, match=r"vocabulary_size=512 is for vocabulary='bpe'"):
            text(folder, vocabulary=vocabulary, vocabulary_size=512)


def test_everything_public_can_be_reached() -> None:
    assert all(getattr(myelin.data, name) is not None for name in myelin.data.__all__)
