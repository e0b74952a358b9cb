"""Cuts tokens into windows and deals them out as batches, in an order that is a pure function.

The last tokens are held out for validation. The rest is cut into windows of `context` + 1 tokens,
each beginning with the last token of the one before, so that no token is a target twice. What is
left after the last whole window is not used. An epoch is one pass over all windows, in a shuffled
order of its own. A position counts windows since the beginning: with the seed, it alone tells what
comes next.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from myelin.data.corpus import CorpusReport
from myelin.data.shuffle import shuffled
from myelin.data.tokens import TokenFile
from myelin.data.vocabulary import Ids, Vocabulary
from myelin.errors import DataError
from myelin.models.checks import check_number, check_whole, shown

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, int64 [rows, context]; targets are the inputs one token later."""


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="myelin.data.1"):
    corpus: str
    vocabulary: str
    validation: float
    context: int
    seed: int
    epoch: int
    index: int


def check_dealing(context: object, *, batch_size: object, validation: object, seed: object) -> None:
    """Check what decides how tokens are dealt out, before there are any.

    Raises:
        DataError: an argument is of the wrong type or out of range.
    """
    if context is not None:
        check_whole(
            "context", context, least=1, instead=", or None for the model's", error=DataError
        )
    check_whole("batch_size", batch_size, least=1, error=DataError)
    check_number("validation", validation, least=0, below=1, error=DataError)
    if not isinstance(seed, int) or isinstance(seed, bool):  # of any size: it is only hashed
        raise DataError(f"seed={shown(seed)}: use a whole number")


