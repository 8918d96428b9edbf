"""What a report shows, as plain data: the page and the pictures for papers are both drawn from these."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fedbe.analysis.runs import Point

# The last two are drawn as pictures only: `fedbe reproduce` makes them, no page shows them.
Kind = Literal["lines", "bars", "dots", "bubbles", "triangle", "histogram", "clouds"]


@dataclass(frozen=True)
class Series:
    """A line; `method` is its colour and the switch that hides it. style: solid, dashed or faint."""

    label: str
    method: str
    points: tuple[Point, ...]
    style: str = "solid"


@dataclass(frozen=True)
class Bar:
    """One bar; `text` is the value as people read it."""

    label: str
    method: str
    value: float
    text: str


@dataclass(frozen=True)
class Dot:
    """A mark at (x, y); corners of a triangle and the like carry a label, colour is a share from 0 to 1."""

    x: float
    y: float
    label: str
    method: str = ""
    colour: float | None = None
    role: str = ""


@dataclass(frozen=True)
class Panel:
    """One of the small pictures of a chart; which fields it fills depends on the kind of the chart."""

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
    """Text cells; `bold` holds the numbers of rows to stress."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bold: tuple[int, ...] = ()


@dataclass(frozen=True)
class Chart:
    """A picture with its finding, what is shown (with n and seeds), what is missing, and its numbers as a table."""

    id: str
    kind: Kind
    title: str
    shown: str
    panels: tuple[Panel, ...]
    table: Table
    x_label: str = ""
    y_label: str = ""
    unit: str = ""
    digits: int = 1
    note: str = ""

    def drawing(self) -> dict[str, Any]:
        """What the page's script needs."""
        values = asdict(self)
        del values["table"]
        return values


@dataclass(frozen=True)
class ReportSection:
    """One study on the page: a headline and how sure it is, the results as a table, then charts.

    missing: what could not be shown, and why.
    """

    id: str
    title: str
    finding: str
    deck: str
    about: tuple[str, ...]
    results: Table
    charts: tuple[Chart, ...]
    methods: tuple[tuple[str, str], ...]  # name and title
    missing: tuple[str, ...] = field(default=())
