"""GPT as the paper trains it: pre-norm, GELU, learned positions, causal attention.

`GPT` describes one; `build` makes its parts, with builders, so that nothing is allocated until a
worker builds the blocks that it owns.

Source: arXiv 2110.13005 for the sizes; initialisation N(0, 0.02), with the projections that write
to the residual stream scaled by 1/sqrt(2 * layers).
"""

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar, TypeGuard

import torch
from torch import nn
from torch.nn import functional

from myelin.errors import BatchError, ModelError
from myelin.models.checks import check_flag, check_number, check_whole, shown
from myelin.models.losses import TokenCrossEntropy
from myelin.models.model import Block, Parts, Plain, Tie

# B microbatch, T tokens, D width (hidden), H heads, K width of one head, V vocabulary

_STD = 0.02
_PAPER = {  # name: layers, hidden, heads
    "12b": (48, 4512, 24),
    "24b": (48, 6336, 36),
    "50b": (96, 6528, 48),
    "100b": (96, 9360, 60),
}


@dataclass(frozen=True, slots=True)
class GPT:
    """A description of a GPT.

    Attributes:
        layers: transformer blocks, besides the embedding and the head.
        hidden: width D of the residual stream.
        heads: attention heads; divides `hidden`.
        vocab: number of tokens.
        context: the longest sequence.
        tied: whether the head's weight is the token embedding.
        dropout: chance of a zero after the embedding and on every residual branch.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    context: int
    tied: bool = True
    dropout: float = 0.0

    factory: ClassVar[str] = "myelin.models.gpt:build"

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "context"):
            check_whole(name, getattr(self, name), least=1, error=ModelError)
        check_flag("tied", self.tied, error=ModelError)
        check_number("dropout", self.dropout, least=0, below=1, error=ModelError)
        if self.hidden % self.heads:
            fitting = max(n for n in range(1, self.heads) if self.hidden % n == 0)
            raise ModelError(
                f"hidden={self.hidden} is not a multiple of heads={self.heads}: the heads share "
                f"the width evenly; use heads={fitting} or hidden="
                f"{math.ceil(self.hidden / self.heads) * self.heads}"
            )

    @classmethod
    def paper(cls, size: str, *, vocab: int = 51200, context: int = 512) -> "GPT":
        """Return one of the paper's models: "12b", "24b", "50b" or "100b".

        Raises:
            ModelError: there is no such size.
        """
        if not isinstance(size, str) or size not in _PAPER:
            raise ModelError(f"no model {shown(size)} in the paper: use one of {', '.join(_PAPER)}")
        layers, hidden, heads = _PAPER[size]
        return cls(layers, hidden, heads, vocab, context)

    @property
    def arguments(self) -> dict[str, Plain]:
        """The arguments of `build`."""
        return asdict(self)

    @property
    def parameters(self) -> int:
        """Number of parameters, a tied weight counted once: l(12D^2 + 13D) + VD + CD + 2D."""
        layer = 12 * self.hidden**2 + 13 * self.hidden
        tables = (self.vocab * (1 if self.tied else 2) + self.context) * self.hidden
        return self.layers * layer + tables + 2 * self.hidden

    def check_inputs(self, tokens_BT: object) -> None:
        """Refuse a batch that would fail on a worker.

        Raises:
            BatchError: the tokens are no [B, T] whole numbers, too many, or not in the vocabulary.
        """
        _check_ids(_checked_tokens(tokens_BT, self.context), self.vocab)

    def check_targets(self, tokens_BT: torch.Tensor, targets_BT: object) -> None:
        """Refuse targets that would fail on a worker; the tokens have been checked.

        Raises:
            BatchError: they are no whole numbers of the tokens' shape, one is not in the
                vocabulary, or all are ignored.
        """
        if not _is_whole(targets_BT) or targets_BT.shape != tokens_BT.shape:
            raise BatchError(
                f"GPT takes whole-number targets of shape {tuple(tokens_BT.shape)}, that of the "
                f"tokens, not {_kind(targets_BT)}"
            )
        ids_BT = targets_BT.long()
        valid = ids_BT[ids_BT != TokenCrossEntropy().ignore_index]
        if not len(valid):
            raise BatchError(
                f"all {ids_BT.numel()} targets of the batch are ignored, so its loss does not "
                "exist: leave the batch out"
            )
        _check_ids(valid, self.vocab)


def build(
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    context: int,
    tied: bool = True,
    dropout: float = 0.0,
) -> Parts:
    """Make a GPT's parts; the arguments are those of `GPT`."""
    GPT(layers, hidden, heads, vocab, context, tied, dropout)
    layer = partial(Layer, hidden, heads, context=context, depth=layers, dropout=dropout)
    blocks: tuple[Block, ...] = (
        partial(Embedding, hidden, vocab=vocab, context=context, dropout=dropout),
        *[layer] * layers,
        partial(Head, hidden, vocab),
    )
    ties = (Tie(0, "token.weight", layers + 1, "head.weight"),) if tied else ()
    return Parts(blocks, TokenCrossEntropy(), ties)


