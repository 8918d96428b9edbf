"""Sections -> one self-contained HTML page: style, script and data are inside, and it loads nothing.

All text from files is escaped, and the page's content security policy allows only its own script.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape as escape_html
from importlib import resources
from string import Template

from fedbe.report import colours
from fedbe.report.chart import Chart, ReportSection, Table


def render(sections: Sequence[ReportSection], notes: Sequence[str] = (), version: str = "") -> str:
    """Make the page.

    Args:
        sections: What `build_sections` returns.
        notes: Sentences for the top of the page.
        version: Identifies the data of a page that `fedbe watch` serves. Such a page asks for newer versions.
    """
    script, style = _template("page.js"), _template("page.css").replace("/*colours*/", colours.css())
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_template("page.html")).substitute(
        policy=f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'",
        title=escape(sections[0].title if len(sections) == 1 else f"{len(sections)} groups of runs"),
        style=style,
        script=script,
        version=escape(version),
        switches=_switches(sections),
        contents=_contents(sections),
        notes=_paragraphs(notes, "missing"),
        sections="\n".join(_section(s) for s in sections),
        data=_data(sections),
    )


def escape(text: str) -> str:
    """Text as HTML. A number stays on one line with its unit.

    >>> escape("<b> 3 %")
    '&lt;b&gt; 3\xa0%'
    """
    joined = re.sub(r"(?<=\bn) = (?=\d)", "\xa0=\xa0", text)
    return escape_html(re.sub(r"(?<=\d) (?=(?:%|s|ms|MB|kB|GB|B|points|seeds?)(?:\W|$))", "\xa0", joined))


def _template(name: str) -> str:
    return (resources.files("fedbe.report") / "templates" / name).read_text(encoding="utf-8")


SWATCH = '<span class="swatch" aria-hidden="true"></span>'  # the script colours it


def _switches(sections: Sequence[ReportSection]) -> str:
    """A button for each method, which hides it; none for a single method."""
    methods = {name: title for s in sections for name, title in s.methods}
    buttons = [
        f'<button type="button" class="switch" aria-pressed="true" data-method="{escape(name)}">'
        f"{SWATCH}{escape(title)}</button>"
        for name, title in methods.items()
    ]
    return "".join(buttons) if len(buttons) > 1 else ""


def _contents(sections: Sequence[ReportSection]) -> str:
    if len(sections) < 2:
        return ""
    links = (f'<li><a href="#{s.id}">{escape(s.title)}</a> <span>{escape(s.finding)}</span></li>' for s in sections)
    return f'<nav aria-label="Groups of runs"><ol class="contents">{"".join(links)}</ol></nav>'


def _section(section: ReportSection) -> str:
    charts = "\n".join(_figure(section, chart) for chart in section.charts)
    about = "".join(f"<p>{escape(line)}</p>" for line in section.about)
    keys = [f' data-method="{escape(name)}"' for name, _ in section.methods]
    results = _html_table(section.results, "Results", keys, SWATCH)
    return (
        f'<section id="{section.id}" aria-labelledby="{section.id}-title">'
        f'<p class="kicker">{escape(section.title)}</p>'
        f'<h2 id="{section.id}-title">{escape(section.finding)}</h2>'
        f'<p class="deck">{escape(section.certainty)}</p>'
        f'<div class="about">{about}</div>'
        f'<div class="scroll results" role="region" aria-label="Results" tabindex="0">{results}</div>'
        f'<p class="fine">{RESULTS_NOTE}{PAIRED_NOTE if len(section.methods) > 1 else ""}</p>'
        f'<div class="charts">{charts}</div>{_paragraphs(section.missing, "missing")}</section>'
    )


RESULTS_NOTE = (
    "Accuracy of the final model on the test data, mean ± sample standard deviation over seeds; finished runs only."
)
PAIRED_NOTE = (
    " Differences are paired by seed; p: two-sided paired t-test, not corrected for the number of methods. "
    "The highest mean is in bold."
)


def _figure(section: ReportSection, chart: Chart) -> str:
    name = f"{section.id}-{chart.id}"
    note = _paragraphs([chart.note] if chart.note else [], "missing")
    return (
        f'<figure id="{name}" class="chart {chart.kind} {chart.id}" aria-labelledby="{name}-title">'
        f'<figcaption><h3 id="{name}-title">{escape(chart.title)}</h3><p>{escape(chart.caption)}</p>{note}</figcaption>'
        f'<div class="plot"></div>'
        f"<details><summary>Show the data</summary>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="Data: {escape(chart.title)}">'
        f"{_html_table(chart.table, chart.title)}</div></details></figure>"
    )


def _html_table(table: Table, caption: str, keys: Sequence[str] = (), mark: str = "") -> str:
    head = "".join(f'<th scope="col">{escape(c)}</th>' for c in table.columns)
    body = []
    for i, row in enumerate(table.rows):
        first = f'<th scope="row">{mark}{escape(row[0])}</th>'
        cells = first + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        bold = ' class="best"' if i in table.bold else ""
        body.append(f"<tr{bold}{keys[i] if keys else ''}>{cells}</tr>")
    top = f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
    return f"<table>{top}<tbody>{''.join(body)}</tbody></table>"


def _paragraphs(lines: Sequence[str], style: str) -> str:
    return "".join(f'<p class="{style}">{escape(line)}</p>' for line in lines)


def _data(sections: Sequence[ReportSection]) -> str:
    """The charts as JSON. <, > and & are escaped, so that no text can end the script element."""
    drawings = {f"{s.id}-{c.id}": c.page_data() for s in sections for c in s.charts}
    variables = {name: colours.variable(name) for s in sections for name, _ in s.methods}
    text = json.dumps({"charts": drawings, "colours": variables}, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
