"""The network, and the data of the server and of each client. Put your own model and data here."""

from functools import cache

import torch
from torch import Tensor, nn

from fedbe.data import Dataset, Partition, load_task, split

CLIENTS, SERVER_IMAGES, SEED = 3, 300, 0


class Net(nn.Sequential):
    """Two hidden layers; 8 × 8 pixels in, ten digits out. Every instance starts with the same weights."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            super().__init__(
                nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
            )


@cache
def load_partition() -> tuple[Dataset, Dataset, Partition]:
    """Training data, test data, and the training indices of the server and of each client."""
    task = load_task("digits")
    labels = task.train.labels
    parts = split("step", labels, clients=CLIENTS, server=SERVER_IMAGES, seed=SEED, major_classes=4, minor_images=2)
    return task.train, task.test, parts


def to_pixels(data: Dataset, index: Tensor | None = None) -> Tensor:
    """Images [N, 8, 8, 1] as floats around 0."""
    images = data.inputs if index is None else data.inputs[index]
    return images.float() / 255 - 0.3


def server_images() -> Tensor:
    """The server's unlabeled images."""
    train, _, parts = load_partition()
    return to_pixels(train, parts.server)
