"""A study's numbers next to the paper's: Markdown for people, CSV for programs."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from fedbe.core.files import write_atomic
from fedbe.experiment import run_folder
from fedbe.experiment.run_folder import Record
from fedbe.report.chart import Chart
from fedbe.report.figures import draw
from fedbe.reproduce import study_analysis
from fedbe.reproduce.heat_map import heat_map_chart
from fedbe.reproduce.results import CellResult
from fedbe.reproduce.round_curves import chart_by_round
from fedbe.reproduce.study import Cell, Scale, Study
from fedbe.reproduce.study_runner import StudyRun


def collect(study: Study, runs: Sequence[StudyRun]) -> list[CellResult]:
    """Read the final number of every finished run and the latest one of every other run, cell by cell."""
    by_seed: dict[Cell, dict[int, float]] = {}
    under_way: dict[Cell, list[str]] = {}
    for run in runs:
        values = by_seed.setdefault(run.cell, {})
        phrases = under_way.setdefault(run.cell, [])
        records = run_folder.read_rounds(run.folder) if run.exists else []
        number = _last_number(study, run, records) if records else None
        if number is None:
            continue
        if run_folder.read_info(run.folder).finished:
            values[run.seed] = number
        else:
            last = len(records) + run_folder.rounds_left(run.folder)
            phrases.append(f"seed {run.seed}: {number:.1f} after round {len(records)} of {last}")
    decimals = 1 if study.unit == "percent" else 2
    return [
        CellResult(cell, values, study.paper.get("/".join(cell), ()), tuple(under_way[cell]), decimals)
        for cell, values in by_seed.items()
    ]


def _last_number(study: Study, run: StudyRun, records: Sequence[Record]) -> float | None:
    """The study's metric after the last round, in its unit; None if it was not measured."""
    defaults = dict.fromkeys(("test", "test_ensemble"), "not measured")
    record = {**defaults, **records[-1], "analysis": study_analysis.read(run.folder) or "not made yet"}
    with study_analysis.reading(run.folder):
        number = study_analysis.look_up(record, study.metric_for(run.cell))
        return None if isinstance(number, str) else (100 if study.unit == "percent" else 1) * float(number)


def markdown(
    study: Study,
    scale: Scale,
    results: Sequence[CellResult],
    missing: Mapping[Cell, str],
    charts: Sequence[Chart] = (),
) -> str:
    """A table with our number, the paper's and the difference in each cell; below it, what is missing."""
    columns = _shown_columns(results)
    lines = [
        f"# {study.title}",
        "",
        f"Scale `{scale}`; {study.measured}, mean ± standard deviation over n seeds.",
    ]
    if study.note:
        lines.append(study.note)
    lines += reductions(study, scale)
    if not study.paper and not study.heat_map:
        lines.append("The paper shows this as a picture, without numbers.")
    lines += ["", *_grid(study, scale, results, columns)]
    lines += _footnotes(results, columns, missing)
    for chart in charts:
        lines += ["", f"![{chart.title}]({chart.id}.svg)", "", f"{chart.caption} {chart.note}".strip()]
    return "\n".join(lines) + "\n"


def _column_names(results: Sequence[CellResult]) -> list[str]:
    return list(dict.fromkeys(result.cell[-1] for result in results))


def _shown_columns(results: Sequence[CellResult]) -> list[str]:
    """The columns with a finished run; all columns if there is none."""
    return _column_names([result for result in results if result.ours]) or _column_names(results)


def _grid(study: Study, scale: Scale, results: Sequence[CellResult], columns: Sequence[str]) -> list[str]:
    """The lines of the Markdown table."""
    by_cell = {result.cell: result for result in results}
    # The smoke scale uses other data, so the paper's numbers would mean nothing there.
    with_paper = {result.cell[-1] for result in results if result.paper and scale != "smoke"}
    head = list(study.rows)
    for column in columns:
        head += [f"{column}: ours", f"{column}: paper", f"{column}: difference"] if column in with_paper else [column]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in dict.fromkeys(result.cell[:-1] for result in results):
        texts = list(row)
        for column in columns:
            texts += _cell_texts(by_cell.get((*row, column)), column in with_paper)
        lines.append(f"| {' | '.join(texts)} |")
    return lines


def _cell_texts(result: CellResult | None, with_paper: bool) -> list[str]:
    texts = [result.text, result.paper_text, result.difference] if result else ["–"] * 3
    return texts if with_paper else texts[:1]


