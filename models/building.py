"""Builds a model block by block: what each block is like, and the blocks that one worker owns.

The same seed gives the same weights whatever is built where: every builder runs under its block's
own seed, and a factory that builds all blocks at once runs as a whole under one seed. Randomness
that does not come from torch's CPU generator is the factory's own affair.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from myelin.errors import ModelError
from myelin.models.factories import find
from myelin.models.model import Block, Description, Parts, Tie, load
from myelin.models.seeds import block_seed, seeded


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """What is known of a block without allocating it.

    Attributes:
        cost: what it computes per token or sample, in multiply-adds; more than zero.
    """

    cost: float


@dataclass(frozen=True, slots=True)
class Sketch:
    """What is known of a model without allocating it."""

    blocks: tuple[BlockInfo, ...]
    ties: tuple[Tie, ...]


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


def describe(description: Description) -> Sketch:
    """Say what each block is like and which weights are tied, and check that ties fit.

    The factory is called once. Blocks are built on the meta device, so a description of any size
    takes no memory. A block that cannot be built there is built for real, alone, and discarded; a
    factory that fails there is called a second time, for real.

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
    return Sketch(tuple(infos), parts.ties)


def build_blocks(
    description: Description, indices: Iterable[int], seed: int
) -> dict[int, nn.Module]:
    """Load a description and build the named blocks; see `assemble`."""
    parts = load(description.factory, description.arguments, seed=seed)
    return assemble(parts, [indices], seed)[0]


def assemble(
    parts: Parts, groups: Sequence[Iterable[int]], seed: int
) -> list[dict[int, nn.Module]]:
    """Build the named blocks of each group, and keep nothing else.

    A tied parameter is one object where both its blocks are in one group; no parameter is in two
    groups. Where the owner is in no group or in another, the user's parameter starts with the
    owner's value: an owner that is not built yet is built under its seed and dropped again, so for
    that moment both take memory.

    Args:
        parts: the model; blocks that it holds ready-made are used themselves, and altered. Where
            two groups would share a parameter, the later one gets copies.
        groups: the blocks to build together.
        seed: the model's seed, as given to `load`.

    Returns:
        For each group its blocks by index, in ascending order, on the CPU and in training mode
        unless the factory made them otherwise.

    Raises:
        ModelError: an index is out of range; or a builder raised; or a tie does not fit; or blocks
            that two groups share cannot be copied.
    """
    made: list[dict[int, nn.Module]] = []
    for indices in groups:
        wanted = sorted(set(indices))
        if wanted and not 0 <= wanted[0] <= wanted[-1] < len(parts.blocks):
            raise ModelError(f"blocks {wanted} of a model with blocks 0 to {len(parts.blocks) - 1}")
        built = {index: _build(parts.blocks[index], index, seed) for index in wanted}
        taken = {id(p) for group in made for block in group.values() for p in block.parameters()}
        if any(id(p) in taken for block in built.values() for p in block.parameters()):
            built = _copied(built)
        _tie(parts, built, seed)
        made.append(built)
    return made


def _copied(blocks: dict[int, nn.Module]) -> dict[int, nn.Module]:
    try:
        return copy.deepcopy(blocks)
    except Exception as error:
        raise ModelError(
            f"blocks {list(blocks)} share weights with another stage of the same worker and cannot "
            f"be copied ({type(error).__name__}: {error}): return functions that build the blocks, "
            "and ties, or put the stages on different workers"
        ) from error


def _tie(parts: Parts, built: Mapping[int, nn.Module], seed: int) -> None:
    """Give the users among the blocks their owners' parameters, or copies if the owner is not."""
    for owner in sorted({tie.owner_block for tie in parts.ties if tie.user_block in built}):
        given = parts.blocks[owner]
        block = built[owner] if owner in built else _build(given, owner, seed)
        others = owner not in built and isinstance(given, nn.Module)
        for tie in parts.ties:
            if tie.owner_block == owner and tie.user_block in built:
                _join(tie, block, built[tie.user_block], copy_it=others)


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
    if any(is_lazy(tensor) for tensor in (*block.parameters(), *block.buffers())):
        raise ModelError(
            f"block {index} ({type(block).__name__}) has parameters without a shape: give its "
            "modules their input sizes instead of using nn.Lazy..."
        )
    return BlockInfo(_cost(block, index))


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


def _join(tie: Tie, owner: nn.Module, user: nn.Module, *, copy_it: bool) -> None:
    """Put the owner's parameter, or a copy, wherever the user block holds its own."""
    owned = dict(owner.named_parameters(remove_duplicate=False))
    used = dict(user.named_parameters(remove_duplicate=False))
    shapes = {(tie.owner_block, name): p.shape for name, p in owned.items()}
    shapes |= {(tie.user_block, name): p.shape for name, p in used.items()}
    _check_tie(tie, shapes)
    replaced, parameter = used[tie.user_name], owned[tie.owner_name]
    if copy_it:
        parameter = copy.deepcopy(parameter)
    for name, own in used.items():
        if own is replaced:
            path, _, attribute = name.rpartition(".")
            setattr(user.get_submodule(path), attribute, parameter)
