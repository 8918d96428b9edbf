"""How matplotlib draws one panel of each kind of chart."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from fedbe.report import colours
from fedbe.report.chart import Chart, Dot, Panel, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SOFT, GRID = "#16181b", "#5a5e65", "#e9e7e2"
WRONG, BUBBLE = "#d98a3d", "#3f5468"
CLASS_COLOURS = ("#0b4f9c", "#c04a00", "#0d8074")  # three classes that differ in lightness too
STYLES = {"solid": ("-", 1.8, 1.0), "dashed": ("--", 1.6, 1.0), "faint": ("-", 1.0, 0.7)}  # dash, width, opacity
SIMPLEX_MARKERS = {"": ("o", 14), "corner": ("o", 90), "centre": ("o", 90), "best": ("*", 170)}  # shape, size by role


def escape_formula(text: str) -> str:
    """Text that matplotlib does not read as a formula."""
    return text.replace("$", r"\$")


def _label(axes: "Axes", text: str, at: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    """Text next to a point of the data; `offset` is in points of the page."""
    axes.annotate(escape_formula(text), at, offset, textcoords="offset points", **style)


def draw_lines(chart: Chart, panel: Panel, axes: "Axes") -> None:
    """A line for each series, with its band."""
    for series in panel.series:
        _line(series, axes)
    axes.set_xlabel(chart.x_label, color=SOFT)
    axes.set_ylabel(chart.y_label, color=SOFT)
    axes.locator_params("x", integer=True)
    axes.grid(axis="y", color=GRID)
    if chart.unit == "points":
        axes.set_ylim(bottom=0)
    if panel.title:  # the lines of a panel may have one colour: only the legend's samples tell them apart
        axes.legend(frameon=False, fontsize=7, loc="best", labelcolor="linecolor")
    else:
        _end_labels(panel.series, axes)


def _line(series: Series, axes: "Axes") -> None:
    colour, (dash, width, opacity) = colours.light(series.method), STYLES[series.style]
    axes.plot(
        [p.x for p in series.points],
        [p.y for p in series.points],
        dash,
        color=colour,
        lw=width,
        alpha=opacity,
        label=escape_formula(series.label),
        marker="o" if len(series.points) == 1 else "",
    )
    banded = [(p.x, p.low, p.high) for p in series.points if p.low is not None and p.high is not None]
    if banded and series.style == "solid":
        x, low, high = zip(*banded, strict=True)
        axes.fill_between(x, low, high, color=colour, alpha=0.14, lw=0)


def _end_labels(series: Sequence[Series], axes: "Axes") -> None:
    """Labels at the ends of their lines, moved apart where they would touch."""
    low, high = axes.get_ylim()
    highest_free = high
    for one in sorted(series, key=lambda s: -s.points[-1].y):
        end = one.points[-1]
        y = min(end.y, highest_free)
        _label(axes, one.label, (end.x, y), (5, 0), va="center", color=colours.light(one.method))
        highest_free = y - 0.07 * (high - low)


def draw_bars(chart: Chart, panel: Panel, axes: "Axes") -> None:
    """Horizontal bars. Panels share their rows: a method without a value leaves its row empty."""
    methods = {b.method: escape_formula(b.label) for p in chart.panels for b in p.bars}
    rows = [list(methods).index(b.method) for b in panel.bars]
    axes.barh(rows, [b.value for b in panel.bars], 0.55, color=[colours.light(b.method) for b in panel.bars])
    for row, bar in zip(rows, panel.bars, strict=True):
        _label(axes, bar.text, (bar.value, row), (3, 0), va="center", fontsize=7)
    axes.set_yticks(range(len(methods)), list(methods.values()))
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.set_xlim(0, 1.35 * max(b.value for p in chart.panels for b in p.bars))
    axes.tick_params(bottom=False, labelbottom=False, left=False)
    axes.spines["bottom"].set_visible(False)


def draw_dots(chart: Chart, panel: Panel, axes: "Axes") -> None:
    """Dots for seeds and labelled rings for means, on one scale for both axes, with the diagonal."""
    means = [d for d in panel.dots if d.role]
    middle = mean(d.x for d in means)
    for dot in panel.dots:
        if dot.role:
            _ring(dot, axes, label_left=dot.x < middle - 0.01)  # labels point away from the other dots
        else:
            axes.plot(dot.x, dot.y, "o", ms=3.5, color=colours.light(dot.method), alpha=0.8)
    axes.axline((0, 0), slope=1, color=SOFT, lw=0.8, ls=":")
    values = [value for dot in panel.dots for value in (dot.x, dot.y)]
    limits = min(values) - 2, max(values) + 2
    axes.set(xlim=limits, ylim=limits, xlabel=chart.x_label, ylabel=chart.y_label, aspect="equal")
    axes.grid(color=GRID)


def _ring(dot: Dot, axes: "Axes", label_left: bool) -> None:
    colour = colours.light(dot.method)
    offset, side = (-8, "right") if label_left else (8, "left")
    axes.plot(dot.x, dot.y, "o", ms=8, mfc="none", mec=colour)
    _label(axes, dot.label, (dot.x, dot.y), (offset, 0), color=colour, ha=side, va="center")


def draw_bubbles(chart: Chart, panel: Panel, axes: "Axes") -> None:
    """A table of bubbles whose areas are the counts, and the total of each row at its right."""
    most = max(1, max(map(max, panel.counts)))
    width, height = (pixels / axes.figure.dpi - 1 for pixels in (axes.figure.bbox.width, axes.figure.bbox.height))
    cell = 72 * min(width / len(panel.columns), height / len(panel.rows))  # in points; an inch is for the labels
    largest, every = min(130.0, (0.88 * cell) ** 2), math.ceil(9 / cell)
    for i, row in enumerate(panel.counts):
        areas = [max(0.6, largest * count / most) if count else 0.0 for count in row]
        axes.scatter(range(len(row)), [i] * len(row), areas, color=BUBBLE, lw=0)
        if i % every == 0:
            axes.annotate(f"{sum(row):,}", (1.01, i), xycoords=axes.get_yaxis_transform(), va="center", color=SOFT)
    columns = range(0, len(panel.columns), every)
    axes.set_xticks(columns, [escape_formula(panel.columns[j][:14]) for j in columns])
    axes.tick_params("x", rotation=90 if max(map(len, panel.columns)) > 3 else 0)
    axes.set_yticks(range(0, len(panel.rows), every), panel.rows[::every])
    axes.set(xlim=(-0.6, len(panel.columns) - 0.4), ylim=(len(panel.rows) - 0.5, -0.5))
    axes.set_xlabel(f"{chart.x_label} (largest bubble: {most:,} {chart.unit}; right: total of the {chart.y_label})")
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)


def draw_triangle(chart: Chart, panel: Panel, axes: "Axes") -> None:
    """Sampled models between three clients; colour is accuracy."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    low, high = panel.scale or (0.0, 1.0)
    ramp = LinearSegmentedColormap.from_list("fedbe", colours.RAMP)
    for role, (marker, size) in SIMPLEX_MARKERS.items():
        x, y, colour = zip(*((d.x, d.y, d.colour) for d in panel.dots if d.role == role), strict=True)
        axes.scatter(x, y, size, colour, marker=marker, cmap=ramp, vmin=0, vmax=1, ec=INK if role else "none")
        if role == "corner":
            axes.fill(x, y, fill=False, ec=SOFT, lw=0.8, zorder=0)
    for dot in panel.dots:
        if dot.role:
            _simplex_label(dot, axes)
    axes.set(aspect="equal", ylim=(-0.12, 0.99))
    axes.axis("off")
    accuracy, label = ScalarMappable(Normalize(low, high), ramp), f"test accuracy, {chart.unit}"
    bar = axes.figure.colorbar(accuracy, ax=axes, orientation="horizontal", shrink=0.6, label=label)
    bar.outline.set_visible(False)


