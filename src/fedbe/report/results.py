"""The comparison table: mean ± std, n, the paired difference to the first method and how likely chance gives it."""

from dataclasses import dataclass
from statistics import mean

from fedbe.analysis.runs import Run, RunGroup
from fedbe.experiment import comparison
from fedbe.report.chart import Table


@dataclass(frozen=True)
class Result:
    """One method: its finished accuracies by seed, and its row; `paired` seeds are shared with the reference."""

    title: str
    method: str
    finals: dict[int, float]
    row: comparison.Row | None
    paired: int
    unfinished: tuple[Run, ...]


def results(group: RunGroup) -> list[Result]:
    """Finished runs only: an accuracy in the middle of a run is not a result."""
    finals = {m: _finals(group.of(m)) for m in group.methods}
    base = next(iter(finals))
    found = []
    for method, title in group.methods.items():
        own = finals[method]
        shared = [s for s in own if s in finals[base]] if method != base else []
        row = comparison.row(method, tuple(own.values()), None) if own else None
        if shared:
            paired = comparison.row(method, tuple(own[s] for s in shared), tuple(finals[base][s] for s in shared))
            row = comparison.Row(method, tuple(own.values()), paired.difference, paired.spread, paired.chance)
        late = tuple(t for t in group.of(method) if not t.finished)
        found.append(Result(title, method, own, row, len(shared), late))
    return found


def fair_seeds(found: list[Result]) -> list[int]:
    """The seeds that all methods with a result have: means over other ones are not to be compared."""
    done = [r for r in found if r.finals]
    return [seed for seed in done[0].finals if all(seed in r.finals for r in done)] if done else []


def best(found: list[Result]) -> Result | None:
    """The method with the highest mean over the fair seeds, if there are such."""
    seeds = fair_seeds(found)
    return max((r for r in found if r.finals), key=lambda r: _mean(r, seeds)) if seeds else None


def _mean(result: Result, seeds: list[int]) -> float:
    return mean(result.finals[seed] for seed in seeds)


def table(group: RunGroup) -> Table:
    found = results(group)
    first = best(found)
    columns: tuple[str, ...] = (
        "Method",
        "Test accuracy, %",
        "n",
        "Seeds",
        f"Against {found[0].title}, points",
        "Paired n",
        "p",
    )
    rows = tuple(_cells(r) for r in found)
    if len(found) == 1:  # nothing to compare with
        columns, rows = columns[:4], tuple(row[:4] for row in rows)
    several = len([r for r in found if r.row]) > 1
    bold = tuple(i for i, r in enumerate(found) if several and r is first)
    return Table(columns, rows, bold)


def _cells(result: Result) -> tuple[str, ...]:
    late = f"unfinished: {', '.join(str(t.info.seed) for t in result.unfinished)}" if result.unfinished else ""
    if result.row is None:
        return result.title, "–", "0", late or "–", "–", "–", "–"
    _, accuracy, against, chance = comparison.cells_of(result.row)
    seeds = ", ".join(map(str, result.finals))
    return (
        result.title,
        accuracy,
        str(len(result.finals)),
        f"{seeds}; {late}" if late else seeds,
        against or "–",
        str(result.paired) if result.paired else "–",
        chance or "–",
    )


def finding(group: RunGroup) -> tuple[str, str]:
    """What the runs say, in a headline, and how sure that is."""
    found = results(group)
    if group.unfinished:
        return f"Unfinished: {_progress(group)}", "What is shown may still change; fedbe resume goes on with it."
    top = best(found)
    if top is None or top.row is None:
        return "No seed was run with all methods", "Their means are over different seeds, so none is called the best."
    n = len(top.finals)
    if len(found) == 1:
        seeds = "one seed: no spread, no certainty" if n == 1 else f"n = {n} seeds, mean ± standard deviation"
        return (
            f"{top.title} ends at {comparison.cells_of(top.row)[1]} % test accuracy",
            f"{seeds[0].upper()}{seeds[1:]}.",
        )
    if all(r.finals.keys() == found[0].finals.keys() for r in found):
        headline, sure = comparison.verdict([r.row for r in found if r.row is not None])
        return headline, f"{sure[0].upper()}{sure[1:]}."
    fair = fair_seeds(found)
    told = f"seed{'s' if len(fair) > 1 else ''} {', '.join(map(str, fair))}"
    headline = f"{top.title} ends highest on {told}, at {_mean(top, fair):.1f} %"
    return headline, "The methods do not all have the same seeds: only what all have is compared."


def _progress(group: RunGroup) -> str:
    late = group.unfinished
    if len(late) == 1 and len(group.runs) == 1:
        return f"{late[0].title} has played {len(late[0].records)} of {late[0].rounds} rounds"
    return f"{len(group.runs) - len(late)} of {len(group.runs)} runs have ended"


def _finals(runs: list[Run]) -> dict[int, float]:
    return {t.info.seed: 100 * float(t.info.final["accuracy"]) for t in runs if t.info.final is not None}
