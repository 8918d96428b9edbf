"""A study by round, as a picture: a line for each value of the last row axis, a panel for each choice of the others."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from fedbe.report.colours import LIGHT_DARK
from fedbe.report.curves import points_table, shown, uneven
from fedbe.report.spec import Chart, Panel, Series
from fedbe.report.trials import over_seeds, read_trial
from fedbe.reproduce.analysis import look_up
from fedbe.reproduce.play import Place
from fedbe.reproduce.study import NAMES, Scale, Study
from fedbe.simulation.round import Record


def by_round(study: Study, scale: Scale, places: Sequence[Place]) -> Chart | None:
    """The study's metric after every round, of all runs as far as they are; none if no run has two rounds of it."""
    if not study.metric_of_rounds:
        return None
    axis = study.order.index(study.rows[-1])
    colours = _colours(tuple(study.axes[study.rows[-1]]))
    there = [place for place in places if (place.folder / "run.json").exists()]
    panels: dict[str, list[Series]] = {}
    for cell in dict.fromkeys(place.cell for place in there):
        trials = [read_trial(place.folder) for place in there if place.cell == cell]
        if points := over_seeds(trials, _percent(study.metric_for(cell))):
            title = ", ".join(_name(value) for i, value in enumerate(cell) if i != axis)
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
        f"{study.measured[0].upper()}{study.measured[1:]} by round. "
        f"{shown([read_trial(place.folder) for place in there])}.",
        tuple(Panel(title, tuple(lines)) for title, lines in kept.items()),
        points_table(named, study.measured),
        "round",
        study.measured.replace(" in percent", ", %"),
        "%",
        note=uneven(named),
    )


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
