"""Play the cells of a study that are not done yet; what cannot be run is said, with the reason."""

import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedbe import data
from fedbe.data import Task
from fedbe.errors import DataError, RunError
from fedbe.experiment import loop, run_folder
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.loop import Observer
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import dump_recipe
from fedbe.experiment.run_folder import RunInfo
from fedbe.reproduce.study import Scale, Study


@dataclass(frozen=True)
class Place:
    """One run of a study: a cell, a seed, and the folder that holds it."""

    cell: tuple[str, ...]
    seed: int
    recipe: Recipe
    folder: Path

    @property
    def first_round(self) -> Path:
        """Where the runs of a seed that begin alike share the clients of that round while they are played."""
        return self.folder.parents[1] / f"first-round-{self.folder.name}"


def places(study: Study, scale: Scale, seeds: int, root: Path) -> Iterator[Place]:
    """All runs of a study at a scale, seed by seed, so that an early stop leaves whole tables.

    Cells with the same recipe (two ways to look at one run) have the same folder.
    """
    folders: dict[str, Path] = {}
    for seed in range(seeds):
        for cell in study.cells(scale):
            recipe = study.recipe_for(cell, scale)
            slug = "--".join(value.replace("/", "-").replace(" ", "-") for value in cell)
            folder = folders.setdefault(recipe.model_dump_json(), root / slug)
            yield Place(cell, seed, recipe, folder / f"seed{seed}")


def seeds_there(root: Path) -> int:
    """How many seeds a study's table has to look for, so that none that was run is left out."""
    found = [path.parent.name.removeprefix("seed") for path in root.glob("*/seed*/run.json")]
    return max((int(seed) + 1 for seed in found if seed.isdecimal()), default=0)


def play(
    todo: list[Place], pool: ProcessPool, observer: Observer, precision: str, should_stop: Callable[[], bool]
) -> tuple[bool, dict[tuple[str, ...], str]]:
    """(all played, reasons why cells could not be). Finished runs are not played again; stopped ones go on."""
    check(todo, precision)
    missing: dict[tuple[str, ...], str] = {}
    tasks: dict[str, Task | str] = {}
    for together, of_a_seed in itertools.groupby(todo, key=lambda place: place.first_round):
        for place in of_a_seed:
            task = _task(place.recipe, tasks)
            if isinstance(task, str):
                missing[place.cell] = task
                continue
            if not (place.folder / "run.json").exists():
                run_folder.create(place.folder, place.recipe, place.recipe.method, place.seed, precision)
            if run_folder.read_info(place.folder).finished is not None:
                continue
            with run_folder.discard_on_error(place.folder):
                done = loop.execute(
                    place.folder, pool, observer, should_stop=should_stop, task=task, first_round=together
                )
            if not done:
                return False, missing
        shutil.rmtree(together, ignore_errors=True)
    return True, missing


def check(places: Iterable[Place], precision: str | None = None) -> None:
    """A run with other settings than the study's must not be passed off as the study's, nor two precisions as one;
    `precision` is that of the runs that are still to be made."""
    precisions: dict[str, Path] = {}
    for place in places:
        if not (place.folder / "run.json").exists():
            precisions |= {precision: place.folder} if precision else {}
            continue
        precisions.setdefault(run_folder.read_info(place.folder).precision, place.folder)
        recipe, info = run_folder.read_recipe(place.folder), run_folder.read_info(place.folder)
        if _means(recipe, info) != _means(place.recipe, place):
            raise RunError(
                f"{place.folder} was run with other settings than this study has now: move it away, choose another "
                "folder with --runs, or say what is different with --set"
            )
    if len(precisions) > 1:
        told = ", ".join(f"{folder} in {name}" for name, folder in precisions.items())
        raise RunError(f"runs of one study must have one precision: {told}; move some away, or choose another --runs")


def _means(recipe: Recipe, who: Place | RunInfo) -> tuple[dict[str, object], dict[str, object], str, int]:
    """All of a recipe that changes numbers: not its name, and not by which words the method's settings were made."""
    method = who.method if isinstance(who, RunInfo) else recipe.method
    words = {"name", "summary", "method", "variant", "settings", "method_settings"}
    settings = recipe.method_for(method).settings()
    return {k: v for k, v in dump_recipe(recipe).items() if k not in words}, settings, method, who.seed


def rounds_left(place: Place) -> int:
    """Rounds still to be played, for the clock."""
    if (place.folder / "run.json").exists():
        return run_folder.rounds_left(place.folder)
    return place.recipe.rounds(place.recipe.method_for())


def _task(recipe: Recipe, known: dict[str, Task | str]) -> Task | str:
    """The data of a recipe, loaded once; or the reason why it is not there."""
    sources = [recipe.data.source, *([recipe.data.unlabeled] if recipe.data.unlabeled else [])]
    for source in sources:
        if source not in known:
            try:
                known[source] = data.load_task(source)
            except DataError as error:
                known[source] = str(error)
        if isinstance(reason := known[source], str):
            return reason
    return known[recipe.data.source]
