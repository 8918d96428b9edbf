"""The pictures of a report for papers: PNG, SVG or PDF by matplotlib, from the same data as the page."""

import math
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbe.core.files import write_atomic
from fedbe.errors import RunError
from fedbe.report import colours
from fedbe.report.chart import Chart, Dot, Panel, ReportSection, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, GRID = "#16181b", "#5a5e65", "#e9e7e2"
WRONG, BUBBLE = "#d98a3d", "#3f5468"
CLOUDS = ("#0b4f9c", "#c04a00", "#0d8074")  # three classes that also differ in lightness
SIMPLEX_MARKERS = {"": ("o", 14), "corner": ("o", 90), "centre": ("o", 90), "best": ("*", 170)}  # shape, size by role
STYLES = {"solid": ("-", 1.8, 1.0), "dashed": ("--", 1.6, 1.0), "faint": ("-", 1.0, 0.7)}


def write_figures(sections: Sequence[ReportSection], folder: Path, kind: str) -> list[Path]:
    """A file for each chart: SECTION-CHART.KIND, or CHART.KIND where there is one section."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot create {folder}: {error.strerror}") from error
    written = []
    for section in sections:
        prefix = f"{section.id}-" if len(sections) > 1 else ""
        for chart in section.charts:
            path = folder / f"{prefix}{chart.id}.{kind}"
            write_atomic(path, draw(chart, kind))
            written.append(path)
    return written


def draw(chart: Chart, kind: str) -> bytes:
    """One chart as the content of a file; the same chart gives the same bytes."""
    from matplotlib import rc_context  # slow to import, and only pictures need it
    from matplotlib.figure import Figure

    looks: Any = {
        "svg.hashsalt": "fedbe",
        "svg.fonttype": "none",
        "pdf.fonttype": 42,
        "font.size": 8,
        "text.color": INK,
    }
    with rc_context({**looks, "axes.edgecolor": SOFT, "xtick.color": SOFT, "ytick.color": SOFT}):
        figure = Figure(_size(chart), dpi=200, layout="constrained")
        columns = _columns(chart)
        share: Any = _shared(chart)
        grid = figure.subplots(_rows(chart), columns, squeeze=False, sharex=share, sharey=share)
        for unused in grid.flat[len(chart.panels) :]:
            unused.set_visible(False)
        for panel, axes in zip(chart.panels, grid.flat[: len(chart.panels)], strict=True):
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(panel.title, loc="left", fontsize=8, fontweight="bold")
            DRAW[chart.kind](chart, panel, axes)
        _caption(figure, chart)
        memory = BytesIO()
        stamp = {"CreationDate": None} if kind == "pdf" else {"Date": None} if kind == "svg" else {}
        figure.savefig(memory, format=kind, metadata=stamp)
    return memory.getvalue()


def _size(chart: Chart) -> tuple[float, float]:
    """In inches: a text column for one panel, a page for several."""
    wide = min(7.2, 2.4 * _columns(chart))
    if chart.kind == "bars":
        return max(4.6, wide), 1.1 + 0.28 * max(len(p.bars) for p in chart.panels)
    if chart.kind == "bubbles":
        panel = chart.panels[0]
        return 4.6 if len(panel.columns) <= 20 else 7.2, min(9.0, 1.4 + 0.3 * len(panel.rows))
    if chart.kind in PAIRED:
        return 5.4, 1.0 + (1.75 if chart.kind == "histogram" else 2.4) * _rows(chart)
    return max(4.6, wide), 4.2 if chart.kind in ("dots", "triangle") else 0.7 + 2.3 * _rows(chart)


PAIRED = ("histogram", "clouds")  # two panels beside each other, pair below pair


def _columns(chart: Chart) -> int:
    """Panels beside each other: two where they come in pairs or are four, else up to three; bars share their names."""
    count = len(chart.panels)
    if chart.kind == "bars":
        return count
    return min(count, 2 if chart.kind in PAIRED or count == 4 else 3)


def _rows(chart: Chart) -> int:
    return math.ceil(len(chart.panels) / _columns(chart))


def _shared(chart: Chart) -> bool | str:
    """Panels that are to be compared have one scale: all of them, or those of a row."""
    return "row" if chart.kind == "histogram" else chart.kind in ("lines", "bars")


def _caption(figure: "Figure", chart: Chart) -> None:
    """The finding above; n and seeds are in what is shown, which goes below."""
    figure.suptitle(_wrapped(chart.title, figure, 11), x=0.01, ha="left", fontsize=9.5, fontweight="bold")
    figure.supxlabel(_wrapped(chart.shown, figure, 20), x=0.01, ha="left", fontsize=6, color=SOFT)


def _wrapped(text: str, figure: "Figure", letters_per_inch: float) -> str:
    from textwrap import fill

    # A number stays with its unit, and n with its seeds.
    whole = re.sub(r" %|n = \d+ seeds? \([\d, ]*\)", lambda found: found[0].replace(" ", "\xa0"), _plain(text))
    return fill(whole, int(figure.get_figwidth() * letters_per_inch)).replace("\xa0", " ")


def _plain(text: str) -> str:
    """Text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")