def _footnotes(results: Sequence[CellResult], columns: Sequence[str], missing: Mapping[Cell, str]) -> list[str]:
    """What the table does not show: different seeds, unfinished runs, cells that could not run."""
    lines: list[str] = []
    for sentence in uneven_seeds(results):
        lines += ["", sentence]
    explained = {*columns, *(cell[-1] for cell in missing)}
    if unfinished := [column for column in _column_names(results) if column not in explained]:
        lines += ["", f"Not finished yet: {', '.join(unfinished)}."]
    if under_way := [f"{' / '.join(r.cell)}, {phrase}" for r in results for phrase in r.under_way]:
        lines += ["", f"Under way: {'; '.join(under_way)}."]
    if missing:
        lines += ["", *(f"Not run: {' / '.join(cell)}: {reason}." for cell, reason in missing.items())]
    return lines


def uneven_seeds(results: Sequence[CellResult]) -> list[str]:
    """Sentences about cells that are compared but have different seeds, with the means over their common seeds.

    Cells are compared if they differ only in the last axis of the rows.
    """
    groups: dict[Cell, list[CellResult]] = {}
    for result in results:
        if result.by_seed:
            *outer, _row, column = result.cell
            groups.setdefault((*outer, column), []).append(result)
    return [
        f"{' / '.join(values)}: the rows do not have the same seeds, so do not compare their means. "
        + _common_means(group)
        for values, group in groups.items()
        if any(set(result.by_seed) != set(group[0].by_seed) for result in group)
    ]


def _common_means(group: Sequence[CellResult]) -> str:
    common = sorted(set.intersection(*(set(result.by_seed) for result in group)))
    if not common:
        return "No seed is common to all."
    means = ", ".join(f"{r.cell[-2]} {mean(r.by_seed[seed] for seed in common):.1f}" for r in group)
    return f"On {'seed' if len(common) == 1 else 'seeds'} {', '.join(map(str, common))}, which all have: {means}."


def reductions(study: Study, scale: Scale) -> list[str]:
    """Sentences that say how a scale differs from the paper."""
    by_recipe = {study.base_recipe(cell): study.scale_changes(cell, scale) for cell in study.cells(scale)}
    sentences = []
    for recipe, changes in by_recipe.items():
        if changes:
            which = f" ({recipe})" if len(by_recipe) > 1 else ""
            sentences.append(f"Changed against the paper{which}: `{'`, `'.join(changes)}`.")
    if left_out := [f"{axis} {', '.join(values)}" for axis, values in study.left_out(scale).items()]:
        sentences.append(f"Left out at this scale: {'; '.join(left_out)}.")
    return sentences


def as_csv(study: Study, results: Sequence[CellResult]) -> str:
    """One line for each cell: its values, our mean, standard deviation and number of seeds, and the paper's."""
    lines: list[Sequence[object]] = [(*study.axis_order, "ours_mean", "ours_std", "n", "paper_mean", "paper_std")]
    for result in results:
        ours = result.ours
        numbers = [mean(ours) if ours else "", stdev(ours) if len(ours) > 1 else "", len(ours)]
        lines.append((*result.cell, *numbers, *(*result.paper, "", "")[:2]))
    return _csv(lines)


def _csv(lines: Iterable[Sequence[object]]) -> str:
    out = io.StringIO()
    csv.writer(out).writerows(lines)
    return out.getvalue()


def write(
    study: Study,
    scale: Scale,
    runs: Sequence[StudyRun],
    missing: Mapping[Cell, str],
    root: Path,
    charts: Sequence[Chart] = (),
) -> tuple[Path, list[Path]]:
    """Write table.md, table.csv and the charts into a study's folder.

    The heat map, or the chart by round if the runs have several rounds, is added. Each chart is written as SVG, PNG
    and CSV.

    Args:
        missing: cell -> the reason why it could not run.
        charts: The charts of the analysis.

    Returns:
        The path of table.md, and the paths of the SVG files.
    """
    results = collect(study, runs)
    drawn = heat_map_chart(study, scale, results) if study.heat_map else chart_by_round(study, scale, runs)
    charts = [*([drawn] if drawn else []), *charts]
    write_atomic(root / "table.md", markdown(study, scale, results, missing, charts).encode())
    write_atomic(root / "table.csv", as_csv(study, results).encode())
    for chart in charts:
        write_atomic(root / f"{chart.id}.csv", _csv([chart.table.columns, *chart.table.rows]).encode())
        for kind in ("svg", "png"):
            write_atomic(root / f"{chart.id}.{kind}", draw(chart, kind))
    return root / "table.md", [root / f"{chart.id}.svg" for chart in charts]
