"""`fedbe …`: the command line. Heavy modules are imported by the commands that need them, so that help is instant."""

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import click
import typer
from rich.text import Text

from fedbe.cli import report
from fedbe.cli.console import err, out, plain_table
from fedbe.cli.data import app as data_app
from fedbe.cli.flower import app as flower_app
from fedbe.cli.reproduce import reproduce
from fedbe.errors import DataError, FedBEError, RecipeError, SettingError
from fedbe.experiment.executors.forkserver import warm_up

app = typer.Typer(
    help="Federated learning by Bayesian model ensemble: FedBE and its baselines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(data_app, name="data")
app.add_typer(flower_app, name="flower")
app.command()(report.report)
app.command()(report.watch)
app.command()(reproduce)

TRAINING = ("run", "compare", "resume", "reproduce")  # the commands that train

RecipeName = Annotated[
    str, typer.Argument(help="A shipped recipe (`fedbe recipes`) or a TOML file.", metavar="[RECIPE]")
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. training.rounds=20.")
]
Workers = Annotated[int | None, typer.Option(min=1, help="Worker processes; default: one a core.")]
Precision = Annotated[str, typer.Option(help="float32, bfloat16 or auto (bfloat16 where the processor has it).")]
Name = Annotated[str | None, typer.Option(help="Name of the folder for the results; default: from the recipe.")]
Runs = Annotated[Path, typer.Option(help="Where result folders are made.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing until it is done.")]
Board = Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard event files beside each run.")]
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN")]


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    """main() reads --debug itself, because errors reach it after this function is gone."""


@app.command()
def run(
    recipe: RecipeName = "digits",
    method: Annotated[str | None, typer.Option(help="A method (`fedbe methods`); default: the recipe's.")] = None,
    seed: Annotated[int, typer.Option(help="All randomness follows from it.")] = 0,
    changes: Changes = None,
    workers: Workers = None,
    precision: Precision = "auto",
    name: Name = None,
    runs: Runs = Path("runs"),
    quiet: Quiet = False,
    tensorboard: Board = False,
) -> None:
    """Train one federation with one method."""
    warm_up()
    from fedbe.core.compute import resolve_precision
    from fedbe.experiment import loop as single
    from fedbe.experiment.recipe_files import load_recipe

    chosen = load_recipe(recipe, changes or ())
    title = method or chosen.method
    folder = _folder(runs, name, f"{chosen.name}-{title}-seed{seed}")
    single.create(folder, chosen, title, seed, resolve_precision(precision))
    with single.or_nothing(folder):
        _train(folder, workers, quiet, tensorboard)


@app.command()
def compare(
    recipe: RecipeName = "digits",
    methods: Annotated[
        str, typer.Option(help="Methods, with commas; the first is the one to compare with.")
    ] = "fedavg,v-distillation,fedbe",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds: 0, 1, …")] = 3,
    changes: Changes = None,
    workers: Workers = None,
    precision: Precision = "auto",
    name: Name = None,
    runs: Runs = Path("runs"),
    quiet: Quiet = False,
    tensorboard: Board = False,
) -> None:
    """Train several methods on the same splits from the same weights, and say which is better and how sure that is."""
    warm_up()
    from fedbe.core.compute import resolve_precision
    from fedbe.experiment import comparison as several
    from fedbe.experiment import loop as single
    from fedbe.experiment.recipe_files import load_recipe

    chosen = load_recipe(recipe, changes or ())
    names = [m.strip() for m in methods.split(",") if m.strip()]
    folder = _folder(runs, name, f"{chosen.name}-compare")
    several.create(folder, chosen, names, range(seeds), resolve_precision(precision))
    with single.or_nothing(folder):
        _train(folder, workers, quiet, tensorboard)


@app.command()
def resume(run: RunFolder, workers: Workers = None, quiet: Quiet = False, tensorboard: Board = False) -> None:
    """Go on with a run or a comparison that was stopped; the result is the same to the last bit."""
    warm_up()
    _train(run, workers, quiet, tensorboard)


@app.command()
def evaluate(run: RunFolder, data: Annotated[str | None, typer.Option(help="Another data source.")] = None) -> None:
    """Measure the final model of a run on test data."""
    from fedbe import data as sources
    from fedbe.experiment import saved_model
    from fedbe.experiment.loop import read_recipe

    loaded = saved_model.open_run(run)
    test = sources.load_task(data or read_recipe(run).data.source).test
    if test.classes != loaded.classes:
        raise DataError(f"the model knows {len(loaded.classes)} classes, the data has other ones: {test.name}")
    found = loaded.metrics(test.inputs, test.labels)
    out.print(f"{test.name}, {len(test)} test examples: accuracy {100 * found.accuracy:.2f} %")
    out.print(f"nll {found.nll:.4f}, ece {found.ece:.4f}, mean confidence {100 * found.confidence:.2f} %")


@app.command()
def predict(run: RunFolder, images: Annotated[list[Path], typer.Argument(help="Image files.")]) -> None:
    """Name the class of images with the final model of a run."""
    from fedbe.experiment import saved_model

    loaded = saved_model.open_run(run)
    probabilities = loaded.probabilities(saved_model.read_images(images, loaded.spec.shape))
    for path, row in zip(images, probabilities, strict=True):
        top = row.topk(min(3, len(row)))
        guesses = ", ".join(
            f"{loaded.classes[i]} {100 * p:.1f} %"
            for p, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)
        )
        out.print(f"{path}: {guesses}")


