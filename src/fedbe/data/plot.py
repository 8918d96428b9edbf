"""A split as a table of bubbles in the terminal: clients × classes, the area of a bubble is the number of images."""

import math

from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

BUBBLES = " ·∙•●⬤"  # of growing area; each step is a fifth of the largest count
CLIENTS_SHOWN, CLASSES_SHOWN = 40, 20  # that a terminal has room for


def in_terminal(counts: Tensor, classes: tuple[str, ...], title: str) -> Group:
    """The split, int64 [clients, classes], as a table of bubbles between a title and a legend."""
    largest, (clients, labels) = max(1, int(counts.max())), counts.shape
    shown = counts[:CLIENTS_SHOWN, :CLASSES_SHOWN].tolist()
    roomy = labels <= 12  # names fit; else columns carry the number of the class
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("client", justify="right", style="dim")
    for label in range(len(shown[0])):
        table.add_column(_short(classes[label]) if roomy else str(label), justify="center", no_wrap=True)
    table.add_column("images", justify="right")
    for client, row in enumerate(shown):
        cells = [Text(bubble(count, largest), style="cyan") for count in row]
        table.add_row(str(client), *cells, f"{int(counts[client].sum()):,}")
    legend = f"· up to {math.ceil(largest / 5):,}   ⬤ up to {largest:,} images of a class"
    if clients > CLIENTS_SHOWN or labels > CLASSES_SHOWN:
        legend += f"; {len(shown)} of {clients} clients, {len(shown[0])} of {labels} classes"
    return Group(Text(title, style="bold"), table, Text(legend, style="dim"))


def bubble(count: int, largest: int) -> str:
    """A character whose area grows with count / largest; blank only for 0.

    >>> [bubble(n, 100) for n in (0, 1, 50, 100)]
    [' ', '·', '•', '⬤']
    """
    return BUBBLES[math.ceil((len(BUBBLES) - 1) * count / largest)]


def _short(name: str) -> str:
    return name.split(",")[0][:14]
