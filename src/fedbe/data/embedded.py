"""Data sets without a download: scikit-learn's digits, the Swiss roll of the paper's Figure 1, and noise."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedbe.core import random
from fedbe.data.dataset import Dataset, Task
from fedbe.errors import DataError

ROLL_TRAIN, ROLL_TEST, ROLL_NOISE = 1200, 600, 0.5


def digits() -> Dataset:
    """1,797 handwritten digits of 8 × 8 pixels, uint8 [1797, 8, 8, 1]; their 0 … 16 is scaled to 0 … 255."""
    rows = torch.from_numpy(np.loadtxt(_digits_file(), delimiter=",", dtype=np.int64))
    ink = rows[:, :64].mul(255).div(16).round().to(torch.uint8)
    return Dataset("digits", ink.view(-1, 8, 8, 1), rows[:, 64].clone(), tuple(str(digit) for digit in range(10)))


def _digits_file() -> Path:
    """scikit-learn's file: 64 pixels and the label in each row. Importing scikit-learn to read it takes a second."""
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise DataError("the digits come with scikit-learn, which is not installed: pip install scikit-learn")
    return Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"


def swissroll(seed: int) -> Task:
    """Three classes in sequence along a Swiss roll in the plane, equally many points of each.

    The roll is scikit-learn's without its third axis: t = 1.5π(1 + 2u), u uniform in [0, 1), class ⌊3u⌋,
    (x, y) = (t·cos t, t·sin t) + noise. With 300 of the 1,200 training points at the server, three clients share
    300 points of each class: 240 + 30 + 30.
    """
    train = _roll(ROLL_TRAIN, random.generator(seed, role="swissroll-train"))
    test = _roll(ROLL_TEST, random.generator(seed, role="swissroll-test"))
    classes = ("inner", "middle", "outer")
    return Task(Dataset("swissroll", *train, classes), Dataset("swissroll", *test, classes))


def _roll(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.arange(count) % 3
    along = (labels + torch.rand(count, generator=generator, dtype=torch.float64)) / 3
    angle = 1.5 * math.pi * (1 + 2 * along)
    points = torch.stack([angle * angle.cos(), angle * angle.sin()], dim=1)
    points += ROLL_NOISE * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return points.float(), labels


def noise() -> tuple[np.ndarray, np.ndarray]:
    """500 images of noise in the shape of digits: a stand-in where unlabeled images come from another data set."""
    draw = np.random.default_rng(0)
    return draw.integers(0, 256, (500, 8, 8, 1), dtype=np.uint8), np.arange(500) % 2
