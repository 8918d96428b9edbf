"""Options and arguments that several commands share."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbe.cli.console import err
from fedbe.errors import SettingError
from fedbe.experiment.executors import make_executor
from fedbe.experiment.executors.forkserver import warm_up

if TYPE_CHECKING:
    from fedbe.experiment.executors.base import Executor

RecipeName = Annotated[
    str, typer.Argument(help="A shipped recipe (`fedbe recipes`) or a TOML file.", metavar="[RECIPE]")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. training.rounds=20.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=0, help="Worker processes; default: one per core, four per accelerator. 0: in this process, for debugging."
    ),
]
ExecutorKind = Annotated[
    str, typer.Option("--executor", help="Where the workers are: processes (this machine) or ray (a Ray cluster).")
]
Address = Annotated[
    str | None, typer.Option(help="Address of the Ray cluster: auto, or HOST:PORT; default: start Ray on this machine.")
]
CPUsPerWorker = Annotated[
    float | None, typer.Option(min=0, help="The CPUs that Ray reserves for a worker; default: 1.", show_default=False)
]
GPUsPerWorker = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="The part of a GPU that Ray reserves for a worker; default: 0.25 with --device cuda, otherwise 0.",
        show_default=False,
    ),
]
Spread = Annotated[
    str,
    typer.Option(
        help="What worker processes share: runs (several at the same time), clients (of one run after the other), or "
        "auto (runs, if there are enough)."
    ),
]
Precision = Annotated[str, typer.Option(help="float32, bfloat16, or auto (bfloat16 if the device supports it).")]
DEVICE_HELP = "cpu, cuda, cuda:0,1 (workers take them in turn), mps, or auto (an accelerator if torch sees one)."
Device = Annotated[str, typer.Option(help=DEVICE_HELP)]
OneDevice = Annotated[
    str, typer.Option("--device", help="cpu, cuda, cuda:1, mps, or auto (an accelerator if torch sees one).")
]
RunsFolder = Annotated[Path, typer.Option(help="The folder for results.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")]


def _trust(value: bool) -> bool:
    if value:
        from fedbe.core import plugins

        plugins.trust()
    return value


Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        callback=_trust,
        help="Allow functions named in the recipe even if they are outside the current directory.",
    ),
]
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN")]
RunOrComparison = Annotated[Path, typer.Argument(help="The folder of a run or a comparison.", metavar="RUN")]


@dataclass(frozen=True)
class Workplace:
    """The options that say where a command trains: --workers, --executor, --address and so on."""

    workers: int | None
    kind: str
    address: str | None
    spread: str = "clients"
    cpus_per_worker: float | None = None
    gpus_per_worker: float | None = None
    device: str | None = None  # of the workers of a Ray cluster

    def warm_up(self) -> None:
        """Start what workers need, while this process imports torch."""
        if self.kind == "processes" and self.workers != 0:
            warm_up()

    def make_executor(self) -> "Executor":
        """The executor of these options."""
        return make_executor(
            self.workers,
            self.kind,
            self.address,
            cpus_per_worker=self.cpus_per_worker,
            gpus_per_worker=self.gpus_per_worker,
            device=self.device,
        )

    def on(self, device: str) -> "Workplace":
        """These options for runs on a device: an accelerator gets a few workers, and the clients of one run.

        Raises:
            SettingError: GPUs are to be reserved for runs on the CPU.
        """
        if device == "cpu":
            if self.kind == "ray" and self.gpus_per_worker:
                raise SettingError("--gpus-per-worker reserves GPUs, but the device is cpu: add --device cuda")
            return self
        from fedbe.core.compute import cores
        from fedbe.core.devices import WORKERS_PER_DEVICE, default_workers

        spread = "clients" if self.spread == "auto" else self.spread
        if self.kind == "ray":
            counted = self.gpus_per_worker is None and device != "mps"  # Ray counts no Apple devices
            gpus = 1 / WORKERS_PER_DEVICE if counted else self.gpus_per_worker
            return replace(self, spread=spread, gpus_per_worker=gpus, device=device)
        workers = default_workers(device, cores()) if self.workers is None else self.workers
        return replace(self, workers=workers, spread=spread)

    def choose_device(self, text: str, quiet: bool = False) -> str:
        """The device that --device means: of this machine, or with Ray of the workers' machines.

        An accelerator that "auto" chose is named on stderr, and one that only the workers have.
        """
        from fedbe.core.devices import is_here, resolve_device

        if self.kind == "ray" and text == "auto" and self.gpus_per_worker:
            text = "cuda" if resolve_device(text) == "cpu" else text
        if self.kind != "ray" or text == "auto" or is_here(text):
            return choose_device(text, quiet)
        if not quiet:
            kind = text.partition(":")[0]
            err.print(f"device: {kind} of the workers; this machine has none, so the server step is on its CPU")
        return text


def choose_device(text: str, quiet: bool = False) -> str:
    """The device that an option means on this machine. An accelerator that "auto" chose is named on stderr."""
    from fedbe.core.devices import describe_device, resolve_device

    device = resolve_device(text)
    if text == "auto" and device != "cpu" and not quiet:
        err.print(f"device: {describe_device(device)}; another one: --device", highlight=False)
    return device
