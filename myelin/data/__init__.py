"""Text as batches of tokens, and any other source of batches that a trainer may read."""

from myelin.data.batches import Batch, TextData
from myelin.data.corpus import (
    PYTHON_SOURCES,
    Corpus,
    CorpusReport,
    Selection,
    find_corpus,
    standard_library,
)
from myelin.data.prepare import text
from myelin.data.sources import Source, batches_of
from myelin.data.tokens import TokenFile, write_tokens
from myelin.data.vocabulary import BpeVocabulary, ByteVocabulary, Vocabulary

__all__ = [
    "PYTHON_SOURCES",
    "Batch",
    "BpeVocabulary",
    "ByteVocabulary",
    "Corpus",
    "CorpusReport",
    "Selection",
    "Source",
    "TextData",
    "TokenFile",
    "Vocabulary",
    "batches_of",
    "find_corpus",
    "standard_library",
    "text",
    "write_tokens",
]
