"""A model as a description that can cross the bus, and the parts that its factory makes of it.

A description is the import path of a factory and plain values. Every process calls the factory
itself, so no module is ever sent, and a factory that returns builders instead of built blocks lets
each worker allocate only the blocks that it owns.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

from torch import nn

from myelin.errors import ModelError
from myelin.models.checks import shown
from myelin.models.factories import checked, find, path_of, place_of
from myelin.models.losses import Loss
from myelin.models.seeds import factory_seed, seeded

Plain: TypeAlias = "bool | int | float | str | Sequence[Plain] | Mapping[str, Plain] | None"
Block: TypeAlias = "nn.Module | Callable[[], nn.Module]"

_DEEPEST = 16  # deeper than any real setting, shallow enough to stop at a list that holds itself
_INTEGERS = range(-(2**63), 2**64)  # what msgpack can carry


class Description(Protocol):
    """What names a model: the import path of its factory and the factory's arguments."""

    @property
    def factory(self) -> str:
        """The import path, `package.module:function` or `/absolute/file.py:function`."""
        ...

    @property
    def arguments(self) -> dict[str, Plain]:
        """The factory's keyword arguments."""
        ...


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Model:
    """A model of one's own: a factory, by import path, and its arguments.

    The factory returns `(blocks, loss)` or `Parts`; see `load`. A module-level function may stand
    in place of its path. Tuples among the arguments become lists, as they would on the bus, so that
    the factory sees the same values in every process.
    """

    factory: str
    _arguments: dict[str, Plain]

    def __init__(self, factory: str | Callable[..., object], /, **arguments: Plain) -> None:
        path = checked(factory) if isinstance(factory, str) else path_of(factory)
        plain = {name: _plain(value, name) for name, value in arguments.items()}
        object.__setattr__(self, "factory", path)
        object.__setattr__(self, "_arguments", plain)

    @property
    def arguments(self) -> dict[str, Plain]:
        """The factory's keyword arguments; a copy."""
        return copy.deepcopy(self._arguments)

    def __hash__(self) -> int:
        return hash(self.factory)

    def __repr__(self) -> str:
        parts = [repr(self.factory), *(f"{k}={v!r}" for k, v in self._arguments.items())]
        return f"Model({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class Tie:
    """Parameter `user_name` of block `user_block` is the same weight as the owner's.

    Its initial value is the owner's. Names are as in `named_parameters()`.
    """

    owner_block: int
    owner_name: str
    user_block: int
    user_name: str


@dataclass(frozen=True, slots=True)
class Parts:
    """What a model is made of.

    Attributes:
        blocks: in order, each a module or a function that builds one. A builder is called under the
            block's own seed and must return a fresh module each time. Modules that come in
            evaluation mode stay in it when the others are trained.
        loss: see `myelin.models.losses`.
        ties: weights shared between blocks. Between blocks that are given as modules, a parameter
            that is the same object in both needs no mention.
    """

    blocks: tuple[Block, ...]
    loss: Loss
    ties: tuple[Tie, ...] = ()


def check_description(model: object) -> Description:
    """Return a model's description as it is, if every worker can make something of it.

    Raises:
        ModelError: it is none, names no factory, or has an argument that cannot cross the bus.
    """
    factory, arguments = getattr(model, "factory", None), getattr(model, "arguments", None)
    if isinstance(model, type) or not isinstance(factory, str) or not isinstance(arguments, dict):
        raise ModelError(
            f"{_mistaken(model)}: a trainer takes a description, GPT(layers=..., hidden=..., ...) "
            'or myelin.Model("my_pkg.models:build", ...), of which workers build their blocks'
        )
    checked(factory)
    for name, value in arguments.items():
        _plain(value, name)
    return cast(Description, model)


def _mistaken(model: object) -> str:
    """Say what was given in the place of a description, and what it should have been."""
    if isinstance(model, type):
        own = hasattr(model, "factory") and hasattr(model, "arguments")
        return f"{model.__name__} is a class, " + (
            f"so call it with its settings, {model.__name__}(...)" if own else "not a description"
        )
    if isinstance(model, nn.Module):
        return (
            f"a module ({type(model).__name__}) lies in this process only, so write a function at "
            "the top level of a file that returns (blocks, loss), and pass myelin.Model(function)"
        )
    if isinstance(model, str):
        return f"{shown(model)} is a text, so write myelin.Model({shown(model)}, ...)"
    if callable(model):
        name = getattr(model, "__name__", "build")
        return f"{shown(model)} is a function, so write myelin.Model({name}, ...)"
    return f"{shown(model)} is no model"


def load(factory: str, arguments: Mapping[str, object], *, seed: int = 0) -> Parts:
    """Call a factory and check what it returns.

    It may return `Parts`, or `(blocks, loss)` where `blocks` is an `nn.Sequential` or a list of
    modules and builders. It runs under a seed of its own, so modules that it builds at once, and
    tensors that its loss holds, are the same in every process. torch's generator is afterwards as
    it was before.

    Args:
        factory: its import path.
        arguments: its keyword arguments.
        seed: the model's seed.

    Raises:
        ModelError: the factory cannot be found, raised, or returned something unusable.
    """
    with seeded(factory_seed(seed)):
        function = find(factory)
    _check_call(factory, function, arguments)
    with seeded(factory_seed(seed)):
        try:
            made = function(**arguments)
        except Exception as error:
            raise ModelError(
                f"factory {factory!r} raised {type(error).__name__}: {error}{place_of(error)}; it "
                f"was called with {dict(arguments)!r}"
            ) from error
    return _parts(factory, made)


