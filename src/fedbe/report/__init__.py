"""Run folders -> one self-contained HTML page, pictures for papers, and a page that follows a run.

Example:
    A page from two run folders::

        from fedbe import report

        groups = report.read_groups([Path("runs/a"), Path("runs/b")])
        report.write_page(report.build_sections(groups), Path("report.html"))
"""

from collections.abc import Sequence
from pathlib import Path

from fedbe.analysis.runs import find_folders, read_groups, readable_folders
from fedbe.core.files import write_atomic
from fedbe.report.chart import ReportSection
from fedbe.report.page import render
from fedbe.report.sections import build_sections

__all__ = ["build_sections", "find_folders", "read_groups", "readable_folders", "render", "write_page"]


def write_page(sections: Sequence[ReportSection], path: Path, notes: Sequence[str] = ()) -> Path:
    """Write the page, whole or not at all, and return its path.

    Args:
        sections: What `build_sections` returns.
        path: The HTML file.
        notes: Sentences for the top of the page.
    """
    write_atomic(path, render(sections, notes).encode())
    return path