@app.command("methods")
def list_methods() -> None:
    """List every method of the catalogue."""
    from fedbe.algorithms.methods import METHODS

    table = plain_table("name", "method", "what it does")
    for method in METHODS.values():
        table.add_row(method.name, method.title, method.summary)
    out.print(table)


@app.command("recipes")
def list_recipes() -> None:
    """List the recipes that come with fedbe."""
    from fedbe.experiment.recipe_files import available_recipes, load_recipe

    table = plain_table("name", "what it is")
    for name in available_recipes():
        table.add_row(name, load_recipe(name).summary)
    out.print(table)


@app.command()
def show(recipe: RecipeName = "digits", changes: Changes = None) -> None:
    """Print every setting of a recipe as TOML, a recipe itself; and, as comments, those that its method runs with."""
    import tomli_w

    from fedbe.experiment.recipe_files import dump_recipe, load_recipe

    chosen = load_recipe(recipe, changes or ())
    method = chosen.method_for()
    typer.echo(tomli_w.dumps(dump_recipe(chosen)))
    typer.echo(
        f"# {method.title} runs with these settings: the recipe's, then those of the variant, then the defaults."
    )
    for line in tomli_w.dumps(method.settings()).splitlines():
        typer.echo(f"# {line}")


def _folder(runs: Path, name: str | None, default: str) -> Path:
    """runs/NAME; a default name that is taken gets a number, a given one is refused by `create`."""
    if name is not None:
        if not name.strip("./ "):
            raise SettingError(f"--name must be a name for a folder, got '{name}'")
        return runs / name
    taken = (runs / default).exists()
    numbered = (runs / f"{default}-{i}" for i in range(2, 10_000))
    return next(path for path in numbered if not path.exists()) if taken else runs / default


def _train(folder: Path, workers: int | None, quiet: bool, tensorboard: bool) -> None:
    """Train what is left of a run or a comparison and show its result, or say how to go on."""
    from fedbe.core.compute import cores
    from fedbe.experiment import comparison as several
    from fedbe.experiment import loop as single
    from fedbe.experiment.callbacks import All, TensorBoard, observer
    from fedbe.experiment.executors.process_pool import ProcessPool

    comparison = several.is_comparison(folder)
    cells = [c for c in (several.cells(folder) if comparison else [folder]) if not single.is_done(c)]
    seen = observer(sum(single.rounds_left(cell) for cell in cells), quiet=quiet, console=err)
    if cells:
        task = single.read_task(cells[0])
        with interruptible() as stopped, ProcessPool(workers or cores()) as pool:
            for cell in cells:
                watchers = All([seen, TensorBoard(cell)]) if tensorboard else seen
                together = several.first_round(cell) if comparison else None
                if not single.execute(cell, pool, watchers, should_stop=stopped, task=task, first_round=together):
                    err.print(f"stopped, nothing is lost; go on with: fedbe resume {shlex.quote(str(folder))}")
                    raise typer.Exit(130)
                if comparison:
                    several.drop_first_rounds(folder)
    _show_comparison(folder) if comparison else _show_run(folder)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C asks to stop after this step, the second stops at once; what is yielded says if one came."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt
        err.print("\nstopping when the current step is done; press Ctrl-C again to stop at once")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(came)
    except KeyboardInterrupt:
        err.print("stopped at once; every finished round is kept, and of a long round the clients that are done")
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGINT, before)


def _show_run(folder: Path) -> None:
    from fedbe.experiment.loop import read_info, read_recipe

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
    from fedbe.algorithms.methods import get
    from fedbe.experiment import comparison as several

    rows = several.table(folder)
    several.write_report(folder, rows)
    best = max(rows, key=lambda r: r.mean).method
    table = plain_table("method", "test accuracy, %", f"against {get(rows[0].method).title}", "p (paired)")
    for row in rows:
        table.add_row(*several.cells_of(row), style="bold" if row.method == best else "")
    out.print(table)
    out.print(several.sentence(rows))
    page = report.write_page(report.build(report.read_studies([folder]), own=True), folder / "report.html")
    out.print(f"report: {page}")


def main(interrupt: "signal._HANDLER | None" = None) -> None:
    """Run a command: every expected error is one sentence and an exit code; --debug shows the traceback.

    `interrupt` is put back as the answer to Ctrl-C, unless the command trains: that says itself when it listens.
    """
    if debug := "--debug" in sys.argv:
        sys.argv.remove("--debug")  # it may stand anywhere
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    if interrupt is not None and command not in TRAINING:
        signal.signal(signal.SIGINT, interrupt)
    try:
        code = app(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = 2 if isinstance(error, click.UsageError) else 1
    except (KeyboardInterrupt, click.Abort):
        code = 130
    except FedBEError as error:
        if debug:
            raise
        err.print(f"fedbe: {error}")
        code = 2 if isinstance(error, SettingError | RecipeError) else 1
    except Exception as error:
        if debug:
            raise
        what = str(error).strip().splitlines() or ["no reason given"]
        err.print(f"fedbe: this should not happen: {type(error).__name__}: {what[0]}; --debug shows where")
        code = 1
    sys.exit(code if isinstance(code, int) else 0)
