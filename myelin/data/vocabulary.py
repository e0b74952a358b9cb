"""Turns text into token ids and back: bytes, or byte pairs learnt from the corpus.

Both can write any text, so there is no unknown token, and decoding never fails: what is not UTF-8
or not in the vocabulary reads as U+FFFD.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from myelin.errors import DataError

Ids: TypeAlias = npt.NDArray[np.integer[Any]]

BYTES: Final = 256
_NEVER_UTF8 = 0xFF  # a byte that no UTF-8 text holds
_REPLACEMENT = "\ufffd"


class Vocabulary(Protocol):
    """What the data room needs of a vocabulary; one of your own may stand in for ours."""

    @property
    def size(self) -> int:
        """Every id is below this."""
        ...

    @property
    def fingerprint(self) -> str:
        """The same for two vocabularies only if they give the same ids for every text."""
        ...

    def encode(self, text: str) -> Ids:
        """Return the ids of a text, one-dimensional."""
        ...

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of some ids, also where they are no whole text."""
        ...


class ByteVocabulary:
    """One token for each byte of the text's UTF-8; needs no training."""

    @property
    def size(self) -> int:
        """256."""
        return BYTES

    @property
    def fingerprint(self) -> str:
        """A constant."""
        return "bytes"

    def encode(self, text: str) -> Ids:
        """Return the text's UTF-8 as ids; they may not be written to."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of some ids; what is no UTF-8 reads as U+FFFD."""
        wanted = _flat(ids)
        known = np.where((wanted >= 0) & (wanted < BYTES), wanted, _NEVER_UTF8)
        return known.astype(np.uint8).tobytes().decode(errors="replace")

    def __repr__(self) -> str:
        return "ByteVocabulary()"


class BpeVocabulary:
    """Byte pairs merged as the corpus taught; any text can be written, since every byte is a token.

    Needs the `tokenizers` package: `pip install myelin[bpe]`.
    """

    def __init__(self, json: str) -> None:
        """Make it from the text that `save` writes.

        Raises:
            DataError: the text is no such vocabulary, or `tokenizers` is missing.
        """
        _require_tokenizers()
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_str(json)
        except Exception as error:  # the library raises no class of its own
            raise DataError(
                f"this is no vocabulary ({error}); train it again with BpeVocabulary.train"
            ) from error
        self._json = json
        self._size = self._tokenizer.get_vocab_size()
        self._fingerprint = "bpe-" + hashlib.blake2b(json.encode(), digest_size=16).hexdigest()

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> "BpeVocabulary":
        """Learn at most `size` tokens from texts; a short text may teach fewer.

        Raises:
            DataError: `size` has no room for the 256 bytes, or `tokenizers` is missing.
        """
        if size < BYTES:
            raise DataError(
                f"a BPE vocabulary of {size} tokens has no room for the {BYTES} bytes; "
                f"use vocabulary_size>={BYTES}"
            )
        _require_tokenizers()
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[],
            show_progress=False,
        )
        tokenizer.train_from_iterator(iter(texts), trainer)
        return cls(tokenizer.to_str())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "BpeVocabulary":
        """Read what `save` wrote.

        Raises:
            DataError: the file cannot be read or holds no vocabulary.
        """
        try:
            return cls(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the vocabulary {path}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the vocabulary as the JSON of the `tokenizers` package."""
        Path(path).write_text(self._json, encoding="utf-8")

    @property
    def size(self) -> int:
        """How many tokens were learnt, the 256 bytes among them."""
        return self._size

    @property
    def fingerprint(self) -> str:
        """A digest of the vocabulary's JSON."""
        return self._fingerprint

    def encode(self, text: str) -> Ids:
        """Return the ids of a text."""
        # The batch form of the call leaves out the offsets and is twice as fast.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of some ids; half a character, or no known id, reads as U+FFFD."""
        wanted = _flat(ids)
        unknown = np.flatnonzero((wanted < 0) | (wanted >= self._size))
        runs = np.split(wanted, np.sort(np.concatenate([unknown, unknown + 1])))
        # Every second run is one unknown id alone.
        return _REPLACEMENT.join(self._decode_known(run) for run in runs[::2])

    def _decode_known(self, ids: Ids) -> str:
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return text

    def __repr__(self) -> str:
        return f"BpeVocabulary(size={self._size})"


def _flat(ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
    return np.asarray(ids, dtype=np.int64).reshape(-1)


def _require_tokenizers() -> None:
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise DataError(
            'a BPE vocabulary needs the "tokenizers" package: pip install myelin[bpe]'
        ) from error