def _simplex_label(dot: Dot, axes: "Axes") -> None:
    """A label that is clear of the triangle and of the other labels."""
    from matplotlib.patheffects import withStroke

    side, offset = "center", (0, 9)
    if dot.role == "best":
        side, offset = ("right", (-10, 2)) if dot.x < 0.5 else ("left", (10, 2))
    elif dot.x in (0, 1):
        side, offset = "left" if dot.x == 0 else "right", (0, -15)
    outline = [withStroke(linewidth=2, foreground="white")]
    _label(axes, dot.label, (dot.x, dot.y), offset, ha=side, fontweight="bold", path_effects=outline)


def draw_histogram(chart: Chart, panel: Panel, axes: "Axes") -> None:
    """Two rows of counts over equal bins of [0, 1], the second on top of the first."""
    bins = len(panel.counts[0])
    centres, below = [(i + 0.5) / bins for i in range(bins)], [0.0] * bins
    for name, counts, colour in zip(panel.rows, panel.counts, (colours.light("fedbe"), WRONG), strict=True):
        axes.bar(centres, counts, 0.9 / bins, below, color=colour, label=escape_formula(name), lw=0)
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


def draw_clouds(chart: Chart, panel: Panel, axes: "Axes") -> None:
    """Points without axes; `rows` are the classes, and a dot's label is its class."""
    for name, colour in zip(panel.rows, CLASS_COLOURS, strict=False):
        dots = [d for d in panel.dots if d.label == name]
        label = escape_formula(name)
        axes.scatter([d.x for d in dots], [d.y for d in dots], 5, colour, lw=0, alpha=0.75, label=label)
    axes.set(xticks=[], yticks=[], aspect="equal", box_aspect=1, adjustable="datalim")
    axes.spines[:].set(visible=True, color=GRID)
    if panel is chart.panels[0]:
        axes.legend(frameon=False, fontsize=7, markerscale=2, handletextpad=0.1, loc="best")


def draw_heat(_: Chart, panel: Panel, axes: "Axes") -> None:
    """A table of coloured numbers. The last row is the worst case; a frame marks the cells that it comes from."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    ramp = LinearSegmentedColormap.from_list("fedbe", colours.RAMP)
    axes.imshow(panel.counts, cmap=ramp, vmin=0, vmax=100, aspect="auto")
    last = len(panel.counts) - 1
    for i, row in enumerate(panel.counts):
        for j, value in enumerate(row):
            if value == value:
                ink = INK if sum(ramp(value / 100)[:3]) > 1.4 else "white"
                axes.text(j, i, f"{value:.0f}", ha="center", va="center", fontsize=7, color=ink)
            if i < last and value == panel.counts[last][j]:
                axes.add_patch(Rectangle((j - 0.46, i - 0.44), 0.92, 0.88, fill=False, ec=WRONG, lw=1.5))
    axes.axhline(last - 0.5, color="white", lw=4)
    axes.set_xticks(range(len(panel.columns)), [escape_formula(c) for c in panel.columns], rotation=45, ha="right")
    axes.set_yticks(range(last + 1), [escape_formula(r) for r in panel.rows])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


DRAW: Mapping[str, Callable[[Chart, Panel, "Axes"], None]] = {
    "lines": draw_lines,
    "bars": draw_bars,
    "dots": draw_dots,
    "bubbles": draw_bubbles,
    "triangle": draw_triangle,
    "histogram": draw_histogram,
    "clouds": draw_clouds,
    "heat": draw_heat,
}
