"""A study as a heat map: a panel for each value of the first row axis, the worst row of each column marked."""

from collections.abc import Sequence
from statistics import mean

from fedbe.report.chart import Chart, Panel, Table
from fedbe.reproduce.results import CellResult
from fedbe.reproduce.study import Scale, Study

WORST = "worst case"


def heat_map_chart(study: Study, scale: Scale, results: Sequence[CellResult]) -> Chart | None:
    """The means of all cells. The last row of a panel is the smallest number above it, by column.

    Returns:
        The chart, or None if no cell has a number.
    """
    numbers = {result.cell: mean(result.ours) for result in results if result.ours}
    if not numbers:
        return None
    panels = [_panel(first, numbers) for first in dict.fromkeys(cell[0] for cell in numbers)]
    seeds = sorted({len(result.ours) for result in results if result.ours})
    counts = f"n = {seeds[0]}" if len(seeds) == 1 else f"n = {seeds[0]} to {seeds[-1]}"
    return Chart(
        id="heat-map",
        kind="heat",
        title=f"{study.title}; {', '.join((f'scale {scale}', *study.extra))}",
        caption=f"{study.measured[0].upper()}{study.measured[1:]}, mean over seeds ({counts}). A frame marks the worst "
        f"case of a {study.columns}.",
        panels=tuple(panels),
        table=_table(study, panels),
        unit="%",
    )


def _panel(first: str, numbers: dict[tuple[str, ...], float]) -> Panel:
    cells = [cell for cell in numbers if cell[0] == first]
    columns = tuple(dict.fromkeys(cell[-1] for cell in cells))
    rows = tuple(dict.fromkeys(cell[1:-1] for cell in cells))
    nothing = float("nan")
    values = [tuple(numbers.get((first, *row, column), nothing) for column in columns) for row in rows]
    worst = tuple(min((v for v in by_column if v == v), default=nothing) for by_column in zip(*values, strict=True))
    names = (*(", ".join(row) for row in rows), WORST)
    return Panel(title=first, rows=names, columns=columns, counts=(*values, worst))


def _table(study: Study, panels: Sequence[Panel]) -> Table:
    """The same numbers as text. The first panel has the columns of all panels."""
    columns = panels[0].columns
    lines = []
    for panel in panels:
        for name, values in zip(panel.rows, panel.counts, strict=True):
            by_column = dict(zip(panel.columns, values, strict=True))
            lines.append((panel.title, name, *(f"{by_column.get(c, float('nan')):.1f}" for c in columns)))
    return Table((study.rows[0], ", ".join(study.rows[1:]), *columns), tuple(lines))
