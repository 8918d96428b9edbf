"""pfl (apple/pfl-research): `torchrun` starts one single-threaded process for each core; they share each cohort.

Data in memory, the local loop of pfl, the evaluation shared by all processes. The users are not evaluated.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor
from torch.nn import functional

from benchmarks.peers import job as jobs


class Module(jobs.BytesModel):
    """The network with the two methods that pfl calls."""

    def loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """Of a batch in training."""
        self.train()
        return functional.cross_entropy(self(pixels), labels)

    @torch.no_grad()
    def metrics(self, pixels: Tensor, labels: Tensor) -> dict[str, Weighted]:
        """Of a batch of test images."""
        self.eval()
        return {"accuracy": Weighted(float((self(pixels).argmax(1) == labels).sum()), len(labels))}


class Report(TrainingProcessCallback):
    """Reports each round from the first process."""

    def after_central_iteration(
        self, aggregate_metrics: Metrics, *_: object, central_iteration: int
    ) -> tuple[bool, Metrics]:
        if get_framework_module().distributed.global_rank == 0:
            values = aggregate_metrics.to_simple_dict()
            jobs.report(central_iteration + 1, values.get("Central val | accuracy"))
        return False, Metrics()


def main(job: jobs.Job, data: Path) -> None:
    """Run the job."""
    torch.set_num_threads(1)
    train, test = jobs.load(data)

    def user(client: int) -> Dataset:
        mine, order = train.of_client(client, job), torch.randperm(job.images)
        return Dataset(raw_data=[mine.pixels[order], mine.labels[order]], user_id=str(client))

    users = FederatedDataset(user, get_user_sampler("minimize_reuse", list(range(job.clients))))
    module = Module(job)
    optimizer_settings: dict[str, Any] = {"momentum": job.momentum, "weight_decay": job.weight_decay}
    model = PyTorchModel(
        module,
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, **optimizer_settings),
        torch.optim.SGD(module.parameters(), 1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=job.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByUser()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=job.lr, local_num_epochs=1, local_batch_size=job.batch_size
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=500),
        callbacks=[
            CentralEvaluationCallback(
                Dataset(raw_data=[test.pixels, test.labels]),
                model_eval_params=NNEvalHyperParams(local_batch_size=500),
                frequency=job.evaluate_every,
            ),
            Report(),
        ],
    )


if __name__ == "__main__":
    main(jobs.JOBS[sys.argv[1]], Path(sys.argv[2]))
