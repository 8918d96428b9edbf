"""On the real CIFAR-10 and CIFAR-100, where FEDBE_DATA has them."""

import hashlib

import pytest
import torch

from fedbe.data import split, unlabeled
from fedbe.data.feed import moments

pytestmark = pytest.mark.real


def sha256(tensor):
    return hashlib.sha256(tensor.to(torch.uint8).contiguous().numpy().data).hexdigest()


def test_cifar10_is_the_real_one(real):
    task = real("cifar10")
    assert sha256(task.train.inputs) == "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a"
    assert sha256(task.train.labels) == "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253"
    assert sha256(task.test.inputs) == "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"
    assert sha256(task.test.labels) == "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5"


def test_cifar10_moments_are_those_of_the_literature(real):
    mean, std = moments(real("cifar10").train.inputs)
    assert mean.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)
    assert std.tolist() == pytest.approx([0.2470, 0.2435, 0.2616], abs=5e-5)


def test_step_on_real_labels(real):
    labels = real("cifar10").train.labels
    counts = split("step", labels, clients=10, server=10_000, seed=0).counts(labels, 10)
    assert counts.unique(return_counts=True)[0].tolist() == [10, 1960]
    assert counts.sum(1).tolist() == [4000] * 10
    labels = real("cifar100").train.labels
    parts = split("step", labels, clients=100, server=10_000, seed=0, major_classes=5, minor_images=1)
    assert parts.counts(labels, 100).unique().tolist() == [1, 61]


def test_the_two_shared_images_are_the_same_and_left_out(real):
    ten, hundred = real("cifar10"), real("cifar100")
    shared = torch.stack([ten.test.inputs[1492], ten.test.inputs[9345]])
    assert torch.equal(shared[0], hundred.train.inputs[49_797])
    assert torch.equal(shared[1], hundred.test.inputs[2203])
    images = unlabeled("cifar100", size=None, like=(3, 32, 32), seed=0, task="cifar10")
    assert len(images) == 59_998
    for image in shared:
        assert not (images == image).flatten(1).all(1).any()
