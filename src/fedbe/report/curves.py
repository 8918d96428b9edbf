"""Charts of quality: accuracy by round, ensemble beside student and average, calibration."""

import math
from collections.abc import Callable, Sequence
from statistics import mean

from fedbe.analysis.runs import Point, Record, Run, RunGroup, over_seeds, seeds_of
from fedbe.report.chart import Chart, Dot, Panel, Series, Table

BAND = "Line: mean over seeds; band: ± one standard deviation"


def percent(part: str, measure: str) -> Callable[[Record], float | None]:
    """Reads one measure of a record, in percent; what is no number counts as missing."""

    def read(record: Record) -> float | None:
        value = record.get(part, {}).get(measure)
        return None if value is None or not math.isfinite(value) else 100 * float(value)

    return read


def accuracy(group: RunGroup) -> Chart | None:
    """Test accuracy by round, a line for each method."""
    value = percent("test", "accuracy")
    series = _by_method(group, value)
    if not series:
        return None
    verb, title = "is" if group.unfinished else "ends", "Test accuracy by round"
    if ends := _ends(group, value):
        top, end = max(ends.items(), key=lambda pair: pair[1].y)
        how = "at" if len(series) == 1 else "highest, at"
        title = f"{top} {verb} {how} {end.y:.1f} % after {_rounds(int(end.x))}"
    return Chart(
        "accuracy",
        "lines",
        title,
        f"Test accuracy by round. {shown(group.runs)}.",
        (Panel(series=series),),
        points_table(series, "Test accuracy, %"),
        "round",
        "test accuracy, %",
        "%",
        note=uneven(series),
    )


PARTS = (("test", "", "solid"), ("test_ensemble", "ensemble", "dashed"), ("test_average", "average", "faint"))


def teachers(group: RunGroup) -> Chart | None:
    """For each method: the vote of the ensemble, the average of the clients, and the model that the round ends with."""
    panels = []
    for method, title in group.methods.items():
        runs, series = group.of(method), []
        for part, name, style in PARTS:
            points = over_seeds(runs, percent(part, "accuracy"))
            if points:
                series.append(Series(name or runs[0].ends_as, method, points, style))
        if len(series) > 1:
            panels.append(Panel(title, tuple(series)))
    if not panels:
        return None
    rows = tuple(s for p in panels for s in _prefixed(p))
    left_out = ", ".join(t for t in group.methods.values() if t not in {p.title for p in panels})
    vote = "the ensemble's vote, of " if any(s.label == "ensemble" for p in panels for s in p.series) else ""
    return Chart(
        "teachers",
        "lines",
        _gap(panels[-1]),
        f"Test accuracy by round of {vote}the average of the clients' weights (with the "
        "server's momentum, if the method has it), and of what the round ends with: the student that learned from the "
        f"vote, if there is one. {shown(group.runs)}.",
        tuple(panels),
        points_table(rows, "Test accuracy, %"),
        "round",
        "test accuracy, %",
        "%",
        note=f"Not shown: {left_out}, of which only what a round ends with was measured." if left_out else "",
    )


def calibration(group: RunGroup) -> Chart | None:
    """Expected calibration error by round."""
    value = percent("test", "ece")
    series = _by_method(group, value)
    if not series:
        return None
    title = "Calibration error by round"
    if ends := _ends(group, value):
        low, end = min(ends.items(), key=lambda pair: pair[1].y)
        title = f"Calibration error {'is' if group.unfinished else 'ends'} at {end.y:.1f} points for {low}"
        title += ", the lowest" if len(series) > 1 else ""
    return Chart(
        "calibration",
        "lines",
        title,
        "Expected calibration error (ECE, 15 bins of confidence) on the test data by round: 0 is best. "
        f"{shown(group.runs)}.",
        (Panel(series=series),),
        points_table(series, "ECE, points"),
        "round",
        "ECE, points",
        "points",
        note=uneven(series),
    )


def confidence(group: RunGroup) -> Chart | None:
    """Mean confidence against accuracy at the end: a dot for each seed, a ring for their mean."""
    dots, ends = [], []
    for method, title in group.methods.items():
        last = [(t.info.seed, _both(t.measured[-1])) for t in group.of(method) if t.measured]
        found = [(seed, pair) for seed, pair in last if pair is not None]
        dots += [Dot(x, y, f"{title}, seed {seed}", method) for seed, (x, y) in found]
        if found:
            x, y = (mean(pair[axis] for _, pair in found) for axis in (0, 1))
            ends.append(Dot(x, y, title, method, role="mean"))
    if not dots:
        return None
    return Chart(
        "confidence",
        "dots",
        _sure(group, ends),
        "Mean confidence against accuracy on the test data at each run's last round. On the diagonal a model is as "
        f"sure as it is right. A dot for each seed, a ring for the mean of a method; {seeds_of(group.runs)}.",
        (Panel(dots=(*dots, *ends)),),
        Table(
            ("Run", "Confidence, %", "Accuracy, %"),
            tuple((f"{d.label}, mean" if d.role else d.label, f"{d.x:.1f}", f"{d.y:.1f}") for d in (*dots, *ends)),
        ),
        "mean confidence, %",
        "accuracy, %",
        "%",
    )


