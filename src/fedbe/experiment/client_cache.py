"""Local training that is done and not yet in a checkpoint: a file a client, so that a stop loses jobs and not a round.

A file is named by a digest of all that the training depends on. So a run finds its own work again, runs that begin
alike (same data, split, weights and local settings, other methods) find each other's first round, and nothing else can
be found.
"""

import contextlib
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from fedbe.algorithms.client.training import Trained
from fedbe.core.compute import Plan
from fedbe.errors import RunError
from fedbe.experiment.federation import Federation
from fedbe.experiment.jobs import TrainJob
from fedbe.experiment.tensor_files import UNREADABLE, model_of, part, read_tensors, tensors_of, write_tensors

WORTH_SECONDS = 5.0  # of a round's training: what is over sooner is written only if a stop is asked for


@dataclass(frozen=True, eq=False)
class ClientCache:
    """The trained clients in a folder, as far as they belong to this federation, arithmetic and program."""

    folder: Path
    federation: Federation
    plan: Plan
    made_with: str

    def find(self, job: TrainJob) -> tuple[Trained, float] | None:
        """What the job would give, and the seconds that it took; None if it was not done, or cannot be read."""
        if not self.folder.is_dir():
            return None
        try:
            header, tensors = read_tensors(self._path(job))
        except UNREADABLE:
            return None
        extras, memory = part("extras/", tensors), part("memory/", tensors)
        trained = Trained(model_of("model", tensors), extras, memory, header["loss"], header["steps"])
        return trained, header["seconds"]

    def keep(self, job: TrainJob, trained: Trained, seconds: float) -> None:
        """Write it, if that can be done: the run goes on without, and its checkpoint will say what is wrong."""
        tensors = tensors_of("model", trained.state)
        tensors |= {f"extras/{name}": t for name, t in trained.extras.items()}
        tensors |= {f"memory/{name}": t for name, t in trained.memory.items()}
        path = self._path(job)
        mine = path.with_name(f"{os.getpid()}-{path.name}")  # two processes may share a first round
        with contextlib.suppress(OSError, RunError):
            self.folder.mkdir(exist_ok=True)
            write_tensors(mine, {"loss": trained.loss, "steps": trained.steps, "seconds": seconds}, tensors)
            mine.replace(path)

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
