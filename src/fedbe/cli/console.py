"""The consoles of the command line. Paths, settings, files and clients' messages are untrusted text.

So markup is off, and no text reaches the terminal with characters that could control it.
"""

import unicodedata
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def visible(text: str) -> str:
    """Text without control characters; lines and tabs stay.

    >>> visible("\x1b[2Jdone")
    '?[2Jdone'
    """
    return "".join("?" if unicodedata.category(c)[0] == "C" and c not in "\n\t" else c for c in text)


class _PlainConsole(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)


out = _PlainConsole(soft_wrap=True, highlight=False, markup=False, emoji=False)
err = _PlainConsole(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)


def plain_table(*columns: str) -> Table:
    """A table without lines. The first column is never cut, because users copy names from it."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", title_justify="left", caption_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, no_wrap=i == 0)
    return table
