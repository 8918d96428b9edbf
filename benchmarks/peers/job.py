"""The two jobs that every simulator does, and what all drivers share: plain PyTorch, without fedbe.

Images are bytes in memory. Batches are cropped, flipped and normalised as a whole, and have the channels last: a slow
way to read images would make all simulators look alike.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

MEAN, STD = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])


@dataclass(frozen=True)
class Job:
    """A federation, its training, and how many rounds are measured. Clients have i.i.d. images and equal weights."""

    name: str
    clients: int
    cohort: int
    images: int  # of each client
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float
    augment: bool
    rounds: int
    evaluate_every: int

    @property
    def model(self) -> str:
        """The function below that makes the network."""
        return "convnet" if self.name == "paper" else "cnn"

    def is_evaluated(self, round: int) -> bool:
        """Whether the test images are predicted after this round: after the first, and at the end."""
        return (round - 1) % self.evaluate_every == 0


JOBS = {
    "paper": Job("paper", 10, 10, 4000, 40, 0.01, 0.9, 1e-3, True, rounds=3, evaluate_every=1),
    "pfl": Job("pfl", 1000, 50, 50, 10, 0.1, 0.0, 0.0, False, rounds=6, evaluate_every=5),
}


@dataclass(frozen=True)
class Images:
    """Images as bytes [N, 32, 32, 3], and their classes [N]."""

    pixels: Tensor
    labels: Tensor

    def of_client(self, client: int, job: Job) -> "Images":
        """The part of one client."""
        part = slice(client * job.images, (client + 1) * job.images)
        return Images(self.pixels[part], self.labels[part])

    def batches(self, job: Job) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch in random order."""
        for index in torch.randperm(len(self.labels)).split(job.batch_size):
            yield inputs(self.pixels[index], augment=job.augment), self.labels[index]


@cache
def load(path: Path) -> tuple[Images, Images]:
    """The training images in random order, and the test images."""
    parts = torch.load(path)
    return Images(*parts["train"]), Images(*parts["test"])


def inputs(pixels: Tensor, *, augment: bool) -> Tensor:
    """Normalised images [B, 3, 32, 32] with the channels last in memory; cropped and flipped if `augment`."""
    images = pixels.float().div_(255).sub_(MEAN).div_(STD)
    if augment:
        images = _crop(images)
        flipped = torch.rand(len(images)) < 0.5
        images[flipped] = images[flipped].flip(2)
    return images.permute(0, 3, 1, 2)


def _crop(images: Tensor, pad: int = 2) -> Tensor:
    padded = functional.pad(images, (0, 0, pad, pad, pad, pad))
    top, left = torch.randint(0, 2 * pad + 1, (2, len(images), 1))
    rows, columns = top + torch.arange(32), left + torch.arange(32)
    return padded[torch.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]]


def convnet() -> nn.Module:
    """The paper's ConvNet, as `fedbe.models.convnet`."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def cnn(classes: int = 10, shape: tuple[int, ...] = (3, 32, 32)) -> nn.Module:  # noqa: ARG001 (what fedbe passes)
    """The network of pfl's published benchmark on CIFAR-10: two convolutions, 1.6 M parameters, dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(14 * 14 * 64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, classes),
    )  # fmt: skip


def make_model(job: Job) -> nn.Module:
    """The network of a job with its first weights."""
    torch.manual_seed(0)
    return globals()[job.model]()  # type: ignore[no-any-return]


class BytesModel(nn.Module):
    """The network of a job, for simulators that hand it images as they are stored."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.augment, self.network = job.augment, make_model(job)

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits [B, 10]."""
        logits: Tensor = self.network(inputs(pixels, augment=self.augment and self.training))
        return logits


def make_optimizer(model: nn.Module, job: Job) -> torch.optim.SGD:
    """The clients' optimizer."""
    return torch.optim.SGD(model.parameters(), lr=job.lr, momentum=job.momentum, weight_decay=job.weight_decay)


def train(model: nn.Module, images: Images, job: Job) -> None:
    """One local epoch, for simulators whose users write this loop themselves."""
    model.train()
    optimizer = make_optimizer(model, job)
    for batch, labels in images.batches(job):
        optimizer.zero_grad()
        functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    """The share of right answers."""
    model.eval()
    parts = zip(images.pixels.split(500), images.labels.split(500), strict=True)
    right = sum((model(inputs(p, augment=False)).argmax(1) == labels).sum() for p, labels in parts)
    return float(right) / len(images.labels)


def report(round: int, accuracy: float | None) -> None:
    """Tell the benchmark that a round has ended."""
    print(json.dumps({"round": round, "accuracy": accuracy}), flush=True)


def declare_torchvision_operators() -> None:
    """Let torchvision be imported: the package index has it for CUDA only, where it registers these itself."""
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