def _plain(value: object, where: str, depth: int = 0) -> Plain:
    """Copy a plain value; subclasses of plain types become the plain type."""
    if depth > _DEEPEST:
        raise ModelError(f"argument {where} is nested deeper than {_DEEPEST}: flatten it")
    match value:
        case None | bool():
            return value
        case int() if int(value) in _INTEGERS:
            return int(value)
        case float():
            return float(value)
        case str() if _is_text(value):
            return str.__str__(value)
        case list() | tuple():
            return [_plain(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
        case dict() if all(isinstance(key, str) for key in value):
            return {str(k): _plain(v, f"{where}[{k!r}]", depth + 1) for k, v in value.items()}
    raise ModelError(
        f"argument {where} is {value!r} ({type(value).__name__}): a description holds only None, "
        "bool, 64-bit int, float, str, and lists, tuples and dicts (keyed by str) of these; pass a "
        "name or a number and make the object in the factory"
    )


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_call(
    factory: str, function: Callable[..., object], arguments: Mapping[str, object]
) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin that does not tell its arguments
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ModelError(
            f"factory {factory!r} takes {signature}, but the description gives "
            f"({', '.join(arguments)}): {error}"
        ) from error


def _parts(factory: str, made: object) -> Parts:
    match made:
        case Parts(blocks=blocks, loss=loss, ties=ties):
            pass
        case (blocks, loss) if isinstance(made, tuple):
            ties = ()
        case _:
            raise ModelError(
                f"factory {factory!r} returned {type(made).__name__}: return (blocks, loss), where "
                "blocks is a list of nn.Module or an nn.Sequential"
            )
    checked_blocks = _blocks(factory, blocks)
    checked_loss = _checked_loss(factory, loss)
    declared = tuple(ties)
    taken = {(tie.user_block, tie.user_name) for tie in declared}
    found = (
        t for t in _shared(factory, checked_blocks) if (t.user_block, t.user_name) not in taken
    )
    parts = Parts(checked_blocks, checked_loss, (*declared, *found))
    _check_ties(factory, parts)
    return parts


def _blocks(factory: str, blocks: object) -> tuple[Block, ...]:
    if not isinstance(blocks, nn.Sequential | nn.ModuleList | list | tuple):
        raise ModelError(
            f"factory {factory!r} returned {type(blocks).__name__} as its blocks: return a list of "
            "nn.Module or an nn.Sequential; a model is cut between its blocks, so divide a single "
            "module into several"
        )
    if not len(blocks):
        raise ModelError(f"factory {factory!r} returned no blocks: return at least one")
    for index, block in enumerate(blocks):
        if not callable(block):
            raise ModelError(
                f"factory {factory!r} returned {type(block).__name__} as block {index}: a block is "
                "an nn.Module or a function without arguments that builds one"
            )
    return tuple(blocks)


def _checked_loss(factory: str, loss: object) -> Loss:
    if not callable(loss):
        raise ModelError(
            f"factory {factory!r} returned {type(loss).__name__} as its loss: a loss is a callable "
            "(output, target) -> scalar tensor"
        )
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise ModelError(
            f"factory {factory!r} returned a loss with trainable parameters, which nothing would "
            "train: move them into the last block"
        )
    return loss


def _check_ties(factory: str, parts: Parts) -> None:
    users = [(tie.user_block, tie.user_name) for tie in parts.ties]
    for tie in parts.ties:
        fault = None
        if not {tie.owner_block, tie.user_block} <= set(range(len(parts.blocks))):
            fault = f"blocks are 0 to {len(parts.blocks) - 1}"
        elif tie.owner_block == tie.user_block:
            fault = "inside one block let both modules hold the same nn.Parameter instead"
        elif users.count((tie.user_block, tie.user_name)) > 1:
            fault = "a parameter can be tied to one owner only"
        elif (tie.owner_block, tie.owner_name) in users:
            fault = "its owner is itself tied; tie all of them to the first owner"
        if fault:
            raise ModelError(f"factory {factory!r} returned {tie}: {fault}")


def _shared(factory: str, blocks: Sequence[Block]) -> Iterator[Tie]:
    """Find the parameters that several ready-made blocks hold as one object."""
    modules = [(index, block) for index, block in enumerate(blocks) if isinstance(block, nn.Module)]
    owners: dict[int, tuple[int, str]] = {}
    for index, block in modules:
        for name, parameter in block.named_parameters():
            owner = owners.setdefault(id(parameter), (index, name))
            if owner[0] != index:
                yield Tie(*owner, index, name)
    holders: dict[int, int] = {}
    for index, block in modules:
        for name, buffer in block.named_buffers():
            if holders.setdefault(id(buffer), index) != index:
                raise ModelError(
                    f"factory {factory!r}: buffer {name!r} of block {index} is also in block "
                    f"{holders[id(buffer)]}; blocks on different workers cannot share a buffer, so "
                    "give each block its own"
                )
