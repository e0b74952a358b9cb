"""Options declared as dataclass fields."""

import argparse
import math
from dataclasses import dataclass

import pytest

from myelin.command.options import (
    Option,
    SettingsError,
    add_options,
    as_plain,
    check_ranges,
    in_options,
    number_or_paper,
    option,
    options_of,
    patterns,
    two_numbers,
    whole_numbers,
)


@dataclass(frozen=True, kw_only=True)
class Pizza:
    toppings: tuple[str, ...] = option((), "food", "what is on it", metavar="X", positional=True)
    slices: int = option(8, "food", "pieces", parse=int, metavar="N", at_least=1, below=20)
    heat: float | None = option(
        None, "oven", "degrees (default: the oven's)", parse=float, metavar="X", above=0
    )
    racks: tuple[int, ...] = option((0, 2), "oven", "where", parse=whole_numbers, metavar="R,R")
    size: str = option("small", "food", "how large", choices=("small", "large"))
    cold: bool = option(False, "oven", "do not bake")
    oven: str = "not an option"


def parsed(*typed: str) -> Pizza:
    parser = argparse.ArgumentParser(prog="pizza")
    add_options(parser, Pizza)
    return Pizza(**vars(parser.parse_args(typed)))


def help_text() -> str:
    parser = argparse.ArgumentParser(prog="pizza")
    add_options(parser, Pizza)
    return " ".join(parser.format_help().split())


def test_what_is_not_typed_has_the_dataclass_defaults() -> None:
    found = parsed()
    assert (found.slices, found.heat, found.racks, found.size) == (8, None, (0, 2), "small")
    assert found.cold is False
    assert list(found.toppings) == []


def test_what_is_typed_has_the_fields_types() -> None:
    found = parsed("ham", "figs", "--slices", "3", "--heat", "9.5", "--racks", "1", "--cold")
    assert list(found.toppings) == ["ham", "figs"]
    assert (found.slices, found.heat, found.racks, found.cold) == (3, 9.5, (1,), True)


def test_fields_made_without_option_are_not_offered() -> None:
    assert "oven" not in options_of(Pizza)
    with pytest.raises(SystemExit):
        parsed("--oven", "gas")


def test_the_help_shows_groups_and_each_default_once_as_it_would_be_typed() -> None:
    text = help_text()
    assert "food: X what is on it --slices N pieces (default: 8)" in text
    assert "degrees (default: the oven's)" in text
    assert "(default: None)" not in text
    assert "--racks R,R where (default: 0,2)" in text
    assert "{small,large}" in text
    assert "--cold do not bake" in text


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("--slices", "many"), "'many': use a whole number of at least 1 and below 20"),
        (("--slices", "2.5"), "use a whole number"),
        (("--heat", "hot"), "'hot': use a number above 0"),
        (("--racks", "0;1"), "'0;1': use whole numbers separated by commas, such as 0,1"),
        (("--size", "huge"), "invalid choice: 'huge'"),
    ],
)
def test_what_cannot_be_parsed_is_refused_with_the_option_and_a_remedy(
    typed: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(*typed)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"argument {typed[0]}" in error
    assert said in error


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"slices": 0}, "--slices 0: use a whole number of at least 1 and below 20"),
        ({"slices": 20}, "--slices 20: use"),
        ({"slices": 1.5}, "--slices 1.5: use a whole number"),
        ({"slices": True}, "--slices True: use a whole number"),
        ({"heat": 0}, "--heat 0: use a number above 0"),
        ({"heat": math.nan}, "--heat nan: use a number above 0"),
        ({"heat": math.inf}, "--heat inf: use a number above 0"),
        ({"size": "huge"}, "--size huge: use small or large"),
    ],
)
def test_a_value_out_of_range_is_refused_wherever_it_comes_from(
    wrong: dict[str, object], said: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        check_ranges(Pizza(**wrong))  # type: ignore[arg-type]
    assert said in str(caught.value)


@pytest.mark.parametrize("right", [{"slices": 1}, {"slices": 19}, {"heat": 1e-9}, {"heat": None}])
def test_the_edges_of_a_range_and_none_are_allowed(right: dict[str, object]) -> None:
    check_ranges(Pizza(**right))  # type: ignore[arg-type]


def test_a_number_without_a_range_may_be_any_finite_one() -> None:
    free = Option("group", "help", parse=float)
    assert free.allowed() == "a number"
    assert free.allows(-1e300)
    assert not free.allows(math.inf)


def test_a_large_bound_is_written_as_a_power() -> None:
    assert Option("group", "help", parse=int, below=2**63).allowed() == (
        "a whole number below 2**63"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("placement=[0, 2]: numbered", "--placement 0,2: numbered"),
        ("hidden=12 of heads=5; use heads=4", "--hidden 12 of --heads 5; use --heads 4"),
        (
            "pipeline_limit='x': use 1, or None (= twice the stages)",
            "--limit x: use 1, or leave it out",
        ),
        ("/lang=en/a.txt is empty", "/lang=en/a.txt is empty"),
    ],
)
def test_an_error_of_the_library_is_said_in_options(text: str, said: str) -> None:
    same = {name: name for name in ("placement", "hidden", "heads")}
    assert in_options(text, same | {"pipeline_limit": "limit"}) == said


def test_lists_and_pairs_and_limits_are_parsed() -> None:
    assert whole_numbers("0,1,0") == (0, 1, 0)
    assert two_numbers("0.9, 0.95") == (0.9, 0.95)
    assert number_or_paper("4") == 4
    assert number_or_paper("paper") == "paper"
    assert patterns("*.py, *.md,") == ("*.py", "*.md")


@pytest.mark.parametrize(
    ("parse", "typed"),
    [
        (whole_numbers, ""),
        (whole_numbers, "1,,2"),
        (two_numbers, "0.9"),
        (two_numbers, "1,2,3"),
        (two_numbers, "a,b"),
        (number_or_paper, "article"),
        (patterns, " , "),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_would(parse: object, typed: str) -> None:
    assert callable(parse)
    with pytest.raises(ValueError, match=r"such as|at least"):
        parse(typed)


def test_plain_values_can_be_written_as_json() -> None:
    assert as_plain(Pizza(toppings=("ham",)))["toppings"] == ["ham"]
    assert as_plain(Pizza())["racks"] == [0, 2]
