"""What a round of FedBE costs as one size grows and the others stay small: seconds, with a picture and a table.

    python -m benchmarks sizes [--out results/speed]

Each client has two made-up vectors of 64 numbers, the model is an MLP, and the student learns for one epoch. The
exponent is that of the last two sizes: 1 is linear, 0 is constant.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.bench_round import CORES
from benchmarks.machine import describe_machine
from benchmarks.many_clients import Costs, made_up
from fedbe.experiment import loop, run_folder
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.recipe_files import load_recipe

ROUNDS = 6
USUAL = {"clients": 1000, "cohort": 10, "parameters": 100_000, "samples": 10, "inputs": 1000}
SIZES = {
    "clients": (10, 100, 1000, 10_000),
    "cohort": (10, 30, 100, 250, 500),
    "parameters": (100_000, 1_000_000, 5_000_000, 25_000_000),
    "samples": (0, 1, 5, 20, 50, 100),
    "inputs": (1000, 3000, 10_000, 25_000, 50_000),
}
TITLES = {
    "clients": "clients of the federation", "cohort": "clients of a round", "parameters": "parameters",
    "samples": "samples M", "inputs": "unlabeled inputs |U|",
}  # fmt: skip


def seconds(pool: ProcessPool, sizes: dict[str, int]) -> float:
    """The median of a round, without the first."""
    width = round(math.sqrt(37**2 + sizes["parameters"]) - 37)  # 64 w + w² + 10 w weights
    recipe = load_recipe(
        "digits",
        [
            f"data.server={sizes['inputs']}", "split.kind=iid", f"split.clients={sizes['clients']}",
            f"model.hidden=[{width}, {width}]", "training.epochs=1", f"training.rounds={ROUNDS}",
            f"training.clients_per_round={sizes['cohort']}", "variant=paper", "settings.distill_epochs=1",
            f"settings.members={'SA' if sizes['samples'] else 'A'}", f"settings.num_samples={sizes['samples'] or 1}",
            "evaluation.every=999", "evaluation.ensemble=",
        ],
    )  # fmt: skip
    costs = Costs()
    with tempfile.TemporaryDirectory() as parent:
        folder = run_folder.create(Path(parent) / "run", recipe, "fedbe", 0, "float32")
        loop.execute(folder, pool, costs, task=made_up(sizes["clients"], sizes["inputs"]))
    return median(one[0] for one in costs.rounds[1:-1])  # the last round is evaluated


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """p of the last two points, if the cost were size^p."""
    (size, cost), (larger, larger_cost) = points[-2:]
    return math.log(larger_cost / cost) / math.log(larger / size)


def table(found: dict[str, list[tuple[int, float]]]) -> str:
    """All seconds as Markdown."""
    lines = ["| what grows | seconds a round, by size | exponent at the end |", "|---|---|---|"]
    for name, points in found.items():
        cells = ", ".join(f"{size:,}: {cost:.2f}" for size, cost in points)
        lines.append(f"| {TITLES[name]} | {cells} | {exponent(points):.2f} |")
    usual = ", ".join(f"{size:,} {TITLES[name]}" for name, size in USUAL.items())
    return "\n".join(
        [*lines, "", f"What does not grow: {usual}. Medians of {ROUNDS - 2} rounds. {describe_machine()}.", ""]
    )


def picture(found: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """A panel for each size, on logarithmic axes, with a dotted line of linear growth through the last point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3), layout="constrained")
    for axes, (name, points) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        sizes, costs = zip(*points, strict=True)
        axes.plot(sizes, costs, "o-", color="#c44e52")
        axes.plot(sizes, [costs[-1] * size / sizes[-1] for size in sizes], ":", color="black", linewidth=1)
        axes.set_xscale("symlog" if sizes[0] == 0 else "log")
        axes.set_yscale("log")
        axes.set_ylim(min(costs) / 2, max(costs) * 2)
        axes.set_xlabel(TITLES[name])
    figure.axes[0].set_ylabel("seconds a round")
    figure.savefig(path, dpi=130)


def main(given: Sequence[str] = ()) -> None:
    """Measure, print, and write table and picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    args = parser.parse_args(given)
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[tuple[int, float]]] = {}
    with ProcessPool(CORES) as pool:
        for name, sizes in SIZES.items():
            found[name] = []
            for size in sizes:
                chosen = USUAL | {name: size}
                chosen["clients"] = max(chosen["clients"], chosen["cohort"]) if name != "clients" else size
                found[name].append((size, seconds(pool, chosen)))
                Console().print(f"{name} {size:,}: {found[name][-1][1]:.3f} s")
    (args.out / "sizes.json").write_text(json.dumps(found) + "\n")
    (args.out / "sizes.md").write_text(table(found))
    picture(found, args.out / "sizes.png")
    print(table(found))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