def _lines(chart: Chart, panel: Panel, axes: "Axes") -> None:
    for series in panel.series:
        _line(series, axes)
    axes.set_xlabel(chart.x_label, color=SOFT)
    axes.set_ylabel(chart.y_label, color=SOFT)
    axes.locator_params("x", integer=True)
    axes.grid(axis="y", color=GRID)
    if chart.unit == "points":
        axes.set_ylim(bottom=0)
    if panel.title:  # lines of one colour: only a piece of each line tells them apart
        axes.legend(frameon=False, fontsize=7, loc="best", labelcolor="linecolor")
    else:
        _end_labels(panel.series, axes)


def _end_labels(series: Sequence[Series], axes: "Axes") -> None:
    """Names at the ends of their lines, pushed apart where they would touch."""
    low, high = axes.get_ylim()
    place = high
    for one in sorted(series, key=lambda s: -s.points[-1].y):
        place = min(one.points[-1].y, place)
        where = (one.points[-1].x, place)
        axes.annotate(
            _plain(one.label), where, (5, 0), textcoords="offset points", va="center", color=colours.light(one.method)
        )
        place -= 0.07 * (high - low)


def _line(series: Series, axes: "Axes") -> None:
    colour, (dash, width, opacity) = colours.light(series.method), STYLES[series.style]
    xs = [p.x for p in series.points]
    marker = "o" if len(xs) == 1 else ""
    axes.plot(
        xs,
        [p.y for p in series.points],
        dash,
        color=colour,
        lw=width,
        alpha=opacity,
        label=_plain(series.label),
        marker=marker,
    )
    banded = [(p.x, p.low, p.high) for p in series.points if p.low is not None and p.high is not None]
    if banded and series.style == "solid":
        x, low, high = zip(*banded, strict=True)
        axes.fill_between(x, low, high, color=colour, alpha=0.14, lw=0)


def _bars(chart: Chart, panel: Panel, axes: "Axes") -> None:
    # Panels share their rows, and a method that lacks a phase leaves its row empty.
    methods = {b.method: _plain(b.label) for p in chart.panels for b in p.bars}
    places = [list(methods).index(b.method) for b in panel.bars]
    axes.barh(places, [b.value for b in panel.bars], 0.55, color=[colours.light(b.method) for b in panel.bars])
    for place, bar in zip(places, panel.bars, strict=True):
        axes.annotate(bar.text, (bar.value, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(methods)), list(methods.values()))
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.set_xlim(0, 1.35 * max(b.value for p in chart.panels for b in p.bars))
    axes.tick_params(bottom=False, labelbottom=False, left=False)
    axes.spines["bottom"].set_visible(False)


def _dots(chart: Chart, panel: Panel, axes: "Axes") -> None:
    means = [d.x for d in panel.dots if d.role]
    for dot in panel.dots:
        colour = colours.light(dot.method)
        if dot.role:
            left = dot.x < sum(means) / len(means) - 0.01  # names stand outside of the cloud
            shift, side = ((-8, 0), "right") if left else ((8, 0), "left")
            axes.plot(dot.x, dot.y, "o", ms=8, mfc="none", mec=colour)
            axes.annotate(
                _plain(dot.label),
                (dot.x, dot.y),
                shift,
                textcoords="offset points",
                color=colour,
                ha=side,
                va="center",
            )
        else:
            axes.plot(dot.x, dot.y, "o", ms=3.5, color=colour, alpha=0.8)
    axes.axline((0, 0), slope=1, color=SOFT, lw=0.8, ls=":")
    low, high = min(min(d.x, d.y) for d in panel.dots) - 2, max(max(d.x, d.y) for d in panel.dots) + 2
    axes.set(xlim=(low, high), ylim=(low, high), xlabel=chart.x_label, ylabel=chart.y_label, aspect="equal")
    axes.grid(color=GRID)