class Embedding(nn.Module):
    """Tokens and their positions to vectors: tokens_BT -> x_BTD."""

    def __init__(self, hidden: int, *, vocab: int, context: int, dropout: float) -> None:
        super().__init__()
        self.token = _table(vocab, hidden)
        self.position = _table(context, hidden)
        self.dropout = nn.Dropout(dropout)
        self.draws_random = dropout > 0

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Embed whole-number tokens.

        Raises:
            BatchError: the tokens are no [B, T] whole numbers, too many, or not in the vocabulary.
        """
        tokens_BT = _checked_tokens(tokens_BT, self.position.num_embeddings)
        try:
            x_BTD = self.token(tokens_BT)
        except IndexError:
            _check_ids(tokens_BT, self.token.num_embeddings)
            raise
        x_BTD = x_BTD + self.position.weight[: tokens_BT.shape[1]]
        return self.dropout(x_BTD)  # type: ignore[no-any-return]

    def cost(self) -> float:
        """Multiply-adds per token: a lookup and an addition."""
        return 2.0 * self.token.embedding_dim


class Layer(nn.Module):
    """One pre-norm transformer block: x_BTD -> x_BTD."""

    def __init__(
        self, hidden: int, heads: int, *, context: int, depth: int, dropout: float
    ) -> None:
        super().__init__()
        residual_std = _STD / math.sqrt(2 * depth)
        self.heads = heads
        self.context = context
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = _linear(hidden, 3 * hidden, std=_STD)
        self.project = _linear(hidden, hidden, std=residual_std)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.widen = _linear(hidden, 4 * hidden, std=_STD)
        self.narrow = _linear(4 * hidden, hidden, std=residual_std)
        self.dropout = nn.Dropout(dropout)
        self.draws_random = dropout > 0

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Mix along the tokens before, then along the width."""
        x_BTD = x_BTD + self.dropout(self._attend(self.attention_norm(x_BTD)))
        wide = functional.gelu(self.widen(self.mlp_norm(x_BTD)))
        return x_BTD + self.dropout(self.narrow(wide))  # type: ignore[no-any-return]

    def cost(self) -> float:
        """Multiply-adds per token, with the attention over a full context."""
        hidden = self.project.in_features
        return 12.0 * hidden**2 + 2.0 * self.context * hidden

    def _attend(self, x_BTD: torch.Tensor) -> torch.Tensor:
        qkv_BTHK = (
            part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x_BTD).chunk(3, dim=-1)
        )
        q_BHTK, k_BHTK, v_BHTK = (part_BTHK.transpose(1, 2) for part_BTHK in qkv_BTHK)
        y_BHTK = functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.project(y_BHTK.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Head(nn.Module):
    """The final norm and the vocabulary's logits: x_BTD -> logits_BTV."""

    draws_random = False

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.head = _linear(hidden, vocab, std=_STD, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token at every position."""
        return self.head(self.norm(x_BTD))  # type: ignore[no-any-return]

    def cost(self) -> float:
        """Multiply-adds per token; the largest of all blocks where the vocabulary is large."""
        return float(self.head.weight.numel())


def _linear(inputs: int, outputs: int, *, std: float, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta")
    layer.to_empty(device=torch.get_default_device())
    nn.init.normal_(layer.weight, std=std)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def _table(rows: int, hidden: int) -> nn.Embedding:
    table = nn.Embedding(rows, hidden, device="meta")
    table.to_empty(device=torch.get_default_device())
    nn.init.normal_(table.weight, std=_STD)
    return table


def _is_whole(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _checked_tokens(tokens_BT: object, context: int) -> torch.Tensor:
    if not _is_whole(tokens_BT) or tokens_BT.ndim != 2:
        raise BatchError(
            f"GPT takes whole-number tokens of shape [batch, tokens], not {_kind(tokens_BT)}"
        )
    length = tokens_BT.shape[1]
    if length > context:
        raise BatchError(
            f"{length} tokens for a context of {context}: cut the sequences or use "
            f"GPT(context={length})"
        )
    return tokens_BT.long()


def _check_ids(ids: torch.Tensor, vocab: int) -> None:
    if not ids.numel():
        return
    low, high = (int(end) for end in ids.aminmax())
    if low < 0 or high >= vocab:
        remedy = "use other data" if low < 0 else f"use GPT(vocab={high + 1}) or other data"
        raise BatchError(f"tokens from {low} to {high} for a vocabulary of {vocab}: {remedy}")
