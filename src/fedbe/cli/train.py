"""`fedbe run`, `fedbe compare` and `fedbe resume`: the commands that train."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fedbe.cli.console import err, out, plain_table
from fedbe.cli.interrupt import interruptible
from fedbe.cli.options import (
    DEVICE_HELP,
    Address,
    CPUsPerWorker,
    Device,
    ExecutorKind,
    GPUsPerWorker,
    Overrides,
    Precision,
    Quiet,
    RecipeName,
    RunOrComparison,
    RunsFolder,
    Spread,
    Trust,
    Workers,
    Workplace,
)
from fedbe.errors import SettingError

Name = Annotated[str | None, typer.Option(help="Name of the result folder; default: made from the recipe.")]
Track = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help="Send all numbers to tensorboard, wandb or mlflow, too; may be given several times."
    ),
]


def run(
    recipe: RecipeName = "digits",
    method: Annotated[str | None, typer.Option(help="A method (`fedbe methods`); default: the recipe's.")] = None,
    seed: Annotated[int, typer.Option(help="The seed of all random numbers.")] = 0,
    changes: Overrides = None,
    workers: Workers = None,
    executor: ExecutorKind = "processes",
    address: Address = None,
    cpus_per_worker: CPUsPerWorker = None,
    gpus_per_worker: GPUsPerWorker = None,
    device: Device = "auto",
    precision: Precision = "auto",
    name: Name = None,
    runs: RunsFolder = Path("runs"),
    quiet: Quiet = False,
    track: Track = None,
    trust: Trust = False,  # noqa: ARG001 (its callback acts)
) -> None:
    """Train one federation with one method."""
    where = Workplace(workers, executor, address, "clients", cpus_per_worker, gpus_per_worker)
    where.warm_up()
    from fedbe.core.compute import resolve_precision
    from fedbe.experiment import run_folder
    from fedbe.experiment.recipe_files import load_recipe

    settings = load_recipe(recipe, changes or ())
    method = method or settings.method
    folder = _result_folder(runs, name, f"{settings.name}-{method}-seed{seed}")
    chosen = where.choose_device(device, quiet)
    run_folder.create(folder, settings, method, seed, resolve_precision(precision, chosen), chosen)
    with run_folder.discard_on_error(folder):
        _train(folder, where, quiet, track or ())


def compare(
    recipe: RecipeName = "digits",
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas; the others are compared with the first.")
    ] = "fedavg,v-distillation,fedbe",
    seeds: Annotated[int, typer.Option(min=1, help="The number of seeds: 0, 1, …")] = 5,
    changes: Overrides = None,
    workers: Workers = None,
    executor: ExecutorKind = "processes",
    address: Address = None,
    cpus_per_worker: CPUsPerWorker = None,
    gpus_per_worker: GPUsPerWorker = None,
    spread: Spread = "auto",
    device: Device = "auto",
    precision: Precision = "auto",
    name: Name = None,
    runs: RunsFolder = Path("runs"),
    quiet: Quiet = False,
    track: Track = None,
    trust: Trust = False,  # noqa: ARG001 (its callback acts)
) -> None:
    """Train several methods on the same splits and initial weights, and compare them."""
    where = Workplace(workers, executor, address, spread, cpus_per_worker, gpus_per_worker)
    where.warm_up()
    from fedbe.core.compute import resolve_precision
    from fedbe.experiment import comparison, run_folder
    from fedbe.experiment.recipe_files import load_recipe

    settings = load_recipe(recipe, changes or ())
    names = [method.strip() for method in methods.split(",") if method.strip()]
    chosen = where.choose_device(device, quiet)
    precision = resolve_precision(precision, chosen)
    same = comparison.find_same(runs, settings, names, range(seeds), precision) if not name else None
    if same is not None:
        finished = all(run_folder.read_info(cell).finished for cell in comparison.cells(same))
        action = "showing" if finished else "continuing"
        err.print(f"{same} has the same settings; {action} it. For a new comparison give it a --name.")
        _train(same, where, quiet, track or (), None if device == "auto" else chosen)
        return
    folder = _result_folder(runs, name, f"{settings.name}-compare")
    comparison.create(folder, settings, names, range(seeds), precision, chosen)
    with run_folder.discard_on_error(folder):
        _train(folder, where, quiet, track or ())


def resume(
    run: RunOrComparison,
    workers: Workers = None,
    executor: ExecutorKind = "processes",
    address: Address = None,
    cpus_per_worker: CPUsPerWorker = None,
    gpus_per_worker: GPUsPerWorker = None,
    spread: Spread = "auto",
    device: Annotated[str | None, typer.Option(help=f"{DEVICE_HELP} Default: the run's.")] = None,
    quiet: Quiet = False,
    track: Track = None,
    trust: Trust = False,  # noqa: ARG001 (its callback acts)
) -> None:
    """Continue a stopped run or comparison; on the same kind of device the result is the same to the last bit."""
    where = Workplace(workers, executor, address, spread, cpus_per_worker, gpus_per_worker)
    where.warm_up()
    chosen = None if device is None else where.choose_device(device, quiet)
    if where.kind == "processes":  # workers of a cluster have their own devices
        _warn_of_slow_precision(run, chosen)
    _train(run, where, quiet, track or (), chosen)


def _warn_of_slow_precision(folder: Path, device: str | None) -> None:
    """Say that the device, by default a run's own, emulates the precision that the unfinished runs began with."""
    from fedbe.core.compute import resolve_precision
    from fedbe.core.devices import is_here
    from fedbe.experiment import comparison, run_folder

    run_folders = comparison.cells(folder) if comparison.is_comparison(folder) else [folder]
    infos = [run_folder.read_info(path) for path in run_folders if not run_folder.is_done(path)]
    devices = {device or info.device for info in infos if info.precision == "bfloat16"}
    # A run whose device is not here does not continue, and another sentence says so.
    for slow in sorted(d for d in devices if is_here(d) and resolve_precision("auto", d) != "bfloat16"):
        err.print(f"{slow} has no units for bfloat16, in which this run began: it continues in bfloat16, much slower")


