"""Options declared once, as the fields of a frozen dataclass: the parser, the help and the checks.

A field made by `option` carries its group, its help and its range. `add_options` turns the fields
into argparse options, `check_ranges` checks values wherever they come from.
"""

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from myelin.errors import MyelinError
from myelin.models.checks import bound_text

Value = TypeVar("Value")


class SettingsError(MyelinError, ValueError):
    """A setting has no meaning, or does not fit another one; change the option that is named."""


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """What argparse needs to know of one field.

    Attributes:
        group: the heading under which `--help` shows it.
        help: what it does; `%(default)s` is replaced by the default.
        parse: makes the value from what was typed; raises ValueError if it cannot.
        metavar: stands for the value in the help; empty for a flag.
        choices: the only values allowed, if not empty.
        positional: whether it is named by its place; then any number of values is taken.
        at_least: least number allowed.
        above: the number must be greater than this.
        below: the number must be less than this.
    """

    group: str
    help: str
    parse: Callable[[str], Any] = str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    positional: bool = False
    at_least: float | None = None
    above: float | None = None
    below: float | None = None

    def allowed(self) -> str:
        """Say which numbers are allowed."""
        kind = "a whole number" if self.parse is int else "a number"
        bounds = {"of at least": self.at_least, "above": self.above, "below": self.below}
        said = [f"{word} {bound_text(b)}" for word, b in bounds.items() if b is not None]
        return " ".join([kind, " and ".join(said)]) if said else kind

    def allows(self, number: float) -> bool:
        """Tell whether a number is within the range."""
        return (
            math.isfinite(number)
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )


def option(default: Value, group: str, help: str, **details: Any) -> Value:
    """Return a dataclass field that is an option; `details` are those of `Option`."""
    metadata = {"option": Option(group, help, **details)}
    field: Any = dataclasses.field(default=default, metadata=metadata)
    return field  # type: ignore[no-any-return]


def options_of(settings: type) -> dict[str, Option]:
    """Return the options of a dataclass by field name, in order."""
    return {
        field.name: field.metadata["option"]
        for field in dataclasses.fields(settings)
        if "option" in field.metadata
    }


def flag_name(name: str) -> str:
    """Return how the option of a field is typed."""
    return "--" + name.replace("_", "-")


def add_options(parser: argparse.ArgumentParser, settings: type) -> None:
    """Add the options of a dataclass to a parser, under their groups."""
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, declared in options_of(settings).items():
        if declared.group not in groups:
            groups[declared.group] = parser.add_argument_group(declared.group)
        _add(groups[declared.group], name, declared, defaults[name])


def _add(group: argparse._ArgumentGroup, name: str, declared: Option, default: object) -> None:
    if declared.positional:
        group.add_argument(name, nargs="*", metavar=declared.metavar, help=declared.help)
        return
    if default is False:
        group.add_argument(flag_name(name), action="store_true", help=declared.help)
        return
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    known = default is not None and "%(default)s" not in declared.help
    group.add_argument(
        flag_name(name),
        type=_typed(declared),
        metavar=declared.metavar or None,
        choices=declared.choices or None,
        default=default,
        # argparse would show a tuple as Python writes it, which cannot be typed.
        help=declared.help.replace("%(default)s", str(shown))
        + (f" (default: {shown})" if known else ""),
    )


def _typed(declared: Option) -> Callable[[str], Any]:
    """Wrap a parser so that argparse says what would have been right."""

    def parse(typed: str) -> Any:
        try:
            return declared.parse(typed)
        except ValueError as error:
            what = str(error) if declared.parse not in (int, float) else declared.allowed()
            raise argparse.ArgumentTypeError(f"{typed!r}: use {what}") from error

    return parse


def check_ranges(settings: Any) -> None:
    """Check that every number is in its option's range and every choice one of those allowed.

    Raises:
        SettingsError: the first one that is not.
    """
    for name, declared in options_of(type(settings)).items():
        value = getattr(settings, name)
        if declared.choices and value not in declared.choices:
            raise SettingsError(f"{flag_name(name)} {value}: use {' or '.join(declared.choices)}")
        if declared.parse in (int, float) and value is not None:
            _check_number(name, declared, value)


def _check_number(name: str, declared: Option, value: object) -> None:
    kinds = (int,) if declared.parse is int else (int, float)
    number = value if isinstance(value, kinds) and not isinstance(value, bool) else None
    if number is None or not declared.allows(number):
        raise SettingsError(f"{flag_name(name)} {value}: use {declared.allowed()}")


def in_options(text: str, names: Mapping[str, str]) -> str:
    """Say in options what an error says in Python: `placement=[0, 2]` is `--placement 0,2`.

    Args:
        text: the error's text.
        names: for each argument that is an option, the name of its field.
    """
    text = text.replace("or None (= twice the stages)", "or leave it out")

    def option_of(found: re.Match[str]) -> str:
        typed = found[2].strip("[]'").replace(", ", ",")
        return f"{flag_name(names[found[1]])} {typed}"

    return re.sub(rf"\b({'|'.join(names)})=(\[[^]]*\]|'[^']*'|[^\s,;:)]+)", option_of, text)


def whole_numbers(typed: str) -> tuple[int, ...]:
    """Parse whole numbers separated by commas."""
    try:
        return tuple(int(part) for part in typed.split(","))
    except ValueError as error:
        raise ValueError("whole numbers separated by commas, such as 0,1") from error


def two_numbers(typed: str) -> tuple[float, float]:
    """Parse two numbers separated by a comma."""
    try:
        first, second = (float(part) for part in typed.split(","))
    except ValueError as error:
        raise ValueError("two numbers separated by a comma, such as 0.9,0.95") from error
    return first, second


def number_or_paper(typed: str) -> int | str:
    """Parse a whole number, or "paper"."""
    if typed == "paper":
        return typed
    try:
        return int(typed)
    except ValueError as error:
        raise ValueError('a whole number of at least 1, or "paper"') from error


def patterns(typed: str) -> tuple[str, ...]:
    """Parse file name patterns separated by commas."""
    found = tuple(part.strip() for part in typed.split(",") if part.strip())
    if not found:
        raise ValueError('patterns separated by commas, such as "*.py,*.md"')
    return found


def as_plain(settings: Any) -> Mapping[str, Any]:
    """Return the settings as values that JSON can hold."""
    found = dataclasses.asdict(settings)
    return {name: list(v) if isinstance(v, tuple) else v for name, v in found.items()}
