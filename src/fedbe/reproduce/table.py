"""What was measured, beside what the paper says: Markdown for people, CSV for programs."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from fedbe.core.files import write_atomic
from fedbe.experiment import run_folder
from fedbe.report.chart import Chart
from fedbe.report.figures import draw
from fedbe.reproduce import analysis
from fedbe.reproduce.round_curves import by_round
from fedbe.reproduce.study import Scale, Study
from fedbe.reproduce.study_runner import Place

Cell = tuple[str, ...]


@dataclass(frozen=True)
class Measured:
    """One cell: our values in percent by seed, of those that are done; the paper's mean and std, if it gives them; and
    how far the seeds are that are not done."""

    cell: Cell
    by_seed: Mapping[int, float]
    paper: tuple[float, ...]
    under_way: tuple[str, ...] = ()

    @property
    def ours(self) -> tuple[float, ...]:
        return tuple(self.by_seed.values())

    @property
    def text(self) -> str:
        if not self.ours:
            return "–"
        spread = f" ± {stdev(self.ours):.1f}" if len(self.ours) > 1 else ""
        return f"{mean(self.ours):.1f}{spread} (n={len(self.ours)})"

    @property
    def paper_text(self) -> str:
        return " ± ".join(f"{v:.2f}" if i else f"{v:.1f}" for i, v in enumerate(self.paper)) or "–"

    @property
    def difference(self) -> str:
        return f"{mean(self.ours) - self.paper[0]:+.1f}" if self.ours and self.paper else "–"


def collect(study: Study, done: Sequence[Place]) -> list[Measured]:
    """The final numbers of all finished runs and the last ones of those under way, cell by cell."""
    found: dict[Cell, dict[int, float]] = {}
    under_way: dict[Cell, list[str]] = {}
    for place in done:
        values, words = found.setdefault(place.cell, {}), under_way.setdefault(place.cell, [])
        if not (place.folder / "run.json").exists() or not (rounds := run_folder.read_rounds(place.folder)):
            continue
        not_there = dict.fromkeys(("test", "test_ensemble"), "not measured")
        record = {**not_there, **rounds[-1], "analysis": analysis.read(place.folder) or "not made yet"}
        number = analysis.look_up(record, study.metric_for(place.cell))
        if isinstance(number, str):
            continue
        if run_folder.read_info(place.folder).finished:
            values[place.seed] = 100 * float(number)
        else:
            last = len(rounds) + run_folder.rounds_left(place.folder)
            words.append(f"seed {place.seed}: {100 * float(number):.1f} after round {len(rounds)} of {last}")
    return [Measured(c, v, study.paper.get("/".join(c), ()), tuple(under_way[c])) for c, v in found.items()]


def markdown(
    study: Study, scale: Scale, rows: Sequence[Measured], missing: Mapping[Cell, str], charts: Sequence[Chart] = ()
) -> str:
    """A table with ours, the paper's and the difference in each cell; below it, what could not be run."""
    asked = list(dict.fromkeys(m.cell[-1] for m in rows))
    finished = {m.cell[-1] for m in rows if m.ours}
    columns = [c for c in asked if c in finished or not finished]
    by_cell = {m.cell: m for m in rows}
    # On other data the paper's numbers would say nothing.
    known = {m.cell[-1] for m in rows if m.paper and scale != "smoke"}
    parts = {c: ("ours", "paper", "difference") if c in known else ("ours",) for c in columns}
    heads = [*study.rows, *(f"{c}: {part}" if c in known else c for c in columns for part in parts[c])]
    lines = [
        f"# {study.title}",
        "",
        f"Scale `{scale}`; {study.measured}, mean ± standard deviation over n seeds.",
        *([study.note] if study.note else []),
        *reductions(study, scale),
        *(["The paper shows this as a picture, without numbers."] if not study.paper else []),
        "",
        f"| {' | '.join(heads)} |",
        "|" + "---|" * len(heads),
    ]
    for head in dict.fromkeys(m.cell[:-1] for m in rows):
        shown: list[str] = []
        for column in columns:
            m = by_cell.get((*head, column))
            cells = (m.text, m.paper_text, m.difference) if m else ("–",) * 3
            shown += cells[: len(parts[column])]
        lines.append(f"| {' | '.join([*head, *shown])} |")
    lines += [line for sentence in uneven_seeds(study, rows) for line in ("", sentence)]
    if left := [c for c in asked if c not in columns and c not in {cell[-1] for cell in missing}]:
        lines += ["", f"Not finished yet: {', '.join(left)}."]
    if half := [f"{' / '.join(m.cell)}, {words}" for m in rows for words in m.under_way]:
        lines += ["", f"Under way: {'; '.join(half)}."]
    if missing:
        lines += ["", *(f"Not run: {' / '.join(cell)}: {reason}." for cell, reason in missing.items())]
    for chart in charts:
        lines += ["", f"![{chart.title}]({chart.id}.svg)", "", f"{chart.shown} {chart.note}".strip()]
    return "\n".join(lines) + "\n"


