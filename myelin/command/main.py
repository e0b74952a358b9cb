"""The `myelin` command's entry: reads options, does the job, turns errors into exit codes.

Exit codes: 0 done; 1 the run failed; 2 settings or data cannot be used, nothing was started; 130
ended by Ctrl-C; 143 ended by SIGTERM.
"""

import argparse
import difflib
import io
import shutil
import sys
from collections.abc import Sequence

import myelin
from myelin.command.options import add_options, flag_name, options_of
from myelin.command.settings import TrainSettings
from myelin.command.train import train_and_report
from myelin.errors import MyelinError

_EXAMPLE = """\
examples:
  myelin train                                  two minutes on Python's own sources
  myelin train ~/books --files "*.txt" --vocabulary bpe --minutes 30
  myelin train --pipeline 4 --workers 2 --placement 0,1,0,1 --layers 6 --hidden 192 --heads 6

The run's folder holds loss.png, losses.csv, settings.json and sample.txt. Ctrl-C ends the
training early and still writes them; a second one ends it at once.
"""
_USAGE = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # text of any corpus is shown on any terminal
    parser, train = _parsers()
    known, unknown = parser.parse_known_args(argv)
    arguments = vars(known)
    if unknown:
        train.error(_unknown(unknown[0]))
    try:
        settings = settings_of(arguments)
        return train_and_report(settings)
    except MyelinError as error:
        print(f"myelin train: {error}", file=sys.stderr)
        return _USAGE
    except KeyboardInterrupt:
        print("myelin train: interrupted", file=sys.stderr)
        return _INTERRUPTED


def settings_of(arguments: dict[str, object]) -> TrainSettings:
    """Make settings of what argparse has read.

    Raises:
        MyelinError: they cannot be used; the text says why.
    """
    known = {name: arguments[name] for name in options_of(TrainSettings)}
    known["paths"] = tuple(arguments["paths"])  # type: ignore[arg-type]
    return TrainSettings(**known)  # type: ignore[arg-type]


def _unknown(typed: str) -> str:
    """Say what is wrong with something that argparse has left over."""
    if not typed.startswith("-"):
        return f"{typed}: give all paths one after the other, before the options"
    name, _, _ = typed.partition("=")
    flags = [flag_name(each) for each, of in options_of(TrainSettings).items() if not of.positional]
    near = difflib.get_close_matches(name, flags, n=1)
    remedy = f"did you mean {near[0]}?" if near else "see myelin train --help"
    return f"there is no option {name}; {remedy}"


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of the whole command, and of `train`."""
    parser = argparse.ArgumentParser(
        prog="myelin", description="Train transformers with message-driven pipelines."
    )
    parser.add_argument("--version", action="version", version=f"myelin {myelin.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a small GPT on text, on worker processes of this machine",
        usage="myelin train [PATH ...] [options]",
        description="Train a small GPT on text, on worker processes of this machine.",
        epilog=_EXAMPLE,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    add_options(train, TrainSettings)
    return parser, train


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the examples as they are, and leaves room for long options."""

    def __init__(self, prog: str) -> None:
        width = min(100, shutil.get_terminal_size().columns - 2)
        super().__init__(prog, max_help_position=28, width=width)
