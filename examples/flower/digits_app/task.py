"""The model, and who has which digits. Put your own model and data here."""

from functools import cache

import torch
from torch import Tensor, nn

from fedbe.data import Dataset, Partition, load_task, split

SERVER_IMAGES = 300  # without labels: what the methods that distil need


class Net(nn.Sequential):
    """Two hidden layers; 8 × 8 pixels in, ten digits out. Always born with the same weights."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            super().__init__(
                nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
            )


@cache
def parts(clients: int, seed: int) -> tuple[Dataset, Dataset, Partition]:
    """Training data, test data, and who has which of the training data: a function of (clients, seed)."""
    task = load_task("digits")
    kind = split(
        "step", task.train.labels, clients=clients, server=SERVER_IMAGES, seed=seed, major_classes=4, minor_images=2
    )
    return task.train, task.test, kind


def pixels(data: Dataset, index: Tensor | None = None) -> Tensor:
    """Images [N, 8, 8, 1] from bytes to numbers around 0."""
    chosen = data.inputs if index is None else data.inputs[index]
    return chosen.float() / 255 - 0.3
