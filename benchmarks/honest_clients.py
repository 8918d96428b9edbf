"""How often the guard sets an honest client aside, on networks and clients that its limits were not chosen on.

    python -m benchmarks.honest_clients [seed] [cohorts]     # 10,000 cohorts by default; a minute or two of one core

tests/algorithms/server/test_honest_clients.py has the cohorts that the limits were chosen on: one small MLP, 16 inputs,
lr 0.01. Here each setting draws its own network, classes, learning rate, batch size and scale of the inputs, and trains
30 honest clients: i.i.d., Step or one class; 2 to 2,000 examples; 1 to 25 epochs. Cohorts are drawn from them.
A client whose own training ends in infinite values is not honest work and is left out, and counted.
"""

import random
import sys

import torch
from torch import Tensor, nn

from fedbe.algorithms.client.training import LocalSettings, train
from fedbe.algorithms.server.influence import cap_weights
from fedbe.algorithms.server.limits import Limits
from fedbe.algorithms.server.outliers import ChangeMeter, Measured, find_outliers
from fedbe.core.inputs import as_inputs
from fedbe.core.model_runner import ModelRunner
from fedbe.core.state import ModelState
from fedbe.core.updates import Update
from fedbe.errors import StateError

SETTINGS, CLIENTS, SIDE = 20, 30, 8
LIMITS = Limits()


def network(kind: str, classes: int) -> nn.Module:
    """A network for grey images of 8 × 8 pixels."""
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, classes))
    if kind == "deep":
        layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh())]
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, classes))
    norm = nn.BatchNorm2d(12) if kind == "conv-bn" else nn.GroupNorm(3, 12)
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, classes)
    )


def examples(choose: random.Random, draw: torch.Generator, classes: int, scale: float) -> tuple[Tensor, Tensor]:
    """A client's images and labels."""
    size, split = round(2 * 1000 ** choose.random()), choose.choice(["iid", "step", "one"])
    known = classes if split == "iid" else min(classes, 2) if split == "step" else 1
    labels = torch.randperm(classes, generator=draw)[:known][torch.randint(known, (size,), generator=draw)]
    if split == "step" and size > classes:
        labels[:classes] = torch.arange(classes)
    centres = torch.randn(classes, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(classes))
    return scale * (centres[labels] + torch.randn(size, 1, SIDE, SIDE, generator=draw)), labels


def bank(seed: int) -> tuple[ChangeMeter, list[Measured], str, int]:
    """Honest clients of one setting, measured; what the setting is; and how many diverged."""
    choose = random.Random(seed)
    kind, classes = choose.choice(["mlp", "deep", "conv-bn", "conv-gn"]), choose.choice([2, 7, 30])
    lr, scale = choose.choice([0.001, 0.03, 0.1]), choose.choice([0.02, 1.0, 1.0, 20.0])
    settings = LocalSettings(epochs=1, lr=lr, batch_size=choose.choice([16, 32, 100]))
    torch.manual_seed(seed)
    runner = ModelRunner(network(kind, classes))
    start: ModelState = runner.read()
    meter, measured, diverged = ChangeMeter(start, runner.layout, {}), list[Measured](), 0
    for i in range(CLIENTS):
        draw = torch.Generator().manual_seed(1000 * seed + i)
        inputs, labels = examples(choose, draw, classes, scale)
        if len(labels) % settings.batch_size == 1:  # BatchNorm cannot learn from one example
            inputs, labels = inputs[1:], labels[1:]
        local = LocalSettings(epochs=choose.randint(1, 25), lr=lr, batch_size=settings.batch_size)
        trained = train(runner, start, as_inputs(inputs), labels, local, draw)
        try:
            measured.append(meter.measure(Update(i, trained.state, float(len(labels)), {})))
        except StateError:
            diverged += 1
    return meter, measured, f"{kind}, {classes} classes, lr {lr}, inputs × {scale}", diverged


def main(seed: int, cohorts: int) -> None:
    """Print a line for each setting, and the total."""
    torch.set_num_threads(1)
    wrong = tried = clients = 0
    for number in range(SETTINGS):
        choose = random.Random(f"{seed} {number}")
        meter, measured, what, diverged = bank(10_000 + 100 * seed + number)
        aside = 0
        for _ in range(cohorts // SETTINGS):
            chosen = choose.sample(measured, choose.randint(2, len(measured)))
            weights = cap_weights([m.update.num_examples for m in chosen], LIMITS.max_share)
            reasons = find_outliers(chosen, weights, meter, LIMITS.max_norm_ratio, LIMITS.max_change)
            aside += bool(reasons)
            tried, clients = tried + 1, clients + len(chosen)
            if reasons and aside == 1:
                print(next(iter(reasons.values())))
        wrong += aside
        print(f"{what}: {aside} cohorts with a client set aside; {diverged} of {CLIENTS} clients diverged", flush=True)
    print(f"seed {seed}: {wrong} of {tried:,} cohorts ({clients:,} clients) had an honest client set aside")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1, int(sys.argv[2]) if len(sys.argv) > 2 else 10_000)
