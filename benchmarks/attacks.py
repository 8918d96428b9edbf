"""Hostile clients on digits: attacks × splits × robust means and votes. docs/robustness.md shows the table.

    python -m benchmarks.attacks 2 > attacks.jsonl     # seeds 0 and 1; about ten minutes each on one core

Ten clients, four rounds, ten local epochs at lr 0.05. Hostile clients are the first ones; they know the honest models
(a-little-is-enough, inner product). The server declares the numbers of examples. Every other limit is the default.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedbe.algorithms.client.training import LocalSettings, train
from fedbe.algorithms.methods import get_method
from fedbe.algorithms.server.context import Context
from fedbe.algorithms.server.limits import Limits
from fedbe.algorithms.server.step import server_step
from fedbe.algorithms.vote import predict
from fedbe.core.metrics import compute_metrics
from fedbe.core.model_runner import ModelRunner
from fedbe.core.random import generator
from fedbe.core.state import ModelState
from fedbe.core.updates import ClientUpdate
from fedbe.errors import AggregationError
from fedbe.experiment.federation import Federation, prepare
from fedbe.experiment.recipe_files import load_recipe

SPLITS = {
    "iid": ["split.kind=iid"],
    "dirichlet(0.3)": ["split.kind=dirichlet", "split.alpha=0.3"],
    "step": ["split.kind=step"],
}
ATTACKS = (
    ("none", 0),
    ("label flip", 2),
    ("label flip", 4),
    ("sign flip × 10", 4),
    ("scaled × 50", 4),
    ("a little is enough", 4),
    ("inner product", 4),
)
DISTILL = {"distill_epochs": 30, "num_samples": 5, "distill_lr": 0.1, "distill_lr_min": 0.04}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fedavg", {}),
    "median": ("fedavg", {"robust": "median"}),
    "trimmed": ("fedavg", {"robust": "trimmed", "hostile_fraction": 0.4}),
    "krum": ("fedavg", {"robust": "krum", "hostile_fraction": 0.4}),
    "geometric": ("fedavg", {"robust": "geometric"}),
    "clip-median": ("fedavg", {"robust": "clip-median"}),
    "FedBE": ("fedbe", DISTILL),
    "fedbe-median": ("fedbe-median", DISTILL),
    "fedbe-median with samples": ("fedbe-median", {**DISTILL, "members": "SAC"}),
    "FedBE, geometric + consensus vote": ("fedbe", {**DISTILL, "robust": "geometric", "vote": "consensus"}),
}


def poison(attack: str, states: Sequence[ModelState], bad: int, previous: ModelState) -> list[ModelState]:
    """The models that the server receives. The first `bad` ones are the attackers' own, trained as they trained."""
    if not bad:
        return list(states)
    start, honest = previous.params, torch.stack([s.params for s in states[bad:]])
    sent = {
        "sign flip × 10": lambda own: start - 10 * (own - start),
        "scaled × 50": lambda own: start + 50 * (own - start),
        "a little is enough": lambda _: honest.mean(0) - 1.5 * honest.std(0),  # Baruch et al., 2019
        "inner product": lambda _: start - 1.5 * (honest.mean(0) - start),  # Xie et al., 2020
    }.get(attack, lambda own: own)
    return [replace(s, params=sent(s.params)) if i < bad else s for i, s in enumerate(states)]


def accuracy(
    federation: Federation, attack: str, bad: int, method: str, settings: Mapping[str, Any], seed: int
) -> float:
    """The test accuracy after four rounds, in percent."""
    chosen = get_method(method, **settings)
    runner = ModelRunner(federation.build_model())
    state, sizes = runner.read(), federation.clients.sizes
    local = LocalSettings(epochs=10, lr=0.05, batch_size=40)
    for number in range(1, 5):
        trained = []
        for client, index in enumerate(federation.clients):
            labels = federation.labels[index]
            labels = 9 - labels if client < bad and attack == "label flip" else labels
            draw = generator(seed, number, "train", client)
            trained.append(train(runner, state, federation.train.select(index), labels, local, draw).state)
        sent = poison(attack, trained, bad, state)
        updates = [ClientUpdate(s, sizes[client], client) for client, s in enumerate(sent)]
        context = Context(runner, seed, number, inputs=federation.server, rounds=4)
        limits = Limits(client_weights=dict(enumerate(sizes)))
        state = server_step(chosen.stages, state, updates, {}, context, limits=limits).state
    return 100 * compute_metrics(predict(runner, state, federation.test), federation.test_labels).accuracy


def main(seeds: int) -> None:
    """Print one JSON line for each cell and seed."""
    torch.set_num_threads(1)
    for seed in range(seeds):
        for split, changes in SPLITS.items():
            federation = prepare(load_recipe("digits", changes), seed)
            for attack, bad in ATTACKS:
                for name, (method, settings) in METHODS.items():
                    try:
                        result: float | None = accuracy(federation, attack, bad, method, settings, seed)
                    except AggregationError:
                        result = None
                    cell = {"split": split, "attack": attack, "hostile": bad, "method": name, "seed": seed}
                    print(json.dumps({**cell, "accuracy": result}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
