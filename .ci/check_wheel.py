"""Proves that what pip installs is what the repository holds, and that it trains.

The wheel is built from the sdist, in a copy of the tree, so that no left-over of an earlier build
can help. Its files are compared with the tree's: three of the package's four areas are links to
folders at the root, which a build backend may drop without a word. The wheel is then installed in
a fresh environment, which borrows the libraries of this one but not its editable install, and
trains for two steps from an empty folder.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKED_AREAS = ("runtime", "transports", "models")
METADATA = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
STEPS_TIMEOUT_S = 180

TWO_STEPS = """\
import torch

import myelin
from myelin.models import GPT


async def main() -> None:
    tokens = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    async with myelin.Cluster(workers=2) as cluster:
        trainer = await cluster.trainer(
            GPT(layers=2, hidden=16, heads=2, vocab=256, context=8),
            plan=myelin.Plan(pipeline=2, microbatches=2),
            optimizer=myelin.AdamW(lr=1e-3),
        )
        for step in range(2):
            print("step", step, await trainer.step((inputs, targets)))


if __name__ == "__main__":
    myelin.run(main)
"""


def expected_files(root: Path) -> set[str]:
    """Return the files that a wheel of the tree at `root` must hold, metadata aside."""
    package = root / "myelin"
    own = [path for path in package.rglob("*.py") if not _through_link(path, package)]
    names = {path.relative_to(root).as_posix() for path in [*own, package / "py.typed"]}
    for area in LINKED_AREAS:
        names |= {
            f"myelin/{path.relative_to(root).as_posix()}" for path in (root / area).rglob("*.py")
        }
    return names


def _through_link(path: Path, package: Path) -> bool:
    return path.relative_to(package).parts[0] in LINKED_AREAS


def differences(names: Iterable[str], expected: set[str], dist_info: str) -> list[str]:
    """Return one line for each file that the wheel lacks or should not have."""
    wanted = expected | {f"{dist_info}/{name}" for name in METADATA}
    found = set(names)
    return [
        *(f"in the tree, not in the wheel: {name}" for name in sorted(wanted - found)),
        *(f"in the wheel, not in the tree: {name}" for name in sorted(found - wanted)),
    ]


def copy_tree(root: Path, copy: Path) -> None:
    """Copy what a fresh clone of `root` would hold, links as links."""
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
    shutil.copytree(root, copy, symlinks=True, ignore=unwanted)


def build_wheel(tree: Path, dist: Path) -> Path:
    """Build the sdist of `tree`, and from it the wheel, which is returned."""
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", dist, tree],
        cwd=tree.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nthe build failed; see above")
    (wheel,) = dist.glob("*.whl")
    return wheel


def compare(wheel: Path, root: Path) -> int:
    """Stop with a list of the differences, if any; return the number of files compared."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    name, version, *_ = wheel.stem.split("-")
    lines = differences(names, expected_files(root), f"{name}-{version}.dist-info")
    if lines:
        raise SystemExit("\n".join([f"{wheel.name} is not what the tree holds:", *lines]))
    return len(names)


def install(wheel: Path, environment: Path) -> Path:
    """Install `wheel` in a fresh environment that borrows this one's libraries; return its Python.

    A folder named in a `.pth` file is searched, but the `.pth` files inside it are not read, so the
    editable install that lies there stays asleep.
    """
    venv.create(environment, symlinks=os.name != "nt")
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "--no-index", "--no-deps", wheel], check=True)
    asked = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    borrowed = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    Path(asked.strip(), "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return python


def _run(python: Path, *arguments: str | Path, cwd: Path | None = None) -> str:
    """Run `python` without the variables that would show it this environment or tree."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    done = subprocess.run(
        [python, *arguments],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name not in hidden},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=STEPS_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nexit status {done.returncode}: {[*map(str, arguments)]}")
    return done.stdout


def train(python: Path, work: Path) -> str:
    """Import the installed package, train for two steps from an empty folder, return the output."""
    empty, script = work / "empty", work / "script" / "two_steps.py"
    empty.mkdir()
    script.parent.mkdir()
    script.write_text(TWO_STEPS)
    origin = _run(python, "-c", "import myelin; print(myelin.__file__)", cwd=empty).strip()
    if not Path(origin).is_relative_to(python.parent.parent):
        raise SystemExit(f"imported {origin}, not the wheel in {python.parent.parent}")
    return _run(python, script, cwd=empty)


def main() -> None:
    """Build, compare, install, train; the exit status says whether all went well."""
    with tempfile.TemporaryDirectory(prefix="myelin-wheel-") as folder:
        work = Path(folder).resolve()
        tree = work / "tree"
        copy_tree(ROOT, tree)
        wheel = build_wheel(tree, work / "dist")
        print(f"{wheel.name}: {compare(wheel, tree)} files, as in the tree", flush=True)
        python = install(wheel, work / "environment")
        print(train(python, work), end="")
    print("installed from the wheel and trained from an empty folder")


if __name__ == "__main__":
    main()