def _result_folder(runs: Path, name: str | None, default: str) -> Path:
    """runs/NAME. A default name that exists gets a number; `create` refuses a given one that exists."""
    if name is not None:
        if not name.strip("./ "):
            raise SettingError(f"--name must be the name of a folder, got '{name}'")
        return runs / name
    if not (runs / default).exists():
        return runs / default
    numbered = (runs / f"{default}-{i}" for i in range(2, 10_000))
    return next(path for path in numbered if not path.exists())


def _train(folder: Path, where: Workplace, quiet: bool, track: Sequence[str], device: str | None = None) -> None:
    """Train the unfinished runs of a run folder or a comparison, by default on their device, then show the result."""
    from fedbe.experiment import comparison, run_folder

    compared = comparison.is_comparison(folder)
    run_folders = comparison.cells(folder) if compared else [folder]
    unfinished = [path for path in run_folders if not run_folder.is_done(path)]
    if device is not None:
        for path in unfinished:
            run_folder.move_to_device(path, device)
    if unfinished and not _train_runs(unfinished, folder if compared else None, where, quiet, track):
        err.print(f"stopped, nothing is lost; continue with: fedbe resume {shlex.quote(str(folder))}")
        raise typer.Exit(130)
    if compared:
        _show_comparison(folder)
    else:
        _show_run(folder)


def _train_runs(
    run_folders: Sequence[Path], compared: Path | None, where: Workplace, quiet: bool, track: Sequence[str]
) -> bool:
    """Train runs on the same data. Returns False if Ctrl-C stopped them.

    `compared` is the folder of the comparison that the runs belong to; its runs share the clients of round 1.
    """
    from fedbe.experiment import comparison, run_folder
    from fedbe.experiment.callbacks import progress_callback
    from fedbe.experiment.run_jobs import RunJob, execute_runs, spread_runs

    def ended(_: RunJob) -> None:
        if compared:
            comparison.drop_first_rounds(compared)

    jobs = [
        RunJob(path, first_round=comparison.first_round(path) if compared else None, trackers=tuple(track))
        for path in run_folders
    ]
    rounds = sum(run_folder.rounds_left(path) for path in run_folders)
    where = where.on(run_folder.read_info(run_folders[0]).device)
    with interruptible() as interrupted, where.make_executor() as executor:
        whole = spread_runs(where.spread, jobs, executor)
        progress = progress_callback(rounds, quiet=quiet, console=err, at_once=executor.workers if whole else 1)
        return execute_runs(jobs, executor, progress, interrupted, whole=whole, ended=ended)


def _show_run(folder: Path) -> None:
    from fedbe.experiment.run_folder import read_info, read_recipe

    info, recipe = read_info(folder), read_recipe(folder)
    assert info.final is not None, "a finished run has a final result"
    method = recipe.method_for(info.method)
    out.print(
        Text.assemble(
            (method.title, "bold"),
            f" on {recipe.data.source}, seed {info.seed}: test accuracy ",
            (f"{100 * info.final['accuracy']:.1f} %", "bold"),
            f" after round {recipe.rounds(method)}. Results: {folder}",
        )
    )


def _show_comparison(folder: Path) -> None:
    from fedbe import report
    from fedbe.algorithms.methods import get_method
    from fedbe.experiment import comparison

    rows = comparison.table(folder)
    comparison.write_report(folder, rows)
    best = max(rows, key=lambda row: row.mean).method
    table = plain_table("method", "test accuracy, %", f"against {get_method(rows[0].method).title}", "p (paired)")
    for row in rows:
        table.add_row(*comparison.cells_of(row), style="bold" if row.method == best else "")
    out.print(table)
    out.print(comparison.sentence(rows))
    page = report.write_page(report.build_sections(report.read_groups([folder]), trusted=True), folder / "report.html")
    out.print(f"report: {page}")
