"""`fedbe reproduce`: one command for each table and figure of the paper."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedbe.errors import SettingError, nearest
from fedbe.simulation.warm import warm_up


def reproduce(
    name: Annotated[str | None, typer.Argument(help="A study that --list shows.")] = None,
    scale: Annotated[str, typer.Option(help="smoke (seconds, embedded data), cpu (reduced), paper (exact).")] = "cpu",
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds; default: the scale's.")] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="List the studies with their cost on this machine.")
    ] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes; default: one a core.")] = None,
    precision: Annotated[str, typer.Option(help="float32, bfloat16 or auto.")] = "auto",
    runs: Annotated[Path, typer.Option(help="Where result folders are made.")] = Path("runs"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing until it is done.")] = False,
) -> None:
    """Run a table or figure of the paper: ours beside the paper's numbers. What is done is not run again."""
    from fedbe.reproduce.study import SCALES, load_study

    if show_list or name is None:
        _list()
        return
    chosen = next((s for s in SCALES if s == scale), None)
    if chosen is None:
        raise SettingError(f"unknown scale '{scale}': {nearest(scale, SCALES)}")
    warm_up()
    from fedbe.cli import err, interruptible, out, resolve_precision
    from fedbe.reproduce import play, table
    from fedbe.simulation.workers import Pool
    from fedbe.watching import observer

    study = load_study(name)
    root = runs / f"reproduce-{name}-{chosen}"
    todo = list(play.places(study, chosen, seeds or study.limits(chosen).seeds, root))
    root.mkdir(parents=True, exist_ok=True)
    seen = observer(sum(play.rounds_left(place) for place in todo), quiet=quiet, console=err)
    with interruptible() as stopped, Pool(workers or os.cpu_count() or 1) as pool:
        whole, missing = play.play(todo, pool, seen, resolve_precision(precision), stopped)
    written = table.write(study, chosen, todo, missing, root)
    if not whole:
        err.print("stopped, nothing is lost; the same command goes on")
        raise typer.Exit(130)
    out.print(written.read_text(), markup=False)
    out.print(f"table: {written}")


def _list() -> None:
    from fedbe.cli import err, out
    from fedbe.reproduce import cost
    from fedbe.reproduce.study import SCALES, available, load_study
    from fedbe.watching import duration

    table = Table("name", "what", *SCALES, box=None, padding=(0, 2, 0, 0), header_style="bold")
    with err.status("measuring this machine"):
        for name in available():
            study = load_study(name)
            table.add_row(name, study.title, *(duration(cost.seconds(study, scale)) for scale in SCALES))
    out.print(table)
    out.print("Estimates in float32 for all cells and seeds of a scale (smoke 1, cpu 1, paper 5), measured just now.")
