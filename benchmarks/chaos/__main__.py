"""Break things on purpose, with seeds, and print a table.

    python -m benchmarks.chaos [--kills 500] [--workers 40] [--writes 300] [--read-only 100] [--power 300]
                               [--inputs 1000000] [--replies 3000] [--seed 0]

For each kind: how often it was tried; how often all was well (a clean result or one sentence); how often a result
differed from the undisturbed one, something reported was lost, an error was raw, or a run hung: these four must be 0.
"""

import argparse
import importlib.util
import json
import logging
import random
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from benchmarks.chaos import disks, fuzz, processes, replies
from benchmarks.chaos.common import Tally, reference_run

OPTIONS = {
    "kills": 500, "workers": 40, "writes": 300, "read-only": 100, "power": 300, "inputs": 1_000_000, "replies": 3000,
    "seed": 0,
}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run everything and print the table. Returns 1 if anything was lost, differed, was raw or hung."""
    parser = argparse.ArgumentParser(prog="chaos")
    for name, default in OPTIONS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.ERROR)  # it has a line for every round and every client set aside
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        rows = _trials(options, Path(folder))
    print(f"seed {options.seed}; {json.dumps({k: v for k, v in vars(options).items() if k != 'seed'})}\n")
    print("| what | tried | well | differing | lost | raw errors | hung |\n|---|---|---|---|---|---|---|")
    for name, tally in rows.items():
        if tally.tried:
            print(tally.row(name))
    return int(any(tally.bad for tally in rows.values()))


def _trials(options: argparse.Namespace, root: Path) -> dict[str, Tally]:
    draw = random.Random(options.seed)
    rows = {
        "SIGKILL at a random moment, all methods": processes.kills(options.kills, draw, root / "kills"),
        "a worker process is stopped or killed": processes.workers(options.workers, draw, root / "workers"),
        "the n-th write, sync or rename fails": disks.full(options.writes, root / "full"),
        "the disk becomes read-only": disks.read_only_disks(options.read_only, root / "read-only"),
        "power fails: unsynced data is lost, twice": disks.power_failures(options.power, draw, root / "power"),
    }
    if options.inputs:
        run = reference_run(root / "fuzz", "fedbe")  # its lines have a vote and a gate
        readers = {**fuzz.run_readers(run), **fuzz.data_readers(root), **fuzz.message_readers()}
        rows |= fuzz.fuzz(options.inputs, options.seed, readers)
    rows["hostile replies, library"] = replies.library(options.replies, draw)
    rows["hostile replies, Flower"] = replies.flower(options.replies, draw)
    if importlib.util.find_spec("nvflare"):
        rows["hostile replies, NVFlare"] = replies.nvflare(options.replies, draw)
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
