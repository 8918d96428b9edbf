"""The jobs of a simulation: train a client, predict with a model. An executor runs them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedbe.algorithms.client.rules import LocalRule
from fedbe.algorithms.client.training import LocalSettings, Trained, train
from fedbe.algorithms.vote import predict
from fedbe.core.compute import Plan
from fedbe.core.devices import ask_for_same_bits
from fedbe.core.model_runner import ModelRunner
from fedbe.core.random import generator
from fedbe.core.state import ModelState
from fedbe.experiment.federation import Federation

DataPart = Literal["server", "test"]
EVALUATION_CHUNK = 2500  # test examples in one job; fixed, so that results do not depend on the number of workers


@dataclass(frozen=True, eq=False)
class TrainJob:
    """One client's local training in one round.

    Args:
        client: The client's number.
        round: The round, from 1.
        seed: The run's seed.
        state: The global model that the client starts from.
        settings: Of the client's SGD.
        num_examples: The size of the client's data.
        rules: What the method adds to SGD (FedProx's term, SCAFFOLD's correction).
        broadcast: Vectors that the server sends with the model, by name.
        memory: Vectors that the client kept from its last round, by name.
        flip_labels: Train on wrong labels, as a hostile client: class c becomes C − 1 − c.
    """

    client: int
    round: int
    seed: int
    state: ModelState
    settings: LocalSettings
    num_examples: int
    rules: tuple[LocalRule, ...] = ()
    broadcast: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    flip_labels: bool = False

    @property
    def size(self) -> int:
        """The work in examples, so that the longest job can start first."""
        return self.settings.epochs * self.num_examples

    @property
    def name(self) -> str:
        """What the job does, for messages."""
        return f"client {self.client}"

    def run(self, federation: Federation, runner: ModelRunner) -> Trained:
        """Train the client."""
        index = federation.clients[self.client]
        labels = federation.labels[index]
        return train(
            runner,
            self.state,
            federation.train.select(index),
            len(federation.classes) - 1 - labels if self.flip_labels else labels,
            self.settings,
            generator(self.seed, self.round, "train", self.client),
            rules=self.rules,
            broadcast=self.broadcast,
            memory=self.memory,
        )


@dataclass(frozen=True, eq=False)
class PredictJob:
    """Probabilities of one model on the server's data, or on the test data from `first` to `last`."""

    state: ModelState
    part: DataPart
    first: int = 0
    last: int | None = None

    @property
    def name(self) -> str:
        """What the job does, for messages."""
        return f"predictions on the {self.part} data"

    def run(self, federation: Federation, runner: ModelRunner) -> Tensor:
        """Predict; returns probabilities [N, classes] on the host."""
        inputs = federation.server if self.part == "server" else federation.test
        assert inputs is not None, "`make_simulation` checks that there is server data if it is needed"
        if self.last is not None:
            inputs = inputs.select(torch.arange(self.first, self.last))
        return predict(runner, self.state, inputs).cpu()


def prepare_jobs(federation: Federation, plan: Plan) -> tuple[Federation, ModelRunner]:
    """What a process needs to run jobs: the data on the plan's device, and the model."""
    runner = ModelRunner(federation.build_model(), plan, federation.model.output)
    ask_for_same_bits(runner.device)
    return federation.on(runner.device), runner


def test_jobs(state: ModelState, count: int) -> list[PredictJob]:
    """Jobs for `count` test examples in chunks of fixed size, so that all workers can share one model's evaluation."""
    firsts = range(0, count, EVALUATION_CHUNK)
    return [PredictJob(state, "test", first=f, last=min(f + EVALUATION_CHUNK, count)) for f in firsts]
