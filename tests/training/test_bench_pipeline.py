"""The pipeline benchmark at its smallest size."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_pipeline.py"
SMALL = "--layers 2 --hidden 12 --vocab 16 --context 4 --batch 4 --microbatches 2 --warmup 1"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_pipeline", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.processes
def test_the_last_line_is_what_was_measured(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = bench.main([*SMALL.split(), "--steps", "3"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == figures
    plain, ours = figures["plain_loop_s"], figures["step_s"]
    assert 0 < plain["min"] <= plain["median"] <= plain["max"]
    assert 0 < ours["min"] <= ours["median"] <= ours["max"]
    assert figures["speedup_vs_plain_loop"] == plain["median"] / ours["median"]
    assert 0 <= figures["idle_fraction"] <= 1


@pytest.mark.slow
@pytest.mark.processes
def test_a_difference_in_the_losses_ends_it(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.PlainLoop, "step", lambda *_: 1.0)
    with pytest.raises(SystemExit, match=r"step 0: the loss .* is not 1\.0"):
        bench.main([*SMALL.split(), "--steps", "1"])
