"""BlazeFL: one single-threaded process for each core, models in shared memory.

Its threads need a Python without the global lock, which this environment does not have. Processes are forked, so they
share the data with their parent.
"""

import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.multiprocessing as mp
from blazefl.core import (
    BaseServerHandler,
    IPCMode,
    ProcessPoolClientTrainer,
    SHMHandle,
    deserialize_model,
    serialize_model,
)

from benchmarks.peers import job as jobs


@dataclass
class Model:
    """What travels in both directions."""

    parameters: torch.Tensor | SHMHandle


@dataclass
class Config:
    """What a worker needs to know; it finds the data in the memory that it got by the fork."""

    job: jobs.Job
    data: Path
    client: int


class Server(BaseServerHandler[Model, Model]):
    """FedAvg."""

    def __init__(self, job: jobs.Job) -> None:
        self.job, self.model, self.round, self.received = job, jobs.make_model(job), 0, list[torch.Tensor]()

    def sample_clients(self) -> list[int]:
        return sorted(random.sample(range(self.job.clients), self.job.cohort))

    def downlink_package(self) -> Model:
        return Model(serialize_model(self.model))

    def load(self, payload: Model) -> bool:
        self.received.append(payload.parameters)
        if len(self.received) < self.job.cohort:
            return False
        deserialize_model(self.model, torch.stack(self.received).mean(0))
        self.received.clear()
        self.round += 1
        return True

    def if_stop(self) -> bool:
        return self.round >= self.job.rounds


class Trainer(ProcessPoolClientTrainer[Model, Model, Config]):
    """Trains clients in processes."""

    def __init__(self, job: jobs.Job, data: Path) -> None:
        self.job, self.data, self.cache = job, data, list[Model]()
        self.num_parallels, self.device, self.ipc_mode = os.cpu_count() or 1, "cpu", IPCMode.SHARED_MEMORY
        self.stop_event = mp.Manager().Event()
        self.buffer = serialize_model(jobs.make_model(job))

    def get_client_config(self, cid: int) -> Config:
        return Config(self.job, self.data, cid)

    def prepare_uplink_package_buffer(self) -> Model:
        return Model(self.buffer.clone())

    @staticmethod
    def worker(config: Config, payload: Model, *_: object, shm_buffer: Model) -> Model:
        torch.set_num_threads(1)
        train = jobs.load(config.data)[0]
        model = jobs.make_model(config.job)
        deserialize_model(model, payload.parameters)
        torch.seed()
        jobs.train(model, train.of_client(config.client, config.job), config.job)
        shm_buffer.parameters.copy_(serialize_model(model))
        return Model(SHMHandle())

    def uplink_package(self) -> list[Model]:
        packages, self.cache = self.cache, []
        return packages


def main(job: jobs.Job, data: Path) -> None:
    """Run the job."""
    _, test = jobs.load(data)
    server, trainer = Server(job), Trainer(job, data)
    while not server.if_stop():
        trainer.local_process(server.downlink_package(), server.sample_clients())
        for package in trainer.uplink_package():
            server.load(package)
        evaluated = job.is_evaluated(server.round)
        jobs.report(server.round, jobs.accuracy(server.model, test) if evaluated else None)


if __name__ == "__main__":
    main(jobs.JOBS[sys.argv[1]], Path(sys.argv[2]))
