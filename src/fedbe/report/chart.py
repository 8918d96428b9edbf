"""What a report shows, as plain data. The page and the pictures for papers are both drawn from it."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from fedbe.analysis.runs import Point

# `fedbe reproduce` draws the last three as pictures. No page shows them.
Kind = Literal["lines", "bars", "dots", "bubbles", "triangle", "histogram", "clouds", "heat"]


@dataclass(frozen=True)
class Series:
    """A line. `method` sets its colour and the button that hides it; `style` is solid, dashed or faint."""

    label: str
    method: str
    points: tuple[Point, ...]
    style: str = "solid"


@dataclass(frozen=True)
class Bar:
    """One bar; `text` is the value with its unit."""

    label: str
    method: str
    value: float
    text: str


@dataclass(frozen=True)
class Dot:
    """A mark at (x, y); `colour` is a share from 0 to 1, `role` is "mean", "corner", "centre", "best" or ""."""

    x: float
    y: float
    label: str
    method: str = ""
    colour: float | None = None
    role: str = ""


@dataclass(frozen=True)
class Panel:
    """One of the small pictures of a chart. The kind of the chart decides which fields it has."""

    title: str = ""
    series: tuple[Series, ...] = ()
    bars: tuple[Bar, ...] = ()
    dots: tuple[Dot, ...] = ()
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    counts: tuple[tuple[float, ...], ...] = ()
    scale: tuple[float, float] | None = None


@dataclass(frozen=True)
class Table:
    """Cells of text; `bold` has the numbers of the rows to emphasise."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bold: tuple[int, ...] = ()


@dataclass(frozen=True)
class Chart:
    """A picture.

    Attributes:
        id: Its name within a section, and the name of its file.
        kind: How it is drawn.
        title: The finding, as a headline.
        caption: What the picture shows, with n and the seeds.
        panels: The data.
        table: The same numbers as text.
        x_label, y_label: Names of the axes.
        unit, digits: Of the values.
        note: A warning, for example about missing seeds.
    """

    id: str
    kind: Kind
    title: str
    caption: str
    panels: tuple[Panel, ...]
    table: Table
    x_label: str = ""
    y_label: str = ""
    unit: str = ""
    digits: int = 1
    note: str = ""

    def page_data(self) -> dict[str, Any]:
        """What the page's script needs, as JSON: everything but the table."""
        values = asdict(self)
        del values["table"]
        return values


@dataclass(frozen=True)
class ReportSection:
    """One group of runs on the page.

    Attributes:
        id: Unique on the page.
        title: The name of the group.
        finding: The headline.
        certainty: How certain the finding is.
        about: Recipe, seeds, versions, machine.
        results: The table of results.
        charts: The charts.
        methods: Name and title of each method.
        missing: Sentences that say what could not be shown, and why.
    """

    id: str
    title: str
    finding: str
    certainty: str
    about: tuple[str, ...]
    results: Table
    charts: tuple[Chart, ...]
    methods: tuple[tuple[str, str], ...]
    missing: tuple[str, ...] = ()
