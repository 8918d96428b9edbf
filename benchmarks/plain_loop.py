"""The reference, a loop as a user would write it: one process, DataLoader, default threads, layout and precision.

    python -m benchmarks.plain_loop convnet 4000 10    # model, images per client, clients

The clients train one after the other for one epoch. Prints the seconds of the whole round.
"""

import copy
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from fedbe.core.random import generator
from fedbe.models import build


class Images(Dataset):  # type: ignore[type-arg]
    """Images with crop and flip, one by one, as transforms do."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        image = functional.pad(self.images[i].float().div(255), (2, 2, 2, 2))
        y, x = torch.randint(0, 5, (2,)).tolist()
        image = image[:, y : y + 32, x : x + 32]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return (image - 0.47) / 0.25, self.labels[i]


def train(model: nn.Module, data: Images) -> nn.Module:
    """One epoch of SGD on a copy of the model."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)
    for images, labels in DataLoader(data, batch_size=40, shuffle=True):
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def main(name: str, images: int, clients: int) -> None:
    """Print the seconds of one round."""
    model = build(name, 10, (3, 32, 32), generator(0))
    pixels = torch.randint(0, 256, (images, 3, 32, 32), dtype=torch.uint8)
    data = Images(pixels, torch.arange(images) % 10)
    train(model, Images(pixels[:120], data.labels[:120]))
    begin = time.perf_counter()
    states = [train(model, data).state_dict() for _ in range(clients)]
    _ = {key: torch.stack([s[key].float() for s in states]).mean(0) for key in states[0]}
    print(time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
