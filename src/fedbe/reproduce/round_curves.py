"""A study by round, as a picture: a line for each value of the last row axis, a panel for each choice of the others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fedbe.analysis.runs import Record, Run, over_seeds, read_run
from fedbe.report.chart import Chart, Panel, Series
from fedbe.report.colours import LIGHT_DARK
from fedbe.report.curves import points_table, shown, uneven
from fedbe.reproduce.analysis import look_up
from fedbe.reproduce.study import NAMES, Scale, Study
from fedbe.reproduce.study_runner import Place

Cell = tuple[str, ...]


def by_round(study: Study, scale: Scale, places: Sequence[Place]) -> Chart | None:
    """The study's metric after every round, of all runs as far as they are; none if no run has two rounds of it.

    A panel compares: it shows only the seeds that all of its lines have, if there are such.
    """
    if not study.metric_of_rounds:
        return None
    axis = study.order.index(study.rows[-1])
    colours = _colours(tuple(study.axes[study.rows[-1]]))
    there = [place for place in places if (place.folder / "run.json").exists()]
    lines: dict[str, dict[Cell, list[Run]]] = {}
    for place in there:
        title = ", ".join(_name(value) for i, value in enumerate(place.cell) if i != axis)
        if (trial := read_run(place.folder)).records:
            lines.setdefault(title, {}).setdefault(place.cell, []).append(trial)
    shared = {title: _fair(own) for title, own in lines.items()}
    panels: dict[str, list[Series]] = {}
    for title, own in shared.items():
        for cell, trials in own.items():
            if points := over_seeds(trials, _percent(study.metric_for(cell))):
                panels.setdefault(title, []).append(Series(_name(cell[axis]), colours[cell[axis]], points))
    kept = {title: lines for title, lines in panels.items() if any(len(s.points) > 1 for s in lines)}
    if not kept:
        return None
    if len({_seeds(s) for lines in kept.values() for s in lines}) > 1:
        kept = {t: [replace(s, label=f"{s.label} (n = {_seeds(s)})") for s in lines] for t, lines in kept.items()}
    named = [Series(f"{title}, {s.label}", s.method, s.points) for title, lines in kept.items() for s in lines]
    return Chart(
        "rounds",
        "lines",
        # A picture travels without its table: it must not pass a smaller scale off as the paper's.
        f"{study.title}; {', '.join((f'scale {scale}', *study.extra))}",
        f"{study.measured[0].upper()}{study.measured[1:]} by round. {shown(_all(shared))}.",
        tuple(Panel(title, tuple(lines)) for title, lines in kept.items()),
        points_table(named, study.measured),
        "round",
        study.measured.replace(" in percent", ", %"),
        "%",
        note=f"{uneven(named)} {_left_out(lines, shared)}".strip(),
    )


def _fair(lines: Mapping[Cell, list[Run]]) -> dict[Cell, list[Run]]:
    """Only the seeds that all lines have; everything, if they have none in common."""
    common = set.intersection(*({t.info.seed for t in trials} for trials in lines.values()))
    return {cell: [t for t in trials if not common or t.info.seed in common] for cell, trials in lines.items()}


def _all(panels: Mapping[str, Mapping[Cell, list[Run]]]) -> list[Run]:
    return [trial for lines in panels.values() for trials in lines.values() for trial in trials]


def _left_out(lines: Mapping[str, Mapping[Cell, list[Run]]], shared: Mapping[str, Mapping[Cell, list[Run]]]) -> str:
    gone = len(_all(lines)) - len(_all(shared))
    return f"Runs of seeds that not all lines have yet are left out ({gone}; see the table)." if gone else ""


def _percent(path: str) -> Callable[[Record], float | None]:
    return lambda record: 100 * float(look_up(record, path)) if path.partition(".")[0] in record else None


def _seeds(series: Series) -> int:
    return max(point.n for point in series.points)


def _name(value: str) -> str:
    return NAMES.get(value, value)


def _colours(values: tuple[str, ...]) -> dict[str, str]:
    """Methods have their own colour; other values take those that are left."""
    left = iter([name for name in LIGHT_DARK if name not in values])
    return {value: value if value in LIGHT_DARK else next(left, "") for value in values}
