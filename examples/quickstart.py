"""The README's example: a small GPT on two worker processes."""

import torch

import myelin
from myelin.models import GPT


async def main() -> None:
    """Learn to count modulo 10, then show it."""
    numbers = torch.arange(64 * 33).reshape(64, 33) % 10
    async with myelin.Cluster(workers=2) as cluster:
        trainer = await cluster.trainer(
            GPT(layers=4, hidden=64, heads=4, vocab=10, context=32),
            plan=myelin.Plan(pipeline=2, microbatches=8),
            optimizer=myelin.AdamW(lr=3e-3),
        )
        async for step in trainer.fit([(numbers[:, :-1], numbers[:, 1:])] * 30):
            print(f"step {step.index:2}  loss {step.loss:.3f}  idle {step.idle_fraction:.0%}")
        print(await trainer.generate([3, 4, 5], tokens=8, temperature=0))


if __name__ == "__main__":
    myelin.run(main)
