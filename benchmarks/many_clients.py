"""Rounds of a federation with many clients: seconds, memory and open files.

    python -m benchmarks.many_clients [--clients 10000] [--cohort 100] [--rounds 10] [--method fedavg] [--hidden 10000]
        [--executor ray] [--address auto] [--workers 2]

Each client has two made-up vectors of 64 numbers; the model is an MLP, that of digits or with one hidden layer of that
width. The content does not change the costs. The memory is that of the driver, its peak in a round, without pages of
files, which the system can take back.
"""

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from fedbe.data import Dataset, Task
from fedbe.experiment import loop, run_folder
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.executors import EXECUTORS, make_executor
from fedbe.experiment.recipe_files import load_recipe
from fedbe.experiment.run_folder import Record

SERVER, TEST, FEATURES = 1000, 1000, 64


class Costs(Callback):
    """Keeps the costs of each round: seconds, the largest memory of this process at a step in MB, open files."""

    def __init__(self) -> None:
        self.rounds: list[tuple[float, float, int]] = []
        self._peak = 0.0

    def phase(self, round: int, phase: str, done: int, total: int) -> None:  # noqa: ARG002
        """Called after each client and each step of the server."""
        lines = Path("/proc/self/status").read_text().splitlines()
        kilobytes = sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
        self._peak = max(self._peak, kilobytes / 1024)

    def round_ended(self, record: Record) -> None:
        self.rounds.append((record["seconds"]["round"], self._peak, len(os.listdir("/proc/self/fd"))))  # noqa: PTH208
        self._peak = 0.0


def made_up(clients: int, server: int = SERVER) -> Task:
    """Two training vectors for each client, and vectors for the server and the test."""
    draw = torch.Generator().manual_seed(0)

    def part(name: str, count: int) -> Dataset:
        vectors = torch.randn(count, FEATURES, generator=draw)
        return Dataset(name, vectors, torch.arange(count) % 10, tuple("abcdefghij"))

    return Task(part("made up", 2 * clients + server), part("made up (test)", TEST))


def main() -> None:
    """Run the rounds and print their costs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--executor", default="processes", choices=EXECUTORS)
    parser.add_argument("--address", help="of a Ray cluster: auto, or HOST:PORT")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--hidden", type=int)
    args = parser.parse_args()
    recipe = load_recipe(
        "digits",
        [
            f"data.server={SERVER}", "split.kind=iid", f"split.clients={args.clients}", "training.epochs=1",
            f"training.rounds={args.rounds}", f"training.clients_per_round={args.cohort}", "variant=paper",
            "settings.distill_epochs=2", "settings.members=SA", "evaluation.clients=false", "evaluation.ensemble=",
            *([f"model.hidden=[{args.hidden}]"] if args.hidden else []),
        ],
    )  # fmt: skip
    costs = Costs()
    with tempfile.TemporaryDirectory() as parent, make_executor(args.workers, args.executor, args.address) as executor:
        folder = run_folder.create(Path(parent) / "run", recipe, args.method, 0, "float32")
        loop.execute(folder, executor, costs, task=made_up(args.clients))
        workers = executor.workers
    seconds, first, last = median(r[0] for r in costs.rounds), costs.rounds[0], costs.rounds[-1]
    Console(soft_wrap=True).print(
        f"{args.method}, {args.clients:,} clients, {args.cohort} in each of {args.rounds} rounds, {workers} workers "
        f"({args.executor}): {seconds:.2f} s a round (median); this process has up to {first[1]:.0f} MB and {first[2]} "
        f"open files in round 1, {last[1]:.0f} MB and {last[2]} in round {args.rounds}"
    )


if __name__ == "__main__":
    main()
