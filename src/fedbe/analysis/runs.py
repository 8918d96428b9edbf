"""Folders -> studies: runs of one recipe, methods × seeds, that may be averaged and compared."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from fedbe.algorithms.methods import METHODS, Method
from fedbe.algorithms.server.stages import Distill, KeepMembers, Momentum
from fedbe.errors import FedBEError, RunError
from fedbe.experiment import comparison, loop
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import dump_recipe
from fedbe.experiment.round import Record


@dataclass(frozen=True)
class Point:
    """A mean over n seeds at x, and the ends of its band (None for one seed)."""

    x: float
    y: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True, eq=False)
class Trial:
    """One run as it is on the disk; `rounds` is how many it is meant to have."""

    folder: Path
    recipe: Recipe
    info: loop.RunInfo
    records: tuple[Record, ...]
    title: str
    rounds: int
    ends_as: str  # what a round ends with: "student", "average" …

    @property
    def finished(self) -> bool:
        return self.info.finished is not None

    @property
    def measured(self) -> list[Record]:
        return [r for r in self.records if "test" in r]


@dataclass(frozen=True, eq=False)
class Study:
    """Trials with the same recipe and precision, at most one for each method and seed; notes say what was left out."""

    name: str
    recipe: Recipe
    trials: tuple[Trial, ...]
    notes: tuple[str, ...] = ()

    @property
    def methods(self) -> dict[str, str]:
        """Name -> title, in the order of the trials."""
        return {t.info.method: t.title for t in self.trials}

    @property
    def unfinished(self) -> list[Trial]:
        return [t for t in self.trials if not t.finished]

    def of(self, method: str) -> list[Trial]:
        return [t for t in self.trials if t.info.method == method]


def read_trial(folder: Path) -> Trial:
    info, recipe = loop.read_info(folder), loop.read_recipe(folder)
    method = recipe.method_for(info.method)
    records = tuple(loop.read_rounds(folder))
    return Trial(folder, recipe, info, records, method.title, recipe.rounds(method), _ends_as(method))


def _ends_as(method: Method) -> str:
    if any(isinstance(stage, Distill) and stage.distill_until == 1 for stage in method.stages):
        return "student"
    if any(isinstance(stage, KeepMembers) for stage in method.stages):
        return "kept members' vote"
    return "model" if any(isinstance(stage, Momentum | Distill) for stage in method.stages) else "average"


def read_studies(folders: Iterable[Path]) -> list[Study]:
    """A study for each comparison, and one for each recipe among single runs; a folder that is neither is an error."""
    singles: dict[str, list[Trial]] = {}
    studies = []
    for folder in dict.fromkeys(folders):
        if comparison.is_comparison(folder):
            trials = [read_trial(cell) for cell in sorted(comparison.cells(folder), key=_asked_order(folder))]
            if not trials:
                raise RunError(f"{folder} is a comparison without runs")
            studies.append(Study(folder.resolve().name, trials[0].recipe, tuple(trials)))
        else:
            trial = read_trial(folder)
            singles.setdefault(_settings(trial), []).append(trial)
    return studies + [_single_study(trials) for trials in singles.values()]


def find(runs: Path) -> list[Path]:
    """Every comparison below a folder, and every run that belongs to none."""
    comparisons = sorted(p.parent for p in runs.rglob("compare.json"))
    cells = {cell for folder in comparisons for cell in _cells(folder)}
    singles = sorted(p.parent for p in runs.rglob("run.json") if p.parent not in cells)
    if not comparisons and not singles:
        raise RunError(f"there are no runs below {runs}: start one with `fedbe run` or name another folder with --runs")
    return [*comparisons, *singles]


def _cells(folder: Path) -> list[Path]:
    """Those of a damaged comparison are not known: `readable` will say that it is damaged."""
    try:
        return comparison.cells(folder)
    except RunError:
        return []


def readable(folders: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """The folders that can be read, and a sentence for each that cannot."""
    good, bad = [], []
    for folder in folders:
        try:
            read_studies([folder])
        except FedBEError as error:
            bad.append(f"{folder} is left out: {error}.")
        else:
            good.append(folder)
    return good, bad


def over_seeds(trials: Sequence[Trial], value: Callable[[Record], float | None]) -> tuple[Point, ...]:
    """By round: mean over the seeds that have it, and mean ± sample standard deviation where there are two or more."""
    found: dict[int, list[float]] = {}
    for trial in trials:
        for record in trial.records:
            if (number := value(record)) is not None:
                found.setdefault(record["round"], []).append(number)
    return tuple(point(x, ys) for x, ys in sorted(found.items()))


def point(x: float, values: Sequence[float]) -> Point:
    """
    >>> point(3, [1.0, 3.0])
    Point(x=3, y=2.0, low=0.5857864376269049, high=3.414213562373095, n=2)
    """
    middle = mean(values)
    if len(values) < 2:
        return Point(x, middle, None, None, len(values))
    spread = stdev(values)
    return Point(x, middle, middle - spread, middle + spread, len(values))


def seeds_of(trials: Sequence[Trial]) -> str:
    """How many seeds with data and which: every chart says so."""
    seeds = sorted({t.info.seed for t in trials if t.records})
    if not seeds:
        return "n = 0 seeds"
    return f"n = {len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))})"


def _asked_order(folder: Path) -> Callable[[Path], tuple[int, int]]:
    """Sort cells by method as it was asked for, then by seed."""
    plan = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
    place = {f"{m}-seed{s}": (i, s) for i, m in enumerate(plan["methods"]) for s in plan["seeds"]}
    return lambda cell: place[cell.name]


def _settings(trial: Trial) -> str:
    """What runs must share to stand in one chart: all that a recipe says but its words and its default method."""
    values = dump_recipe(trial.recipe) | {"name": "", "summary": "", "method": "", "precision": trial.info.precision}
    return json.dumps(values, sort_keys=True)


def _single_study(trials: Sequence[Trial]) -> Study:
    kept: dict[tuple[str, int], Trial] = {}
    notes = []
    for trial in sorted(trials, key=lambda t: (t.finished, len(t.records)), reverse=True):
        key = (trial.info.method, trial.info.seed)
        if key in kept:
            notes.append(f"{trial.folder} is left out: {kept[key].folder} has the same recipe, method and seed.")
        else:
            kept[key] = trial
    ordered = sorted(kept.values(), key=lambda t: (_rank(t.info.method), t.info.seed))
    name = ordered[0].folder.resolve().name if len(ordered) == 1 else ordered[0].recipe.name
    return Study(name, ordered[0].recipe, tuple(ordered), tuple(notes))


def _rank(method: str) -> int:
    """The catalogue's order: FedAvg, the usual reference, comes first."""
    return list(METHODS).index(method) if method in METHODS else len(METHODS)
