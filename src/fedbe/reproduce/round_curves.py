"""A study's metric by round: a line for each value of the last row axis, a panel for each choice of the other axes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from fedbe.analysis.runs import Run, over_seeds, read_run
from fedbe.report.chart import Chart, Panel, Series
from fedbe.report.colours import LIGHT_DARK
from fedbe.report.curves import how_to_read, line_chart, percent, uneven_note
from fedbe.reproduce.study import NAMES, Cell, Scale, Study
from fedbe.reproduce.study_runner import StudyRun

CellRuns = Mapping[Cell, Sequence[Run]]  # the runs behind the lines of one panel


def chart_by_round(study: Study, scale: Scale, study_runs: Sequence[StudyRun]) -> Chart | None:
    """The study's metric after every round, for all runs, also unfinished ones.

    A panel shows only the seeds that all of its lines have, so that its lines can be compared. If there are none, it
    leaves out the lines that do not have the seed of most lines.

    Returns:
        The chart, or None if no run has two rounds with the metric.
    """
    if not study.metric_in_rounds:
        return None
    runs = _runs_by_panel(study_runs)
    compared = {title: _common_seeds(panel) for title, panel in runs.items()}
    panels = [Panel(title, _series(study, panel)) for title, panel in compared.items()]
    panels = _with_seed_counts([panel for panel in panels if any(len(s.points) > 1 for s in panel.series)])
    if not panels:
        return None
    # A picture may be shown without its table, so its title says what was changed.
    title = f"{study.title}; {', '.join((f'scale {scale}', *study.extra))}"
    caption = f"{study.measured[0].upper()}{study.measured[1:]} by round. {how_to_read(_flatten(compared))}."
    measured = study.measured, study.measured.replace(" in percent", ", %")
    note = uneven_note(panels)
    if left_out := len(_flatten(runs)) - len(_flatten(compared)):
        note += f" Runs of seeds that not all lines have yet are left out ({left_out}; see the table)."
    return line_chart("rounds", title, caption, panels, measured, "%", note.strip())


def _runs_by_panel(study_runs: Sequence[StudyRun]) -> dict[str, dict[Cell, list[Run]]]:
    """Panel title -> cell -> its runs that have a round."""
    panels: dict[str, dict[Cell, list[Run]]] = {}
    for study_run in study_runs:
        if not study_run.exists:
            continue
        run = read_run(study_run.folder)
        if run.records:
            *outer, _line, column = study_run.cell
            title = ", ".join(NAMES.get(value, value) for value in (*outer, column))
            panels.setdefault(title, {}).setdefault(study_run.cell, []).append(run)
    return panels


def _common_seeds(panel: CellRuns) -> dict[Cell, list[Run]]:
    """Only the runs whose seed all lines have; without such a seed, only those of the most common one."""
    seeds = {cell: {run.info.seed for run in runs} for cell, runs in panel.items()}
    common = set.intersection(*seeds.values())
    if not common:
        counts = Counter(chain.from_iterable(seeds.values()))
        common = {min(counts, key=lambda seed: (-counts[seed], seed))}
    kept = {cell: [run for run in runs if run.info.seed in common] for cell, runs in panel.items()}
    return {cell: runs for cell, runs in kept.items() if runs}


def _series(study: Study, panel: CellRuns) -> tuple[Series, ...]:
    """The lines of a panel; cells without the metric have none."""
    colours = series_colours(tuple(study.axes[study.rows[-1]]))
    series = []
    for cell, runs in panel.items():
        part, metric = study.metric_for(cell).split(".")
        if points := over_seeds(runs, percent(part, metric)):
            line = cell[-2]  # the value of the last row axis
            series.append(Series(NAMES.get(line, line), colours[line], points))
    return tuple(series)


def _with_seed_counts(panels: list[Panel]) -> list[Panel]:
    """The same panels. If the numbers of seeds of their lines differ, each label has its number."""
    if len({_seed_count(s) for panel in panels for s in panel.series}) == 1:
        return panels
    return [
        replace(panel, series=tuple(replace(s, label=f"{s.label} (n = {_seed_count(s)})") for s in panel.series))
        for panel in panels
    ]


def _seed_count(series: Series) -> int:
    return max(point.n for point in series.points)


def _flatten(panels: Mapping[str, CellRuns]) -> list[Run]:
    return [run for panel in panels.values() for runs in panel.values() for run in runs]


def series_colours(values: tuple[str, ...]) -> dict[str, str]:
    """Value -> the name of its colour. Methods have their own colours; other values take unused ones."""
    unused = iter([name for name in LIGHT_DARK if name not in values])
    return {value: value if value in LIGHT_DARK else next(unused, "") for value in values}
