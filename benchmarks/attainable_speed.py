"""One process of the reference: forward, backward and update of a network on prepared batches.

    python -m benchmarks.attainable_speed convnet float32 100    # model, precision, steps

It uses the best layout (channels-last) and one thread, and keeps freed memory. After a warm-up it prints "ready" and
waits for a line on stdin. Then it runs the steps and prints their seconds.
"""

import sys
import time

import torch
from torch.nn import functional

from fedbe.core.compute import Plan
from fedbe.core.model_runner import ModelRunner
from fedbe.core.optim import SGD
from fedbe.core.random import generator
from fedbe.experiment.executors.memory_usage import keep_freed_memory
from fedbe.models import build

BATCH_SIZE = 40


def main(model: str, precision: str, steps: int) -> None:
    """Print the seconds of `steps` training steps."""
    torch.set_num_threads(1)
    keep_freed_memory()
    runner = ModelRunner(build(model, 10, (3, 32, 32), generator(0)), Plan(precision))
    runner.module.train()
    inputs = [
        torch.randn(BATCH_SIZE, 3, 32, 32, generator=generator(i)).contiguous(memory_format=torch.channels_last)
        for i in range(10)
    ]
    labels = torch.arange(BATCH_SIZE) % 10
    optimizer = SGD(runner, 0.9, 1e-3)

    def step(i: int) -> None:
        optimizer.zero_grad()
        with runner.plan.autocast(runner.device):
            logits = runner.module(inputs[i % len(inputs)])
        functional.cross_entropy(logits.float(), labels).backward()
        optimizer.step(0.01)

    for i in range(5):
        step(i)
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    for i in range(steps):
        step(i)
    print(time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
