"""Everything here fails if something was left behind: a failure nobody looked at, a directory."""

import gc
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

import myelin
from myelin.testing.ops import Gate


@pytest.fixture(scope="session", autouse=True)
def quick_collections() -> None:
    """Have the garbage collector leave alone what the imports made, so that it is quick."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def noise() -> Iterator[list[str]]:
    """What asyncio had to log: failures that nobody has looked at, callbacks that raised."""
    told: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(self.format(record))

    listener = Listener(logging.WARNING)
    logging.getLogger("asyncio").addHandler(listener)
    yield told
    gc.collect()
    logging.getLogger("asyncio").removeHandler(listener)
    assert not told


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where clusters make their directories, which must be gone in the end.

    Its path is shorter than `tmp_path`, which pytest has made before.
    """
    made = Path(tempfile.mkdtemp(prefix="mt-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    yield made
    left = [path.name for path in made.glob("myelin-*")]
    shutil.rmtree(made)
    assert not left


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A gate that is opened in the end at the latest."""
    made = Gate(str(tmp_path / "gate"))
    yield made
    made.open()


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets for the models of `myelin.testing`, four rows each."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)


JITTER = myelin.Jitter(op_s=0.001, message_s=0.001)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def inside() -> AsyncIterator[myelin.Cluster]:
    """A cluster inside this process, for all tests of a module."""
    async with myelin.Cluster(0, jitter=JITTER) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def outside() -> AsyncIterator[myelin.Cluster]:
    """A cluster of two processes, for all tests of a module."""
    cluster = myelin.Cluster(2, jitter=JITTER)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tempfile, "tempdir", None)  # not that of a single test
        await cluster.__aenter__()
    yield cluster
    await cluster.__aexit__(None, None, None)


@pytest.fixture(
    params=["inside", pytest.param("outside", marks=[pytest.mark.processes, pytest.mark.slow])]
)
def cluster(request: pytest.FixtureRequest) -> myelin.Cluster:
    """Each of the two."""
    found: myelin.Cluster = request.getfixturevalue(request.param)
    return found
