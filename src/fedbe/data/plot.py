"""A split as a table of bubbles in the terminal: clients × classes, the area of a bubble is the number of examples."""

import math

from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

BUBBLES = " ·∙•●⬤"  # by area; each step is a fifth of the largest count
MAX_ROWS, MAX_COLUMNS = 40, 20  # clients and classes that fit into a terminal


def split_table(counts: Tensor, classes: tuple[str, ...], title: str) -> Group:
    """A table of bubbles for the terminal of `counts` [clients, classes], with a title and a legend.

    Returns:
        A rich renderable. Of a large split it has the first 40 clients and 20 classes.
    """
    largest, (clients, labels) = max(1, int(counts.max())), counts.shape
    shown = counts[:MAX_ROWS, :MAX_COLUMNS].tolist()
    names_fit = labels <= 12  # otherwise a column shows the number of the class
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("client", justify="right", style="dim")
    for label in range(len(shown[0])):
        table.add_column(_short(classes[label]) if names_fit else str(label), justify="center", no_wrap=True)
    table.add_column("examples", justify="right")
    for client, row in enumerate(shown):
        cells = [Text(bubble(count, largest), style="cyan") for count in row]
        table.add_row(str(client), *cells, f"{int(counts[client].sum()):,}")
    legend = f"· up to {math.ceil(largest / 5):,}   ⬤ up to {largest:,} examples of a class"
    if clients > MAX_ROWS or labels > MAX_COLUMNS:
        legend += f"; {len(shown)} of {clients} clients, {len(shown[0])} of {labels} classes"
    return Group(Text(title, style="bold"), table, Text(legend, style="dim"))


def bubble(count: int, largest: int) -> str:
    """A character whose area grows with count / largest; a blank means 0.

    >>> [bubble(n, 100) for n in (0, 1, 50, 100)]
    [' ', '·', '•', '⬤']
    """
    return BUBBLES[math.ceil((len(BUBBLES) - 1) * count / largest)]


def _short(name: str) -> str:
    return name.split(",")[0][:14]
