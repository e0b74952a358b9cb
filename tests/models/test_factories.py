import functools
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from myelin.errors import ModelError
from myelin.models.factories import checked, find, path_of
from myelin.testing import models

SCRIPT = """
import neighbour_of_the_script

LOADED = []
LOADED.append(__name__)
build = lambda: None


def factory(width):
    return neighbour_of_the_script.DOUBLE * width


if __name__ == "__main__":
    raise SystemExit("ran as main")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_the_script.py").write_text("DOUBLE = 2\n")
    path = tmp_path / "my script.py"
    path.write_text(SCRIPT)
    return path


def test_a_module_path_finds_the_function() -> None:
    assert find("myelin.testing.models:mlp") is models.mlp


def test_a_file_is_run_without_its_main_part_and_may_import_its_neighbours(script: Path) -> None:
    assert find(f"{script}:factory")(width=3) == 6


def test_a_file_is_run_once_however_it_is_reached(script: Path) -> None:
    link = script.parent / "link.py"
    link.symlink_to(script)
    first = find(f"{script}:factory")
    assert find(f"{script}:factory") is first
    assert find(f"{link}:factory") is first


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    values = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.py").write_text(f"def build(): return {folder!r}\n")
        values.append(find(f"{tmp_path / folder / 'model.py'}:build")())
    assert values == ["a", "b"]


def test_a_file_that_raised_can_be_mended_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "mended.py"
    path.write_text("raise OSError('no such disk')\n")
    with pytest.raises(ModelError, match="no such disk") as caught:
        find(f"{path}:build")
    assert isinstance(caught.value.__cause__, OSError)
    path.write_text("def build(): return 'mended now'\n")
    assert find(f"{path}:build")() == "mended now"


def test_a_script_that_exits_on_import_is_told_about_its_main_part(tmp_path: Path) -> None:
    path = tmp_path / "exits.py"
    path.write_text("raise SystemExit(3)\n")
    with pytest.raises(ModelError, match="__main__"):
        find(f"{path}:build")


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        ("no.such.module:build", "No module named 'no'"),
        ("/no/such/file.py:build", "No such file"),
        ("myelin.testing.models:mpl", "no function 'mpl'; check the spelling"),
        ("myelin.models.gpt:_STD", "a float called '_STD'"),
    ],
)
def test_what_cannot_be_found_is_named(factory: str, text: str) -> None:
    with pytest.raises(ModelError, match=text) as caught:
        find(factory)
    assert factory in str(caught.value)


@pytest.mark.parametrize(
    "factory",
    [
        "",
        "build",
        "pkg.mod",
        ":build",
        "pkg.mod:",
        "pkg.mod:a.b",
        "pkg..mod:build",
        "pkg/mod:build",
    ],
)
def test_a_path_written_wrongly_is_refused_with_both_forms(factory: str) -> None:
    with pytest.raises(ModelError, match=r"package\.module:function.*file\.py:function"):
        checked(factory)


def test_a_relative_file_is_refused_with_its_absolute_path() -> None:
    with pytest.raises(ModelError) as caught:
        checked("models/mine.py:build")
    assert str(Path("models/mine.py").resolve()) in str(caught.value)


@pytest.mark.parametrize(
    "factory", ["pkg.mod:build", "mod:b", "/a b/c.py:build", "/a:b/c.py:build"]
)
def test_a_path_written_right_is_returned(factory: str) -> None:
    assert checked(factory) == factory


def test_a_function_of_a_module_gets_the_module_path() -> None:
    assert path_of(models.mlp) == "myelin.testing.models:mlp"


def test_a_function_of_a_loaded_file_gets_the_file_path(script: Path) -> None:
    path = f"{script}:factory"
    assert path_of(find(path)) == path


def nested() -> Callable[[], None]:
    def inside() -> None: ...

    return inside


@pytest.mark.parametrize(
    "function", [lambda: None, nested(), functools.partial(models.mlp, 3), Path("a").exists, 0]
)
def test_what_a_worker_cannot_import_is_refused_with_the_remedy(
    function: Callable[..., object],
) -> None:
    with pytest.raises(
        ModelError, match=r"top level of a module or .*, and pass its settings as arguments"
    ):
        path_of(function)


def test_a_lambda_is_refused_even_under_a_module_level_name(script: Path) -> None:
    with pytest.raises(ModelError, match="lambdas"):
        path_of(find(f"{script}:build"))


MAIN = """
from myelin.models.factories import path_of
def build(): ...
print(path_of(build))
"""


def test_a_function_of_a_running_script_gets_a_path_that_workers_can_import(
    tmp_path: Path,
) -> None:
    path = tmp_path / "main_script.py"
    path.write_text(MAIN)

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.stdout.strip() or done.stderr.strip().splitlines()[-1]

    assert run("main_script.py") == f"{path}:build"
    assert run("-m", "main_script") == "main_script:build"
    assert "interactive session" in run("-c", MAIN)


def test_a_function_of_a_script_without_a_file_of_its_own_is_refused(tmp_path: Path) -> None:
    def told(*arguments: str | Path, script: str = "") -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            input=script,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stderr.strip().splitlines()[-1]

    (tmp_path / "script").write_text(MAIN)
    advice = "which cannot be imported by a worker: it must be in a file with a name such as"
    for text in (told(script=MAIN), told("-", script=MAIN), told("-c", MAIN), told("script")):
        assert advice in text
    assert "build was defined in a script that was read from standard input" in told(script=MAIN)
    assert "whose name does not end with .py" in told("script")


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import os\n\nraise OSError('no such disk')\n", 3),
        ("import fractions\nfractions.Fraction('x')\n", 2),  # raised by Python's own code
        ("import torch\n\n\ntorch.nn.Linear('x', 1)\n", 4),  # raised by a library
        ("def build(:\n", 1),
        ("def f():\n    raise SystemExit(1)\nf()\n", 2),
    ],
)
def test_an_error_while_importing_names_the_line_of_the_users_own_code(
    tmp_path: Path, source: str, line: int
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(ModelError) as caught:
        find(f"{path}:build")
    assert f"({path}:{line}); the module must" in str(caught.value)


def test_what_does_not_exist_has_no_line() -> None:
    for factory in ("no.such.module:build", "/no/such/file.py:build"):
        with pytest.raises(ModelError) as caught:
            find(factory)
        assert "importlib" not in str(caught.value)


def test_a_script_run_by_name_still_has_its_main_part(script: Path) -> None:
    sys.path.append(str(script.parent))
    with pytest.raises(SystemExit, match="ran as main"):
        runpy.run_path(str(script), run_name="__main__")
