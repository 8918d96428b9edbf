"""Charts of quality: accuracy by round, ensemble against student and average, calibration."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import mean

from fedbe.analysis.runs import Point, Run, RunGroup, over_seeds, seeds_of
from fedbe.experiment.run_folder import Record
from fedbe.report.chart import Chart, Dot, Panel, Series, Table

Metric = Callable[[Record], float | None]
ACCURACY = ("Test accuracy, %", "test accuracy, %")  # in the table, at the axis


def percent(part: str, metric: str) -> Metric:
    """A function that reads one metric of a record in percent; None if it is missing or not finite."""

    def read(record: Record) -> float | None:
        value = record.get(part, {}).get(metric)
        return None if value is None or not math.isfinite(value) else 100 * float(value)

    return read


def accuracy(group: RunGroup) -> Chart | None:
    """Test accuracy by round, a line for each method."""
    value = percent("test", "accuracy")
    series = _by_method(group, value)
    if not series:
        return None
    title = "Test accuracy by round"
    if ends := _last_points(group, value):
        ranked = sorted(ends.items(), key=lambda pair: -pair[1].y)
        rounds = _rounds(int(max(end.x for end in ends.values())))
        title = f"After {rounds}{' so far' if group.unfinished else ''}: {_values(ranked, ' %')}"
    caption = f"Test accuracy by round. {how_to_read(group.runs)}."
    panels = [Panel(series=series)]
    return line_chart("accuracy", title, caption, panels, ACCURACY, "%", uneven_note(panels))


def ensembles(group: RunGroup) -> Chart | None:
    """For each method: the ensemble, the average of the clients, and the model that the round ends with."""
    panels = [panel for method in group.methods if (panel := _ensemble_panel(group, method)) is not None]
    if not panels:
        return None
    ensemble = "the ensemble, of " if any(s.label == "ensemble" for panel in panels for s in panel.series) else ""
    caption = (
        f"Test accuracy by round of {ensemble}the average of the clients' weights (with server momentum, if the "
        "method has it), and of the model that the round ends with: the student that learned from the ensemble, if "
        f"there is one. {how_to_read(group.runs)}."
    )
    title, note = _gap_to_average(panels[-1]), _without_panel(group, panels)
    return line_chart("teachers", title, caption, panels, ACCURACY, "%", note)


def _without_panel(group: RunGroup, panels: Sequence[Panel]) -> str:
    shown = {panel.title for panel in panels}
    missing = ", ".join(title for title in group.methods.values() if title not in shown)
    return f"Not shown: {missing}. Only the model that a round ends with was tested." if missing else ""


def _ensemble_panel(group: RunGroup, method: str) -> Panel | None:
    runs = group.of(method)
    parts = (
        (runs[0].ends_as, "test", "solid"),
        ("ensemble", "test_ensemble", "dashed"),
        ("average", "test_average", "faint"),
    )
    lines = ((label, over_seeds(runs, percent(key, "accuracy")), style) for label, key, style in parts)
    series = tuple(Series(label, method, points, style) for label, points, style in lines if points)
    return Panel(group.methods[method], series) if len(series) > 1 else None


def _gap_to_average(panel: Panel) -> str:
    """The finding of one method: how far ensemble and student are from the average in the last round."""
    ends = {s.label: s.points[-1].y for s in panel.series}
    average = ends.pop("average", None)
    if average is None:
        return f"{panel.title}: {' and '.join(sorted(ends))}"
    (first, gap), *others = sorted((label, y - average) for label, y in ends.items())
    return f"{panel.title}: {first} {_gap(gap)} the average" + "".join(f", {label} {_gap(g)} it" for label, g in others)


def _gap(points: float) -> str:
    """
    >>> _gap(2.04), _gap(-0.5), _gap(0.01)
    ('2.0 points above', '0.5 points below', 'equal to')
    """
    return "equal to" if abs(points) < 0.05 else f"{abs(points):.1f} points {'above' if points > 0 else 'below'}"


def calibration(group: RunGroup) -> Chart | None:
    """Expected calibration error by round."""
    value = percent("test", "ece")
    series = _by_method(group, value)
    if not series:
        return None
    title = "How far stated confidence is from accuracy, by round"
    if ends := _last_points(group, value):
        ranked = sorted(ends.items(), key=lambda pair: pair[1].y)
        title = f"Stated confidence is off by: {_values(ranked, ' points')}"
    caption = (
        "Expected calibration error (ECE, 15 bins) on the test data by round: the mean distance between confidence "
        f"and accuracy. 0 is best. {how_to_read(group.runs)}."
    )
    panels = [Panel(series=series)]
    return line_chart("calibration", title, caption, panels, ("ECE, points",) * 2, "points", uneven_note(panels))


def confidence(group: RunGroup) -> Chart | None:
    """Mean confidence and accuracy in the last round: a dot for each seed, a ring for the mean of a method."""
    seeds, means = [], []
    for method in group.methods:
        dots = _confidence_dots(group, method)
        seeds += dots
        if dots:
            x, y = mean(d.x for d in dots), mean(d.y for d in dots)
            means.append(Dot(x, y, group.methods[method], method, role="mean"))
    if not seeds:
        return None
    rows = [(d.label, d) for d in seeds] + [(f"{d.label}, mean", d) for d in means]
    return Chart(
        "confidence",
        "dots",
        _over_or_under(means),
        "Mean confidence and accuracy on the test data in each run's last round. On the diagonal they are equal; below "
        "it a model is overconfident, above it underconfident. A dot for each seed, a ring for the mean of a method; "
        f"{seeds_of(group.runs)}.",
        (Panel(dots=(*seeds, *means)),),
        Table(("Run", "Confidence, %", "Accuracy, %"), tuple((name, f"{d.x:.1f}", f"{d.y:.1f}") for name, d in rows)),
        "mean confidence, %",
        "accuracy, %",
        "%",
    )


def _confidence_dots(group: RunGroup, method: str) -> list[Dot]:
    """A dot for each seed of a method whose last tested round has both numbers."""
    dots = []
    for run in group.of(method):
        record: Record = next((r for r in reversed(run.records) if "test" in r), {})
        x, y = percent("test", "confidence")(record), percent("test", "accuracy")(record)
        if x is not None and y is not None:
            dots.append(Dot(x, y, f"{run.title}, seed {run.info.seed}", method))
    return dots


def _over_or_under(means: Sequence[Dot]) -> str:
    """The finding: the method whose confidence is furthest from its accuracy.

    >>> _over_or_under([Dot(70, 75, "FedAvg"), Dot(80, 79, "FedBE")])
    'FedAvg is underconfident by 5.0 points'
    """
    worst = max(means, key=lambda d: abs(d.y - d.x))
    gap = worst.y - worst.x
    return f"{worst.label} is {'under' if gap > 0 else 'over'}confident by {abs(gap):.1f} points"


def _values(ranked: Sequence[tuple[str, Point]], unit: str) -> str:
    """The first three values, without a word like "best": only the section's headline knows what may be chance.

    >>> _values([("FedBE", Point(3, 92.8, None, None, 1)), ("FedAvg", Point(3, 85.5, None, None, 1))], " %")
    'FedBE 92.8 %, FedAvg 85.5 %'
    """
    more = f", and {len(ranked) - 3} more" if len(ranked) > 3 else ""
    return ", ".join(f"{title} {end.y:.1f}{unit}" for title, end in ranked[:3]) + more


def _last_points(group: RunGroup, value: Metric) -> dict[str, Point]:
    """The points that a title may compare, by the methods' titles; empty if the methods have none in common.

    Each is the last point of a method over the seeds that all methods have. While runs go on, it is the point in the
    last round that all methods have; a method of one round has its only point.
    """
    runs = _runs_of_common_seeds(group, value)
    lines = {
        method: [p for p in over_seeds(method_runs, value) if p.n == len(method_runs)]
        for method, method_runs in runs.items()
    }
    last = _last_common_round(runs, lines) if group.unfinished else math.inf
    ends: dict[str, Point] = {}
    for method, line in lines.items():
        points = line if len(line) == 1 else [p for p in line if p.x <= last]
        if not points:
            return {}
        ends[group.methods[method]] = points[-1]
    return ends


def _runs_of_common_seeds(group: RunGroup, value: Metric) -> dict[str, list[Run]]:
    """By method: the runs that have the value, of the seeds that all methods have."""
    runs: dict[str, list[Run]] = {}
    for run in group.runs:
        if any(value(record) is not None for record in run.records):
            runs.setdefault(run.info.method, []).append(run)
    seeds = set.intersection(*({run.info.seed for run in method_runs} for method_runs in runs.values()))
    return {method: [run for run in method_runs if run.info.seed in seeds] for method, method_runs in runs.items()}


def _last_common_round(runs: Mapping[str, Sequence[Run]], lines: Mapping[str, Sequence[Point]]) -> float:
    """The last round that all methods of more than one round have; 0 if there is none."""
    rounds = [
        {p.x for p in lines[method]}
        for method, method_runs in runs.items()
        if any(run.rounds > 1 for run in method_runs)
    ]
    return max(set.intersection(*rounds), default=0) if rounds else 0


def _by_method(group: RunGroup, value: Metric) -> tuple[Series, ...]:
    lines = ((title, method, over_seeds(group.of(method), value)) for method, title in group.methods.items())
    return tuple(Series(title, method, points) for title, method, points in lines if points)


def line_chart(
    name: str, title: str, caption: str, panels: Sequence[Panel], measured: tuple[str, str], unit: str, note: str
) -> Chart:
    """A chart of lines by round. Its table has a row for each point; `measured` is its column and the y axis."""
    rows = [
        (label, f"{p.x:g}", f"{p.y:.2f}", "–" if p.high is None else f"{p.high - p.y:.2f}", str(p.n))
        for label, series in _labelled_series(panels)
        for p in series.points
    ]
    column, y_label = measured
    table = Table(("Series", "Round", column, "std", "n"), tuple(rows))
    return Chart(name, "lines", title, caption, tuple(panels), table, "round", y_label, unit, note=note)


def _labelled_series(panels: Sequence[Panel]) -> list[tuple[str, Series]]:
    """Each line with its full label: the title of its panel, if there is one, and its own label."""
    return [(", ".join(filter(None, (panel.title, s.label))), s) for panel in panels for s in panel.series]


def how_to_read(runs: Sequence[Run]) -> str:
    """What line and band of a chart mean, and the seeds."""
    seeds = seeds_of(runs)
    if seeds.startswith("n = 1 "):
        return f"One run for each line, so no band; {seeds}"
    return f"Line: mean over seeds; band: ± one standard deviation; {seeds}"


def _rounds(count: int) -> str:
    return f"{count} round{'s' if count > 1 else ''}"


def uneven_note(panels: Sequence[Panel]) -> str:
    """A warning that a mean may jump where the number of seeds changes along a line; "" if it never does."""
    uneven = [label for label, series in _labelled_series(panels) if len({p.n for p in series.points}) > 1]
    if not uneven:
        return ""
    return f"{', '.join(uneven)}: some seeds have fewer rounds, so n changes along the line (see the data)."
