"""Imports point one way, core files stay pure, and nothing that unpickles is used anywhere.

The sources are parsed, never imported. The last tests plant one bad source each, so that this file
shows that it can fail.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "myelin"
LINKED_AREAS = ("runtime", "transports", "models")
CORE = ("runtime/graph.py", "runtime/scheduler.py", "runtime/step.py", "models/partition.py")


@dataclass(frozen=True, slots=True)
class Area:
    """What the files of one folder may import, besides the standard library and their own area.

    Attributes:
        own: the modules of Myelin.
        libraries: the top-level names of others; None is any.
    """

    own: tuple[str, ...]
    libraries: frozenset[str] | None = None


AREAS = {
    "models": Area(own=("myelin.errors",), libraries=frozenset({"torch", "numpy"})),
    "transports": Area(own=("myelin.errors",)),
    "runtime": Area(own=("myelin.errors", "myelin.transports", "myelin.models")),
    "myelin": Area(own=("myelin",)),
}
SCRIPTS = ("benchmarks", "examples", "docs", ".ci")

NOT_IN_CORE = frozenset({"asyncio", "threading", "time", "socket", "torch", "uvloop", "zmq"})
UNPICKLERS = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"})
UNSAFE_ATTRIBUTES = frozenset({"recv_pyobj", "send_pyobj"})
UNSAFE_ARGUMENTS = {"weights_only": False, "allow_pickle": True}
UNSAFE_CALLS = frozenset({"eval", "exec"})
TORCH_LOADERS = frozenset({"torch.load", "torch.serialization.load"})


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of everything imported; `import a.b` and `from a import b` are `a.b`.

    Imports below `if TYPE_CHECKING` and calls of `import_module` count like the others.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = "." * level + (module or "")
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if _last_name(function) in {"import_module", "__import__"}:
                    yield node.lineno, name


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _lies_in(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def upward(folder: str, name: str) -> str | None:
    """Return what is wrong with importing `name` in a file of the area `folder`, if anything is."""
    top = name.partition(".")[0]
    area = AREAS[folder]
    if top == "":
        return f"relative import of {name}"
    if top in LINKED_AREAS:
        return f"imports {name}; say {PACKAGE}.{name}"
    if top == PACKAGE:
        allowed = _lies_in(name, (*area.own, f"{PACKAGE}.{folder}"))
        return None if allowed else f"imports {name}, which {folder} may not know"
    if area.libraries is None or top in sys.stdlib_module_names or top in area.libraries:
        return None
    return f"imports {name}; {folder} may use only {', '.join(sorted(area.libraries))}"


def direction_problems(root: Path) -> list[str]:
    """Return a line for each import under the four areas that points upward."""
    return [
        f"{path.relative_to(root)}:{line}: {problem}"
        for folder in AREAS
        for path in sources(root / folder)
        for line, name in imported(_parse(path))
        if (problem := upward(folder, name))
    ]


def core_problems(root: Path) -> list[str]:
    """Return a line for each thing by which a core file could wait, read a clock or use tensors."""
    problems = []
    for name in CORE:
        if not (root / name).is_file():
            problems.append(f"{name}: listed as core, but there is no such file")
            continue
        tree = _parse(root / name)
        problems += [
            f"{name}:{line}: a core file imports {module}"
            for line, module in imported(tree)
            if module.partition(".")[0] in NOT_IN_CORE
        ]
        problems += [
            f"{name}:{node.lineno}: a core file has something async"
            for node in ast.walk(tree)
            if isinstance(node, ast.AsyncFunctionDef | ast.AsyncWith | ast.AsyncFor | ast.Await)
        ]
    return problems


def unpickling_problems(root: Path) -> list[str]:
    """Return a line for each use, outside the tests, of something that can run what it reads."""
    return [
        f"{path.relative_to(root)}:{line}: {what}"
        for folder in (*AREAS, *SCRIPTS)
        for path in sources(root / folder)
        for line, what in _unsafe(_parse(path))
    ]


def _unsafe(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for line, name in imported(tree):
        if name.partition(".")[0] in UNPICKLERS or name in TORCH_LOADERS:
            yield line, f"imports {name}"
    torch_names = _names_of_torch(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr="load") if owner in torch_names:
                yield node.lineno, f"{owner}.load"
            case ast.Attribute(attr=name) if name in UNSAFE_ATTRIBUTES:
                yield node.lineno, name
            case ast.Call(func=ast.Name(id=name)) if name in UNSAFE_CALLS:
                yield node.lineno, f"{name}()"
            case ast.keyword(arg=str(name), value=ast.Constant(value=value)):
                if name in UNSAFE_ARGUMENTS and value is UNSAFE_ARGUMENTS[name]:
                    yield node.lineno, f"{name}={value}"


def _names_of_torch(tree: ast.AST) -> set[str]:
    """Return the names under which a file knows the modules that have a `load`."""
    names = {"torch"}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                names |= {a.asname for a in aliases if a.name == "torch" and a.asname}
            case ast.ImportFrom(module="torch", names=aliases):
                names |= {a.asname or a.name for a in aliases if a.name == "serialization"}
    return names


def sources(folder: Path) -> list[Path]:
    """Return the Python files under `folder`, those behind links aside."""
    links = [path for path in folder.glob("*") if path.is_symlink()]
    return sorted(
        path
        for path in folder.rglob("*.py")
        if not any(path.is_relative_to(link) for link in links)
    )


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def test_the_walk_sees_every_area() -> None:
    for folder in AREAS:
        assert ROOT / folder / "__init__.py" in sources(ROOT / folder)


def test_files_behind_the_links_are_read_once() -> None:
    assert all(path == path.resolve() for path in sources(ROOT / PACKAGE))


def test_imports_point_one_way() -> None:
    assert direction_problems(ROOT) == []


def test_core_files_neither_wait_nor_touch_a_tensor() -> None:
    assert core_problems(ROOT) == []


def test_nothing_outside_the_tests_unpickles() -> None:
    assert unpickling_problems(ROOT) == []


def plant(root: Path, name: str, source: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


@pytest.mark.parametrize(
    ("name", "source", "problem"),
    [
        ("models/a.py", "import zmq", "imports zmq; models may use only numpy, torch"),
        ("models/a.py", "import myelin.runtime.graph", "which models may not know"),
        ("models/deep/a.py", "from myelin.transports import bus", "which models may not know"),
        ("transports/a.py", "from myelin.models import GPT", "which transports may not know"),
        ("transports/a.py", "from myelin import runtime", "which transports may not know"),
        ("transports/a.py", "import myelin", "which transports may not know"),
        ("runtime/a.py", "from myelin.cluster import Cluster", "which runtime may not know"),
        ("runtime/a.py", "def f():\n  import myelin.errors_too", "which runtime may not know"),
        ("runtime/a.py", "import importlib\nimportlib.import_module('myelin.data')", "myelin.data"),
        ("runtime/a.py", "if TYPE_CHECKING:\n  from myelin import Plan", "imports myelin.Plan"),
        ("runtime/a.py", "from . import graph", "relative import"),
        ("runtime/a.py", "from models import GPT", "say myelin.models"),
        ("myelin/a.py", "from runtime.graph import Op", "say myelin.runtime.graph.Op"),
    ],
)
def test_an_upward_arrow_is_found(tmp_path: Path, name: str, source: str, problem: str) -> None:
    plant(tmp_path, name, source)
    (found,) = direction_problems(tmp_path)
    assert found.startswith(f"{name}:")
    assert problem in found


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("models/a.py", "import math\nimport torch.nn\nfrom myelin.errors import PlanError"),
        ("models/a.py", "from myelin.models.gpt import GPT\nfrom myelin import errors"),
        ("transports/a.py", "import zmq, torch\nfrom myelin.transports.bus import Bus"),
        ("runtime/a.py", "from myelin.models import GPT\nfrom myelin.transports import gloo"),
        ("myelin/a.py", "import rich\nfrom myelin.runtime.graph import Op\nimport myelin.data"),
        ("elsewhere/a.py", "from models import my_own"),
    ],
)
def test_a_downward_arrow_is_none_of_its_business(tmp_path: Path, name: str, source: str) -> None:
    plant(tmp_path, name, source)
    assert direction_problems(tmp_path) == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import asyncio", "imports asyncio"),
        ("from time import monotonic", "imports time.monotonic"),
        ("def f():\n  import torch.nn as nn", "imports torch.nn"),
        ("import zmq.asyncio", "imports zmq.asyncio"),
        ("async def f(): pass", "something async"),
    ],
)
@pytest.mark.parametrize("name", CORE)
def test_an_impure_core_file_is_found(tmp_path: Path, name: str, source: str, problem: str) -> None:
    for core in CORE:
        plant(tmp_path, core, "import heapq")
    assert core_problems(tmp_path) == []
    plant(tmp_path, name, source)
    (found,) = core_problems(tmp_path)
    assert found.startswith(f"{name}:")
    assert problem in found


def test_a_core_file_that_was_renamed_is_missed(tmp_path: Path) -> None:
    assert len(core_problems(tmp_path)) == len(CORE)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import pickle", "imports pickle"),
        ("from pickle import loads", "imports pickle.loads"),
        ("def f():\n  import cloudpickle as safe", "imports cloudpickle"),
        ("import marshal", "imports marshal"),
        ("__import__('pickle')", "imports pickle"),
        ("async def f(s): return await s.recv_pyobj()", "recv_pyobj"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("import torch as t\nread = t.load", "t.load"),
        ("from torch import load as read", "imports torch.load"),
        ("from torch import serialization as s\ns.load('x')", "s.load"),
        ("read('x', weights_only=False)", "weights_only=False"),
        ("numpy.load('x', allow_pickle=True)", "allow_pickle=True"),
        ("eval('1 + 1')", "eval()"),
    ],
)
@pytest.mark.parametrize("folder", ["runtime", "transports", "models/deep", "myelin", "benchmarks"])
def test_anything_that_unpickles_is_found(
    tmp_path: Path, folder: str, source: str, problem: str
) -> None:
    plant(tmp_path, f"{folder}/a.py", source)
    (found,) = unpickling_problems(tmp_path)
    assert found.startswith(f"{folder}/a.py:")
    assert problem in found


@pytest.mark.parametrize(
    "source",
    [
        '"""No pickle, no torch.load, no weights_only=False, no eval()."""  # import pickle',
        "model.eval()",
        "import json, torch\njson.load(file)\ntorch.save_nothing = 1",
        "read('x', weights_only=True)",
    ],
)
def test_harmless_neighbours_of_unpicklers_pass(tmp_path: Path, source: str) -> None:
    plant(tmp_path, "runtime/a.py", source)
    assert unpickling_problems(tmp_path) == []
