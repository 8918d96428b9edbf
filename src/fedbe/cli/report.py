"""`fedbe report` and `fedbe watch`: results as a web page. Commands import torch only if they need it."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedbe.cli.options import RunOrComparison
from fedbe.errors import SettingError


class Format(StrEnum):
    """The file format of pictures for a paper."""

    PNG = "png"
    SVG = "svg"
    PDF = "pdf"


Folders = Annotated[
    list[Path] | None, typer.Argument(help="Folders of runs or comparisons.", metavar="RUN…", show_default=False)
]


def report(
    runs: Folders = None,
    everything: Annotated[bool, typer.Option("--all", help="All runs and comparisons below --runs.")] = False,
    below: Annotated[Path, typer.Option("--runs", help="The folder that --all searches.")] = Path("runs"),
    to: Annotated[
        Path | None,
        typer.Option(help="The HTML file; default: report.html in the run's folder."),
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="Also write every picture into this folder.")] = None,
    kind: Annotated[Format, typer.Option("--format", help="The format of the pictures.")] = Format.PNG,
) -> None:
    """Write tables and charts of runs as one self-contained HTML page, and as pictures for a paper."""
    if everything == bool(runs):
        raise SettingError("give the folders of runs or comparisons, or --all for everything below --runs")
    from fedbe import report as pages

    folders, notes = list(runs or ()), list[str]()
    home = folders[0] if len(folders) == 1 else Path()
    if everything:
        folders, notes = pages.readable_folders(pages.find_folders(below))
        home = below
    path = to or home / "report.html"
    sections = pages.build_sections(pages.read_groups(folders))
    pages.write_page(sections, path, notes)
    typer.echo(f"report: {path}")
    if figures is not None:
        from fedbe.report.figures import write_figures

        for written in write_figures(sections, figures, kind.value):
            typer.echo(f"picture: {written}")


def watch(
    run: RunOrComparison,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1; 0 for a free one.")] = 0,
) -> None:
    """Serve the report of a run while it trains; Ctrl-C ends it."""
    from fedbe.report.live import Page, serve

    page = Page(run)
    with serve(page, port) as server:
        typer.echo(f"watch: http://127.0.0.1:{server.server_port}/ (Ctrl-C ends)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("watch ended; the run is not affected", err=True)
