"""One process of the reference: forward, backward and update of a network on prepared batches.

    python -m benchmarks.attainable_speed convnet float32 100 [10]    # model, precision, steps, forward passes

It uses the best layout (channels-last) and one thread, and keeps freed memory. After a warm-up it prints "ready" and
waits for a line on stdin. Then it runs the steps, and forward passes of 500 images, and prints their seconds. The model
`cnn` is that of pfl's job (benchmarks/peers/job.py), with its batch size and optimizer.
"""

import sys
import time

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.peers.job import JOBS, cnn
from fedbe.core.compute import Plan
from fedbe.core.model_runner import ModelRunner
from fedbe.core.optim import SGD
from fedbe.core.random import generator
from fedbe.experiment.executors.memory_usage import keep_freed_memory
from fedbe.models import build

EVALUATED = 500  # images in a forward pass


def batch(size: int, seed: int) -> Tensor:
    """Noise in the shape of images."""
    return torch.randn(size, 3, 32, 32, generator=generator(seed)).contiguous(memory_format=torch.channels_last)


def main(model: str, precision: str, steps: int, forward_passes: int = 0) -> None:
    """Print the seconds of training steps and forward passes."""
    torch.set_num_threads(1)
    keep_freed_memory()
    job = JOBS["pfl" if model == "cnn" else "paper"]
    module = cnn() if model == "cnn" else build(model, 10, (3, 32, 32), generator(0))
    runner = ModelRunner(module, Plan(precision))
    inputs = [batch(job.batch_size, seed) for seed in range(10)]
    labels = torch.arange(job.batch_size) % 10
    tested = batch(EVALUATED, 0)
    optimizer = SGD(runner, job.momentum, job.weight_decay)

    def step(i: int) -> None:
        optimizer.zero_grad()
        with runner.plan.autocast(runner.device):
            logits = runner.module(inputs[i % len(inputs)])
        functional.cross_entropy(logits.float(), labels).backward()
        optimizer.step(0.01)

    def run(steps: int, forward_passes: int) -> None:
        runner.module.train()
        for i in range(steps):
            step(i)
        runner.module.eval()
        with torch.inference_mode():
            for _ in range(forward_passes):
                runner.module(tested)

    run(5, 1)
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    run(steps, forward_passes)
    print(time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
