"""A graph that is no training: two workers, each doing its part of the work on a stream of images.

Worker 0 blurs an image; worker 1 finds how much detail the blur took away. While worker 1 is at one
image, worker 0 is at the next.

Run it with `python examples/tensor_pipeline.py`.
"""

import torch
from torch.nn import functional

import myelin


def blur(image_HW: torch.Tensor) -> torch.Tensor:
    """Return the image, each pixel the mean of its 5 x 5 neighbourhood."""
    return functional.avg_pool2d(image_HW[None, None], 5, stride=1, padding=2)[0, 0]


def detail(image_HW: torch.Tensor, blurred_HW: torch.Tensor) -> torch.Tensor:
    """Return the root of the mean squared difference, a scalar."""
    return (image_HW - blurred_HW).square().mean().sqrt()


async def main() -> list[float]:
    """Push eight images through the two workers; return each one's detail."""
    images = [torch.rand(256, 256, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    async with myelin.Cluster(workers=2) as cluster, cluster.graph() as graph:
        image = graph.input("image")
        blurred = graph.op(blur, image, worker=0)
        lost = graph.op(detail, image, blurred, worker=1)
        runs = [await graph.run(image=one) for one in images]
        found = [float(await run[lost]) for run in runs]
    print(" ".join(f"{value:.4f}" for value in found))
    return found


if __name__ == "__main__":
    myelin.run(main)
