"""Tests with the real CIFAR-10 and CIFAR-100 in FEDBE_DATA."""

import hashlib

import pytest
import torch

from fedbe.data import load_unlabeled, split
from fedbe.data.auxiliary import SHARED_IMAGES
from fedbe.data.loader import channel_statistics

pytestmark = pytest.mark.real


def sha256(tensor):
    return hashlib.sha256(tensor.to(torch.uint8).contiguous().numpy().data).hexdigest()


def test_cifar10_hashes(real):
    task = real("cifar10")
    assert sha256(task.train.inputs) == "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a"
    assert sha256(task.train.labels) == "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253"
    assert sha256(task.test.inputs) == "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"
    assert sha256(task.test.labels) == "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5"


def test_cifar10_mean_and_deviation_match_the_literature(real):
    mean, std = channel_statistics(real("cifar10").train.inputs)
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


@pytest.mark.parametrize(("task", "other"), [("cifar10", "cifar100"), ("cifar100", "cifar10")])
def test_unlabeled_images_have_none_of_the_task(real, task, other):
    in_task = {image.numpy().tobytes() for part in (real(task).train, real(task).test) for image in part.inputs}
    in_other = [image.numpy().tobytes() for part in (real(other).train, real(other).test) for image in part.inputs]
    shared = [index for index, image in enumerate(in_other) if image in in_task]
    assert tuple(shared) == SHARED_IMAGES[task, other]
    images = load_unlabeled(other, size=None, shape=(3, 32, 32), seed=0, task=real(task))
    assert len(images) == 59_997
    assert not any(image.numpy().tobytes() in in_task for image in images)
