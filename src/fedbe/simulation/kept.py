"""Local training that is done and not yet in a checkpoint: a file a client, so that a stop loses jobs and not a round.

A file is named by a digest of all that the training depends on. So a run finds its own work again, runs that begin
alike (same data, split, weights and local settings, other methods) find each other's first round, and nothing else can
be found.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedbe.clients.train import Trained
from fedbe.errors import RunError
from fedbe.files import write_whole
from fedbe.simulation.federation import Federation
from fedbe.simulation.jobs import TrainJob
from fedbe.states import ModelState
from fedbe.workbench import Plan

WORTH_SECONDS = 5.0  # of a round's training: what is over sooner is done again rather than written and read


@dataclass(frozen=True, eq=False)
class Kept:
    """The trained clients in a folder, as far as they belong to this federation, arithmetic and program."""

    folder: Path
    federation: Federation
    plan: Plan
    made_with: str

    def find(self, job: TrainJob) -> tuple[Trained, float] | None:
        """What the job would give, and the seconds that it took; None if it was not done, or cannot be read."""
        try:
            header, tensors = read_tensors(self._path(job))
        except (OSError, ValueError, KeyError, safetensors.SafetensorError):
            return None
        named = {kind: part(f"{kind}/", tensors) for kind in ("extras", "memory")}
        return Trained(model_of("model", tensors), **named, loss=header["loss"], steps=header["steps"]), header[
            "seconds"
        ]

    def keep(self, job: TrainJob, trained: Trained, seconds: float) -> None:
        tensors = tensors_of("model", trained.state)
        tensors |= {f"extras/{name}": t for name, t in trained.extras.items()}
        tensors |= {f"memory/{name}": t for name, t in trained.memory.items()}
        path = self._path(job)
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot write in {path.parent.parent}: {error.strerror}") from error
        write_tensors(path, {"loss": trained.loss, "steps": trained.steps, "seconds": seconds}, tensors)

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, job: TrainJob) -> Path:
        said = (
            self.made_with, self.plan, self.federation.digest, self.federation.model, self.federation.train.augment,
            job.client, job.round, job.seed, job.settings, job.rules, sorted(job.broadcast), sorted(job.memory),
        )  # fmt: skip
        vectors = [given[name] for given in (job.broadcast, job.memory) for name in sorted(given)]
        numbers = job.state.digest(self.federation.clients[job.client], *vectors)
        digest = hashlib.sha256(f"{said!r} {numbers}".encode()).hexdigest()
        return self.folder / f"{digest[:32]}.safetensors"


def write_tensors(path: Path, header: object, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, whole or not at all."""
    # safetensors refuses tensors that share memory, as a member and the model may.
    separate = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    write_whole(path, safetensors.torch.save(separate, {"fedbe": json.dumps(header)}))


def read_tensors(path: Path) -> tuple[dict, dict[str, Tensor]]:  # type: ignore[type-arg]
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["fedbe"])
        return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def tensors_of(prefix: str, state: ModelState) -> dict[str, Tensor]:
    counters = {f"{prefix}/counters/{name}": t for name, t in state.counters.items()}
    return {f"{prefix}/params": state.params, f"{prefix}/buffers": state.buffers, **counters}


def model_of(prefix: str, tensors: Mapping[str, Tensor]) -> ModelState:
    counters = part(f"{prefix}/counters/", tensors)
    return ModelState(tensors[f"{prefix}/params"], tensors[f"{prefix}/buffers"], counters)


def part(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
