import hashlib

import pytest
import torch

from fedbe.core.random import generator
from fedbe.data import Partition, split
from fedbe.data.splits import stratified
from fedbe.errors import DataError, SettingError

TEN = torch.arange(10).repeat(500)  # 5,000 images, 500 a class
UNEVEN = torch.tensor([0] * 101 + [1] * 53 + [2] * 77)
SETTINGS = {
    "iid": {},
    "step": {"major_classes": 2, "minor_images": 3},
    "dirichlet": {"alpha": 0.5},
    "column": {"ids": torch.arange(5000) // 7 % 10},
}


def classes(count, images):
    return torch.arange(count).repeat_interleave(images)


def assert_exactly_once(parts: Partition, images: int):
    everything = torch.cat([parts.server, *parts.clients])
    assert torch.equal(everything.sort().values, torch.arange(images))
    assert all(torch.equal(part, part.sort().values) for part in (parts.server, *parts.clients))
    assert all(part.dtype == torch.int64 for part in (parts.server, *parts.clients))


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("server", [0, 700])
def test_every_image_goes_to_exactly_one_owner(kind, server):
    parts = split(kind, TEN, clients=10, server=server, seed=0, **SETTINGS[kind])
    assert len(parts.server) == server
    assert len(parts.clients) == 10
    assert_exactly_once(parts, 5000)


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_split_is_a_function_of_its_seed(kind):
    one, same, other = (split(kind, TEN, clients=10, server=700, seed=s, **SETTINGS[kind]) for s in (3, 3, 4))
    assert torch.equal(one.server, same.server)
    assert all(torch.equal(a, b) for a, b in zip(one.clients, same.clients, strict=True))
    assert not torch.equal(one.server, other.server)
    assert not all(torch.equal(a, b) for a, b in zip(one.clients, other.clients, strict=True))


@pytest.mark.parametrize(
    ("count", "images", "clients", "majors", "minor", "major"),
    [
        (10, 5000, 10, 2, 10, 1960),  # CIFAR-10: 2·1,960 + 8·10 = 4,000
        (100, 500, 100, 5, 1, 61),  # CIFAR-100: 5·61 + 95·1 = 400
        (200, 500, 100, 2, 1, 351),  # Tiny-ImageNet: 2·351 + 198·1 = 900, nothing is left over
    ],
)
def test_step_has_the_exact_counts_of_the_paper(count, images, clients, majors, minor, major):
    labels = classes(count, images)
    parts = split("step", labels, clients=clients, server=10_000, seed=0, major_classes=majors, minor_images=minor)
    counts = parts.counts(labels, count)
    assert set(counts.unique().tolist()) == {minor, major}
    assert torch.equal((counts == major).sum(1), torch.full((clients,), majors))
    assert torch.equal((counts == major).sum(0), torch.full((count,), clients * majors // count))
    assert torch.equal(torch.bincount(labels[parts.server]), torch.full((count,), 10_000 // count))
    assert_exactly_once(parts, len(labels))


def test_step_defaults_match_cifar10():
    labels = classes(10, 5000)
    counts = split("step", labels, clients=10, server=10_000, seed=5).counts(labels, 10)
    assert set(counts.unique().tolist()) == {10, 1960}


def test_step_majors_depend_on_the_seed():
    labels = classes(10, 500)
    tables = [split("step", labels, clients=10, server=0, seed=s).counts(labels, 10) for s in range(3)]
    assert not torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[1], tables[2])


def test_step_remainders_differ_by_at_most_one():
    # 101, 53 and 77 images, 4 clients with 1 major each: a class is major for one client or two.
    parts = split("step", UNEVEN, clients=4, server=0, seed=0, major_classes=1, minor_images=5)
    assert_exactly_once(parts, len(UNEVEN))
    counts = parts.counts(UNEVEN, 3)
    for label in range(3):
        major = counts[:, label][counts[:, label] != 5]
        assert len(major) in (1, 2)
        assert major.max() - major.min() <= 1


def test_step_class_without_a_major_client_is_shared_by_all():
    labels = classes(10, 100)
    counts = split("step", labels, clients=3, server=0, seed=0, major_classes=2, minor_images=7).counts(labels, 10)
    major = (counts == 100 - 2 * 7).sum(0)
    assert major.sum() == 6
    assert sorted(counts[:, major == 0].flatten().tolist()) == [33] * 8 + [34] * 4
    assert counts.sum(1).max() - counts.sum(1).min() <= 1  # leftovers go to those who have least


def test_step_is_even_if_every_client_is_major():
    labels = classes(2, 10)
    counts = split("step", labels, clients=3, server=0, seed=0, major_classes=2).counts(labels, 2)
    assert sorted(counts[:, 0].tolist()) == [3, 3, 4]


def test_step_with_major_share_gives_the_swiss_roll_split_of_the_paper():
    labels = classes(3, 400)
    parts = split("step", labels, clients=3, server=300, seed=0, major_classes=1, major_share=0.8)
    counts = parts.counts(labels, 3)
    assert sorted(counts.flatten().tolist()) == [30] * 6 + [240] * 3
    assert counts.sum(1).tolist() == [300] * 3


def test_iid_has_even_sizes_and_mixed_classes():
    parts = split("iid", TEN, clients=7, server=1000, seed=0)
    sizes = [len(part) for part in parts.clients]
    assert max(sizes) - min(sizes) <= 1
    assert parts.counts(TEN, 10).min() > 30  # 57 expected


def test_dirichlet_small_alpha_is_uneven_large_alpha_even():
    def largest_share(alpha):
        counts = split("dirichlet", TEN, clients=5, server=0, seed=1, alpha=alpha).counts(TEN, 10)
        return (counts.max(0).values / counts.sum(0)).mean()

    assert largest_share(0.1) > 0.6
    assert largest_share(1000.0) < 0.25


def test_dirichlet_shares_have_the_right_mean_and_variance():
    # q ~ Dir(a·1_K): mean 1/K, variance (K − 1)/(K²(K·a + 1)).
    labels = classes(400, 100)
    share = split("dirichlet", labels, clients=4, server=0, seed=0, alpha=0.5).counts(labels, 400) / 100
    assert share.mean(1).tolist() == pytest.approx([0.25] * 4, abs=0.04)
    assert share.var().item() == pytest.approx(3 / (16 * 3), rel=0.12)


def test_column_keeps_equal_ids_together_in_sorted_order():
    ids = torch.tensor([30, 10, 10, 20, 30, 20])
    parts = split("column", torch.zeros(6).long(), clients=3, server=0, seed=0, ids=ids)
    assert [part.tolist() for part in parts.clients] == [[1, 2], [3, 5], [0, 4]]


def test_stratified_is_proportional_by_largest_remainder():
    # 231 images, 50 wanted: 21.86, 11.47, 16.67 -> 22, 11, 17.
    chosen = stratified(UNEVEN, 50, generator(0))
    assert torch.bincount(UNEVEN[chosen]).tolist() == [22, 11, 17]
    assert torch.equal(chosen, chosen.unique())


def test_other_splits_draw_the_server_part_uniformly():
    parts = split("iid", TEN, clients=2, server=1000, seed=0)
    assert torch.bincount(TEN[parts.server]).tolist() != [100] * 10


def test_a_setting_of_none_counts_as_not_given():
    assert len(split("iid", TEN, clients=2, server=0, seed=0, alpha=None, major_classes=None).clients) == 2


@pytest.mark.parametrize(
    ("kind", "change", "error", "sentence"),
    [
        ("stepp", {}, SettingError, "did you mean 'step'"),
        ("iid", {"alpha": 1.0}, SettingError, "no setting 'alpha': it has none"),
        ("dirichlet", {"minor_images": 1}, SettingError, "no setting 'minor_images': choose one of: alpha"),
        ("iid", {"clients": 0}, SettingError, "`clients` must be 1 or more"),
        ("iid", {"server": -1}, SettingError, "`server` must be 0 or more"),
        ("iid", {"server": 5001}, SettingError, "data has 5000"),
        ("iid", {"clients": 5001}, SettingError, "need 5001 examples"),
        ("step", {"major_classes": 11}, SettingError, "`major_classes` must be 1 … 10.*got 11"),
        ("step", {"major_classes": 0}, SettingError, "`major_classes` must be 1 … 10.*got 0"),
        ("step", {"minor_images": 51}, SettingError, "must be 0 … 50.*class 0 has 500"),
        ("step", {"minor_images": -1}, SettingError, "`minor_images` must be 0 … 50"),
        ("step", {"minor_images": 1, "major_share": 0.5}, SettingError, "give one of them"),
        ("step", {"major_share": 1.5}, SettingError, "`major_share`.*got 1.5"),
        ("dirichlet", {"alpha": 0.0}, SettingError, "`alpha` must be > 0 .*got 0.0"),
        ("dirichlet", {"alpha": float("inf")}, SettingError, "`alpha` must be .*finite, got inf"),
        ("dirichlet", {"alpha": 0.001, "clients": 50}, DataError, r"leaves \d+ of 50 clients without an example"),
        ("column", {}, DataError, "needs `ids`.*got none"),
        ("column", {"ids": torch.zeros(3).long()}, DataError, r"got shape \[3\]"),
        ("column", {"ids": torch.zeros(5000).long()}, SettingError, "`clients` must be 1, .*got 10"),
        ("step", {"seed": "0"}, SettingError, "`seed` must be a whole number"),
    ],
)
def test_impossible_settings_are_errors(kind, change, error, sentence):
    arguments = {"clients": 10, "server": 0, "seed": 0} | change
    with pytest.raises(error, match=sentence):
        split(kind, TEN, **arguments)


def test_error_names_the_client_without_images():
    ids = torch.tensor([0] + [1] * 99)
    with pytest.raises(DataError, match="without an example, first 0"):
        split("column", torch.zeros(100).long(), clients=2, server=98, seed=0, ids=ids)


@pytest.mark.parametrize(
    ("kind", "golden"), [("iid", "d92dad1de368c8fd"), ("step", "d9733c747bd4f219"), ("dirichlet", "0fc5a8b939a676eb")]
)
def test_golden_splits(kind, golden):
    """Published results name a seed, so the draws must not change."""
    parts = split(kind, TEN, clients=10, server=700, seed=0)
    content = torch.cat([parts.server, *parts.clients]).numpy().data
    assert hashlib.sha256(content).hexdigest()[:16] == golden


def test_a_class_that_is_only_at_the_server_does_not_disturb_the_rest():
    labels = torch.tensor([0] * 9 + [1])
    for kind, settings in (("dirichlet", {"alpha": 100.0}), ("step", {"major_classes": 1, "minor_images": 0})):
        for seed in range(40):
            parts = split(kind, labels, clients=1, server=5, seed=seed, **settings)
            assert_exactly_once(parts, 10)


def test_quantity_gives_unequal_sizes_and_equal_classes():
    labels = torch.arange(10).repeat_interleave(500)
    partition = split("quantity", labels, clients=8, server=100, seed=0, alpha=0.5)
    sizes = [len(part) for part in partition.clients]
    assert sum(sizes) == 4900
    assert min(sizes) >= 1
    assert max(sizes) > 3 * min(sizes)
    largest = partition.counts(labels, 10)[sizes.index(max(sizes))].double()
    assert float(largest.std() / largest.mean()) < 0.2
    even = split("quantity", labels, clients=8, server=100, seed=0, alpha=1e6)
    assert max(len(p) for p in even.clients) - min(len(p) for p in even.clients) < 20
    with pytest.raises(SettingError, match="`alpha` must be > 0"):
        split("quantity", labels, clients=8, server=100, seed=0, alpha=0)


def test_shards_give_each_client_few_classes():
    labels = torch.arange(10).repeat_interleave(60)
    partition = split("shards", labels, clients=10, server=0, seed=0)
    counts = partition.counts(labels, 10)
    assert counts.sum(1).tolist() == [60] * 10
    assert int((counts > 0).sum(1).max()) <= 2  # a shard of 30 lies within one class of 60
    with pytest.raises(SettingError, match="`shards_per_client` must be 1 … 60, got 61"):
        split("shards", labels, clients=10, server=0, seed=0, shards_per_client=61)


@pytest.mark.parametrize("kind", ["step", "dirichlet", "shards"])
def test_a_class_for_each_pixel_has_no_split_by_class(kind):
    labels = torch.zeros(20, 2, 2, dtype=torch.int64)
    with pytest.raises(DataError, match="use one of column, iid, quantity"):
        split(kind, labels, clients=2, server=2, seed=0)
    assert split("iid", labels, clients=2, server=2, seed=0).counts(labels, 1).tolist() == [[36], [36]]
