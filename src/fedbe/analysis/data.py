"""The data of a run, loaded once, and how it is split over the clients."""

from functools import lru_cache

from fedbe import data
from fedbe.data import Task
from fedbe.experiment.federation import divide, with_validation
from fedbe.experiment.recipe import Recipe

Counts = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=8)
def load_task(source: str) -> Task:
    """The data set named `source`. Several charts need it, so it is cached."""
    return data.load_task(source)


def split_counts(recipe: Recipe, seed: int) -> tuple[Counts, tuple[str, ...]]:
    """Training examples by client and class, and the names of the classes, computed again from the recipe."""
    train = with_validation(recipe, load_task(recipe.data.source)).train
    counts = divide(recipe, train, seed).counts(train.labels, len(train.classes)).tolist()
    return tuple(map(tuple, counts)), train.classes
