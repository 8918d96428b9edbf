"""`fedbe reproduce`: one command for each table and figure of the paper."""

import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fedbe.cli.console import err, out
from fedbe.cli.interrupt import interruptible
from fedbe.cli.options import (
    Address,
    CPUsPerWorker,
    Device,
    ExecutorKind,
    GPUsPerWorker,
    Precision,
    Quiet,
    RunsFolder,
    Spread,
    Workers,
    Workplace,
    choose_device,
)
from fedbe.core.files import make_folder
from fedbe.errors import RunError

if TYPE_CHECKING:
    from fedbe.report.chart import Chart
    from fedbe.reproduce.study import Cell, Study
    from fedbe.reproduce.study_runner import StudyPlan

DEFAULT_SCALE = "cpu"
ASK_SECONDS = 3600.0


def reproduce(
    name: Annotated[str | None, typer.Argument(help="A study that --list shows.")] = None,
    scale: Annotated[
        str | None,
        typer.Option(help="smoke (seconds, embedded data), cpu (reduced; the default), paper (exact)."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="The number of seeds; default: the scale's.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="VALUE", help="Run only cells with this value, e.g. step or fedbe.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of every cell, e.g. training.epochs=5."),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the studies and their cost on this machine.")] = False,
    train: Annotated[bool, typer.Option(help="--no-train: only write the table and pictures of existing runs.")] = True,
    workers: Workers = None,
    executor: ExecutorKind = "processes",
    address: Address = None,
    cpus_per_worker: CPUsPerWorker = None,
    gpus_per_worker: GPUsPerWorker = None,
    spread: Spread = "auto",
    device: Device = "auto",
    precision: Precision = "auto",
    runs: RunsFolder = Path("runs"),
    quiet: Quiet = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Start hours of work without asking.")] = False,
) -> None:
    """Run a table or figure of the paper, and show our numbers next to the paper's.

    Finished runs are not run again. Without --scale the cost is shown first, and hours of work need a yes.
    """
    if show_list or name is None:
        _list_studies(choose_device(device, quiet=True))
        return
    from fedbe.reproduce.study import load_study, parse_scale

    chosen = parse_scale(scale or DEFAULT_SCALE)
    where = Workplace(workers, executor, address, spread, cpus_per_worker, gpus_per_worker)
    if train:
        where.warm_up()
    from fedbe.core.compute import resolve_precision
    from fedbe.reproduce import table
    from fedbe.reproduce.study_runner import check_runs, plan_study

    study = load_study(name).with_changes(changes or ())
    root = runs / f"reproduce-{name}-{chosen}"
    plan = plan_study(study, chosen, root, seeds=seeds, values=only or (), train=train)
    chosen_device = where.choose_device(device, quiet)
    precision = resolve_precision(precision, chosen_device)
    check_runs(plan.shown, precision)  # the table also shows runs that were not selected now
    if not train and not root.is_dir():
        raise RunError(f"{root} does not exist: leave out --no-train, or choose another folder with --runs")
    if scale is None and plan.selected:
        _show_cost(plan, chosen_device, yes)
    make_folder(root)
    if device != "auto":
        _move_runs(plan, chosen_device)
    finished, missing, charts = _train_and_analyse(
        study, plan, where.on(chosen_device), precision, chosen_device, quiet
    )
    path, pictures = table.write(study, chosen, plan.runs, missing, root, charts)
    if not finished:
        err.print("stopped, nothing is lost; the same command continues")
        raise typer.Exit(130)
    _print_results(path, pictures)


def _move_runs(plan: "StudyPlan", device: str) -> None:
    """Continue runs on this device that were begun on another."""
    from fedbe.experiment import run_folder

    for run in plan.selected:
        if run.exists:
            run_folder.move_to_device(run.folder, device)


def _print_results(path: Path, pictures: Iterable[Path]) -> None:
    out.print(path.read_text())
    out.print(f"table: {path}")
    for picture in pictures:
        out.print(f"picture: {picture}, .png; its numbers: {picture.with_suffix('.csv')}")


