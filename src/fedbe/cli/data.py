"""`fedbe data`: list and download data sets, show a split. Commands import torch only if they need it."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from fedbe.cli.console import err, out, plain_table
from fedbe.cli.options import Trust
from fedbe.errors import DataError

app = typer.Typer(help="Data sets: list them, download one, show a split.", no_args_is_help=True)


@app.command("list")
def list_datasets() -> None:
    """List the data sets: what each is, whether it is on this machine, its size and its licence."""
    from fedbe.data.catalogue import DATASETS, data_root, local_path

    table = plain_table("name", "what", "here", "size", "licence")
    table.title, table.columns[3].justify = f"data sets in {data_root()}", "right"
    for name, info in DATASETS.items():
        here = "yes" if info.read is None or local_path(name) else "no"
        size = f"{info.megabytes} MB" if info.read else "–"
        table.add_row(name, info.description, here, size, info.licence)
    table.caption = "download one with: fedbe data get NAME"
    out.print(table)


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="A name that `fedbe data list` shows.")],
    to: Annotated[
        Path | None, typer.Option(help="The data directory; default: FEDBE_DATA or the user's cache directory.")
    ] = None,
) -> None:
    """Download a data set: resumable, checked by SHA-256, complete or absent."""
    from fedbe.data import download

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, console=err) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(file: str, done: int, total: int) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file, total=None)
            bars.update(tasks[file], completed=done, total=total or None)

        path = download.download_dataset(name, to, progress)
    typer.echo(f"{name} is in {path}")


@app.command()
def show(
    source: Annotated[
        str,
        typer.Argument(help="A known name, folder:PATH, npz:PATH, csv:PATH, parquet:PATH, module:function or a path."),
    ],
    kind: Annotated[
        str, typer.Option("--split", help="One of: iid, step, dirichlet, quantity, shards, column.")
    ] = "step",
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 10,
    server: Annotated[
        int | None, typer.Option(help="Examples for the server; default: a fifth of the training data.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    major_classes: Annotated[int | None, typer.Option(help="step: number of major classes of each client [2].")] = None,
    minor_images: Annotated[int | None, typer.Option(help="step: examples of each other class [10].")] = None,
    major_share: Annotated[float | None, typer.Option(help="step: part of a class for its major clients.")] = None,
    alpha: Annotated[
        float | None, typer.Option(help="dirichlet and quantity: smaller is more uneven [0.1 and 0.5].")
    ] = None,
    shards_per_client: Annotated[int | None, typer.Option(help="shards: number of shards of each client [2].")] = None,
    to: Annotated[Path | None, typer.Option(help="The PNG file; default: SOURCE-SPLIT.png in this directory.")] = None,
    trust: Trust = False,  # noqa: ARG001 (its callback acts)
) -> None:
    """Show how many examples of each class each client has; the area of a bubble is the number of examples."""
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
        "shards_per_client": shards_per_client,
    }
    if kind == "column":
        if train.client_ids is None:
            raise DataError(f"{train.name} has no client ids; choose another split")
        settings["ids"] = train.client_ids
    server_size = len(train) // 5 if server is None else server
    partition = split(kind, train.labels, clients=clients, server=server_size, seed=seed, **settings)
    counts = partition.counts(train.labels, len(train.classes))
    title = f"{train.name}, {kind} split: {clients} clients, {len(partition.server):,} examples at the server"
    out.print(plot.split_table(counts, train.classes, title))
    target = to or Path(f"{train.name}-{kind}.png")
    chart = split_chart(tuple(map(tuple, counts.tolist())), train.classes, title)
    write_atomic(target, draw(chart, "png"), DataError)
    typer.echo(f"written: {target}")
