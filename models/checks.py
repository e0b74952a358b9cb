"""Checks single arguments where a user gives them: a whole number, a number, yes or no.

The text of every error has the argument's name, what was given and what to give instead. It lies in
this room since all others that take arguments may import it; it knows nothing of models.
"""

import math
from collections.abc import Callable
from typing import Final

_SHOWN: Final = 80  # characters of a value that an error repeats
SEEDS: Final = 2**63  # a seed is below this: what every generator and the bus can carry


def shown(value: object) -> str:
    """Write a value in one line that is not too long for an error's text."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def shortened(text: str) -> str:
    """Write a text in one line without its middle, if it is long: of a path both ends matter."""
    line = " ".join(text.split())
    half = _SHOWN // 2 - 2
    return line if len(line) <= _SHOWN else f"{line[:half]}...{line[-half:]}"


def check_whole(
    name: str,
    value: object,
    *,
    least: int,
    below: int | None = None,
    instead: str = "",
    error: Callable[[str], Exception] = ValueError,
) -> None:
    """Refuse what is no whole number within the bounds; True and 1.0 are none.

    Args:
        name: of the argument.
        value: what was given.
        least: the least number allowed.
        below: the number must be less than this; None for any.
        instead: what else may be given, such as ", or None".
        error: makes the error of its text.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and least <= value and (below is None or value < below):  # type: ignore[operator]
        return
    bounds = f"of at least {least}"
    if below is not None:
        bounds += f" and below {bound_text(below)}"
    raise error(f"{name}={shown(value)}: use a whole number {bounds}{instead}")


def check_seed(value: object, *, error: Callable[[str], Exception] = ValueError) -> None:
    """Refuse what is no seed: a whole number from -2**63 to below 2**63."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not -SEEDS <= value < SEEDS:  # type: ignore[operator]
        raise error(f"seed={shown(value)}: use a whole number, from 0 to below 2**63")


def check_number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    what: str = "a number",
    error: Callable[[str], Exception] = ValueError,
) -> None:
    """Refuse what is no finite Python number within the bounds; True is none.

    Args:
        name: of the argument.
        value: what was given.
        least: the least number allowed; None for any.
        above: the number must be greater than this; None for any.
        below: the number must be less than this; None for any.
        what: the number's kind, such as "a number of seconds".
        error: makes the error of its text.
    """
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if (
        -math.inf < number < math.inf
        and (least is None or number >= least)
        and (above is None or number > above)
        and (below is None or number < below)
    ):
        return
    bounds = {"of at least": least, "above": above, "below": below}
    said = " and ".join(
        f"{word} {bound_text(bound)}" for word, bound in bounds.items() if bound is not None
    )
    raise error(f"{name}={shown(value)}: use {what} {said}".rstrip())


def check_flag(name: str, value: object, *, error: Callable[[str], Exception] = ValueError) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise error(f"{name}={shown(value)}: use True or False")


def bound_text(bound: float) -> str:
    """Write a bound as people do, a large power of two as such."""
    whole = int(bound)
    if whole == bound and whole > 2**20 and whole & (whole - 1) == 0:
        return f"2**{whole.bit_length() - 1}"
    return f"{bound:g}" if isinstance(bound, float) else str(bound)
