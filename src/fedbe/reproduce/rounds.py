"""The picture of a study by round: a panel for each table cell but its last row axis, a line for each value of that."""

from collections.abc import Callable, Sequence

from fedbe.report.colours import LIGHT_DARK
from fedbe.report.curves import points_table, shown, uneven
from fedbe.report.spec import Chart, Panel, Series
from fedbe.report.trials import Trial, over_seeds, read_trial
from fedbe.reproduce.analysis import look_up
from fedbe.reproduce.play import Place
from fedbe.reproduce.study import NAMES, Study
from fedbe.simulation.round import Record


def by_round(study: Study, places: Sequence[Place]) -> Chart | None:
    """The study's metric after every round, of all runs as far as they are; none if no run has two rounds of it."""
    if not study.metric_of_rounds:
        return None
    axis = study.order.index(study.rows[-1])
    runs: dict[tuple[str, ...], dict[str, list[tuple[Trial, str]]]] = {}
    for place in places:
        if (place.folder / "run.json").exists():
            panel = (*place.cell[:axis], *place.cell[axis + 1 :])
            found = (read_trial(place.folder), study.metric_for(place.cell))
            runs.setdefault(panel, {}).setdefault(place.cell[axis], []).append(found)
    colours = _colours(tuple(study.axes[study.rows[-1]]))
    panels = [Panel(_title(panel), _series(lines, colours)) for panel, lines in runs.items()]
    panels = [p for p in panels if any(len(s.points) > 1 for s in p.series)]
    if not panels:
        return None
    trials = [trial for lines in runs.values() for found in lines.values() for trial, _ in found]
    named = [Series(f"{p.title}, {s.label}", s.method, s.points) for p in panels for s in p.series]
    return Chart(
        "rounds",
        "lines",
        study.title,
        f"{study.measured[0].upper()}{study.measured[1:]} by round. {shown(trials)}.",
        tuple(panels),
        points_table(named, study.measured),
        "round",
        study.measured.replace(" in percent", ", %"),
        "%",
        note=uneven(named),
    )


def _series(lines: dict[str, list[tuple[Trial, str]]], colours: dict[str, str]) -> tuple[Series, ...]:
    found = ((name, over_seeds([t for t, _ in runs], _percent(runs[0][1]))) for name, runs in lines.items())
    return tuple(Series(NAMES.get(name, name), colours[name], points) for name, points in found if len(points) > 1)


def _percent(path: str) -> Callable[[Record], float | None]:
    return lambda record: 100 * float(look_up(record, path)) if path.partition(".")[0] in record else None


def _title(panel: tuple[str, ...]) -> str:
    return ", ".join(NAMES.get(value, value) for value in panel)


def _colours(values: tuple[str, ...]) -> dict[str, str]:
    """Methods have their own colour; other values take those that are left."""
    left = iter([name for name in LIGHT_DARK if name not in values])
    return {value: value if value in LIGHT_DARK else next(left, "") for value in values}
