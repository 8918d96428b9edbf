"""What was measured, beside what the paper says: Markdown for people, CSV for programs."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedbe.files import write_whole
from fedbe.reproduce.play import Place
from fedbe.reproduce.study import Scale, Study
from fedbe.simulation import run

Cell = tuple[str, ...]


@dataclass(frozen=True)
class Measured:
    """One cell: our values in percent, one for each seed that is done; the paper's mean and std, if it gives them."""

    cell: Cell
    ours: tuple[float, ...]
    paper: tuple[float, ...]

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
    """The final numbers of all finished runs, cell by cell."""
    found: dict[Cell, list[float]] = {}
    for place in done:
        values = found.setdefault(place.cell, [])
        if (place.folder / "run.json").exists() and run.read_info(place.folder).finished:
            values.append(100 * number(run.read_rounds(place.folder)[-1], study.metric_for(place.cell)))
    return [Measured(c, tuple(v), study.paper.get("/".join(c), ())) for c, v in found.items()]


def number(record: Mapping[str, Any], path: str) -> float:
    """The number at a path like test_ensemble.accuracy.

    >>> number({"test": {"accuracy": 0.5}}, "test.accuracy")
    0.5
    """
    found: Any = record
    for key in path.split("."):
        found = found[key]
    return float(found)


def markdown(study: Study, scale: Scale, rows: Sequence[Measured], missing: Mapping[Cell, str]) -> str:
    """A table with ours, the paper's and the difference in each cell; below it, what could not be run."""
    columns = list(dict.fromkeys(m.cell[-1] for m in rows))
    by_cell = {m.cell: m for m in rows}
    # On other data the paper's numbers would say nothing.
    shown_parts = ("ours",) if scale == "smoke" else ("ours", "paper", "difference")
    heads = [*study.rows, *(f"{c}: {part}" for c in columns for part in shown_parts)]
    lines = [
        f"# {study.title}",
        "",
        f"Scale `{scale}`; test accuracy in percent, mean ± standard deviation over n seeds.",
        *([study.note] if study.note else []),
        *([f"Changed against the paper: `{'`, `'.join(study.limits(scale).changes)}`."] if scale != "paper" else []),
        "",
        f"| {' | '.join(heads)} |",
        "|" + "---|" * len(heads),
    ]
    for head in dict.fromkeys(m.cell[:-1] for m in rows):
        shown: list[str] = []
        for column in columns:
            m = by_cell.get((*head, column))
            parts = (m.text, m.paper_text, m.difference) if m else ("–",) * 3
            shown += parts[: len(shown_parts)]
        lines.append(f"| {' | '.join([*head, *shown])} |")
    lines += ["", *(f"Not run: {' / '.join(cell)}: {reason}." for cell, reason in missing.items())]
    return "\n".join(lines).rstrip() + "\n"


def as_csv(study: Study, rows: Sequence[Measured]) -> str:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([*study.order, "ours_mean", "ours_std", "n", "paper_mean", "paper_std"])
    for m in rows:
        ours = [mean(m.ours) if m.ours else "", stdev(m.ours) if len(m.ours) > 1 else "", len(m.ours)]
        writer.writerow([*m.cell, *ours, *(*m.paper, "", "")[:2]])
    return out.getvalue()


def series_csv(study: Study, done: Sequence[Place]) -> str:
    """The metric of every round of every run."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([*study.order, "seed", "round", "value"])
    for place in done:
        for record in run.read_rounds(place.folder):
            if "test" in record:
                value = 100 * number(record, study.metric_for(place.cell))
                writer.writerow([*place.cell, place.seed, record["round"], f"{value:.3f}"])
    return out.getvalue()


def write(study: Study, scale: Scale, done: Sequence[Place], missing: Mapping[Cell, str], root: Path) -> Path:
    """table.md and table.csv (and rounds.csv for a study of rounds) in the study's folder; returns the first."""
    rows = collect(study, done)
    write_whole(root / "table.md", markdown(study, scale, rows, missing).encode())
    write_whole(root / "table.csv", as_csv(study, rows).encode())
    if study.series:
        write_whole(root / "rounds.csv", series_csv(study, done).encode())
    return root / "table.md"
