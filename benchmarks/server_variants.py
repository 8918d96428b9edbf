"""Compare server settings on the clients of one round: which models vote, and how the student learns.

    python -m benchmarks.server_variants RUN [key=value,key=value …]

Runs the last round of a run again; a stopped run gives an early round. Prints the accuracy of every kind of teacher on
the server's images. For each given group of settings (members, distill_lr, distill_epochs, sharpening …) it prints the
accuracy of the student on the server's and on the test images.
"""

import json
import sys
from pathlib import Path
from typing import Any

from fedbe.algorithms.methods import get_method
from fedbe.algorithms.vote import vote
from fedbe.analysis.rerun import rerun_last_round
from fedbe.analysis.runs import read_run
from fedbe.core.compute import cores
from fedbe.core.normalization import batch_norm_layers, recalibrate
from fedbe.experiment.evaluation import measure
from fedbe.experiment.executors.process_pool import ProcessPool

TEACHERS = ("A", "S", "C", "SA", "AC", "SAC")


def main(folder: Path, groups: list[str]) -> None:
    """Print one line for each teacher and for each group of settings."""
    with ProcessPool(cores()) as pool:
        rerun = rerun_last_round(read_run(folder), pool)
        sim, draft, round = rerun.sim, rerun.draft, rerun.round
        average = _percent(measure(sim, draft.state))
        print(f"{folder.name}, round {round.context.round}: average {average} on the test images")
        if batch_norm_layers(sim.runner.module):
            sim.runner.load(draft.state)
            recalibrate(sim.runner, round.context.unlabeled())
            recalibrated = _percent(measure(sim, sim.runner.read()))
            print(f"  with BatchNorm statistics recomputed on the server's images: {recalibrated}", flush=True)
        for members in TEACHERS:
            voters = round.members(sim.ensemble(members=members), draft.state)
            outcome = vote(voters, sim.predictor("server"), round.context.labels)
            print(f"  teacher {members:4}{_percent(outcome.metrics)}", flush=True)
        for group in groups:
            distill = get_method("fedbe", **dict(_setting(word) for word in group.split(","))).stages[-1]
            student = distill(draft, round).state
            on_server = f"teacher {_percent(round.info.ensemble)}, student {_percent(round.info.student)}"
            print(f"  {group}: {on_server}, on the test images {_percent(measure(sim, student))}", flush=True)


def _setting(word: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _percent(metrics: Any) -> str:
    return f"{100 * metrics.accuracy:.1f} %"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