def uneven_seeds(study: Study, rows: Sequence[Measured]) -> list[str]:
    """Where cells that are to be compared (all but the last row axis alike) have not the same seeds, their means must
    not be compared either: a sentence with those over the seeds that all have."""
    axis = study.order.index(study.rows[-1])
    groups: dict[Cell, list[Measured]] = {}
    for m in rows:
        if m.by_seed:
            groups.setdefault((*m.cell[:axis], *m.cell[axis + 1 :]), []).append(m)
    said = []
    for where, group in groups.items():
        seeds = [set(m.by_seed) for m in group]
        if all(own == seeds[0] for own in seeds):
            continue
        if common := sorted(set.intersection(*seeds)):
            means = ", ".join(f"{m.cell[axis]} {mean(m.by_seed[s] for s in common):.1f}" for m in group)
            seed = "seed" if len(common) == 1 else "seeds"
            which = f"On {seed} {', '.join(map(str, common))}, which all have: {means}."
        else:
            which = "No seed is common to all."
        said.append(f"{' / '.join(where)}: the rows do not have the same seeds, so do not compare their means. {which}")
    return said


def reductions(study: Study, scale: Scale) -> list[str]:
    """Sentences that say how a scale differs from the paper."""
    by_base = {study.base(cell): study.smaller(cell, scale) for cell in study.cells(scale)}
    said = [
        f"Changed against the paper{f' ({base})' if len(by_base) > 1 else ''}: `{'`, `'.join(changes)}`."
        for base, changes in by_base.items()
        if changes
    ]
    gone = [f"{axis} {', '.join(values)}" for axis, values in study.left_out(scale).items()]
    return said + ([f"Left out at this scale: {'; '.join(gone)}."] if gone else [])


def as_csv(study: Study, rows: Sequence[Measured]) -> str:
    lines: list[Sequence[object]] = [(*study.order, "ours_mean", "ours_std", "n", "paper_mean", "paper_std")]
    for m in rows:
        ours = [mean(m.ours) if m.ours else "", stdev(m.ours) if len(m.ours) > 1 else "", len(m.ours)]
        lines.append((*m.cell, *ours, *(*m.paper, "", "")[:2]))
    return _csv(lines)


def _csv(lines: Iterable[Sequence[object]]) -> str:
    out = io.StringIO()
    csv.writer(out).writerows(lines)
    return out.getvalue()


def write(
    study: Study,
    scale: Scale,
    done: Sequence[Place],
    missing: Mapping[Cell, str],
    root: Path,
    charts: Sequence[Chart] = (),
) -> tuple[Path, list[Path]]:
    """table.md and table.csv in the study's folder, and for each chart (rounds, if there are several, and those of the
    analysis) its picture (SVG, PNG) and its numbers; returns the table and the pictures."""
    rows = collect(study, done)
    picture = by_round(study, scale, done)
    charts = [*([picture] if picture else []), *charts]
    write_atomic(root / "table.md", markdown(study, scale, rows, missing, charts).encode())
    write_atomic(root / "table.csv", as_csv(study, rows).encode())
    for chart in charts:
        write_atomic(root / f"{chart.id}.csv", _csv([chart.table.columns, *chart.table.rows]).encode())
        for kind in ("svg", "png"):
            write_atomic(root / f"{chart.id}.{kind}", draw(chart, kind))
    return root / "table.md", [root / f"{chart.id}.svg" for chart in charts]
