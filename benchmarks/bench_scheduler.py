"""What the scheduler costs per op, on the program of one worker of a realistic training step.

8 stages in turn on 4 workers; with the default number of microbatches one worker's program has
about 10,000 ops, its sends and receives included. The events of a run are recorded beforehand, in
the order in which jittery devices and messages make them happen (`myelin.testing.simulation`).
Timed is `Scheduler.handle`, from the first event to the last: events in, commands out, priorities
included. `whole_run_us_per_op` has the making of the run and of its events in it as well.

The baseline, measured in turn with it, is an asyncio Task per op, which awaits the Tasks of its
inputs and then its own event. It is favoured: it gets all events at once, and keeps neither
priorities nor a limit on what a stream has issued. Prints one JSON object as its last line.

    python benchmarks/bench_scheduler.py
    python benchmarks/bench_scheduler.py --microbatches 100 --run-ahead 2
"""

import argparse
import asyncio
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from myelin.runtime.graph import Phase, Program
from myelin.runtime.scheduler import Arrived, Finished, Schedule, Scheduler, StepDone
from myelin.runtime.step import StepShape, build_step
from myelin.testing.simulation import Conditions, simulate

BASELINE = "asyncio_task_per_op"


@dataclass(frozen=True, slots=True)
class Recording:
    """A worker's program, and the events of one run of it, in order."""

    program: Program
    run_ahead: int
    events: tuple[Arrived | Finished, ...]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and return the figures."""
    arguments = _parse(argv)
    recording = _record(arguments)
    schedule = Schedule(recording.program, run_ahead=recording.run_ahead)
    ours: list[float] = []
    whole: list[float] = []
    tasks: list[float] = []
    for repeat in range(arguments.repeats + 1):  # the first one warms up
        took = (_handle_all(schedule, recording), _run_all(schedule, recording), _tasks(recording))
        if repeat:
            for seconds, times in zip(took, (ours, whole, tasks), strict=True):
                times.append(seconds * 1e6 / len(recording.program.ops))
    figures = _figures(arguments, recording, ours, whole, tasks)
    print(json.dumps(figures))
    return figures


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--stages", type=int, default=8, help="pipeline stages")
    parser.add_argument("--workers", type=int, default=4, help="stages go to them in turn")
    parser.add_argument("--microbatches", type=int, default=833, help="of the step")
    parser.add_argument("--worker", type=int, default=1, help="the one whose scheduler is timed")
    parser.add_argument("--run-ahead", type=int, default=1, help="ops a stream may have issued")
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
    parser.add_argument("--repeats", type=int, default=15, help="measurements of each")
    return parser.parse_args(argv)


def _record(arguments: argparse.Namespace) -> Recording:
    placement = tuple(stage % arguments.workers for stage in range(arguments.stages))
    shape = StepShape(placement, arguments.microbatches, limit=2 * arguments.stages)
    conditions = Conditions(
        message_s=0.05,
        jitter=0.15,
        seed=arguments.seed,
        run_ahead=arguments.run_ahead,
        validate_every=1000,
    )
    history = simulate(build_step(shape, Phase.TRAIN), arguments.workers, conditions)
    worker = history.workers[arguments.worker]
    events = (handled.event for handled in worker.handled)
    of_ops = tuple(event for event in events if isinstance(event, Arrived | Finished))
    return Recording(worker.program, arguments.run_ahead, of_ops)


def _handle_all(schedule: Schedule, recording: Recording) -> float:
    """Return how many seconds `handle` takes for all events."""
    scheduler = Scheduler(schedule)
    scheduler.start()
    handle, said = scheduler.handle, None
    gc.collect()
    started = time.perf_counter()
    for event in recording.events:
        said = handle(event)
    took = time.perf_counter() - started
    assert said == [StepDone()]
    return took


def _run_all(schedule: Schedule, recording: Recording) -> float:
    """Return how many seconds a run takes, the making of scheduler and events included."""
    told = [(type(event), event.op) for event in recording.events]
    gc.collect()
    started = time.perf_counter()
    scheduler = Scheduler(schedule)
    scheduler.start()
    handle = scheduler.handle
    for kind, op in told:
        handle(kind(op))
    took = time.perf_counter() - started
    assert scheduler.over
    return took


def _tasks(recording: Recording) -> float:
    """Return how many seconds the same program and events take with a Task per op."""
    gc.collect()
    return asyncio.run(_task_per_op(recording))


async def _task_per_op(recording: Recording) -> float:
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []
    ops = recording.program.ops

    async def run(inputs: tuple[int, ...], event: asyncio.Future[None]) -> None:
        for earlier in inputs:
            await tasks[earlier]
        await event

    started = time.perf_counter()
    over: list[asyncio.Future[None]] = [loop.create_future() for _ in ops]
    tasks += [
        asyncio.create_task(run((*op.inputs, *op.after), over[index]))
        for index, op in enumerate(ops)
    ]
    for event in recording.events:
        over[event.op].set_result(None)
    await asyncio.gather(*tasks)
    return time.perf_counter() - started


def _figures(
    arguments: argparse.Namespace,
    recording: Recording,
    ours: list[float],
    whole: list[float],
    tasks: list[float],
) -> dict[str, Any]:
    us_per_op, baseline_us = statistics.median(ours), statistics.median(tasks)
    return {
        "benchmark": "scheduler",
        "us_per_op": round(us_per_op, 3),
        "min": round(min(ours), 3),
        "max": round(max(ours), 3),
        "ops": len(recording.program.ops),
        "repeats": len(ours),
        "whole_run_us_per_op": round(statistics.median(whole), 3),
        "baseline": BASELINE,
        "baseline_us_per_op": round(baseline_us, 3),
        "baseline_min": round(min(tasks), 3),
        "baseline_max": round(max(tasks), 3),
        "times_cheaper_than_baseline": round(baseline_us / us_per_op, 2),
        "arguments": vars(arguments),
        "versions": {
            "python": platform.python_version(),
            "msgspec": importlib.metadata.version("msgspec"),
        },
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
        },
    }


if __name__ == "__main__":
    main()
