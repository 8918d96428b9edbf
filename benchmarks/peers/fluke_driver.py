# ruff: noqa: E402 (torchvision can be imported only after its operators are declared)
"""fluke (fluke-fl): clients one after the other in one process, which uses all cores. Only GPUs train in parallel."""

import sys
from pathlib import Path

from benchmarks.peers import job as jobs

jobs.declare_torchvision_operators()

from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataContainer, DataSplitter
from fluke.evaluation import ClassificationEval
from fluke.utils import FederationObserver
from torchmetrics import Accuracy


class Report(FederationObserver):
    """Reports each round. Fluke evaluates once more when all rounds have ended."""

    accuracy: float | None = None

    def server_evaluation(self, round: int, eval_type: str, evals: dict[str, float]) -> None:  # noqa: ARG002
        self.accuracy = evals.get("accuracy")

    def end_round(self, round: int) -> None:
        jobs.report(round, self.accuracy)

    def finished(self, round: int) -> None:
        jobs.report(round - 1, self.accuracy)


def main(job: jobs.Job, data: Path) -> None:
    """Run the job."""
    train, test = jobs.load(data)
    count = job.clients * job.images
    container = DataContainer(train.pixels[:count], train.labels[:count], test.pixels, test.labels, 10)
    metric = Accuracy(task="multiclass", num_classes=10)
    FlukeENV().set_evaluator(ClassificationEval(job.evaluate_every, 10, accuracy=metric))
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=True)
    client = DDict(
        batch_size=job.batch_size,
        local_epochs=1,
        loss="CrossEntropyLoss",
        optimizer=DDict(lr=job.lr, momentum=job.momentum, weight_decay=job.weight_decay),
        scheduler=DDict(gamma=1, step_size=1),
    )
    settings = DDict(client=client, server=DDict(weighted=False), model=jobs.BytesModel(job))
    algorithm = FedAVG(job.clients, DataSplitter(container, distribution="iid"), settings)
    algorithm.set_callbacks(Report())
    algorithm.run(job.rounds, job.cohort / job.clients)


if __name__ == "__main__":
    main(jobs.JOBS[sys.argv[1]], Path(sys.argv[2]))
