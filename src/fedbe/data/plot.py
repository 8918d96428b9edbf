"""Pictures of a split, clients × classes, the area of a bubble in proportion to the number of images."""

import math
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fedbe.core.files import write_atomic
from fedbe.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BUBBLES = " ·∙•●⬤"  # of growing area; each step is a fifth of the largest count
CLIENTS_SHOWN, CLASSES_SHOWN = 40, 20  # that a terminal has room for
INK, GREY, PALE, TEAL = "#1f2933", "#7b8794", "#e4e7eb", "#0f766e"


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


def _plain(text: str) -> str:
    """No formula, whatever a class is called."""
    return text.replace("$", r"\$")


def to_png(counts: Tensor, classes: tuple[str, ...], title: str, path: Path) -> None:
    """Write the split, int64 [clients, classes], as a PNG with a legend of sizes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and only pictures need it
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    clients, labels = counts.shape
    cell = min(0.52, 16 / max(clients, labels))  # inches: a large split gets smaller bubbles, not a larger page
    width, height = max(5.6, labels * cell + 3), max(3.4, clients * cell + 2)
    figure = Figure((width, height), dpi=160, layout=ConstrainedLayoutEngine(w_pad=0.18, h_pad=0.18))
    font = max(8.0, width * 0.7)
    axes = figure.add_subplot()
    _draw(axes, counts, 0.88 * 72 * cell, font)
    _label(axes, counts, classes, min(font, 60 * cell))
    figure.suptitle(_plain(title), x=0.03, ha="left", fontsize=1.3 * font, fontweight="bold", color=INK)
    memory = BytesIO()
    FigureCanvasAgg(figure).print_png(memory)  # type: ignore[no-untyped-call]
    write_atomic(path, memory.getvalue(), DataError)


def _draw(axes: "Axes", counts: Tensor, diameter: float, font: float) -> None:
    """A bubble for each client and class with images, and the legend; diameter (of the largest) in points."""
    largest = max(1, int(counts.max()))
    unit = diameter**2 / largest  # the size of a marker in matplotlib is the square of its diameter
    own, kind = counts.nonzero(as_tuple=True)
    axes.scatter(kind, own, s=counts[own, kind] * unit, color=TEAL, linewidths=0, zorder=2)
    for value in legend_counts(largest):
        axes.scatter([], [], s=value * unit, color=TEAL, linewidths=0, label=f"{value:,}")
    axes.legend(
        title="images of\na class",
        title_fontsize=font,
        fontsize=font,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        borderaxespad=5,
        frameon=False,
        labelspacing=max(0.6, 0.95 * diameter / font - 0.7),  # so that the two largest do not touch
        handletextpad=max(0.8, 0.6 * diameter / font),
        alignment="left",
        labelcolor=INK,
    )


def legend_counts(largest: int) -> list[int]:
    """A few round counts up to the largest, which comes last as it is.

    >>> legend_counts(1960), legend_counts(61), legend_counts(2)
    ([200, 1000, 1960], [6, 30, 61], [1, 2])
    """

    def rounded(value: float) -> int:
        step = int(10 ** math.floor(math.log10(max(value, 1))))
        return max(1, round(value / step) * step)

    return sorted({rounded(largest / 10), rounded(largest / 2), largest})


def _label(axes: "Axes", counts: Tensor, classes: tuple[str, ...], font: float) -> None:
    """Classes above, clients at the left with the first at the top, how many images each has at the right."""
    clients, labels = counts.shape
    ink = {"labelsize": font, "labelcolor": INK, "length": 0}
    axes.set_xticks(range(labels), [_plain(_short(name)) for name in classes])
    axes.tick_params("x", top=True, labeltop=True, bottom=False, labelbottom=False, labelrotation=90, **ink)
    axes.set_yticks(range(clients))
    axes.tick_params("y", **ink)
    axes.set_ylabel("client", color=INK, fontsize=max(font, 9))
    for client, total in enumerate(counts.sum(1).tolist()):
        axes.text(labels - 0.35, client, f"{total:,}", va="center", fontsize=font, color=GREY)
    axes.set_xlim(-0.6, labels - 0.4)
    axes.set_ylim(clients - 0.4, -0.6)
    axes.set_aspect("equal")
    axes.grid(color=PALE, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
