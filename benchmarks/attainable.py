"""One process of the reference: forward, backward and update of a network on batches that lie ready.

    python -m benchmarks.attainable convnet float32 100    # model, precision, steps

Best layout (channels-last), one thread, freed memory is kept. It warms up, prints "ready", waits for a line on stdin,
works, and prints the seconds that the steps took.
"""

import sys
import time

import torch
from torch.nn import functional

from fedbe.core.compute import Plan
from fedbe.core.model_runner import ModelRunner
from fedbe.core.optim import SGD
from fedbe.core.random import generator
from fedbe.experiment.memory_usage import keep_freed_memory
from fedbe.models import build

BATCH = 40


def main(model: str, precision: str, steps: int) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    bench = ModelRunner(build(model, 10, (3, 32, 32), generator(0)), Plan(precision))
    bench.module.train()
    inputs = [
        torch.randn(BATCH, 3, 32, 32, generator=generator(i)).contiguous(memory_format=torch.channels_last)
        for i in range(10)
    ]
    labels = torch.arange(BATCH) % 10
    optimizer = SGD(bench, 0.9, 1e-3)

    def step(i: int) -> None:
        optimizer.zero_grad()
        with bench.plan.autocast(bench.device):
            logits = bench.module(inputs[i % len(inputs)])
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
