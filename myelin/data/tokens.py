"""Keeps a corpus as token ids in a file that is mapped, not read, so that it may exceed memory.

`NAME` holds the ids, little-endian, two bytes each or four where the vocabulary needs more;
`NAME.json` says what they are. The side file is removed first and written last, both by renaming a
finished file, so whatever has a side file is complete. Opening checks length and digest: a file
that was cut, changed or put there by something else is refused.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from myelin.data.vocabulary import Ids, Vocabulary
from myelin.errors import DataError

Tokens: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

_DTYPES: dict[str, np.dtype[np.uint16] | np.dtype[np.uint32]] = {
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
}
_CHECK_TOKENS = 1 << 22  # read in blocks when checking a digest


class TokenHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="myelin.tokens.1"):
    """What the side file says of the tokens.

    Attributes:
        dtype: type of one id.
        count: how many ids there are.
        vocabulary: fingerprint of the vocabulary that made them.
        corpus: fingerprint of the text they were made from.
        digest: of the ids as they lie in the file.
    """

    dtype: Literal["uint16", "uint32"]
    count: int
    vocabulary: str
    corpus: str
    digest: str


@dataclass(frozen=True, slots=True)
class TokenFile:
    """The ids of a corpus; slices of `tokens` read from the file, which cannot be written to.

    Attributes:
        header: what they are.
        tokens: the ids.
    """

    header: TokenHeader
    tokens: Tokens

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "TokenFile":
        """Map the tokens that `write_tokens` left at `path`, after reading them once to check them.

        Raises:
            DataError: they are missing, cut, changed, or not tokens; the message says which.
        """
        path = Path(path)
        header = _read_header(side_file(path))
        try:
            with path.open("rb") as file:
                return _map(file, header, path)
        except OSError as error:
            raise DataError(f"cannot open the tokens {path}: {error}") from error


def side_file(path: Path) -> Path:
    """Return where the description of the tokens at `path` lies."""
    return path.with_name(path.name + ".json")


def write_tokens(
    path: str | os.PathLike[str], texts: Iterable[str], vocabulary: Vocabulary, *, corpus: str
) -> TokenFile:
    """Write the ids of all texts to `path` and map them; if it fails, what was there stays.

    Args:
        path: where the file is to be; its folder exists.
        texts: the corpus, in pieces that are encoded one by one.
        vocabulary: makes the ids.
        corpus: fingerprint of the corpus.

    Raises:
        DataError: there is no token at all, or the vocabulary gave an id outside its size.
    """
    path = Path(path)
    with _replacing(path) as file:
        header = _write(file, texts, vocabulary, corpus)
        file.flush()
        opened = _map(file, header, path)
        side_file(path).unlink(missing_ok=True)
    with _replacing(side_file(path)) as file:
        file.write(msgspec.json.format(msgspec.json.encode(header)))
    return opened


def unnamed_tokens(texts: Iterable[str], vocabulary: Vocabulary, *, corpus: str) -> TokenFile:
    """Write the ids of all texts to a temporary file without a name, gone when it is dropped.

    Raises:
        DataError: as `write_tokens`.
    """
    with tempfile.TemporaryFile(prefix="myelin-") as file:
        header = _write(file, texts, vocabulary, corpus)
        file.flush()
        return _map(file, header, Path(tempfile.gettempdir()))


def _write(
    file: IO[bytes], texts: Iterable[str], vocabulary: Vocabulary, corpus: str
) -> TokenHeader:
    name, cast = _checked_cast(vocabulary)
    digest = hashlib.blake2b(digest_size=16)
    count = 0
    for text in texts:
        ids = cast(vocabulary.encode(text))
        data = ids.tobytes()
        file.write(data)
        digest.update(data)
        count += len(ids)
    if not count:
        raise DataError(f"{vocabulary!r} gave no token for the whole corpus; give it some text")
    return TokenHeader(name, count, vocabulary.fingerprint, corpus, digest.hexdigest())


def _checked_cast(
    vocabulary: Vocabulary,
) -> tuple[Literal["uint16", "uint32"], Callable[[Ids], Tokens]]:
    """Choose the narrowest type for a vocabulary, and how to cast to it without ever wrapping."""
    size = vocabulary.size
    if not 1 <= size <= 2**32:
        raise DataError(f"{vocabulary!r} has size {size}; it must be from 1 to 2**32")
    name: Literal["uint16", "uint32"] = "uint16" if size <= 2**16 else "uint32"
    dtype: np.dtype[Any] = _DTYPES[name]

    def cast(ids: Ids) -> Tokens:
        ids = np.asarray(ids)
        if ids.size == 0:
            return np.empty(0, dtype)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise DataError(
                f"{vocabulary!r} gave ids of shape {ids.shape} and type {ids.dtype}; "
                f"encode must return a one-dimensional array of integers"
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= size:
            raise DataError(
                f"{vocabulary!r} gave ids from {low} to {high}; of size {size}, it must stay "
                f"within 0 to {size - 1}"
            )
        return ids.astype(dtype)

    return name, cast


def _map(file: IO[bytes], header: TokenHeader, path: Path) -> TokenFile:
    dtype = _DTYPES[header.dtype]
    size_bytes, expected_bytes = os.fstat(file.fileno()).st_size, header.count * dtype.itemsize
    if header.count < 1 or size_bytes != expected_bytes:
        raise DataError(
            f"the tokens {path} have {size_bytes} bytes where {header.count} ids of "
            f"{header.dtype} need {expected_bytes}; delete the file and it is made anew"
        )
    tokens = np.memmap(file, dtype=dtype, mode="r", shape=(header.count,))
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, header.count, _CHECK_TOKENS):
        digest.update(tokens[start : start + _CHECK_TOKENS].data)
    if digest.hexdigest() != header.digest:
        raise DataError(
            f"the tokens {path} are not those that were written (digest {digest.hexdigest()}, "
            f"expected {header.digest}); delete the file and it is made anew"
        )
    return TokenFile(header, tokens)


def _read_header(path: Path) -> TokenHeader:
    try:
        return msgspec.json.decode(path.read_bytes(), type=TokenHeader)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"no description of tokens in {path}: {error}") from error


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Give a file that takes the place of `path` at the end, or vanishes if the body raises."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
