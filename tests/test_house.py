"""The repository's own machinery: links, pinned versions, make's set-up, the check of the wheel."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import myelin

ROOT = Path(__file__).resolve().parent.parent
AREAS = ("runtime", "transports", "models")

# Stands in for an interpreter. Asked for its version it answers truly, or as the older Python that
# it pretends to be; asked for an environment it writes one whose programs do nothing. Logs calls.
FAKE_PYTHON = """\
#!/bin/sh
echo "${{0##*/}} $*" >> {log}
[ "$1" = -c ] && exec {python} -c "import sys; {pretend}; exec(sys.argv[1])" "$2"
for folder; do :; done
mkdir -p "$folder/bin"
for program in python myelin; do
  printf '#!/bin/sh\\necho ".venv/${{0##*/}} $*" >> {log}\\n' > "$folder/bin/$program"
  chmod +x "$folder/bin/$program"
done
"""


@pytest.fixture(scope="module")
def check_wheel() -> Iterator[ModuleType]:
    """The script `.ci/check_wheel.py`, as a module."""
    spec = importlib.util.spec_from_file_location("check_wheel", ROOT / ".ci" / "check_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class House:
    """A folder with the repository's Makefile and a fake interpreter to run it with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._log = folder, folder / "log"
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder / name)
        self.python("python", pretend="pass")

    def python(self, name: str, *, pretend: str) -> None:
        text = FAKE_PYTHON.format(log=self._log, python=sys.executable, pretend=pretend)
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def make(self, *arguments: str, python: str = "./python") -> subprocess.CompletedProcess[str]:
        """Run make as from a fresh shell."""
        inherited = ("MAKEFLAGS", "MAKELEVEL", "ARGS", "CONSTRAINTS", "PIP_ARGS", "VENV_ARGS")
        return subprocess.run(
            ["make", *arguments, f"PYTHON={python}"],
            cwd=self.folder,
            env={name: value for name, value in os.environ.items() if name not in inherited},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def calls(self) -> list[str]:
        """Return the programs run since the last call, without the questions for a version."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return [" ".join(line.split()) for line in lines if " -c import sys" not in line]


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


INSTALL = (
    ".venv/python -m pip install --disable-pip-version-check -c constraints.txt --editable .[dev]"
)


def test_make_sets_up_once_and_then_only_does_the_job(house: House) -> None:
    assert house.make("train").returncode == 0
    assert house.calls() == [
        "python -m venv .venv",
        INSTALL,
        ".venv/myelin train",
    ]
    house.make("test", "ARGS=-k something")
    assert house.calls() == [".venv/python -m pytest -m not cuda -k something"]


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_make_installs_again_when_a_requirement_changed(house: House, name: str) -> None:
    house.make("setup")
    house.calls()
    installed = (house.folder / ".venv" / ".installed").stat().st_mtime
    os.utime(house.folder / name, (installed + 1, installed + 1))
    house.make("train")
    assert house.calls() == [INSTALL, ".venv/myelin train"]


def test_make_repeats_an_installation_that_broke_off(house: House) -> None:
    house.make("setup")
    house.calls()
    broken = house.folder / ".venv" / "bin" / "python"
    works = broken.read_text()
    broken.write_text("#!/bin/sh\nexit 1\n")
    (house.folder / ".venv" / ".installed").unlink()
    assert house.make("train").returncode != 0
    assert house.calls() == []
    broken.write_text(works)
    assert house.make("train").returncode == 0
    assert house.calls() == [INSTALL, ".venv/myelin train"]


def test_make_takes_a_machines_own_torch_when_asked(house: House) -> None:
    house.make("setup", "CONSTRAINTS=", "VENV_ARGS=--system-site-packages", "PIP_ARGS=--no-index")
    assert house.calls() == [
        "python -m venv --system-site-packages .venv",
        ".venv/python -m pip install --disable-pip-version-check --no-index --editable .[dev]",
    ]
    house.make("train")
    assert house.calls() == [".venv/myelin train"]


def test_make_refuses_an_old_python_by_name(house: House) -> None:
    house.python("old", pretend="sys.version_info = (3, 10, 14)")
    done = house.make("train", python="./old")
    assert done.returncode != 0
    assert "./old is Python 3.10; Myelin needs 3.11 or newer" in done.stderr
    assert house.calls() == []
    assert not (house.folder / ".venv").exists()


def test_make_says_what_to_do_without_a_python(house: House) -> None:
    done = house.make("test", python="no-such-python")
    assert done.returncode != 0
    assert "no-such-python not found: install Python 3.11 or newer" in done.stderr


def test_clean_keeps_runs_and_environment(house: House) -> None:
    house.make("setup")
    for folder in ("runs/first", "build/lib", "runtime/__pycache__", ".venv/lib/__pycache__"):
        (house.folder / folder).mkdir(parents=True)
    house.make("clean")
    left = {path.name for path in house.folder.iterdir() if path.is_dir()}
    assert left == {"runs", "runtime", ".venv"}
    assert not (house.folder / "runtime" / "__pycache__").exists()
    assert (house.folder / ".venv" / "lib" / "__pycache__").exists()
    house.make("distclean")
    assert (house.folder / "runs" / "first").exists()
    assert not (house.folder / ".venv").exists()


def test_help_lists_every_target(house: House) -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = re.findall(r"^  make (\S+) ", house.make("help").stdout, re.MULTILINE)
    assert shown == phony.split()


def test_ci_runs_the_targets_that_contributors_run() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()
    assert "for target in check test wheel; do" in script.read_text()


def test_the_links_lead_to_the_folders_at_the_root() -> None:
    for area in AREAS:
        link = ROOT / "myelin" / area
        assert link.is_symlink()
        assert link.readlink() == Path("..", area)


def test_the_installed_package_is_this_tree() -> None:
    assert myelin.__file__ is not None
    assert Path(myelin.__file__).resolve() == ROOT / "myelin" / "__init__.py"


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    names = [re.split(r"[^A-Za-z0-9_.-]", line)[0].lower() for line in lines]
    return [name for name in names if name != project["name"]]


def test_every_requirement_is_pinned() -> None:
    assert [name for name in requirements() if name not in pins()] == []


def test_every_pin_is_a_plain_version() -> None:
    assert [pin for pin in pins().items() if not re.fullmatch(r"\d+(\.\d+)+", pin[1])] == []


def test_the_licence_is_the_one_that_is_declared() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert importlib.metadata.metadata("myelin")["License-Expression"] == "Apache-2.0"


def small_tree(root: Path) -> set[str]:
    """Write a tree laid out like the repository; return what its wheel must hold."""
    for name in ("myelin/__init__.py", "myelin/command/main.py", "myelin/py.typed"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    for area in AREAS:
        (root / area / "deep").mkdir(parents=True)
        (root / area / "deep" / "a.py").touch()
        (root / "myelin" / area).symlink_to(Path("..", area))
    own = {"myelin/__init__.py", "myelin/command/main.py", "myelin/py.typed"}
    return own | {f"myelin/{area}/deep/a.py" for area in AREAS}


def test_a_wheel_must_hold_what_lies_behind_the_links(
    check_wheel: ModuleType, tmp_path: Path
) -> None:
    assert check_wheel.expected_files(tmp_path) == {"myelin/py.typed"}
    wanted = small_tree(tmp_path)
    assert check_wheel.expected_files(tmp_path) == wanted


def test_a_lost_link_changes_nothing_in_what_a_wheel_must_hold(
    check_wheel: ModuleType, tmp_path: Path
) -> None:
    wanted = small_tree(tmp_path)
    (tmp_path / "myelin" / "runtime").unlink()
    assert check_wheel.expected_files(tmp_path) == wanted


def test_a_wheel_with_a_file_too_few_or_too_many_is_found(check_wheel: ModuleType) -> None:
    expected = {"myelin/__init__.py", "myelin/runtime/graph.py"}
    metadata = {f"myelin-1.dist-info/{name}" for name in check_wheel.METADATA}
    assert check_wheel.differences(expected | metadata, expected, "myelin-1.dist-info") == []
    names = (expected | metadata | {"runtime/graph.py"}) - {"myelin/runtime/graph.py"}
    assert check_wheel.differences(names, expected, "myelin-1.dist-info") == [
        "in the tree, not in the wheel: myelin/runtime/graph.py",
        "in the wheel, not in the tree: runtime/graph.py",
    ]


def test_the_tree_is_copied_with_its_links_and_without_leftovers(
    check_wheel: ModuleType, tmp_path: Path
) -> None:
    wanted = small_tree(tmp_path / "tree")
    for leftover in ("build", "dist", "myelin.egg-info", ".venv", "runtime/__pycache__"):
        (tmp_path / "tree" / leftover).mkdir()
    check_wheel.copy_tree(tmp_path / "tree", tmp_path / "copy")
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {"myelin", *AREAS}
    assert (tmp_path / "copy" / "myelin" / "runtime").is_symlink()
    assert not (tmp_path / "copy" / "runtime" / "__pycache__").exists()
    assert check_wheel.expected_files(tmp_path / "copy") == wanted
