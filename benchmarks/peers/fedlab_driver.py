# ruff: noqa: E402 (torchvision can be imported only after its operators are declared)
"""FedLab: its standalone simulation trains clients one after the other in one process, which uses all cores."""

import sys
from pathlib import Path

import torch

from benchmarks.peers import job as jobs

jobs.declare_torchvision_operators()

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline


class Trainer(SGDSerialClientTrainer):
    """Trains clients with the loop of this benchmark."""

    def setup(self, job: jobs.Job, train: jobs.Images) -> None:
        """Set the job and its data."""
        self.job, self.train_images = job, train

    def local_process(self, payload: list[torch.Tensor], id_list: list[int]) -> None:
        for client in id_list:
            self.set_model(payload[0])
            jobs.train(self._model, self.train_images.of_client(client, self.job), self.job)
            self.cache.append([self.model_parameters])


class Pipeline(StandalonePipeline):
    """FedLab's loop, with the evaluation that it leaves to its users."""

    def __init__(self, handler: SyncServerHandler, trainer: Trainer, test: jobs.Images) -> None:
        super().__init__(handler, trainer)
        self.test = test

    def evaluate(self) -> None:
        done = self.handler.round
        evaluated = self.trainer.job.is_evaluated(done)
        jobs.report(done, jobs.accuracy(self.handler.model, self.test) if evaluated else None)


def main(job: jobs.Job, data: Path) -> None:
    """Run the job."""
    train, test = jobs.load(data)
    model = jobs.make_model(job)
    trainer = Trainer(model, job.clients, cuda=False)
    trainer.setup(job, train)
    handler = SyncServerHandler(model, job.rounds, job.cohort / job.clients, cuda=False)
    Pipeline(handler, trainer, test).main()


if __name__ == "__main__":
    main(jobs.JOBS[sys.argv[1]], Path(sys.argv[2]))