def _longest_context(count: int, validation: float) -> int:
    """Return the longest context that leaves a row on both sides; 0 if there is none."""
    trained = min(count - round(count * validation), count // 2) if validation else count
    return max(trained - 1, 0)


class TextData:
    """Endless batches of a corpus; iterating moves the object's own position.

    So a second `for` goes on where the first one stopped. Tensors belong to the caller.

    Attributes:
        vocabulary: turns text into ids and back.
        report: which files were read, where the tokens were made from files.
    """

    def __init__(
        self,
        tokens: TokenFile,
        vocabulary: Vocabulary,
        *,
        context: int | None = None,
        batch_size: int = 16,
        validation: float = 0.05,
        seed: int = 0,
        report: CorpusReport | None = None,
    ) -> None:
        """Deal out `tokens`, which `vocabulary` made.

        Args:
            tokens: the corpus.
            vocabulary: what made the tokens.
            context: tokens of a row; None leaves it to `bind`.
            batch_size: rows of a batch.
            validation: share of the tokens to hold out, at least one window unless it is 0.
            seed: chooses the order.
            report: kept for the reader.

        Raises:
            DataError: the corpus is too short, an argument is out of range, or `vocabulary` did
                not make these tokens.
        """
        check_dealing(context, batch_size=batch_size, validation=validation, seed=seed)
        if tokens.header.vocabulary != vocabulary.fingerprint:
            raise DataError(
                f"the tokens were made by the vocabulary {tokens.header.vocabulary!r}, not by "
                f"{vocabulary.fingerprint!r}; load the vocabulary that made them"
            )
        self.vocabulary = vocabulary
        self._batch_size = batch_size
        self.report = report
        self._file = tokens
        self._validation = validation
        self._seed = seed
        self._position = 0
        self._context = 0  # not chosen yet
        self._split = 0
        if context is not None:
            self._cut(context)

    def bind(self, context: int | None) -> None:
        """Choose the length of a row for a model that takes at most `context` tokens.

        A length that was chosen before stays; None is for a model that does not say what it takes.

        Raises:
            DataError: the length chosen before is more than the model takes, or none was chosen
                and the model does not say; or the corpus is too short.
        """
        if context is None:
            self._chosen_context()
        elif not self._context:
            self._cut(context)
        elif self._context > context:
            raise DataError(
                f"the data gives rows of context={self._context} tokens and the model takes "
                f"{context}; use context={context} or leave it out"
            )

    def _cut(self, context: int) -> None:
        check_whole("context", context, least=1, error=DataError)
        count, window = self._file.header.count, context + 1
        most = _longest_context(count, self._validation)
        shorter = f" or a context below {most + 1}" if most else ""
        if count < window:
            raise DataError(
                f"the corpus has {count} tokens; one row of context={context} takes {window} "
                f"with its last target: give more text{shorter}"
            )
        held_out = max(round(count * self._validation), window) if self._validation else 0
        if count - held_out < window:
            raise DataError(
                f"the corpus has {count} tokens; holding out {held_out} for "
                f"validation={self._validation} leaves {count - held_out} to train on, and one row "
                f"of context={context} takes {window} with its last target: give more text"
                f"{shorter or ''}, or validation=0"
            )
        self._context, self._split = context, count - held_out

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        return self._batch_size

    @property
    def context(self) -> int | None:
        """Tokens of a row, or None while they are not chosen."""
        return self._context or None

    @property
    def windows(self) -> int:
        """How many rows there are in an epoch."""
        return (self._split - 1) // self._chosen_context()

    @property
    def tokens(self) -> int:
        """How many tokens the corpus has, those held out among them."""
        return self._file.header.count

    @property
    def position(self) -> int:
        """How many rows have been dealt out since the beginning."""
        return self._position

    @property
    def vocab_size(self) -> int:
        """The vocabulary's size."""
        return self.vocabulary.size

    def encode(self, text: str) -> Ids:
        """Return the ids of a text."""
        return self.vocabulary.encode(text)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of some ids."""
        return self.vocabulary.decode(ids)

    def __iter__(self) -> "TextData":
        return self

    def __next__(self) -> Batch:
        batch = self.batch_at(self._position)
        self.skip()
        return batch

    def skip(self, batches: int = 1) -> None:
        """Move on without reading."""
        self._position += batches * self.batch_size

    def batch_at(self, position: int) -> Batch:
        """Return the batch that begins at a position, without moving there.

        May be called from any thread. A batch at an epoch's end goes on into the next epoch.

        Raises:
            DataError: no context has been chosen yet.
        """
        count = self.windows
        rows: list[int] = []
        while (missing := self.batch_size - len(rows)) > 0:
            epoch, index = divmod(position + len(rows), count)
            places = np.arange(index, min(index + missing, count))
            rows += shuffled(places, count, seed=self._seed, epoch=epoch).tolist()
        return self._rows([row * self._context for row in rows])

    def validation_batches(self, limit: int | None = None) -> Iterator[Batch]:
        """Yield the tokens held out, in order; the last batch may have fewer rows.

        Args:
            limit: at most so many batches, spread evenly over the tokens held out.

        Raises:
            DataError: no context has been chosen yet.
        """
        context = self._chosen_context()
        count = max(0, (self.tokens - self._split - 1) // context)
        wanted = count if limit is None else min(count, limit * self.batch_size)
        starts = [self._split + row * count // wanted * context for row in range(wanted)]
        return (
            self._rows(starts[first : first + self.batch_size])
            for first in range(0, wanted, self.batch_size)
        )

    def _rows(self, starts: Sequence[int]) -> Batch:
        """Copy one window from each start: nothing refers to the file or to another tensor."""
        windows = np.empty((len(starts), self._context + 1), dtype=np.int64)
        for row, start in enumerate(starts):
            windows[row] = self._file.tokens[start : start + self._context + 1]
        both = torch.from_numpy(windows)
        return both[:, :-1].clone(), both[:, 1:].clone()

    def state(self) -> dict[str, str | int | float]:
        """Return the position and what gives it its meaning, as plain values.

        Raises:
            DataError: no context has been chosen yet.
        """
        state: dict[str, str | int | float] = msgspec.to_builtins(self._state())
        return state

    def _state(self) -> _State:
        epoch, index = divmod(self._position, self.windows)
        return _State(
            corpus=self._file.header.digest,
            vocabulary=self._file.header.vocabulary,
            validation=self._validation,
            context=self._chosen_context(),
            seed=self._seed,
            epoch=epoch,
            index=index,
        )

    def restore(self, state: Mapping[str, object]) -> None:
        """Go to the position of a `state`; the batches that follow are the same to the last bit.

        Another batch size is allowed: the rows still come in the same order. Nothing moves if it
        fails.

        Raises:
            DataError: it is no state, or one of another corpus, vocabulary, seed, context or
                share of validation; or no context has been chosen yet.
        """
        try:
            wanted = msgspec.convert(dict(state), _State)
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise DataError(f"this is no position in a corpus: {error}") from error
        here = self._state()
        for name in ("corpus", "vocabulary", "validation", "context", "seed"):
            saved, present = getattr(wanted, name), getattr(here, name)
            if saved != present:
                raise DataError(
                    f"the position was saved with {name}={saved!r} and this data has "
                    f"{name}={present!r}; use the same {name} to go on, or begin anew"
                )
        if wanted.epoch < 0 or not 0 <= wanted.index < self.windows:
            raise DataError(
                f"the position epoch={wanted.epoch}, index={wanted.index} is not among the "
                f"{self.windows} windows of an epoch; the state was changed"
            )
        self._position = wanted.epoch * self.windows + wanted.index

    def _chosen_context(self) -> int:
        if not self._context:
            raise DataError(
                "the length of a row is not chosen; give myelin.data.text a context=, or call bind"
            )
        return self._context

    def __repr__(self) -> str:
        return (
            f"<TextData {self.tokens:,} tokens, context={self.context}, "
            f"batch_size={self.batch_size}, position={self._position}>"
        )
