"""`fedbe data`: what is known, getting it, looking at a split. torch is imported by the command that needs it."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from fedbe.cli.console import err, out, plain_table
from fedbe.errors import DataError

app = typer.Typer(help="Data sets: what is known, getting one, a picture of a split.", no_args_is_help=True)


@app.command("list")
def list_known() -> None:
    """Show every known data set: what it is, whether it is here, its size and its licence."""
    from fedbe.data.catalogue import DATASETS, data_root, here

    table = plain_table("name", "what", "here", "size", "licence")
    table.title, table.columns[3].justify = f"data sets in {data_root()}", "right"
    for name, entry in DATASETS.items():
        place = here(name)
        state = "yes" if place or entry.read is None else "no"
        size = f"{entry.megabytes} MB" if entry.read else "–"
        table.add_row(name, entry.what, state, size, entry.licence)
    table.caption = "fetch one with: fedbe data get NAME"
    out.print(table)


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="A name that `fedbe data list` shows.")],
    to: Annotated[
        Path | None, typer.Option(help="Where to put it; default: FEDBE_DATA or the user's cache directory.")
    ] = None,
) -> None:
    """Fetch a data set: resumed where it broke off, checked by SHA-256, written whole or not at all."""
    from fedbe.data import download

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, console=err) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(file: str, done: int, total: int) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file, total=None)
            bars.update(tasks[file], completed=done, total=total or None)

        place = download.get(name, to, progress)
    typer.echo(f"{name} is in {place}")


@app.command()
def show(
    source: Annotated[str, typer.Argument(help="A known name, folder:PATH, npz:PATH, module:function or a path.")],
    kind: Annotated[str, typer.Option("--split", help="One of: iid, step, dirichlet, column.")] = "step",
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 10,
    server: Annotated[
        int | None, typer.Option(help="Images set apart for the server; default: a fifth of the training data.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed, another split.")] = 0,
    major_classes: Annotated[int | None, typer.Option(help="step: large classes of a client [2].")] = None,
    minor_images: Annotated[int | None, typer.Option(help="step: images of every other class [10].")] = None,
    major_share: Annotated[float | None, typer.Option(help="step: part of a class at its major clients.")] = None,
    alpha: Annotated[float | None, typer.Option(help="dirichlet: small is uneven [0.1].")] = None,
    to: Annotated[Path | None, typer.Option(help="The PNG; default: SOURCE-SPLIT.png in this directory.")] = None,
) -> None:
    """Draw who has which images: clients × classes, the area of a bubble is the number of images."""
    from fedbe.core.files import write_atomic
    from fedbe.data import load_task, plot, split
    from fedbe.report.figures import draw
    from fedbe.report.split_chart import split_chart

    train = load_task(source, seed=seed).train
    settings: dict[str, Any] = {
        "major_classes": major_classes,
        "minor_images": minor_images,
        "major_share": major_share,
        "alpha": alpha,
    }
    if kind == "column":
        if train.clients is None:
            raise DataError(f"{train.name} has no column of client ids; choose another split")
        settings["ids"] = train.clients
    apart = len(train) // 5 if server is None else server
    parts = split(kind, train.labels, clients=clients, server=apart, seed=seed, **settings)
    counts = parts.counts(train.labels, len(train.classes))
    title = f"{train.name}, {kind} split: {clients} clients, {len(parts.server):,} images at the server"
    out.print(plot.in_terminal(counts, train.classes, title))
    target = to or Path(f"{train.name}-{kind}.png")
    chart = split_chart(tuple(map(tuple, counts.tolist())), train.classes, title)
    write_atomic(target, draw(chart, "png"), DataError)
    typer.echo(f"written: {target}")
