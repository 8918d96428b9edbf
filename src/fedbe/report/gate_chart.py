"""The gate: by round, who agreed more with the vote on the inputs that were held out, and what was decided."""

from collections.abc import Sequence

from fedbe.analysis.runs import Run, RunGroup, over_seeds
from fedbe.experiment.run_folder import Record
from fedbe.report.chart import Chart, Panel, Series
from fedbe.report.curves import Metric, how_to_read, line_chart, percent

AGREEMENT = ("Agreement with the vote, %", "agreement with the vote, %")


def gate_of_group(group: RunGroup) -> Chart | None:
    """For each method with a gate: the scores of student and average by round; None if no method has one."""
    panels = [panel for method in group.methods if (panel := _panel(group, method)) is not None]
    if not panels:
        return None
    caption = (
        "Agreement with the vote on the server's held-out inputs, of the student and of the average that it started "
        "from. The student replaces the average only if it is clearly ahead. A round without a point is a round of "
        f"rest. {how_to_read(group.runs)}."
    )
    return line_chart("gate", _finding(group), caption, panels, AGREEMENT, "%", "")


def _panel(group: RunGroup, method: str) -> Panel | None:
    parts = (("student", "solid"), ("average", "faint"))
    lines = ((who, over_seeds(group.of(method), _score(who)), style) for who, style in parts)
    series = tuple(Series(who, method, points, style) for who, points, style in lines if points)
    return Panel(group.methods[method], series) if series else None


def _score(who: str) -> Metric:
    def read(record: Record) -> float | None:
        return percent("gate", who)(record.get("server", {}))

    return read


def _judgements(runs: Sequence[Run]) -> list[bool]:
    """Whether the student was accepted, for each round in which there was one."""
    gates = (record.get("server", {}).get("gate", {}) for run in runs for record in run.records)
    return [bool(gate["accepted"]) for gate in gates if "accepted" in gate]


def _finding(group: RunGroup) -> str:
    """How many students the gate accepted, over all methods and seeds that have one."""
    runs = [run for method in group.methods if _judgements(group.of(method)) for run in group.of(method)]
    judged, rounds = _judgements(runs), sum(len(run.records) for run in runs)
    resting = f", and rests in {rounds - len(judged)} of {rounds} rounds" if rounds > len(judged) else ""
    return f"The gate accepts {sum(judged)} of {len(judged)} students{resting}"
