"""Honest clients differ widely, and the guard never sets one aside: 2,000 random cohorts of really trained clients.

`python -m benchmarks.honest_clients` tries many more, in other settings.
"""

import random

import pytest
import torch
from torch import nn

from fedbe.algorithms.client.training import LocalSettings, train
from fedbe.algorithms.server.influence import cap_weights
from fedbe.algorithms.server.limits import Limits
from fedbe.algorithms.server.outliers import ChangeMeter, find_outliers
from fedbe.core.inputs import as_inputs
from fedbe.core.model_runner import ModelRunner
from fedbe.core.updates import Update

CLASSES, DIMENSIONS = 10, 16
COHORTS, CLIENTS = 2_000, 30
LIMITS = Limits()


def _network(norm):
    torch.manual_seed(0)
    layers = [nn.Linear(DIMENSIONS, 32), *([nn.BatchNorm1d(32)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, CLASSES))


def _data(draw, size, split, scale):
    """A client's examples: all classes, two major classes with single others (Step), or one class (Dirichlet(0.01))."""
    if split == "iid":
        labels = torch.randint(CLASSES, (size,), generator=draw)
    else:
        major = torch.randint(CLASSES, (2 if split == "step" else 1,), generator=draw)
        labels = major[torch.randint(len(major), (size,), generator=draw)]
        if split == "step" and size > CLASSES:
            labels[:CLASSES] = torch.arange(CLASSES)
    centres = 2 * torch.randn(CLASSES, DIMENSIONS, generator=torch.Generator().manual_seed(1))
    return scale * (centres[labels] + torch.randn(size, DIMENSIONS, generator=draw)), labels


def _client(runner, start, i, scale):
    """One honest client: 3 to 3,000 examples, 1 to 20 epochs."""
    choose = random.Random(i)
    size, epochs = round(3 * 1000 ** choose.random()), choose.randint(1, 20)
    if i < 7:  # six tiny clients, and one with 99 % of the data
        size, epochs = (3000, 20) if i == 6 else (3, 1)
    draw = torch.Generator().manual_seed(i)
    inputs, labels = _data(draw, size, choose.choice(["iid", "step", "dirichlet"]), scale)
    settings = LocalSettings(epochs=epochs, lr=0.01)
    if size % settings.batch_size == 1:  # BatchNorm cannot learn from one example
        inputs, labels = inputs[1:], labels[1:]
    trained = train(runner, start, as_inputs(inputs), labels, settings, draw)
    return Update(i, trained.state, float(len(labels)), {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "rounds", "scale"),
    [(False, 0, 1.0), (True, 0, 1.0), (True, 1, 1.0), (True, 0, 100.0)],
    ids=["plain", "batch-norm", "batch-norm-later-round", "batch-norm-raw-inputs"],
)
def test_no_honest_client_is_set_aside(norm, rounds, scale):
    runner = ModelRunner(_network(norm))
    start = runner.read()
    if rounds:
        start = _client(runner, start, 6, scale).state
    bank = [_client(runner, start, i, scale) for i in range(CLIENTS)]
    meter = ChangeMeter(start, runner.layout, {})
    measured, _ = meter.measure(bank, [1.0] * len(bank))
    choose = random.Random(0)
    cohorts = [choose.sample(range(CLIENTS), choose.randint(2, 20)) for _ in range(COHORTS // 4 - 1)]
    alone = [[i] for i in range(CLIENTS)]
    for cohort in [list(range(7)), *alone, *cohorts]:
        chosen = [measured[i] for i in cohort]
        weights = cap_weights([m.update.num_examples for m in chosen], LIMITS.max_share, LIMITS.max_size_ratio)
        assert find_outliers(chosen, weights, meter, LIMITS.max_norm_ratio, LIMITS.max_change) == {}
