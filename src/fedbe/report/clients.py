"""Who has which images: the split of a study, clients × classes."""

from functools import lru_cache

from fedbe import data
from fedbe.analysis.runs import Study
from fedbe.data import Task
from fedbe.data.sources import is_function
from fedbe.errors import FedBEError
from fedbe.experiment.federation import divide
from fedbe.experiment.recipe import Recipe
from fedbe.report.chart import Chart, Panel, Table


def split(study: Study, *, own: bool = False) -> Chart | str:
    """The split of the study's first seed, drawn anew from the recipe; or why it cannot be.

    A function that the recipe names is called only if the runs are our `own`: looking at a run must not start things.
    """
    seed, source = study.trials[0].info.seed, study.recipe.data.source
    if is_function(source) and not own:
        return (
            "The split is not shown, because a report does not call the function that its data come from: "
            f"`fedbe data show {source}` does."
        )
    try:
        counts, classes = _counts(study.recipe, seed)
    except FedBEError as error:
        return f"The split is not shown, because its data is not here: {error}."
    except Exception as error:  # a user's own function may give anything, and a report must not end by it
        return f"The split is not shown: {type(error).__name__}: {error}."
    names = tuple(f"client {i}" for i in range(len(counts)))
    enlarged = ", but the smallest are enlarged to be seen" if len(classes) > 30 else ""
    return Chart(
        "split",
        "bubbles",
        _finding(counts),
        f"Training examples by client and class: the area of a bubble is their number{enlarged}. Seed {seed}; "
        f"every seed has its own split. {source}, {study.recipe.split.kind}.",
        (Panel(rows=names, columns=classes, counts=counts),),
        Table(
            ("Client", *classes, "all"),
            tuple((n, *(f"{c:,}" for c in row), f"{sum(row):,}") for n, row in zip(names, counts, strict=True)),
        ),
        "class",
        "client",
        "examples",
        0,
    )


def _finding(counts: tuple[tuple[int, ...], ...]) -> str:
    """How uneven it is: the share of the clients' largest classes in all their data.

    >>> _finding(((8, 1, 1), (1, 8, 1)))
    '2 clients: 80 % of their data is of their largest class'
    """
    top, name = (2, "two largest classes") if len(counts[0]) > 3 else (1, "largest class")
    largest = sum(sum(sorted(row)[-top:]) for row in counts) / max(1, sum(map(sum, counts)))
    return f"{len(counts)} clients: {100 * largest:.0f} % of their data is of their {name}"


@lru_cache(maxsize=8)
def load_task(source: str) -> Task:
    """Data that several parts of a report need; read once."""
    return data.load_task(source)


def _counts(recipe: Recipe, seed: int) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    train = load_task(recipe.data.source).train
    counts = divide(recipe, train, seed).counts(train.labels, len(train.classes)).tolist()
    return tuple(map(tuple, counts)), train.classes