def _bubbles(chart: Chart, panel: Panel, axes: "Axes") -> None:
    """A table of bubbles, and the total of each row at its right."""
    most, (width, height) = max(1, max(map(max, panel.counts))), _size(chart)
    # In points; labels take about an inch of either side.
    cell = 72 * min((width - 1) / len(panel.columns), (height - 1) / len(panel.rows))
    largest, every = min(130.0, (0.88 * cell) ** 2), math.ceil(9 / cell)
    for i, row in enumerate(panel.counts):
        areas = [max(0.6, largest * c / most) if c else 0.0 for c in row]
        axes.scatter(range(len(row)), [i] * len(row), areas, color=BUBBLE, lw=0)
        if i % every == 0:
            axes.annotate(f"{sum(row):,}", (1.01, i), xycoords=axes.get_yaxis_transform(), va="center", color=SOFT)
    columns = range(0, len(panel.columns), every)
    axes.set_xticks(columns, [_plain(panel.columns[j][:14]) for j in columns])
    axes.tick_params("x", rotation=90 if max(map(len, panel.columns)) > 3 else 0)
    axes.set_yticks(range(0, len(panel.rows), every), panel.rows[::every])
    axes.set(xlim=(-0.6, len(panel.columns) - 0.4), ylim=(len(panel.rows) - 0.5, -0.5))
    axes.set_xlabel(f"{chart.x_label} (largest bubble: {most:,} {chart.unit}; right: total of the {chart.y_label})")
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)


def _triangle(chart: Chart, panel: Panel, axes: "Axes") -> None:
    """Sampled models between three clients; colour is accuracy."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.patheffects import withStroke

    low, high = panel.scale or (0.0, 1.0)
    accuracy = ScalarMappable(Normalize(low, high), LinearSegmentedColormap.from_list("fedbe", colours.RAMP))
    corners = [d for d in panel.dots if d.role == "corner"]
    axes.fill([d.x for d in corners], [d.y for d in corners], fill=False, ec=SOFT, lw=0.8)
    for role, (marker, size) in SIMPLEX_MARKERS.items():
        dots = [d for d in panel.dots if d.role == role]
        values = [low + (d.colour or 0) * (high - low) for d in dots]
        axes.scatter(
            [d.x for d in dots], [d.y for d in dots], size, values,
            marker=marker, cmap=accuracy.cmap, vmin=low, vmax=high, ec=INK if role else "none",
        )  # fmt: skip
    for dot in panel.dots:
        if dot.role:
            side, offset = _simplex_label(dot)
            axes.annotate(
                dot.label, (dot.x, dot.y), offset, textcoords="offset points", ha=side, fontweight="bold",
                path_effects=[withStroke(linewidth=2, foreground="white")],
            )  # fmt: skip
    axes.set(aspect="equal", ylim=(-0.12, 0.99))
    axes.axis("off")
    label = f"test accuracy, {chart.unit}"
    bar = axes.figure.colorbar(accuracy, ax=axes, orientation="horizontal", shrink=0.6, label=label)
    bar.outline.set_visible(False)


def _simplex_label(dot: Dot) -> tuple[str, tuple[int, int]]:
    """Alignment and offset in points of a label: clear of the triangle and of the other labels."""
    if dot.role == "best":
        return ("right", (-10, 2)) if dot.x < 0.5 else ("left", (10, 2))
    if dot.x == 0:
        return "left", (0, -15)
    return ("right", (0, -15)) if dot.x == 1 else ("center", (0, 9))


def _histogram(chart: Chart, panel: Panel, axes: "Axes") -> None:
    """Two rows of counts over equal bins of [0, 1], the second on top of the first."""
    bins = len(panel.counts[0])
    places, below = [(i + 0.5) / bins for i in range(bins)], [0.0] * bins
    for name, counts, colour in zip(panel.rows, panel.counts, (colours.light("fedbe"), WRONG), strict=True):
        axes.bar(places, counts, 0.9 / bins, below, color=colour, label=_plain(name), lw=0)
        below = [a + b for a, b in zip(below, counts, strict=True)]
    axes.set(xlim=(0, 1), xticks=[0, 0.2, 0.4, 0.6, 0.8, 1])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(chart.x_label, color=SOFT)
    if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
        axes.set_ylabel(chart.y_label, color=SOFT)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    if panel is chart.panels[0]:
        axes.legend(frameon=False, fontsize=7, loc="upper left", handlelength=0.9)


def _clouds(chart: Chart, panel: Panel, axes: "Axes") -> None:
    """Points without axes; `rows` are the classes, which dots carry as labels."""
    for name, colour in zip(panel.rows, CLOUDS, strict=False):
        chosen = [d for d in panel.dots if d.label == name]
        axes.scatter([d.x for d in chosen], [d.y for d in chosen], 5, colour, lw=0, alpha=0.75, label=_plain(name))
    axes.set(xticks=[], yticks=[], aspect="equal", box_aspect=1, adjustable="datalim")
    axes.spines[:].set(visible=True, color=GRID)
    if panel is chart.panels[0]:
        axes.legend(frameon=False, fontsize=7, markerscale=2, handletextpad=0.1, loc="best")


DRAW = {
    "lines": _lines,
    "bars": _bars,
    "dots": _dots,
    "bubbles": _bubbles,
    "triangle": _triangle,
    "histogram": _histogram,
    "clouds": _clouds,
}
