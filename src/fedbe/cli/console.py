"""The consoles of the command line. Markup is off: paths, settings and clients' messages are untrusted text."""

from rich.console import Console
from rich.table import Table

out = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
err = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)


def plain_table(*columns: str) -> Table:
    """A table without lines. The first column is never cut, because users copy names from it."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", title_justify="left", caption_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, no_wrap=i == 0)
    return table
