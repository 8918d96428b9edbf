"""A federated round next to the machine's limit and a plain loop, interleaved.

    python -m benchmarks round

(a) attainable: the same network's forward, backward and update on prepared batches, best layout, one
    single-threaded process per core
(b) ours: ten clients, ConvNet or ResNet-20, batch 40, one epoch, augmentation; with and without evaluation
(c) plain: a PyTorch loop as a user would write it (DataLoader, default threads and layout, float32)
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from fedbe.core.compute import has_bfloat16
from fedbe.data import Dataset, Task
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.federation import prepare
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import load_recipe
from fedbe.experiment.round import run_round
from fedbe.experiment.run_state import RunState
from fedbe.experiment.simulation import make_simulation

REPEATS = 3
CLIENTS = 10
IMAGES = {"convnet": 4000, "resnet20": 400}  # per client; ResNet-20 is five times slower
CORES = os.cpu_count() or 1


def synthetic() -> Task:
    """Noise in the shape of CIFAR-10. The speed does not depend on the content of images."""
    draw = torch.Generator().manual_seed(0)

    def part(name: str, count: int) -> Dataset:
        pixels = torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8, generator=draw)
        return Dataset(name, pixels, torch.arange(count) % 10, tuple("abcdefghij"))

    return Task(part("noise", 50_000), part("noise-test", 10_000))


def recipe(model: str) -> Recipe:
    """One epoch on `IMAGES` images per client; the server takes the rest."""
    left_out = 50_000 - CLIENTS * IMAGES[model]
    changes = (f"model.name={model}", "training.epochs=1", "training.rounds=1000", f"data.server={left_out}")
    return load_recipe("cifar10-step", changes)


def ours(pool: ProcessPool, task: Task, model: str, precision: str, evaluated: bool) -> float:
    """Images a second over one whole round of FedAvg."""
    settings = recipe(model)
    if not evaluated:
        settings = settings.model_copy(update={"evaluation": settings.evaluation.model_copy(update={"every": 999})})
    sim = make_simulation(settings, "fedavg", 0, precision, prepare(settings, 0, task), pool)
    state = RunState(0, sim.runner.read())
    warm = settings.model_copy(update={"training": settings.training.model_copy(update={"clients_per_round": CORES})})
    run_round(replace(sim, recipe=warm), state, lambda *_: None)
    begin = time.perf_counter()
    run_round(sim, state, lambda *_: None)
    return CLIENTS * IMAGES[model] / (time.perf_counter() - begin)


def attainable(model: str, precision: str) -> float:
    """Images a second of all cores together, without a framework."""
    steps = {"convnet": 150, "resnet20": 20}[model]
    return sum(steps * 40 / seconds for seconds in attainable_seconds(model, precision, steps))


def attainable_seconds(model: str, precision: str, steps: int, forward_passes: int = 0) -> list[float]:
    """Seconds of one process for each core, all at the same time; see `benchmarks.attainable_speed`."""
    command = [sys.executable, "-m", "benchmarks.attainable_speed", model, precision, str(steps), str(forward_passes)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(CORES)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [float(process.communicate()[0]) for process in processes]


def plain(model: str) -> float:
    """Images a second of the plain loop."""
    images = IMAGES[model] // 4  # a quarter is enough to measure the speed
    command = [sys.executable, "-m", "benchmarks.plain_loop", model, str(images), str(CLIENTS)]
    seconds = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return images * CLIENTS / seconds


def first_round_seconds() -> float:
    """From the start of the command to the end of a tiny first round."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        command = [sys.executable, "-m", "fedbe", "run", "digits", "-q", "--method", "fedavg"]
        changes = ["--set", "training.rounds=1", "--set", "training.epochs=1", "--runs", folder]
        subprocess.run([*command, *changes], check=True, capture_output=True)
        return time.perf_counter() - begin


def import_seconds() -> float:
    """The time of `import torch`, which every program with torch needs."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begin


def tree_memory_mb(pool: ProcessPool) -> float:
    """Proportional memory of this process and all workers: shared pages count once."""
    total = 0
    for pid in (os.getpid(), *pool.pids):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024


def speeds(pool: ProcessPool, task: Task, model: str, precision: str) -> list[str]:
    """The cells of a table row: four speeds, and the ratios of (b) to (a) and (c)."""
    rows = []
    for _ in range(REPEATS):
        a = attainable(model, precision)
        b = ours(pool, task, model, precision, evaluated=False)
        b_with_test = ours(pool, task, model, precision, evaluated=True)
        c = plain(model)
        rows.append((a, b, b_with_test, c, b / a, b / c))
    *images, to_limit, to_plain = (median(column) for column in zip(*rows, strict=True))
    return [*(f"{value:,.0f}" for value in images), f"{to_limit:.0%}", f"{to_plain:.2f}×"]


def main() -> None:
    """Print the speeds of all models and precisions, memory, and the time to start."""
    task, console = synthetic(), Console()
    precisions = ["float32", "bfloat16"] if has_bfloat16() else ["float32"]
    table = Table(title=f"images/s, {CORES} cores, median of {REPEATS} interleaved repeats", box=None)
    for column in ("model", "precision", "(a) attainable", "(b) round", "(b) with test", "(c) plain", "b/a", "b/c"):
        table.add_column(column, justify="left" if column in ("model", "precision") else "right")
    with ProcessPool(CORES) as pool:
        for model in IMAGES:
            for precision in precisions:
                table.add_row(model, precision, *speeds(pool, task, model, precision))
        memory = tree_memory_mb(pool)
    console.print(table)
    if len(precisions) == 1:
        console.print("bfloat16 was not measured: this processor has no hardware for it")
    console.print(f"memory of all processes (proportional): {memory:,.0f} MB")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(f"peak resident memory of the main process: {peak:,.0f} MB")
    starts = [(first_round_seconds(), import_seconds()) for _ in range(REPEATS)]
    start, import_only = median(s for s, _ in starts), median(s for _, s in starts)
    console.print(
        f"start of the command to the end of a tiny first round: {start:.1f} s, "
        f"{start / import_only:.1f} × `import torch` ({import_only:.1f} s)"
    )


if __name__ == "__main__":
    main()
