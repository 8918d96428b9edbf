"""The grid searches for recipes/digits.toml, on images and seeds that are not used for any reported number.

    python -m benchmarks.choose_digits fedavg|fedbe|v-distillation [key=value …]

Each tuning seed holds out another fifth of the *training* part of digits and measures on it. The test part is not used.
Further arguments change the recipe. Prints mean ± std over the seeds for each setting.
"""

import sys
from collections.abc import Sequence
from itertools import product
from statistics import mean, stdev

from fedbe import data
from fedbe.core.compute import cores
from fedbe.data.sources import hold_out
from fedbe.errors import AggregationError
from fedbe.experiment import run_folder
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.federation import prepare
from fedbe.experiment.recipe_files import load_recipe
from fedbe.experiment.round import run_round
from fedbe.experiment.run_state import RunState
from fedbe.experiment.simulation import make_simulation

SEEDS = range(100, 110)
GRIDS: dict[str, dict[str, Sequence[object]]] = {
    "fedavg": {
        "training.schedule": ("constant", "paper", "released"),
        "training.epochs": (1, 2, 5, 10, 20, 40),
        "training.lr": (0.01, 0.02, 0.05, 0.1, 0.2, 0.4),
    },
    "fedbe": {"distill_epochs": (20, 100), "distill_lr": (0.001, 0.01, 0.03, 0.1, 0.3)},
    "v-distillation": {"distill_epochs": (20, 100), "distill_lr": (0.003, 0.01, 0.03)},
}


def accuracy(pool: ProcessPool, method: str, seed: int, changes: Sequence[str]) -> float:
    """Accuracy in percent on the held-out part after the last round; 0 if training diverged."""
    recipe = load_recipe(
        "digits", (*changes, "evaluation.every=1000", "evaluation.ensemble=", "evaluation.clients=false")
    )
    federation = prepare(recipe, seed, hold_out(data.load_task("digits").train, seed))
    sim = make_simulation(recipe, method, seed, "float32", federation, pool)
    state = RunState(0, sim.runner.read())
    record: run_folder.Record = {}
    try:
        while state.round < sim.rounds:
            state, record = run_round(sim, state, lambda *_: None)
    except AggregationError:
        return 0.0
    return 100 * float(record["test"]["accuracy"])


def main(method: str, changes: list[str]) -> None:
    """Search the grid of a method."""
    names, values = zip(*GRIDS[method].items(), strict=True)
    with ProcessPool(cores()) as pool:
        for combination in product(*values):
            settings = [f"{n}={v}" for n, v in zip(names, combination, strict=True)]
            if method != "fedavg":
                settings.append(f"distill_lr_min={0.4 * float(str(combination[-1]))}")  # the paper's proportion
                settings = [f"method_settings.{method}.{setting}" for setting in settings]
            settings += changes
            accuracies = [accuracy(pool, method, seed, settings) for seed in SEEDS]
            print(f"{mean(accuracies):5.1f} ± {stdev(accuracies):4.1f}  {method} {' '.join(settings)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
