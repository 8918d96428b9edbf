"""What the parts of the server's step cost in seconds, from the records of a run."""

from statistics import mean
from typing import Any

from fedbe.analysis.runs import Run
from fedbe.errors import RunError
from fedbe.experiment.executors.base import Executor
from fedbe.experiment.run_folder import Record


def measure(run: Run, executor: Executor) -> dict[str, Any]:  # noqa: ARG001
    """Seconds of the `distribution`, of the `inference` of one member and of the `distillation`, mean over rounds.

    Raises:
        RunError: The method has no distillation.
    """
    rounds = [_costs(record) for record in run.records if "distill" in record["seconds"]]
    if not rounds:
        raise RunError(f"{run.title} has no distillation, so its parts cannot be timed")
    return {name: mean(costs[name] for costs in rounds) for name in rounds[0]}


def _costs(record: Record) -> dict[str, float]:
    seconds, members = record["seconds"], record["server"]["members"]
    return {
        "distribution": seconds.get("fit", 0.0),
        "inference": seconds["ensemble"] / len(members),
        "distillation": seconds["distill"],
    }
