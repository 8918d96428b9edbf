"""`fedbe reproduce`: one command for each table and figure of the paper."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fedbe.cli.console import err, out
from fedbe.cli.interrupt import interruptible
from fedbe.cli.options import Precision, Quiet, RunsFolder, Workers
from fedbe.core.files import make_folder
from fedbe.errors import RunError, SettingError, nearest
from fedbe.experiment.executors.forkserver import warm_up

if TYPE_CHECKING:
    from fedbe.report.chart import Chart


def reproduce(
    name: Annotated[str | None, typer.Argument(help="A study that --list shows.")] = None,
    scale: Annotated[str, typer.Option(help="smoke (seconds, embedded data), cpu (reduced), paper (exact).")] = "cpu",
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds; default: the scale's.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="VALUE", help="Run only cells with this value, e.g. step or fedbe.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of every cell, e.g. training.epochs=5."),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="List the studies with their cost on this machine.")
    ] = False,
    train: Annotated[
        bool, typer.Option(help="--no-train: only write table and picture of the runs that are there.")
    ] = True,
    workers: Workers = None,
    precision: Precision = "auto",
    runs: RunsFolder = Path("runs"),
    quiet: Quiet = False,
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
    from fedbe.core.compute import cores, resolve_precision
    from fedbe.experiment.callbacks import observer
    from fedbe.experiment.executors.process_pool import ProcessPool
    from fedbe.reproduce import analysis, study_runner, table

    study = load_study(name).with_changes(changes or ())
    root = runs / f"reproduce-{name}-{chosen}"
    asked = seeds or study.limits(chosen).seeds
    everywhere = list(study_runner.places(study, chosen, max(asked, study_runner.seeds_there(root)), root))
    wanted = study.wanted(only or (), chosen)
    todo = [place for place in everywhere if place.cell in wanted and place.seed < asked and train]
    beside = [place for place in everywhere if (place.folder / "run.json").exists()]
    study_runner.check(
        [*todo, *beside], resolve_precision(precision)
    )  # the table shows all that is there, wanted now or not
    if not train and not root.is_dir():
        raise RunError(f"there is no {root}: nothing to draw; leave out --no-train, or choose a folder with --runs")
    make_folder(root)
    left = {place.folder: study_runner.rounds_left(place) for place in todo}  # cells that share a run have one folder
    seen = observer(sum(left.values()), quiet=quiet, console=err)
    whole, missing, charts = True, dict[tuple[str, ...], str](), list["Chart"]()
    with interruptible() as stopped, ProcessPool(workers or cores()) if todo else nullcontext() as pool:
        if pool:
            whole, missing = study_runner.play(todo, pool, seen, resolve_precision(precision), stopped)
        if study.analysis:
            with nullcontext() if quiet else err.status("looking at what was trained"):
                looker, shown = pool if whole else None, [p for p in everywhere if p in todo or p in beside]
                seen_all, unseen, charts = analysis.analyse(study, shown, looker, stopped, asked=todo)
            whole, missing = whole and seen_all, {**unseen, **missing}
    written, pictures = table.write(study, chosen, everywhere, missing, root, charts)
    if not whole:
        err.print("stopped, nothing is lost; the same command goes on")
        raise typer.Exit(130)
    out.print(written.read_text())
    out.print(f"table: {written}")
    for picture in pictures:
        out.print(f"picture: {picture}, .png; its numbers: {picture.with_suffix('.csv')}")


def _list() -> None:
    """A line of costs for each study, and below it what it is: that fits into 80 columns."""
    from fedbe.reproduce import cost
    from fedbe.reproduce.study import SCALES, available, load_study

    rows, titles = [("study", "smoke", "cpu", "cpu, a column", "paper")], [""]
    with err.status("measuring this machine"):
        # The paper's order, more or less: tables, the appendix's tables, figures.
        for name in sorted(available(), key=lambda n: (not n.startswith("table"), n.startswith("fig"), n)):
            study = load_study(name)
            smoke, cpu, paper = (_about(cost.seconds(study, scale)) for scale in SCALES)
            rows.append((name, smoke, cpu, _about(max(cost.seconds_by_column(study, "cpu").values())), paper))
            titles.append(study.title)
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row, title in zip(rows, titles, strict=True):
        first, *rest = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        out.print(Text.assemble((first, "bold"), f"  {'  '.join(rest).rstrip()}"))
        if title:
            out.print(f"  {title}")
    for line in (
        "",
        "Estimates for this machine, measured just now, in float32: all cells and seeds",
        "(paper: five); of cpu also the largest column with one seed. The table that",
        "`fedbe reproduce NAME --scale SCALE` writes says what the scale changes.",
    ):
        out.print(line)


def _about(seconds: float) -> str:
    """
    >>> _about(3), _about(65), _about(9000), _about(9e5)
    ('seconds', '1 min', '2.5 h', '10 days')
    """
    if seconds < 20:
        return "seconds"  # most of which are spent on starting
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:,.0f} days"
