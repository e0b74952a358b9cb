import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.data import corpus as corpus_module
from myelin.data.corpus import (
    PIECE_BYTES,
    PYTHON_SOURCES,
    CorpusReport,
    Selection,
    find_corpus,
    standard_library,
)
from myelin.errors import DataError


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def whole_text(*paths: Path, select: Selection | None = None) -> str:
    return "".join(find_corpus(paths, select=select).texts())


def test_a_folder_is_read_in_the_order_of_names_files_first(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"b.txt": "2\n", "a.txt": "1\n", "d/z.txt": "4\n", "d/a.txt": "3\n", "c/e/f.txt": "0\n"},
    )
    assert whole_text(tmp_path) == "1\n2\n0\n3\n4\n"


def test_a_line_end_separates_files_and_nothing_else_is_changed(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "no end", "b.txt": "\r\n tab\t é 你\r\n", "c.txt": "\n\n"})
    assert whole_text(tmp_path) == "no end\n\r\n tab\t é 你\r\n\n\n"


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    write(
        tmp_path, {"a.txt": b"\xef\xbb\xbfhello\n", "b.txt": b"\xef\xbb\xbf", "c.txt": "x\ufeffy\n"}
    )
    found = find_corpus(tmp_path)
    assert "".join(found.texts()) == "hello\nx\ufeffy\n"
    assert (found.report.files, found.report.empty) == (2, 1)


def test_every_kind_of_file_that_is_no_text_is_counted_and_left_out(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "good.txt": "good\n",
            "empty.txt": "",
            "image.bin": b"\x89PNG\r\n\x00\x01",
            "utf16.txt": "text".encode("utf-16"),
            "latin.txt": "é".encode("latin-1"),
            "cut.txt": "é".encode()[:1],
            "surrogate.txt": b"\xed\xa0\x80",
        },
    )
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    found = find_corpus(tmp_path)
    assert found.report == CorpusReport(
        files=1, bytes=5, empty=1, binary=2, not_utf8=3, unreadable=3
    )
    assert "".join(found.texts()) == "good\n"


@pytest.mark.parametrize("tail", [b"\0", b"\xff", "é".encode()[:1]])
def test_a_file_is_judged_as_a_whole(tmp_path: Path, tail: bytes) -> None:
    write(tmp_path, {"bad.txt": b"x" * (PIECE_BYTES + 10) + tail, "good.txt": "good\n"})
    assert whole_text(tmp_path) == "good\n"


def test_a_summary_is_one_line_that_names_what_was_left_out() -> None:
    assert CorpusReport(files=1, bytes=7).summary() == "1 file, 7 bytes of text"
    report = CorpusReport(files=1500, bytes=12_340_000, empty=3, not_utf8=1)
    assert report.summary() == "1,500 files, 12.3 MB of text; skipped 3 empty, 1 not UTF-8"
    assert CorpusReport(2, 2_500, 0, 4, 0, 5).summary() == (
        "2 files, 2.5 kB of text; skipped 4 binary, 5 unreadable"
    )
    assert "3.0 GB" in CorpusReport(2, 3_000_000_000).summary()


def test_a_report_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CorpusReport(1, 1).files = 2  # type: ignore[misc]


def test_hidden_files_and_installed_packages_are_not_taken_from_a_folder(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "a\n", "site/b.txt": "b\n"})
    (tmp_path / ".hidden").write_text("no")
    write(tmp_path / "site-packages", {"c.txt": "no"})
    write(tmp_path / "__pycache__", {"c.txt": "no"})
    write(tmp_path / ".venv", {"c.txt": "no"})
    write(tmp_path / "deep" / ".venv", {"c.txt": "no"})
    assert whole_text(tmp_path) == "a\nb\n"


def test_a_hidden_folder_can_be_the_corpus_itself(tmp_path: Path) -> None:
    folder = write(tmp_path / ".cache" / "site-packages", {"a.txt": "a\n"})
    assert whole_text(folder) == "a\n"


def test_a_selection_applies_to_folders_and_not_to_a_named_file(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"a.py": "a\n", "b.PY": "b\n", "c.txt": "c\n", "test/d.py": "d\n", "x/test/e.py": "e\n"},
    )
    select = Selection(patterns=("*.py", "*.md"), skip=frozenset({"test"}))
    assert whole_text(tmp_path, select=select) == "a\n"
    assert whole_text(tmp_path, tmp_path / "c.txt", select=select) == "a\nc\n"
    assert whole_text(tmp_path / "test", select=select) == "d\n"


def test_several_paths_are_read_in_the_order_given_and_none_twice(tmp_path: Path) -> None:
    write(tmp_path, {"x/a.txt": "a\n", "x/b.txt": "b\n", "y/c.txt": "c\n"})
    (tmp_path / "y" / "again.txt").symlink_to(tmp_path / "x" / "a.txt")
    x, y = tmp_path / "x", tmp_path / "y"
    assert whole_text(y, x / "b.txt", x, y / "c.txt") == "a\nc\nb\n"


def test_paths_may_be_strings(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "a\n"})
    alone, listed = find_corpus(str(tmp_path)), find_corpus([str(tmp_path / "a.txt")])
    assert list(alone.texts()) == list(listed.texts()) == ["a\n"]


def test_linked_folders_are_followed_and_a_circle_of_links_ends(tmp_path: Path) -> None:
    write(tmp_path, {"in/a.txt": "a\n", "elsewhere/b.txt": "b\n"})
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "in")
    assert whole_text(tmp_path / "in") == "a\nb\n"


def test_an_excluded_folder_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "a\n", "cache/t.json": "{}"})
    found = find_corpus(tmp_path, exclude=tmp_path / "x" / ".." / "cache")
    assert "".join(found.texts()) == "a\n"