def _both(record: Record) -> tuple[float, float] | None:
    x, y = percent("test", "confidence")(record), percent("test", "accuracy")(record)
    return None if x is None or y is None else (x, y)


def _sure(group: RunGroup, ends: Sequence[Dot]) -> str:
    """The finding: the method that is furthest from the diagonal at the end."""
    worst = max(ends, key=lambda d: abs(d.y - d.x))
    gap = worst.y - worst.x
    way = "less sure than it is right" if gap > 0 else "surer than it is right"
    verb = "is" if group.unfinished else "ends"
    return f"{worst.label} {verb} {abs(gap):.1f} points {way}"


def _gap(panel: Panel) -> str:
    """The finding of one method: how far ensemble and student end from the average."""
    ends = {s.label: s.points[-1].y for s in panel.series}
    base = ends.get("average")
    if base is None:
        return f"{panel.title}: the ensemble beside the model"
    others = sorted(((name, y - base) for name, y in ends.items() if name != "average"), key=lambda pair: pair[0])
    (first, gap), *rest = others
    return f"{panel.title}'s {first} is {_far(gap)} its average" + "".join(f", its {n} {_far(d)} it" for n, d in rest)


def _far(gap: float) -> str:
    """
    >>> _far(2.04), _far(-0.5), _far(0.01)
    ('2.0 points above', '0.5 points below', 'level with')
    """
    return "level with" if abs(gap) < 0.05 else f"{abs(gap):.1f} points {'above' if gap > 0 else 'below'}"


def _ends(group: RunGroup, value: Callable[[Record], float | None]) -> dict[str, Point]:
    """Where the methods' lines are to be compared, by title: on the seeds that all have, at the end; and while runs go
    on, in the last round that all of these have. Methods of one round end where they are."""
    runs = {m: [t for t in group.of(m) if any(value(r) is not None for r in t.records)] for m in group.methods}
    runs = {m: own for m, own in runs.items() if own}
    seeds = set.intersection(*({t.info.seed for t in own} for own in runs.values()))
    fair = {m: [t for t in own if t.info.seed in seeds] for m, own in runs.items()}
    lines = {m: [p for p in over_seeds(own, value) if p.n == len(seeds)] for m, own in fair.items()}
    if group.unfinished:
        long = [{p.x for p in lines[m]} for m, own in fair.items() if any(t.rounds > 1 for t in own)]
        last = max(set.intersection(*long), default=0) if long else 0
        lines = {m: [p for p in line if p.x <= last or len(line) == 1] for m, line in lines.items()}
    return {group.methods[m]: line[-1] for m, line in lines.items()} if all(lines.values()) else {}


def _by_method(group: RunGroup, value: Callable[[Record], float | None]) -> tuple[Series, ...]:
    found = ((title, m, over_seeds(group.of(m), value)) for m, title in group.methods.items())
    return tuple(Series(title, m, points) for title, m, points in found if points)


def _prefixed(panel: Panel) -> list[Series]:
    return [Series(f"{panel.title}, {s.label}", s.method, s.points) for s in panel.series]


def points_table(series: Sequence[Series], what: str) -> Table:
    rows = [
        (s.label, f"{p.x:g}", f"{p.y:.2f}", "–" if p.high is None else f"{p.high - p.y:.2f}", str(p.n))
        for s in series
        for p in s.points
    ]
    return Table(("Series", "Round", what, "std", "n"), tuple(rows))


def shown(runs: Sequence[Run]) -> str:
    """How the lines of these runs are to be read."""
    seeds = seeds_of(runs)
    return f"{BAND}; {seeds}" if not seeds.startswith("n = 1 ") else f"One run for each line, so no band; {seeds}"


def _rounds(count: int) -> str:
    return f"{count} round{'s' if count > 1 else ''}"


def uneven(series: Sequence[Series]) -> str:
    """A mean over other seeds from one round to the next can jump: say so."""
    jumps = [s.label for s in series if len({p.n for p in s.points}) > 1]
    if not jumps:
        return ""
    return f"{', '.join(jumps)}: not every seed has come equally far, so n changes along the line (see the data)."
