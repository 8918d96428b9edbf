"""Figure 1 of the paper, from data to vote: the ensemble of sampled models beats the average.

Three clients with 80/10/10 % of the classes, ten rounds of two epochs of FedAvg with a two-layer MLP on the raw
coordinates, then ensembles of ten models from Dirichlet(0.5). The paper has 64 % for the average and 69 % for the
ensemble; here, with five ensembles for each seed, it is 66.2 % and 72.9 % over seeds 0 to 9, and over seeds 0 to 39
66.0 % and 70.5 %: 4.5 ± 0.9 points (standard error), with the ensemble ahead in 37 of 40.

It is a statement about this regime, where the clients have drifted apart. Where training has converged (standardised
inputs, smaller batches: 97 % and more) the average is as good or better; see the report of issue 2.
"""

import statistics

import pytest
import torch

from fedbe import Dirichlet
from fedbe.algorithms.client import LocalSettings, train
from fedbe.algorithms.vote import Member, local_predictor, predict, vote
from fedbe.core.inputs import TensorInputs
from fedbe.core.model_runner import ModelRunner
from fedbe.core.moments import weighted_mean
from fedbe.core.random import generator
from fedbe.core.updates import Update
from fedbe.data import load_task, split
from fedbe.models import build

pytestmark = pytest.mark.slow

SEEDS, ENSEMBLES, SAMPLES, ROUNDS = range(10), 5, 10, 10
LOCAL = LocalSettings(epochs=2, batch_size=100, lr=0.1)


def _federation(seed):
    """The runner, the last average, the clients' last models and the test data."""
    task = load_task("swissroll", seed=seed)
    inputs, labels = task.train.inputs, task.train.labels
    parts = split("step", labels, clients=3, server=300, seed=seed, major_classes=1, major_share=0.8)
    assert sorted(parts.counts(labels, 3).flatten().tolist()) == [30] * 6 + [240] * 3
    runner = ModelRunner(build("mlp", 3, (2,), generator(seed, role="model"), hidden=(100,)))
    average, updates = runner.read(), []
    for round in range(1, ROUNDS + 1):
        updates = []
        for client, own in enumerate(parts.clients):
            feed, draw = TensorInputs(inputs[own]), generator(seed, round, "train", client)
            trained = train(runner, average, feed, labels[own], LOCAL, draw)
            updates.append(Update(client, trained.state, len(own), {}))
        average = weighted_mean([(u.state, u.num_examples) for u in updates])
    return runner, average, updates, task.test


def _accuracies(seed):
    runner, average, updates, test = _federation(seed)
    inputs = TensorInputs(test.inputs)

    def accuracy(probabilities):
        return float((probabilities.argmax(1) == test.labels).double().mean())

    fitted, ask = Dirichlet.fit(updates, alpha=0.5), local_predictor(runner, inputs)
    drawn = fitted.sample_states(ENSEMBLES * SAMPLES, generator(seed, ROUNDS, "posterior"))
    voted = [
        accuracy(vote([Member(f"sample {i}", next(drawn)) for i in range(SAMPLES)], ask).probabilities)
        for _ in range(ENSEMBLES)
    ]
    return accuracy(predict(runner, average, inputs)), statistics.mean(voted)


@pytest.fixture(scope="module")
def accuracies():
    average, ensemble = torch.tensor([_accuracies(seed) for seed in SEEDS]).T
    return average, ensemble


def test_the_ensemble_beats_the_average(accuracies):
    average, ensemble = accuracies
    print(f"average {float(average.mean()):.3f}, ensemble {float(ensemble.mean()):.3f} over {len(average)} seeds")
    assert float((ensemble - average).mean()) > 0.02


def test_both_are_far_from_chance_and_from_perfect(accuracies):
    average, ensemble = accuracies
    assert 0.5 < float(average.mean()) < 0.8
    assert 0.5 < float(ensemble.mean()) < 0.85
