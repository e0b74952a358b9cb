"""Builds a model block by block: what each block is like, and the blocks that one worker owns.

The same seed gives the same weights whatever is built where: every builder runs under its block's
own seed, and a factory that builds all blocks at once runs as a whole under one seed. Randomness
that does not come from torch's CPU generator is the factory's own affair.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from myelin.errors import ModelError
from myelin.models.factories import find
from myelin.models.model import Block, Description, Parts, Tie, load
from myelin.models.seeds import block_seed as block_seed
from myelin.models.seeds import op_seed as op_seed
from myelin.models.seeds import seeded


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """What is known of a block without allocating it.

    Attributes:
        name: the block's class.
        parameters: numbers in its parameters, those tied to another block's included.
        buffers: numbers in its buffers.
        cost: what it computes per token or sample, in multiply-adds; more than zero.
    """

    name: str
    parameters: int
    buffers: int
    cost: float


def outline(description: Description) -> Parts:
    """Load a description without allocating its weights, where its factory permits that.

    Only the structure is good for use: blocks given as modules, and tensors in the loss, may be on
    the meta device. A factory that fails there is called again for real. Its module is imported
    before, so that tensors at the module's top level are real; a tensor that the factory itself
    keeps for later (in a cache) would stay on the meta device.

    Raises:
        ModelError: as `load` does.
    """
    with seeded(0):
        find(description.factory)
    try:
        with torch.device("meta"):
            return load(description.factory, description.arguments)
    except ModelError:
        return load(description.factory, description.arguments)


def describe(description: Description) -> list[BlockInfo]:
    """Say what each block is like, and check that ties fit.

    Blocks are built on the meta device, so a description of any size takes no memory. A block that
    cannot be built there is built for real, alone, and discarded.

    Raises:
        ModelError: as `load` does; or a builder raised; or a tie does not fit.
    """
    parts = outline(description)
    infos: list[BlockInfo] = []
    shapes: dict[tuple[int, str], torch.Size] = {}
    for index, block in enumerate(parts.blocks):
        built = _sketch(block, index)
        infos.append(_info(built, index))
        shapes.update(
            {(index, n): p.shape for n, p in built.named_parameters(remove_duplicate=False)}
        )
    for tie in parts.ties:
        _check_tie(tie, shapes)
    return infos


def build_blocks(
    description: Description, indices: Iterable[int], seed: int
) -> dict[int, nn.Module]:
    """Build the named blocks, and keep nothing else.

    A tied parameter is one object where both its blocks are built here. Where the owner is
    elsewhere, the user's parameter starts with the owner's value: the owner block is built under
    its seed and dropped again, so for that moment both take memory.

    Args:
        description: the model.
        indices: the blocks to build.
        seed: the model's seed.

    Returns:
        The blocks by index, in ascending order, on the CPU and in training mode unless the factory
        made them otherwise.

    Raises:
        ModelError: as `load` does; or an index is out of range; or a builder raised; or a tie does
            not fit.
    """
    parts = load(description.factory, description.arguments, seed=seed)
    wanted = sorted(set(indices))
    if wanted and not 0 <= wanted[0] <= wanted[-1] < len(parts.blocks):
        raise ModelError(f"blocks {wanted} of a model with blocks 0 to {len(parts.blocks) - 1}")
    built = {index: _build(parts.blocks[index], index, seed) for index in wanted}
    for owner in sorted({tie.owner_block for tie in parts.ties if tie.user_block in built}):
        block = built[owner] if owner in built else _build(parts.blocks[owner], owner, seed)
        for tie in parts.ties:
            if tie.owner_block == owner and tie.user_block in built:
                _join(tie, block, built[tie.user_block])
    return built


def _build(block: Block, index: int, seed: int) -> nn.Module:
    if isinstance(block, nn.Module):
        return block
    with seeded(block_seed(seed, index)):
        try:
            built = block()
        except Exception as error:
            raise ModelError(
                f"building block {index} raised {type(error).__name__}: {error}; its builder is "
                "called without arguments"
            ) from error
    if not isinstance(built, nn.Module):
        raise ModelError(
            f"the builder of block {index} returned {type(built).__name__}: return an nn.Module"
        )
    return built


def _sketch(block: Block, index: int) -> nn.Module:
    try:
        with torch.device("meta"):
            return _build(block, index, seed=0)
    except ModelError:
        return _build(block, index, seed=0)


def _info(block: nn.Module, index: int) -> BlockInfo:
    name = type(block).__name__
    parameters, buffers = list(block.parameters()), list(block.buffers())
    if any(is_lazy(tensor) for tensor in (*parameters, *buffers)):
        raise ModelError(
            f"block {index} ({name}) has parameters without a shape: give its modules their input "
            "sizes instead of using nn.Lazy..."
        )
    return BlockInfo(
        name=name,
        parameters=sum(p.numel() for p in parameters),
        buffers=sum(b.numel() for b in buffers),
        cost=_cost(block, index),
    )


def _cost(block: nn.Module, index: int) -> float:
    own = getattr(block, "cost", None)
    if not callable(own):
        return _estimate(block)
    cost = float(own())
    if not math.isfinite(cost) or cost < 0:
        raise ModelError(
            f"cost() of block {index} ({type(block).__name__}) is {cost}: return multiply-adds per "
            "token or sample, a finite number of at least 0"
        )
    return max(cost, 1.0)


def _estimate(block: nn.Module) -> float:
    """Take each weight to be used once per sample, except tables, of which one row is used."""
    tables = [m for m in block.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    rows = sum(table.embedding_dim for table in tables)
    looked_up = {id(table.weight) for table in tables}
    used = sum(p.numel() for p in block.parameters() if id(p) not in looked_up)
    return float(max(used + rows, 1))


def _check_tie(tie: Tie, shapes: Mapping[tuple[int, str], torch.Size]) -> None:
    owner = shapes.get((tie.owner_block, tie.owner_name))
    user = shapes.get((tie.user_block, tie.user_name))
    if owner is None or user is None:
        raise ModelError(
            f"{tie}: there is no such parameter in block "
            f"{tie.owner_block if owner is None else tie.user_block}; use a name that the block's "
            "named_parameters() gives"
        )
    if owner != user:
        raise ModelError(
            f"{tie}: shapes {tuple(owner)} and {tuple(user)} differ; only parameters of one shape "
            "can be tied"
        )


def _join(tie: Tie, owner: nn.Module, user: nn.Module) -> None:
    """Put the owner's parameter wherever the user block holds its own."""
    owned = dict(owner.named_parameters(remove_duplicate=False))
    used = dict(user.named_parameters(remove_duplicate=False))
    shapes = {(tie.owner_block, name): p.shape for name, p in owned.items()}
    shapes |= {(tie.user_block, name): p.shape for name, p in used.items()}
    _check_tie(tie, shapes)
    replaced = used[tie.user_name]
    for name, parameter in used.items():
        if parameter is replaced:
            path, _, attribute = name.rpartition(".")
            setattr(user.get_submodule(path), attribute, owned[tie.owner_name])
