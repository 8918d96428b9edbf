"""Clients that are trained, but not yet part of a checkpoint: one file each, so that a stop loses no finished client.

A file is named by a digest of everything that the training depends on. So a resumed run finds its own clients. Runs
that start with the same first round (same data, split, weights and local settings, other methods) find each other's.
"""

import contextlib
import hashlib
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from fedbe.algorithms.client.training import Trained
from fedbe.core.compute import Plan
from fedbe.errors import RunError
from fedbe.experiment.federation import Federation
from fedbe.experiment.jobs import TrainJob
from fedbe.experiment.tensor_files import UNREADABLE, model_of, part, read_tensors, tensors_of, write_tensors


@dataclass(frozen=True, eq=False)
class ClientCache:
    """The trained clients in a folder that belong to this federation, arithmetic and program.

    Args:
        folder: Where the files are.
        federation: The data and the model.
        plan: The arithmetic.
        made_with: The versions that the numbers depend on.
    """

    folder: Path
    federation: Federation
    plan: Plan
    made_with: str

    def load(self, job: TrainJob) -> tuple[Trained, float] | None:
        """The result of a job, and the seconds that it took; None if there is no readable file for it."""
        if not self.folder.is_dir():
            return None
        try:
            header, tensors = read_tensors(self._path(job))
            loss, steps, seconds = float(header["loss"]), int(header["steps"]), float(header["seconds"])
            state = model_of("model", tensors)
        except (*UNREADABLE, OverflowError):
            return None
        return Trained(state, part("extras/", tensors), part("memory/", tensors), loss, steps), seconds

    def save(self, job: TrainJob, trained: Trained, seconds: float) -> None:
        """Write the result of a job, but not through a link.

        Failures are ignored: the run continues, and its checkpoint reports them.
        """
        tensors = tensors_of("model", trained.state)
        tensors |= {f"extras/{name}": t for name, t in trained.extras.items()}
        tensors |= {f"memory/{name}": t for name, t in trained.memory.items()}
        path = self._path(job)
        part_path = path.with_name(f"{uuid4().hex}-{path.name}")  # two processes may share a first round
        with contextlib.suppress(OSError, RunError):
            if self.folder.is_symlink():
                return
            self.folder.mkdir(exist_ok=True)
            write_tensors(part_path, {"loss": trained.loss, "steps": trained.steps, "seconds": seconds}, tensors)
            part_path.replace(path)

    def clear(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, job: TrainJob) -> Path:
        # A run that moves to another device keeps the clients that have finished.
        arithmetic = replace(self.plan, device=None)
        settings = (
            self.made_with, arithmetic, self.federation.digest, self.federation.model, self.federation.train.augment,
            job.client, job.round, job.seed, job.settings, job.rules, sorted(job.broadcast), sorted(job.memory),
            *(["flipped labels"] if job.flip_labels else []),
        )  # fmt: skip
        vectors = [by_name[name] for by_name in (job.broadcast, job.memory) for name in sorted(by_name)]
        numbers = job.state.digest(self.federation.clients[job.client], *vectors)
        digest = hashlib.sha256(f"{settings!r} {numbers}".encode()).hexdigest()
        return self.folder / f"{digest[:32]}.safetensors"
