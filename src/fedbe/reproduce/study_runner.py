"""Run the cells of a study that are not finished. A cell that cannot run gets a reason instead of a number."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedbe.analysis.data import load_task
from fedbe.errors import DataError, RunError
from fedbe.experiment import run_folder
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.executors.base import Executor
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import dump_recipe
from fedbe.experiment.run_jobs import NewRun, RunJob, execute_runs
from fedbe.reproduce.study import Cell, Scale, Study


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: a cell, a seed, its recipe and its folder."""

    cell: Cell
    seed: int
    recipe: Recipe
    folder: Path

    @property
    def exists(self) -> bool:
        """Whether the run was started."""
        return run_folder.exists(self.folder)

    @property
    def first_round(self) -> Path:
        """The folder in which runs with the same first round share its trained clients, for one seed."""
        return self.folder.parents[1] / f"first-round-{self.folder.name}"

    @property
    def rounds_left(self) -> int:
        """The number of rounds that are not finished."""
        return run_folder.rounds_left(self.folder) if self.exists else self.recipe.rounds(self.recipe.method_for())


@dataclass(frozen=True)
class StudyPlan:
    """The runs of a study in a folder.

    Attributes:
        runs: Every cell and seed of the scale, seed by seed.
        selected: The runs to train now.
    """

    runs: Sequence[StudyRun]
    selected: Sequence[StudyRun]

    @property
    def shown(self) -> list[StudyRun]:
        """The runs that the table shows: those that exist, and those that are selected."""
        return [run for run in self.runs if run.exists or run in self.selected]

    @property
    def rounds_left(self) -> int:
        """The number of rounds to train now. Cells that share a folder share its run."""
        return sum({run.folder: run.rounds_left for run in self.selected}.values())


def plan_study(
    study: Study, scale: Scale, root: Path, *, seeds: int | None = None, values: Sequence[str] = (), train: bool = True
) -> StudyPlan:
    """Choose the runs to train.

    Args:
        seeds: The number of seeds to train; None for the scale's.
        values: Select only cells with these values; see `Study.select`.
        train: False to select no run.
    """
    seeds = seeds or study.limits(scale).seeds
    runs = list(study_runs(study, scale, max(seeds, _count_seeds(root)), root))
    cells = study.select(values, scale)
    return StudyPlan(runs, [run for run in runs if train and run.cell in cells and run.seed < seeds])


def study_runs(study: Study, scale: Scale, seeds: int, root: Path) -> Iterator[StudyRun]:
    """All runs of a study at a scale, seed by seed, so that an early stop leaves complete tables.

    Cells with the same recipe (two views of one run) have the same folder.
    """
    folders: dict[str, Path] = {}
    for seed in range(seeds):
        for cell in study.cells(scale):
            recipe = study.recipe_for(cell, scale)
            slug = "--".join(value.replace("/", "-").replace(" ", "-") for value in cell)
            folder = folders.setdefault(recipe.model_dump_json(), root / slug)
            yield StudyRun(cell, seed, recipe, folder / f"seed{seed}")


def _count_seeds(root: Path) -> int:
    """The number of seeds that covers every run in the folder."""
    seeds = [path.parent.name.removeprefix("seed") for path in root.glob("*/seed*/run.json")]
    return max((int(seed) + 1 for seed in seeds if seed.isdecimal()), default=0)


def plan_jobs(runs: Sequence[StudyRun], precision: str, device: str = "cpu") -> tuple[list[RunJob], dict[Cell, str]]:
    """The jobs of the runs that are not finished, and the reasons why cells cannot run.

    Cells that share a folder share its job.

    Raises:
        RunError: A run in the folder has other settings or another precision.
    """
    check_runs(runs, precision)
    jobs: dict[Path, RunJob] = {}
    missing: dict[Cell, str] = {}
    for run in runs:
        if problem := _data_problem(run.recipe):
            missing[run.cell] = problem
        elif not run.exists or run_folder.read_info(run.folder).finished is None:
            new = NewRun(run.recipe, run.recipe.method, run.seed, precision, device)
            jobs[run.folder] = RunJob(run.folder, new, run.first_round)
    return list(jobs.values()), missing


def run_study(
    jobs: Sequence[RunJob],
    executor: Executor,
    callback: Callback,
    should_stop: Callable[[], bool],
    *,
    whole: bool = False,
) -> bool:
    """Train the runs of a study to their end; stopped runs continue. See `run_jobs.execute_runs`.

    Returns:
        Whether all runs are finished (False if `should_stop` ended them).
    """
    left = Counter(job.first_round for job in jobs)

    def ended(job: RunJob) -> None:
        left[job.first_round] -= 1
        if job.first_round and not left[job.first_round]:
            shutil.rmtree(job.first_round, ignore_errors=True)

    return execute_runs(jobs, executor, callback, should_stop, whole=whole, ended=ended)


def check_runs(runs: Iterable[StudyRun], precision: str | None = None) -> None:
    """Check that existing runs have the study's settings, and that all runs have one precision.

    Args:
        precision: The precision of runs that do not exist yet; None if they are not to be trained.

    Raises:
        RunError: A run has other settings, or there are two precisions.
    """
    precisions: dict[str, Path] = {}
    for run in runs:
        if run.exists:
            _check_settings(run)
            precisions.setdefault(run_folder.read_info(run.folder).precision, run.folder)
        elif precision:
            precisions[precision] = run.folder
    if len(precisions) > 1:
        listed = ", ".join(f"{folder} in {name}" for name, folder in precisions.items())
        raise RunError(f"runs of one study must have one precision: {listed}; move some away, or choose another --runs")


def _check_settings(run: StudyRun) -> None:
    info = run_folder.read_info(run.folder)
    actual = _numeric_settings(run_folder.read_recipe(run.folder), info.method)
    if info.seed != run.seed or actual != _numeric_settings(run.recipe, run.recipe.method):
        raise RunError(
            f"{run.folder} was run with other settings than this study has now: move it away, choose another "
            "folder with --runs, or give the settings of the run with --set"
        )


def _numeric_settings(recipe: Recipe, method: str) -> tuple[dict[str, object], dict[str, object], str]:
    """The settings that change numbers: not the recipe's name, and the method's settings only as resolved."""
    resolved = {"name", "summary", "method", "variant", "settings", "method_settings"}
    others = {key: value for key, value in dump_recipe(recipe).items() if key not in resolved}
    return others, recipe.method_for(method).settings(), method


def _data_problem(recipe: Recipe) -> str:
    """Why the data of a recipe cannot be read; empty if it can."""
    try:
        load_task(recipe.data.source)
        if recipe.data.unlabeled:
            load_task(recipe.data.unlabeled)
    except DataError as error:
        return str(error)
    return ""
