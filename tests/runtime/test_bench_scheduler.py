import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_scheduler.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_scheduler", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "ops"),
    [
        # two loads, forward, backward, norm, commit, update
        (["--stages", "1", "--workers", "1", "--worker", "0", "--microbatches", "1"], 7),
        # receive, load, forward, backward, send, norm, send, receive, update
        (["--stages", "2", "--workers", "2", "--microbatches", "1", "--run-ahead", "2"], 9),
    ],
)
def test_the_benchmark_prints_its_figures_as_its_last_line(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], ops: int
) -> None:
    figures = bench.main([*arguments, "--repeats", "2"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == figures
    assert (figures["ops"], figures["repeats"]) == (ops, 2)
    assert 0 < figures["min"] <= figures["us_per_op"] <= figures["max"]
    assert figures["whole_run_us_per_op"] > 0
    assert figures["baseline"] == "asyncio_task_per_op"
    assert 0 < figures["baseline_min"] <= figures["baseline_us_per_op"] <= figures["baseline_max"]
    assert figures["times_cheaper_than_baseline"] > 0
    assert set(figures["versions"]) == {"python", "msgspec"}
    assert figures["arguments"]["stages"] == int(arguments[1])


def test_the_default_program_has_about_ten_thousand_ops(bench: ModuleType) -> None:
    """Told from a tenth of it, which takes a tenth of the time."""
    defaults = bench._parse([])
    arguments = bench._parse(["--microbatches", str(defaults.microbatches // 10)])
    recording = bench._record(arguments)
    assert len(recording.events) == len(recording.program.ops)
    assert 9_500 < 10 * len(recording.program.ops) < 10_500
