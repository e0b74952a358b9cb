"""The transformer blocks, and how a model is described, cut and built block by block."""

from myelin.models.gpt import GPT
from myelin.models.model import Model, Parts, Tie

__all__ = ["GPT", "Model", "Parts", "Tie"]
