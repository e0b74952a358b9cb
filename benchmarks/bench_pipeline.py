"""Step time of two workers against a plain single-thread loop on the same model and batch.

Both run in turn, step by step, in one run, since machines drift: plain, Myelin, plain, Myelin.
Prints one JSON object as its last line.

    python benchmarks/bench_pipeline.py
    python benchmarks/bench_pipeline.py --stages 4 --placement 0,1,0,1
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

import myelin
from myelin.models import GPT
from myelin.testing.reference import PlainLoop


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and return the figures."""
    arguments = _parse(argv)
    torch.set_num_threads(1)
    figures = myelin.run(lambda: _measure(arguments))
    print(json.dumps(figures))
    return figures


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=8, help="transformer blocks")
    parser.add_argument("--hidden", type=int, default=384, help="width")
    parser.add_argument("--vocab", type=int, default=256, help="vocabulary")
    parser.add_argument("--context", type=int, default=256, help="sequence length")
    parser.add_argument("--batch", type=int, default=16, help="rows of a batch")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches of a batch")
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages")
    parser.add_argument("--placement", default="0,1", help="the worker of each stage")
    parser.add_argument("--limit", type=int, default=None, help="microbatches in flight")
    parser.add_argument("--cuts", default=None, help="first block of each stage but the first")
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each")
    parser.add_argument("--warmup", type=int, default=2, help="steps before measuring")
    return parser.parse_args(argv)


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    model = GPT(
        layers=arguments.layers,
        hidden=arguments.hidden,
        heads=6,
        vocab=arguments.vocab,
        context=arguments.context,
    )
    placement = _integers(arguments.placement)
    plan = myelin.Plan(
        pipeline=arguments.stages,
        microbatches=arguments.microbatches,
        pipeline_limit=arguments.limit,
        placement=placement,
        cuts=None if arguments.cuts is None else _integers(arguments.cuts),
    )
    optimizer = myelin.AdamW(lr=3e-4)
    tokens = torch.randint(
        arguments.vocab,
        (arguments.batch, arguments.context + 1),
        generator=torch.Generator().manual_seed(0),
    )
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    plain = PlainLoop(model, optimizer, seed=0, microbatches=arguments.microbatches)
    plain_s: list[float] = []
    ours_s: list[float] = []
    idle: list[float] = []
    async with myelin.Cluster(workers=max(placement) + 1, threads=1) as cluster:
        trainer = await cluster.trainer(model, plan=plan, optimizer=optimizer, seed=0)
        for step in range(arguments.warmup + arguments.steps):
            began = time.perf_counter()
            plain_loss = plain.step(batch)
            plain_ended = time.perf_counter()
            result = await trainer.step(batch)
            ended = time.perf_counter()
            if result.loss != plain_loss:
                raise SystemExit(f"step {step}: the loss {result.loss} is not {plain_loss}")
            if step >= arguments.warmup:
                plain_s.append(plain_ended - began)
                ours_s.append(ended - plain_ended)
                idle.append(result.idle_fraction)
    return _figures(arguments, plain_s, ours_s, idle) | {"final_loss": plain_loss}


def _figures(
    arguments: argparse.Namespace, plain_s: list[float], ours_s: list[float], idle: list[float]
) -> dict[str, Any]:
    return {
        "benchmark": "pipeline",
        "arguments": vars(arguments),
        "speedup_vs_plain_loop": statistics.median(plain_s) / statistics.median(ours_s),
        "plain_loop_s": _spread(plain_s),
        "step_s": _spread(ours_s),
        "idle_fraction": statistics.median(idle),
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
