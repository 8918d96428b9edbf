"""The grids behind recipes/digits.toml, on images and seeds that no reported number comes from.

    python -m benchmarks.choose_digits fedavg|fedbe|v-distillation [key=value …]

Each tuning seed holds out another fifth of the *training* part of digits and measures on that; the test part is never
looked at. Further arguments change the recipe. Prints a line for each setting: mean ± std over the seeds.
"""

import sys
from collections.abc import Sequence
from itertools import product
from statistics import mean, stdev

from fedbe import data
from fedbe.core.compute import cores
from fedbe.data.sources import hold_out
from fedbe.errors import AggregationError
from fedbe.experiment import loop, run_folder
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.federation import prepare
from fedbe.experiment.recipe_files import load_recipe
from fedbe.experiment.round import RunState, play_round

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
    """Percent right on the held-out part after the last round; 0 if training diverged."""
    recipe = load_recipe(
        "digits", (*changes, "evaluation.every=1000", "evaluation.ensemble=", "evaluation.clients=false")
    )
    federation = prepare(recipe, seed, hold_out(data.load_task("digits").train, seed))
    sim = loop.simulation(recipe, run_folder.RunInfo(method, seed, "float32", {}, ""), federation, pool)
    state, record = RunState(0, sim.bench.read()), {}
    try:
        while state.round < sim.rounds:
            state, record = play_round(sim, state, lambda *_: None)
    except AggregationError:
        return 0.0
    return 100 * float(record["test"]["accuracy"])


def main(method: str, changes: list[str]) -> None:
    names, values = zip(*GRIDS[method].items(), strict=True)
    with ProcessPool(cores()) as pool:
        for chosen in product(*values):
            setting = [f"{n}={v}" for n, v in zip(names, chosen, strict=True)]
            if method != "fedavg":
                setting.append(f"distill_lr_min={0.4 * float(str(chosen[-1]))}")  # the paper's proportion
                setting = [f"method_settings.{method}.{one}" for one in setting]
            found = [accuracy(pool, method, seed, [*setting, *changes]) for seed in SEEDS]
            print(f"{mean(found):5.1f} ± {stdev(found):4.1f}  {method} {' '.join([*setting, *changes])}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
