"""The `fedbe` command: its subcommands, and one sentence and an exit code for every error.

Commands import heavy modules themselves, so that `fedbe --help` does not wait for torch.
"""

import signal
import sys
import warnings
from collections.abc import Callable
from typing import Annotated

import click
import typer
from typer.core import TyperGroup

from fedbe.cli import catalogue, data, doctor, flower, model, report, reproduce, train
from fedbe.cli.console import err, out
from fedbe.errors import FedBEError, ModelWarning, RecipeError, RunWarning, SettingError

HELP_NAMES = {"help_option_names": ["-h", "--help"]}

# The help lists the commands in this order, that of their use.
COMMANDS: dict[str, typer.Typer | Callable[..., None]] = {
    "doctor": doctor.doctor,
    "methods": catalogue.methods,
    "recipes": catalogue.recipes,
    "show": catalogue.show,
    "data": data.app,
    "run": train.run,
    "compare": train.compare,
    "resume": train.resume,
    "evaluate": model.evaluate,
    "predict": model.predict,
    "report": report.report,
    "watch": report.watch,
    "reproduce": reproduce.reproduce,
    "flower": flower.app,
}


class _InOrder(TyperGroup):
    """Lists the commands in the order of `COMMANDS`: Typer alone lists groups after all commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)


app = typer.Typer(
    cls=_InOrder,
    help="Federated learning by Bayesian model ensemble: FedBE and its baselines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP_NAMES,
)
for _name, _command in COMMANDS.items():
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name)
    else:
        app.command(_name)(_command)

TRAINING = ("run", "compare", "resume", "reproduce")  # these commands handle Ctrl-C themselves


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        out.print(f"fedbe {version('fedbe')}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Declare --debug for the help. `main` reads it, because errors arrive there."""


def main(interrupt: "signal._HANDLER | None" = None) -> None:
    """Run the command in `sys.argv` and exit.

    An expected error becomes one sentence and an exit code; with --debug it is raised instead.

    Args:
        interrupt: The handler of Ctrl-C for commands that do not train. None leaves the handler as it is.
    """
    if debug := "--debug" in sys.argv:
        sys.argv.remove("--debug")  # it may be anywhere on the command line
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    if interrupt is not None and command not in TRAINING:
        signal.signal(signal.SIGINT, interrupt)
    warnings.showwarning = _show_warning  # as one sentence, without a line of our source
    try:
        code = app(standalone_mode=False)
    except (KeyboardInterrupt, click.Abort):
        code = 130
    except click.ClickException as error:
        error.show()
        code = 2 if isinstance(error, click.UsageError) else 1
    except Exception as error:
        if debug:
            raise
        code = _report_error(error)
    sys.exit(code if isinstance(code, int) else 0)


def _show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    if issubclass(category, RunWarning | ModelWarning):
        err.print(f"fedbe: {message}")


def _report_error(error: Exception) -> int:
    """Print an error as one sentence. Returns the exit code: 2 for a wrong setting, else 1."""
    if isinstance(error, FedBEError):
        err.print(f"fedbe: {error}")
        return 2 if isinstance(error, SettingError | RecipeError) else 1
    lines = str(error).strip().splitlines() or ["no message"]
    err.print(f"fedbe: unexpected error: {type(error).__name__}: {lines[0]}; --debug shows the traceback")
    return 1
