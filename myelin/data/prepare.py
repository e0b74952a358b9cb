"""From paths to batches: text, vocabulary, tokens, and a cache that keeps the last two."""

import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from myelin.data.batches import TextData, check_dealing
from myelin.data.corpus import Corpus, Selection, StrPath, find_corpus
from myelin.data.tokens import TokenFile, unnamed_tokens, write_tokens
from myelin.data.vocabulary import BpeVocabulary, ByteVocabulary, Vocabulary
from myelin.errors import DataError
from myelin.models.checks import check_whole, shortened, shown

log = logging.getLogger(__name__)
skipping = logging.getLogger("myelin.data.skipped")  # apart, for those who tell of it themselves

_VOCABULARY = ("size", "fingerprint", "encode", "decode")  # what one of your own must have
BPE_SIZE = 4096  # where nothing else is asked for


def text(
    paths: StrPath | Iterable[StrPath],
    *,
    context: int | None = None,
    batch_size: int = 16,
    vocabulary: Literal["bytes", "bpe"] | Vocabulary = "bytes",
    vocabulary_size: int | None = None,
    validation: float = 0.05,
    seed: int = 0,
    cache: StrPath | None = None,
    select: Selection | None = None,
) -> TextData:
    """Make batches of the text in a file, a folder, or several of either.

    The text is read in the order of sorted names and held in a mapped file, not in memory. Files
    of a folder that are empty, binary or not UTF-8 are left out, counted (see the `report` of the
    result) and warned of in the log; a file that is named outright must be text.
    There is no token between two files but a line's end.

    Args:
        paths: where the text is.
        context: tokens of a row; None takes the model's.
        batch_size: rows of a batch.
        vocabulary: `"bytes"`, `"bpe"` to learn byte pairs from this text (`pip install
            myelin[bpe]`), or one of your own.
        vocabulary_size: how many tokens `"bpe"` learns, 4096 by default.
        validation: share of the tokens to hold out, taken from the end.
        seed: chooses the order of the rows.
        cache: a folder, made if need be, that keeps tokens and vocabulary for the next time;
            without it they live in a temporary file that is gone when the program ends.
        select: which files of a folder are text of the corpus, by default all but hidden ones.

    Raises:
        DataError: a path does not exist, there is no text, or not enough for one row; or an
            argument is of the wrong type or out of range.
    """
    check_dealing(context, batch_size=batch_size, validation=validation, seed=seed)
    _check_vocabulary(vocabulary, vocabulary_size)
    folder = None if cache is None else _cache_folder(cache)
    corpus = find_corpus(paths, select=select, exclude=folder)
    log.info("corpus: %s", corpus.report.summary())
    if corpus.report.skipped():
        skipping.warning("some files are no text and were left out: %s", corpus.report.summary())
    chosen = _vocabulary(vocabulary, vocabulary_size, corpus, folder)
    return TextData(
        _tokens(corpus, chosen, folder),
        chosen,
        context=context,
        batch_size=batch_size,
        validation=validation,
        seed=seed,
        report=corpus.report,
    )


def _check_vocabulary(vocabulary: object, size: object) -> None:
    """Refuse what is no vocabulary before the corpus is read for it."""
    if size is not None:
        check_whole("vocabulary_size", size, least=1, instead=", or None", error=DataError)
        if vocabulary != "bpe":
            raise DataError(
                f"vocabulary_size={size} is for vocabulary='bpe'; any other has a size of its own"
            )
    if isinstance(vocabulary, type) or (
        vocabulary not in ("bytes", "bpe")
        and not all(hasattr(vocabulary, name) for name in _VOCABULARY)
    ):
        raise DataError(
            f"vocabulary={shown(vocabulary)}; use 'bytes', 'bpe', or an object with "
            f"{', '.join(_VOCABULARY[:-1])} and {_VOCABULARY[-1]}"
        )


def _cache_folder(cache: StrPath) -> Path:
    if not isinstance(cache, str | os.PathLike):
        raise DataError(f"cache={shown(cache)}: give the path of a folder, or None")
    folder = Path(cache)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise DataError(
            f"cache={shortened(str(folder))} cannot be used as a folder: {error}"
        ) from error
    return folder


def _vocabulary(
    vocabulary: str | Vocabulary, size: int | None, corpus: Corpus, folder: Path | None
) -> Vocabulary:
    if vocabulary == "bpe":
        return _bpe(BPE_SIZE if size is None else size, corpus, folder)
    return ByteVocabulary() if isinstance(vocabulary, str) else vocabulary


def _bpe(size: int, corpus: Corpus, folder: Path | None) -> BpeVocabulary:
    path = None if folder is None else folder / f"{corpus.fingerprint}-bpe{size}.json"
    if path is not None and path.exists():
        try:
            return BpeVocabulary.load(path)
        except DataError as error:
            log.warning("the vocabulary is learnt anew: %s", error)
    learnt = BpeVocabulary.train(corpus.texts(), size)
    if path is not None:
        _save(learnt, path)
    return learnt


def _save(vocabulary: BpeVocabulary, path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as private:
        vocabulary.save(Path(private, path.name))
        os.replace(Path(private, path.name), path)


def _tokens(corpus: Corpus, vocabulary: Vocabulary, folder: Path | None) -> TokenFile:
    if folder is None:
        return unnamed_tokens(corpus.texts(), vocabulary, corpus=corpus.fingerprint)
    path = folder / f"{corpus.fingerprint}-{_file_name(vocabulary.fingerprint)}.tokens"
    if path.exists():
        try:
            found = TokenFile.open(path)
            wanted = (corpus.fingerprint, vocabulary.fingerprint)
            if (found.header.corpus, found.header.vocabulary) == wanted:
                return found
            log.warning("%s is of another corpus or vocabulary; it is made anew", path)
        except DataError as error:
            log.warning("the tokens are made anew: %s", error)
    return write_tokens(path, corpus.texts(), vocabulary, corpus=corpus.fingerprint)


def _file_name(fingerprint: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in fingerprint)[:64]
