"""Finds the text files of a corpus, judges each one, and reads them in pieces.

Every file is judged as a whole before any of it is used: text, empty, binary, not UTF-8 or
unreadable. Only text is read; the rest is counted. The order is that of sorted names, so that the
same files give the same text on every machine. Nothing is held in memory but one piece.
"""

import codecs
import enum
import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol, TypeAlias

from myelin.errors import DataError
from myelin.models.checks import shortened, shown

StrPath: TypeAlias = str | os.PathLike[str]

PIECE_BYTES = 1 << 20  # long enough to be fast, short enough for any vocabulary's working memory

_BOM = codecs.BOM_UTF8


@dataclass(frozen=True, slots=True)
class Selection:
    """Which files of a folder belong to the corpus; a file named by itself always does.

    Names that begin with a dot are never taken from a folder.

    Attributes:
        patterns: a file is taken if its name matches one of these, as in a shell, case by case.
        skip: names of files and folders that are left out at any depth.
    """

    patterns: tuple[str, ...] = ("*",)
    skip: frozenset[str] = frozenset({"__pycache__", "site-packages", "dist-packages"})

    def __post_init__(self) -> None:
        _check_names("patterns", self.patterns)
        _check_names("skip", self.skip)

    def takes_folder(self, name: str) -> bool:
        """Tell whether to look into a folder of this name."""
        return not name.startswith(".") and name not in self.skip

    def takes_file(self, name: str) -> bool:
        """Tell whether a file of this name belongs to the corpus."""
        wanted = any(fnmatchcase(name, pattern) for pattern in self.patterns)
        return wanted and self.takes_folder(name)


def _check_names(name: str, names: object) -> None:
    """Refuse what is no list of names; of a text every single letter would be one."""
    listed = names if isinstance(names, Collection) and not isinstance(names, str) else (None,)
    if not all(isinstance(each, str) for each in listed):
        example = f"({names!r},)" if isinstance(names, str) else '("*.txt", "*.md")'
        raise DataError(f"{name}={shown(names)}: list names, such as {name}={example}")


PYTHON_SOURCES = Selection(
    patterns=("*.py",),
    # Tests repeat themselves, and `encodings` is mostly tables of numbers.
    skip=Selection().skip | {"test", "tests", "idle_test", "encodings"},
)
"""Python code alone: of the standard library about 11 MB in 700 files."""


def standard_library() -> Path:
    """Return the folder of this Python's own sources, a corpus that needs no download.

    Read it with `PYTHON_SOURCES`, for example
    `myelin.data.text(standard_library(), select=PYTHON_SOURCES)`.

    Raises:
        DataError: this Python came without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    if not (folder / "argparse.py").is_file():
        raise DataError(
            f"this Python has no sources of its standard library in {folder}; "
            f"give the path of a corpus of your own"
        )
    return folder


@dataclass(frozen=True, slots=True)
class CorpusReport:
    """How many files were read and how many were not, and why.

    Attributes:
        files: files that were taken.
        bytes: their size.
        empty: files without a single byte of text.
        binary: files with a NUL byte (UTF-16 text is among them).
        not_utf8: other files that are not UTF-8.
        unreadable: files and folders that could not be opened, or are no regular files.
    """

    files: int
    bytes: int
    empty: int = 0
    binary: int = 0
    not_utf8: int = 0
    unreadable: int = 0

    def skipped(self) -> str:
        """Say how many files were left out and why, or nothing if none was."""
        reasons = {
            "empty": self.empty,
            "binary": self.binary,
            "not UTF-8": self.not_utf8,
            "unreadable": self.unreadable,
        }
        return ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)

    def summary(self) -> str:
        """Say it in one line."""
        skipped = self.skipped()
        taken = f"{self.files:,} file{'' if self.files == 1 else 's'}, {_size(self.bytes)} of text"
        return f"{taken}; skipped {skipped}" if skipped else taken


def _size(size_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes} bytes"


@dataclass(frozen=True, slots=True)
class Corpus:
    """The text files found, all judged; made by `find_corpus`.

    Attributes:
        files: the files that are text, in the order in which they are read.
        report: what was found.
        fingerprint: a digest of the text and its order, the same wherever the files lie.
    """

    files: tuple[Path, ...]
    report: CorpusReport
    fingerprint: str

    def texts(self) -> Iterator[str]:
        r"""Read all files in pieces of about a megabyte that end with a line where they can.

        The pieces joined are the files joined, each without its byte order mark and with `\n` added
        where it does not end with one.

        Raises:
            DataError: a file has been changed or taken away since it was judged.
        """
        for path in self.files:
            try:
                yield from _pieces(path)
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(
                    f"{path} was text a moment ago and now cannot be read ({error}); "
                    f"leave the corpus alone while it is read"
                ) from error


def find_corpus(
    paths: StrPath | Iterable[StrPath],
    *,
    select: Selection | None = None,
    exclude: Path | None = None,
) -> Corpus:
    """Find and judge all files of a file, a folder, or several of either.

    Links are followed; a file that is reached twice counts once. All files are read once, at
    about a gigabyte a second.

    Args:
        paths: where to look.
        select: which files of the folders belong to the corpus.
        exclude: a folder that never belongs to it, such as the tokens' own.

    Raises:
        DataError: a path does not exist, a file that was named is no text, or none was found.
    """
    roots = _roots(paths)
    if select is not None and not isinstance(select, Selection):
        raise DataError(
            f"select={shown(select)}: use a Selection, such as "
            f'myelin.data.Selection(patterns=("*.txt",))'
        )
    named = {os.path.realpath(root) for root in roots if not root.is_dir()}
    counts: Counter[_Verdict] = Counter()

    def lost(_: OSError) -> None:
        counts[_Verdict.UNREADABLE] += 1

    found = _distinct(_find(roots, select or Selection(), exclude, lost))
    digest = hashlib.blake2b(digest_size=16)
    taken: list[Path] = []
    size_bytes = 0
    for path in found:
        verdict, file_bytes = _judge(path, digest)
        counts[verdict] += 1
        if verdict is _Verdict.TEXT:
            taken.append(path)
            size_bytes += file_bytes
        elif os.path.realpath(path) in named:
            raise DataError(f"{path} {_REASONS[verdict]}")
    report = CorpusReport(
        files=len(taken),
        bytes=size_bytes,
        empty=counts[_Verdict.EMPTY],
        binary=counts[_Verdict.BINARY],
        not_utf8=counts[_Verdict.NOT_UTF8],
        unreadable=counts[_Verdict.UNREADABLE],
    )
    if not taken:
        names = shortened(", ".join(str(root) for root in roots)) or "an empty list of paths"
        wanted = "" if select is None else f" of {' '.join(select.patterns)}"
        raise DataError(
            f"no text{wanted} in {names}: {report.summary()}; "
            f"give a folder or files that hold UTF-8 text"
        )
    return Corpus(tuple(taken), report, digest.hexdigest())


def _roots(paths: object) -> list[Path]:
    """Return the paths that were given, one or several; all of them exist."""
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise DataError(f"{shown(given)} is no path; give that of a text file or a folder")
    roots = list(given)
    for root in roots:
        if not isinstance(root, str | os.PathLike) or not str(root):
            raise DataError(f"{shown(root)} is no path; give that of a text file or a folder")
        if not os.path.exists(root):
            raise DataError(
                f"{shortened(str(root))} does not exist; give the path of a text file or a folder "
                f"(a text itself must be in a file)"
            )
    return [Path(root) for root in roots]


def _find(
    roots: Iterable[Path],
    select: Selection,
    exclude: Path | None,
    lost: Callable[[OSError], None],
) -> Iterator[Path]:
    for root in roots:
        if exclude is not None and os.path.realpath(root) == os.path.realpath(exclude):
            raise DataError(
                f"{root} is the corpus and the cache at once; use a folder of its own for the cache"
            )
        if root.is_dir():
            yield from _walk(root, select, exclude, lost)
        else:
            yield root


def _walk(
    root: Path, select: Selection, exclude: Path | None, lost: Callable[[OSError], None]
) -> Iterator[Path]:
    """Yield a folder's files, then those of its folders, by name; each real folder once."""
    seen = set() if exclude is None else {os.path.realpath(exclude)}
    for folder, folders, files in os.walk(root, onerror=lost, followlinks=True):
        here = os.path.realpath(folder)
        if here in seen:
            folders.clear()
            continue
        seen.add(here)
        folders[:] = sorted(name for name in folders if select.takes_folder(name))
        for name in sorted(files):
            if select.takes_file(name):
                yield Path(folder, name)