def test_a_missing_path_is_an_error_that_names_it(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "a\n"})
    with pytest.raises(DataError, match=r"nowhere does not exist"):
        find_corpus([tmp_path, tmp_path / "nowhere"])


@pytest.mark.parametrize("paths", [None, 3, b"a.txt", "", [None], [3], [b"b.txt"]])
def test_what_is_no_path_is_refused(tmp_path: Path, paths: Any) -> None:
    with pytest.raises(DataError, match="is no path; give that of a text file or a folder"):
        find_corpus(paths)


def test_a_text_in_the_place_of_a_path_is_not_repeated_at_length() -> None:
    for given_text in ("the quick brown fox jumps over the lazy dog. " * 50, "a\nb\n" * 40, "a\0b"):
        with pytest.raises(DataError, match="a text itself must be in a file") as caught:
            find_corpus(given_text)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty; name a file that holds text"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"a\0b", r"is no text but binary \(it has a NUL byte\)"),
        (b"caf\xe9", "is not UTF-8; make it so"),
    ],
)
def test_a_file_named_outright_must_be_text(
    tmp_path: Path, content: str | bytes, reason: str
) -> None:
    write(tmp_path, {"good.txt": "good\n", "named": content})
    assert whole_text(tmp_path) == "good\n"
    for paths in ([tmp_path / "named"], [tmp_path / "good.txt", tmp_path / "named"]):
        with pytest.raises(DataError, match=f"named {reason}"):
            find_corpus(paths)
    with pytest.raises(DataError, match=f"named {reason}"):
        find_corpus([tmp_path, tmp_path / "named"])  # found in its folder first


def test_a_pipe_named_outright_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe cannot be opened, or is no regular file"):
        find_corpus(tmp_path / "pipe")


@pytest.mark.parametrize("select", ["*.txt", ("*.txt",), 3])
def test_what_is_no_selection_is_refused(tmp_path: Path, select: Any) -> None:
    with pytest.raises(DataError, match=r'use a Selection, such as .*patterns=\("\*\.txt",\)'):
        find_corpus(tmp_path, select=select)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"patterns": "*.txt"}, r"patterns='\*\.txt': .*patterns=\('\*\.txt',\)"),
        ({"patterns": (1,)}, r"patterns=\(1,\): list names"),
        ({"patterns": None}, "patterns=None"),
        ({"skip": "tests"}, r"skip='tests': .*skip=\('tests',\)"),
    ],
)
def test_a_selection_lists_names(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        Selection(**arguments)


def test_a_corpus_without_text_is_an_error_that_says_what_was_found(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no text in .*: 0 files"):
        find_corpus(tmp_path)
    write(tmp_path, {"a.bin": b"\0", "b.txt": ""})
    with pytest.raises(DataError, match=r"skipped 1 empty, 1 binary; give a folder"):
        find_corpus(tmp_path)
    with pytest.raises(DataError, match=r"no text of \*\.py in"):
        find_corpus(tmp_path, select=PYTHON_SOURCES)
    with pytest.raises(DataError, match="empty list of paths"):
        find_corpus([])


def test_the_fingerprint_follows_the_text_and_not_the_place(tmp_path: Path) -> None:
    one = write(tmp_path / "one", {"a.txt": "a\n", "b.txt": "b\n", "junk.bin": b"\0"})
    moved = write(tmp_path / "moved", {"d/x.txt": "a\n", "d/y.txt": "b\n"})
    swapped = write(tmp_path / "swapped", {"a.txt": "b\n", "b.txt": "a\n"})
    joined = write(tmp_path / "joined", {"a.txt": "a\nb\n"})
    prints = [find_corpus(folder).fingerprint for folder in (one, moved, swapped, joined)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_a_file_that_vanishes_or_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "a\n", "b.txt": "b\n"})
    found = find_corpus(tmp_path)
    texts = found.texts()
    assert next(texts) == "a\n"
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"b\.txt was text a moment ago"):
        next(texts)
    (tmp_path / "b.txt").unlink()
    with pytest.raises(DataError, match=r"b\.txt was text a moment ago"):
        list(found.texts())


@given(
    lines=st.lists(st.text(st.sampled_from("aé你😀\n\r "), max_size=40), max_size=12),
    piece_bytes=st.integers(4, 32),
)
def test_pieces_joined_are_the_file_wherever_they_are_cut(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], piece_bytes: int
) -> None:
    content = "".join(lines) or "x"
    path = tmp_path_factory.mktemp("pieces") / "a.txt"
    path.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "PIECE_BYTES", piece_bytes)
        pieces = list(find_corpus(path).texts())
    assert "".join(pieces) == (content if content.endswith("\n") else content + "\n")
    assert max(len(piece.encode()) for piece in pieces) <= 3 * piece_bytes


def test_a_large_file_comes_in_pieces_that_end_with_a_line(tmp_path: Path) -> None:
    content = "".join(f"line {number}\n" for number in range(300_000))
    (tmp_path / "large.txt").write_text(content)
    pieces = list(find_corpus(tmp_path).texts())
    assert len(pieces) > 3
    assert all(piece.endswith("\n") for piece in pieces)
    assert "".join(pieces) == content


def test_the_standard_library_is_a_corpus_of_python_code() -> None:
    found = find_corpus(standard_library(), select=PYTHON_SOURCES)
    assert {path.suffix for path in found.files} == {".py"}
    parts = {part for path in found.files for part in path.relative_to(standard_library()).parts}
    assert {"asyncio", "argparse.py"} <= parts
    assert not {"site-packages", "test", "tests", "__pycache__"} & parts
    assert 5_000_000 < found.report.bytes < 40_000_000


def test_a_python_without_sources_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(DataError, match="no sources of its standard library"):
        standard_library()
