import math

import torch

from fedbe.data import load_task, split


def test_digits_are_scikit_learns_scaled_to_255():
    from sklearn.datasets import load_digits

    task = load_task("digits")
    raw = load_digits()
    assert len(task.train) + len(task.test) == 1797
    everything = torch.cat([task.train.inputs, task.test.inputs]).flatten(1).double()
    sixteenths = (everything * 16 / 255).round()
    assert sixteenths.max() == 16
    assert sorted(sixteenths.sum(1).tolist()) == sorted(raw.data.sum(1).tolist())
    assert int(everything.max()) == 255


def test_digits_hold_out_a_stratified_fifth_by_seed():
    first, same, other = load_task("digits", seed=0), load_task("digits", seed=0), load_task("digits", seed=1)
    assert first.test.digest() == same.test.digest() != other.test.digest()
    shares = torch.bincount(first.test.labels) / torch.bincount(torch.cat([first.train.labels, first.test.labels]))
    assert ((shares - 0.2).abs() < 0.005).all()


def test_swissroll_classes_follow_each_other_along_the_roll():
    task = load_task("swissroll")
    radius = task.train.inputs.norm(dim=1)
    # t = 1.5π(1 + 2u) is the radius: class c lies in 1.5π(1 + 2c/3) … 1.5π(1 + 2(c + 1)/3), plus noise.
    for label in range(3):
        class_radius = radius[task.train.labels == label]
        middle = 1.5 * math.pi * (1 + (2 * label + 1) / 3)
        assert abs(class_radius.mean().item() - middle) < 0.15
        assert (class_radius - middle).abs().max() < 0.5 * math.pi + 2.5
    assert torch.bincount(task.train.labels).tolist() == [400] * 3
    assert torch.bincount(task.test.labels).tolist() == [200] * 3


def test_swissroll_depends_on_its_seed_and_train_differs_from_test():
    assert load_task("swissroll", seed=1).train.digest() == load_task("swissroll", seed=1).train.digest()
    assert load_task("swissroll", seed=1).train.digest() != load_task("swissroll", seed=2).train.digest()
    task = load_task("swissroll")
    assert not torch.isin(task.test.inputs[:, 0], task.train.inputs[:, 0]).any()


def test_swissroll_divides_into_80_10_10():
    labels = load_task("swissroll").train.labels
    parts = split("step", labels, clients=3, server=300, seed=0, major_classes=1, major_share=0.8)
    assert sorted(parts.counts(labels, 3)[0].tolist()) == [30, 30, 240]


def test_golden_embedded_data():
    assert load_task("digits").test.digest()[:16] == "eedaeef06b4595b9"
    assert load_task("swissroll").train.digest()[:16] == "1dcb418d220d8dfa"
