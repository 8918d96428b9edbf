"""How often the guard sets an honest client aside, on networks and clients that its limits were not chosen on.

    python -m benchmarks.honest_clients [seed] [cohorts]     # 10,000 cohorts by default; a minute or two of one core

tests/algorithms/server/test_honest_clients.py has the cohorts that the limits were chosen on: one small MLP, 16 inputs,
lr 0.01. Here each setting draws its own network, classes, learning rate, batch size and scale of the inputs, and trains
30 honest clients: i.i.d., Step or one class; 2 to 2,000 examples; 1 to 25 epochs. Cohorts are drawn from them.

In some settings SGD diverges, such as raw inputs × 20 at lr 0.1. Such a client is honest, but its update would spoil
the average, so the guard is right to set it aside. It is counted apart: a client **diverged** if in any epoch its mean
loss is not finite, or more than `EXPLODED` times the loss of the model that it started from. The guard must admit all
others.
"""

import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbe.algorithms.client.training import LocalSettings, Trained, train
from fedbe.algorithms.server.influence import cap_weights
from fedbe.algorithms.server.limits import Limits
from fedbe.algorithms.server.outliers import ChangeMeter, Measured, find_outliers
from fedbe.core.inputs import as_inputs
from fedbe.core.model_runner import ModelRunner
from fedbe.core.state import ModelState
from fedbe.core.updates import ClientId, Update

SETTINGS, CLIENTS, SIDE = 20, 30, 8
LIMITS = Limits()
EXPLODED = 100.0


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


@dataclass(frozen=True, eq=False)
class Client:
    """An honest client: its data and its settings."""

    runner: ModelRunner
    start: ModelState
    inputs: Tensor
    labels: Tensor
    local: LocalSettings
    seed: int

    def train(self, epochs: int) -> Trained:
        """Train so many epochs. The first epochs are the same for every number."""
        local, draw = replace(self.local, epochs=epochs), torch.Generator().manual_seed(self.seed)
        return train(self.runner, self.start, as_inputs(self.inputs), self.labels, local, draw)

    def losses(self) -> Iterator[float]:
        """The mean loss before training, then of each epoch."""
        self.runner.load(self.start)
        self.runner.module.train()
        with torch.no_grad():
            yield float(functional.cross_entropy(self.runner.module(self.inputs), self.labels))
        for epochs in range(1, self.local.epochs + 1):
            yield self.train(epochs).loss

    def diverged(self) -> bool:
        """Whether the loss exploded in any epoch."""
        first, *later = self.losses()
        return any(not math.isfinite(loss) or loss > EXPLODED * first for loss in later)


def bank(seed: int) -> tuple[ChangeMeter, list[Measured], list[Client], str]:
    """Honest clients of one setting, those with finite updates measured; and what the setting is."""
    choose = random.Random(seed)
    kind, classes = choose.choice(["mlp", "deep", "conv-bn", "conv-gn"]), choose.choice([2, 7, 30])
    lr, scale = choose.choice([0.001, 0.03, 0.1]), choose.choice([0.02, 1.0, 1.0, 20.0])
    batch_size = choose.choice([16, 32, 100])
    torch.manual_seed(seed)
    runner = ModelRunner(network(kind, classes))
    start: ModelState = runner.read()
    meter, updates, clients = ChangeMeter(start, runner.layout, {}), list[Update](), list[Client]()
    for i in range(CLIENTS):
        draw = torch.Generator().manual_seed(1000 * seed + i)
        inputs, labels = examples(choose, draw, classes, scale)
        if len(labels) % batch_size == 1:  # BatchNorm cannot learn from one example
            inputs, labels = inputs[1:], labels[1:]
        local = LocalSettings(epochs=choose.randint(1, 25), lr=lr, batch_size=batch_size)
        client = Client(runner, start, inputs, labels, local, 1000 * seed + i)
        clients.append(client)
        updates.append(Update(i, client.train(local.epochs).state, float(len(labels)), {}))
    results, _ = meter.measure(updates, [1.0] * CLIENTS)
    measured = [m for m in results if isinstance(m, Measured)]  # the others diverged, and no guard could use them
    return meter, measured, clients, f"{kind}, {classes} classes, lr {lr}, inputs × {scale}"


def main(seed: int, cohorts: int) -> int:
    """Print a line for each setting, and the total. Returns 1 if a client that did not diverge was set aside."""
    torch.set_num_threads(1)
    wrong = diverged = tried = total = 0
    for number in range(SETTINGS):
        choose = random.Random(f"{seed} {number}")
        meter, measured, clients, what = bank(10_000 + 100 * seed + number)
        refused: list[set[ClientId]] = []
        reason: dict[ClientId, str] = {}
        for _ in range(cohorts // SETTINGS):
            chosen = choose.sample(measured, choose.randint(2, len(measured)))
            weights = cap_weights([m.update.num_examples for m in chosen], LIMITS.max_share, LIMITS.max_size_ratio)
            reasons = find_outliers(chosen, weights, meter, LIMITS.max_norm_ratio, LIMITS.max_change)
            by_client = {chosen[i].update.client_id: text for i, text in reasons.items()}
            refused.append(set(by_client))
            reason |= by_client
            total += len(chosen)
        exploded = {client_id for client_id in reason if clients[int(client_id)].diverged()}
        for client_id in sorted(set(reason) - exploded):
            print(f"  client {client_id} did not diverge: {reason[client_id]}")
        with_honest = sum(bool(ids - exploded) for ids in refused)
        with_diverged = sum(bool(ids) for ids in refused) - with_honest
        wrong, diverged, tried = wrong + with_honest, diverged + with_diverged, tried + len(refused)
        print(f"{what}: {with_honest} cohorts lost an honest client, {with_diverged} only diverged ones ", end="")
        print(f"({CLIENTS - len(measured)} of {CLIENTS} clients ended infinite, {len(exploded)} exploded)", flush=True)
    print(f"seed {seed}: of {tried:,} cohorts ({total:,} clients) {wrong} lost a client that did not diverge, ", end="")
    print(f"{diverged} only clients that did")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1, int(sys.argv[2]) if len(sys.argv) > 2 else 10_000))
