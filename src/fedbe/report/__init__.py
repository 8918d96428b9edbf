"""Records -> one self-contained HTML page, pictures for papers, and a page that follows a run."""

from collections.abc import Sequence
from pathlib import Path

from fedbe.analysis.runs import find, read_studies, readable
from fedbe.core.files import write_whole
from fedbe.report.chart import Section
from fedbe.report.page import render
from fedbe.report.sections import build

__all__ = ["build", "find", "read_studies", "readable", "render", "write_page"]


def write_page(sections: Sequence[Section], path: Path, notes: Sequence[str] = ()) -> Path:
    """Write the page, whole or not at all; returns its path."""
    write_whole(path, render(sections, notes).encode())
    return path
