"""Picks the next token from logits: enough for a quick look at what a model has learnt."""

import math

import torch

from myelin.errors import ModelError

# V vocabulary


def sample(
    logits_V: torch.Tensor,
    *,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
) -> int:
    """Draw one token.

    Args:
        logits_V: one logit per token, of any float type.
        temperature: 0 takes the likeliest token; 1 draws from the model's own distribution.
        top_k: draw only among this many likeliest tokens; None draws among all.
        generator: where the randomness comes from; on the logits' device.

    Raises:
        ModelError: an argument is out of range, or the logits hold NaN or infinity.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ModelError(f"temperature={temperature}: use a finite number of at least 0")
    if top_k is not None and top_k < 1:
        raise ModelError(f"top_k={top_k}: use at least 1, or None for all tokens")
    scores_V = _checked(logits_V).float()
    if temperature == 0:
        return int(scores_V.argmax())
    kept, tokens = scores_V.topk(min(top_k or len(scores_V), len(scores_V)))
    # Less the largest before the division: a tiny temperature must not make infinities.
    chances = ((kept - kept[0]) / temperature).softmax(0)
    return int(tokens[torch.multinomial(chances, 1, generator=generator)])


def _checked(logits_V: torch.Tensor) -> torch.Tensor:
    if logits_V.ndim != 1 or not len(logits_V):
        raise ModelError(
            f"logits of shape {tuple(logits_V.shape)}: give those of one position, one per token"
        )
    best = float(logits_V.max())
    if not math.isfinite(best) or bool(logits_V.isnan().any()):
        raise ModelError(
            f"the logits hold NaN or infinity (largest: {best}): the model has diverged; "
            "train with a lower learning rate"
        )
    return logits_V