def _distinct(paths: Iterable[Path]) -> Iterator[Path]:
    seen: set[str] = set()
    for path in paths:
        real = os.path.realpath(path)
        if real not in seen:
            seen.add(real)
            yield path


class _Verdict(enum.Enum):
    TEXT = enum.auto()
    EMPTY = enum.auto()
    BINARY = enum.auto()
    NOT_UTF8 = enum.auto()
    UNREADABLE = enum.auto()


_REASONS = {
    _Verdict.EMPTY: "is empty; name a file that holds text",
    _Verdict.BINARY: "is no text but binary (it has a NUL byte); UTF-16 must be made UTF-8 first",
    _Verdict.NOT_UTF8: "is not UTF-8; make it so first, such as with `iconv -t utf-8`",
    _Verdict.UNREADABLE: "cannot be opened, or is no regular file",
}
"""What is wrong with a file that was named outright, and what to do."""


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


def _judge(path: Path, digest: _Digest) -> tuple[_Verdict, int]:
    """Read a whole file; return what it is and its size, and add it to the digest if it is text."""
    own = hashlib.blake2b(digest_size=16)
    decoder = codecs.getincrementaldecoder("utf-8")()
    size_bytes = 0
    try:
        for data in _blocks(path):
            if b"\0" in data:
                return _Verdict.BINARY, 0
            decoder.decode(data)
            own.update(data)
            size_bytes += len(data)
        decoder.decode(b"", final=True)
    except OSError:
        return _Verdict.UNREADABLE, 0
    except UnicodeDecodeError:
        return _Verdict.NOT_UTF8, 0
    if not size_bytes:
        return _Verdict.EMPTY, 0
    digest.update(own.digest())
    return _Verdict.TEXT, size_bytes


def _blocks(path: Path) -> Iterator[bytes]:
    """Read a file without its byte order mark; a pipe or device is refused, since it may block."""
    if not path.is_file():
        raise OSError(f"{path} is no regular file")
    with path.open("rb") as file:
        data = file.read(PIECE_BYTES).removeprefix(_BOM)
        while data:
            yield data
            data = file.read(PIECE_BYTES)


def _pieces(path: Path) -> Iterator[str]:
    rest = b""
    for data in _blocks(path):
        lines, newline, rest_of_line = (rest + data).rpartition(b"\n")
        if newline:
            yield (lines + newline).decode()
        rest = rest_of_line
        if len(rest) > PIECE_BYTES:  # no line ends here: cut between two characters, keep the last
            text, used = codecs.utf_8_decode(rest[:-1], "strict", False)
            yield text
            rest = rest[used:]
    if rest:
        yield rest.decode() + "\n"
