"""The split: how many examples of each class every client has."""

from fedbe.analysis.data import Counts, split_counts
from fedbe.analysis.runs import RunGroup
from fedbe.data.sources import is_function
from fedbe.errors import FedBEError
from fedbe.report.chart import Chart, Panel, Table


def split_of_group(group: RunGroup, *, trusted: bool = False) -> Chart | str:
    """The split of the group's first seed, computed again from the recipe, or a sentence that says why it is missing.

    A recipe can name a function as its data. It is called only if the runs are `trusted`: to look at a run must not
    start someone else's code.
    """
    seed, source = group.runs[0].info.seed, group.recipe.data.source
    if is_function(source) and not trusted:
        return (
            "The split is not shown: a report does not call the function that makes the data. "
            f"Use `fedbe data show {source}`."
        )
    try:
        counts, classes = split_counts(group.recipe, seed)
    except FedBEError as error:
        return f"The split is not shown: its data is missing: {error}."
    except Exception as error:  # a user's function may raise anything, and the report must still be written
        return f"The split is not shown: {type(error).__name__}: {error}."
    about = f"Seed {seed}; every seed has its own split. {source}, {group.recipe.split.kind}."
    return split_chart(counts, classes, largest_classes(counts), about)


def split_chart(counts: Counts, classes: tuple[str, ...], title: str, about: str = "") -> Chart:
    """A bubble for each client and class.

    Args:
        counts: Training examples, [clients, classes].
        classes: The names of the classes.
        title: The heading.
        about: Sentences for the end of the caption.
    """
    names = tuple(f"client {i}" for i in range(len(counts)))
    enlarged = "; the smallest are enlarged" if len(classes) > 30 else ""
    caption = f"Training examples by client and class. The area of a bubble is their number{enlarged}. {about}"
    return Chart(
        "split",
        "bubbles",
        title,
        caption.strip(),
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


def largest_classes(counts: Counts) -> str:
    """How uneven the split is: the share of the clients' largest classes in all their data.

    Example:
        >>> largest_classes(((8, 1, 1), (1, 8, 1)))
        '2 clients: 80 % of their examples are in their largest class'
    """
    top, name = (2, "two largest classes") if len(counts[0]) > 3 else (1, "largest class")
    largest = sum(sum(sorted(row)[-top:]) for row in counts) / max(1, sum(map(sum, counts)))
    return f"{len(counts)} clients: {100 * largest:.0f} % of their examples are in their {name}"
