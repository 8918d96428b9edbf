"""The model and the data of each client. Put your own model and data here."""

from functools import cache

import torch
from torch import Tensor, nn

from fedbe.data import Dataset, Partition, load_task, split

SERVER_IMAGES = 300  # unlabeled images at the server, for methods that distil


class Net(nn.Sequential):
    """Two hidden layers; 8 × 8 pixels in, ten digits out. Every instance starts with the same weights."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            super().__init__(
                nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
            )


@cache
def load_partition(clients: int, seed: int) -> tuple[Dataset, Dataset, Partition]:
    """Training data, test data, and the training indices of each client: a function of (clients, seed)."""
    task = load_task("digits")
    partition = split(
        "step", task.train.labels, clients=clients, server=SERVER_IMAGES, seed=seed, major_classes=4, minor_images=2
    )
    return task.train, task.test, partition


def to_pixels(data: Dataset, index: Tensor | None = None) -> Tensor:
    """Images [N, 8, 8, 1] as floats around 0."""
    images = data.tensor if index is None else data.tensor[index]
    return images.float() / 255 - 0.3
