"""Read run folders and group them: runs of one recipe, methods × seeds, that may be averaged and compared."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from fedbe.algorithms.methods import METHODS
from fedbe.errors import FedBEError, RunError
from fedbe.experiment import comparison, run_folder
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import dump_recipe
from fedbe.experiment.run_folder import Record


@dataclass(frozen=True)
class Point:
    """A mean over n seeds at x, and the ends of its band, mean ± standard deviation (None for one seed)."""

    x: float
    y: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True, eq=False)
class Run:
    """One run as its folder holds it.

    Attributes:
        folder: The run folder.
        recipe: Every setting.
        info: Method, seed, precision, versions and, at the end, the final result.
        records: One record for each round that is done.
        title: The method's name for people.
        rounds: How many rounds the whole run has.
        ends_as: What a round ends with: "student", "average" …
    """

    folder: Path
    recipe: Recipe
    info: run_folder.RunInfo
    records: tuple[Record, ...]
    title: str
    rounds: int
    ends_as: str

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self.info.finished is not None


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs with the same recipe and precision, at most one for each method and seed.

    Attributes:
        name: The comparison's folder, the run's folder or the recipe.
        recipe: The settings that all runs share.
        runs: The runs, method by method.
        notes: A sentence for each run that was left out.
    """

    name: str
    recipe: Recipe
    runs: tuple[Run, ...]
    notes: tuple[str, ...] = ()

    @property
    def methods(self) -> dict[str, str]:
        """Name -> title, in the order of the runs."""
        return {r.info.method: r.title for r in self.runs}

    @property
    def unfinished(self) -> list[Run]:
        """The runs that have not ended."""
        return [r for r in self.runs if not r.finished]

    def of(self, method: str) -> list[Run]:
        """The runs of one method."""
        return [r for r in self.runs if r.info.method == method]


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        RunError: The folder is not a run folder, or a file in it is damaged.
    """
    info, recipe = run_folder.read_info(folder), run_folder.read_recipe(folder)
    method = recipe.method_for(info.method)
    records = tuple(run_folder.read_rounds(folder))
    return Run(folder, recipe, info, records, method.title, recipe.rounds(method), method.result)


def read_groups(folders: Iterable[Path]) -> list[RunGroup]:
    """Read run folders and comparisons: a group for each comparison, and one for each recipe among single runs.

    Args:
        folders: Folders of runs and of comparisons; one that is named twice counts once.

    Raises:
        RunError: A folder is neither a run nor a comparison.
    """
    single_runs: dict[str, list[Run]] = {}
    groups = []
    for folder in dict.fromkeys(folders):
        if comparison.is_comparison(folder):
            groups.append(_comparison_group(folder))
        else:
            run = read_run(folder)
            single_runs.setdefault(_shared_settings(run), []).append(run)
    return groups + [_single_group(runs) for runs in single_runs.values()]


def find_folders(root: Path) -> list[Path]:
    """Every comparison below a folder, and every run that belongs to none.

    Args:
        root: The folder that is searched, at any depth.

    Raises:
        RunError: There is none.
    """
    comparisons = sorted(p.parent for p in root.rglob(comparison.PLAN_FILE))
    cells = {cell for folder in comparisons for cell in _cells(folder)}
    single_runs = sorted(p.parent for p in root.rglob(run_folder.INFO_FILE) if p.parent not in cells)
    if not comparisons and not single_runs:
        raise RunError(f"there are no runs below {root}: start one with `fedbe run` or name another folder with --runs")
    return [*comparisons, *single_runs]


def _cells(folder: Path) -> list[Path]:
    """The runs of a comparison; none of a damaged one, which `readable_folders` reports."""
    try:
        return comparison.cells(folder)
    except RunError:
        return []


def readable_folders(folders: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """The folders that can be read, and a sentence for each that cannot.

    Args:
        folders: Folders of runs and of comparisons.
    """
    good, reasons = [], []
    for folder in folders:
        try:
            read_groups([folder])
        except FedBEError as error:
            reasons.append(f"{folder} is left out: {error}.")
        else:
            good.append(folder)
    return good, reasons


def over_seeds(runs: Sequence[Run], value: Callable[[Record], float | None]) -> tuple[Point, ...]:
    """Average a value of the records over the seeds, round by round.

    Args:
        runs: Runs of one method.
        value: Reads the number from a record; None if the record has none.

    Returns:
        For each round the mean over the seeds that have it, ± the sample standard deviation if there are two or more.
    """
    by_round: dict[int, list[float]] = {}
    for run in runs:
        for record in run.records:
            if (number := value(record)) is not None:
                by_round.setdefault(record["round"], []).append(number)
    return tuple(point(x, ys) for x, ys in sorted(by_round.items()))


def point(x: float, values: Sequence[float]) -> Point:
    """The mean of the values and their band.

    Example:
        >>> point(3, [1.0, 3.0])
        Point(x=3, y=2.0, low=0.5857864376269049, high=3.414213562373095, n=2)
    """
    middle = mean(values)
    if len(values) < 2:
        return Point(x, middle, None, None, len(values))
    spread = stdev(values)
    return Point(x, middle, middle - spread, middle + spread, len(values))


def seeds_of(runs: Sequence[Run]) -> str:
    """How many seeds have records, and which: "n = 2 seeds (0, 1)". Every chart states it."""
    seeds = sorted({r.info.seed for r in runs if r.records})
    if not seeds:
        return "n = 0 seeds"
    return f"n = {len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))})"


def _comparison_group(folder: Path) -> RunGroup:
    """The runs of a comparison, in the order of its methods, then of the seeds."""
    runs = [read_run(cell) for cell in comparison.cells(folder)]
    methods = list(dict.fromkeys(run.info.method for run in runs))
    runs.sort(key=lambda run: (methods.index(run.info.method), run.info.seed))
    return RunGroup(folder.resolve().name, runs[0].recipe, tuple(runs))


def _shared_settings(run: Run) -> str:
    """What runs must share to be in one chart: the whole recipe without its name, summary and default method."""
    values = dump_recipe(run.recipe) | {"name": "", "summary": "", "method": "", "precision": run.info.precision}
    return json.dumps(values, sort_keys=True)


def _single_group(runs: Sequence[Run]) -> RunGroup:
    """Single runs with the same settings; of two with the same method and seed the longer one."""
    kept: dict[tuple[str, int], Run] = {}
    notes = []
    for run in sorted(runs, key=lambda r: (r.finished, len(r.records)), reverse=True):
        key = (run.info.method, run.info.seed)
        if key in kept:
            notes.append(f"{run.folder} is left out: {kept[key].folder} has the same recipe, method and seed.")
        else:
            kept[key] = run
    ordered = sorted(kept.values(), key=lambda r: (_rank(r.info.method), r.info.seed))
    name = ordered[0].folder.resolve().name if len(ordered) == 1 else ordered[0].recipe.name
    return RunGroup(name, ordered[0].recipe, tuple(ordered), tuple(notes))


def _rank(method: str) -> int:
    """The catalogue's order: FedAvg, the usual reference, comes first."""
    return list(METHODS).index(method) if method in METHODS else len(METHODS)
