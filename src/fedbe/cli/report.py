"""`fedbe report` and `fedbe watch`: results as a page. torch is imported by the command that needs it."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedbe.errors import SettingError


class Format(StrEnum):
    """What a picture for a paper can be written as."""

    PNG = "png"
    SVG = "svg"
    PDF = "pdf"


Folders = Annotated[
    list[Path] | None, typer.Argument(help="Folders of runs or comparisons.", metavar="RUN…", show_default=False)
]


def report(
    runs: Folders = None,
    everything: Annotated[bool, typer.Option("--all", help="All runs and comparisons below --runs.")] = False,
    below: Annotated[Path, typer.Option("--runs", help="Where --all looks.")] = Path("runs"),
    to: Annotated[Path | None, typer.Option(help="The page; default: report.html in the folder.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Also write every picture into this folder.")] = None,
    kind: Annotated[Format, typer.Option("--format", help="Of the pictures.")] = Format.PNG,
) -> None:
    """Write one HTML page, complete in itself, with tables and charts of runs; and its pictures for a paper."""
    if everything == bool(runs):
        raise SettingError("name runs or comparisons for the report, or --all for everything below --runs")
    from fedbe import report as pages

    folders, notes = pages.readable_folders(pages.find_folders(below)) if everything else (list(runs or ()), [])
    home = below if everything else folders[0] if len(folders) == 1 else Path()
    path = to or home / "report.html"
    sections = pages.build_sections(pages.read_groups(folders))
    pages.write_page(sections, path, notes)
    typer.echo(f"report: {path}")
    if figures is not None:
        from fedbe.report.figures import write_figures

        for written in write_figures(sections, figures, kind.value):
            typer.echo(f"picture: {written}")


def watch(
    run: Annotated[Path, typer.Argument(help="The folder of a run or a comparison.", metavar="RUN")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="On 127.0.0.1; 0 takes a free one.")] = 0,
) -> None:
    """Show a run's page in the browser while it trains; Ctrl-C ends it."""
    from fedbe.report.live import Page, serve

    page = Page(run)
    with serve(page, port) as server:
        typer.echo(f"watch: http://127.0.0.1:{server.server_port}/ (Ctrl-C ends)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("watch ended; the run is not touched by that", err=True)