def _train_and_analyse(
    study: "Study", plan: "StudyPlan", where: Workplace, precision: str, device: str, quiet: bool
) -> "tuple[bool, dict[Cell, str], list[Chart]]":
    """Returns whether all is finished, the reasons why cells have no number, and the charts of the analysis."""
    from fedbe.experiment.callbacks import progress_callback
    from fedbe.experiment.run_jobs import spread_runs
    from fedbe.reproduce.study_analysis import analyse
    from fedbe.reproduce.study_runner import plan_jobs, run_study

    finished = True
    jobs, missing = plan_jobs(plan.selected, precision, device)
    with interruptible() as interrupted, where.make_executor() if plan.selected else nullcontext() as executor:
        if executor:
            whole = spread_runs(where.spread, jobs, executor)
            at_once = executor.workers if whole else 1
            progress = progress_callback(plan.rounds_left, quiet=quiet, console=err, at_once=at_once)
            finished = run_study(jobs, executor, progress, interrupted, whole=whole)
        if not study.analysis:
            return finished, missing, []
        with nullcontext() if quiet else err.status("analysing finished runs"):
            analysed, not_analysed, charts = analyse(
                study, plan.shown, executor if finished else None, interrupted, requested=plan.selected
            )
    return finished and analysed, {**not_analysed, **missing}, charts


def _show_cost(plan: "StudyPlan", device: str, yes: bool) -> None:
    """Say how long the runs will take; ask before hours of work, or refuse them where nobody can answer."""
    from fedbe.core.devices import is_here
    from fedbe.reproduce import cost

    device = device if is_here(device) else "cpu"  # what only the workers have cannot be measured here
    with err.status("measuring this machine"):
        seconds = cost.seconds_left(plan.selected, device)
    text = f"the runs that are left take about {_duration(seconds)} on {device} ({_busy() or 'measured now'})"
    if yes or seconds < ASK_SECONDS:
        err.print(text)
    elif not can_ask():
        raise RunError(f"{text}: start them with --yes, or choose less with --scale smoke, --only or --seeds")
    elif not typer.confirm(f"{text}. Start them?", err=True):
        raise typer.Exit(1)


def can_ask() -> bool:
    """Whether a person can answer a question: stdin is a terminal."""
    return sys.stdin.isatty()


def _busy() -> str:
    """A remark if other programs use this machine, so that measured times are too long."""
    from fedbe.core.compute import cores
    from fedbe.reproduce import cost

    load = cost.busy_cores()
    return "" if load is None else f"measured while the machine is busy, load {load:.1f} on {cores()} cores: too high"


def _list_studies(device: str) -> None:
    """Print a line of costs for each study and its title below it, within 80 columns."""
    from fedbe.reproduce import cost
    from fedbe.reproduce.study import SCALES, available_studies, load_study

    rows, titles = [("study", "smoke", "cpu", "cpu, a column", "paper")], [""]
    with err.status("measuring this machine"):
        # Roughly the paper's order: tables, the appendix's tables, figures.
        for name in sorted(available_studies(), key=lambda n: (not n.startswith("table"), n.startswith("fig"), n)):
            study = load_study(name)
            one_seed = {scale: cost.seconds_by_column(study, scale, device).values() for scale in SCALES}
            whole = {s: _duration(study.limits(s).seeds * sum(columns)) for s, columns in one_seed.items()}
            rows.append((name, whole["smoke"], whole["cpu"], _duration(max(one_seed["cpu"])), whole["paper"]))
            titles.append(study.title)
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row, title in zip(rows, titles, strict=True):
        first, *rest = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        out.print(Text.assemble((first, "bold"), f"  {'  '.join(rest).rstrip()}"))
        if title:
            out.print(f"  {title}")
    out.print(f"\nEstimates for all cells and seeds on this machine ({device}), in float32,")
    out.print(f"{_busy() or 'measured now'}.")
    out.print("`cpu, a column` is the most expensive column with one seed. The table that")
    out.print("`fedbe reproduce NAME --scale SCALE` writes says what the scale changes.")


def _duration(seconds: float) -> str:
    """
    >>> _duration(3), _duration(65), _duration(9000), _duration(9e5)
    ('seconds', '1 min', '2.5 h', '10 days')
    """
    if seconds < 20:
        return "seconds"  # starting takes most of them
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:,.0f} days"
