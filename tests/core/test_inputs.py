import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fedbe.core.inputs import Inputs, TensorInputs, as_inputs, batches, hold_out
from fedbe.errors import SettingError

ROWS = torch.arange(12.0).view(6, 2)


class Plain(Dataset):
    """A map-style data set with the items `make(row)`."""

    def __init__(self, make, count=6):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return self.make(i)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


@pytest.mark.parametrize(
    "source",
    [
        ROWS,
        ROWS.clone().requires_grad_(),
        Plain(lambda i: ROWS[i]),
        Plain(lambda i: (ROWS[i], 3)),
        Plain(lambda i: [ROWS[i], "label"]),
        TensorDataset(ROWS, torch.zeros(6)),
        list(ROWS),
        TensorInputs(ROWS),
        ROWS.numpy(),
        DataLoader(TensorDataset(ROWS, torch.zeros(6)), batch_size=4),
    ],
    ids=["tensor", "with-grad", "tensors", "tuples", "lists", "TensorDataset", "list", "inputs", "numpy", "DataLoader"],
)
def test_sources(source):
    inputs = as_inputs(source)
    assert isinstance(inputs, Inputs)
    assert len(inputs) == 6
    batch = inputs.batch(torch.tensor([4, 1]))
    assert batch.tolist() == [[8, 9], [2, 3]]
    assert not batch.requires_grad


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (torch.zeros(0, 3), r"J > 0, got shape \[0, 3\]"),
        (torch.tensor(1.0), r"got shape \[\]"),
        (Plain(lambda i: ROWS[i], 0), "J > 0"),
        (TensorInputs(torch.zeros(0, 3)), "`unlabeled` is empty"),
        (Plain(lambda i: torch.zeros(i + 1)), r"`unlabeled`\[1\] has shape \[2\], the first has \[1\]"),
        (Plain(lambda _: "text"), r"`unlabeled\[0\]` must be a tensor, got str"),
        (Plain(lambda _: {"image": "text"}), r"`unlabeled\[0\]: 'image'` must be a tensor, got str"),
        (Plain(lambda i: {"ids": ROWS[i]} if i else {"tokens": ROWS[i]}), r"`unlabeled`\[1\] has shape \{'ids'"),
        (Stream(), "a DataLoader or Inputs, got Stream"),
        ({}, "no tensors"),
        ({"label": ROWS}, "no tensors"),
        ((ROWS, ROWS[:2]), "of one length, got 6, 2"),
        ({"ids": {"deep": ROWS}}, "'ids'` must be a tensor, got dict"),
        (np.array(["a", "b"]), "got ndarray"),
        (3, "got int"),
        ("path/to/data", "got str"),
        (torch.full((2, 2), torch.nan), "must be finite"),
        (torch.tensor([[1.0, torch.inf]]), "must be finite"),
        (torch.zeros(2, 2, device="meta"), "dense tensor with data"),
        (torch.zeros(2, 2).to_sparse(), "dense tensor with data"),
    ],
)
def test_sources_that_cannot_work(source, message):
    with pytest.raises(SettingError, match=message):
        as_inputs(source)


IDS, MASK = torch.arange(12).view(6, 2), torch.ones(6, 2)


@pytest.mark.usefixtures("warns_always")
def test_read_only_arrays_as_those_of_a_data_frame():
    rows = ROWS.numpy().copy()
    rows.setflags(write=False)
    assert as_inputs(rows).batch(torch.tensor([1])).tolist() == [[2, 3]]
    assert as_inputs({"x": rows}).batch(torch.tensor([1]))["x"].tolist() == [[2, 3]]
    same = ROWS.numpy()
    assert as_inputs(same).tensor.data_ptr() == ROWS.data_ptr()  # others are not copied


@pytest.mark.parametrize(
    "source",
    [
        {"ids": IDS, "mask": MASK},
        {"ids": IDS.numpy(), "mask": MASK.numpy(), "labels": torch.zeros(6)},
        Plain(lambda i: {"ids": IDS[i], "mask": MASK[i], "label": 1}),
        Plain(lambda i: ({"ids": IDS[i], "mask": MASK[i]}, 1)),
        DataLoader(Plain(lambda i: {"ids": IDS[i], "mask": MASK[i], "label": 1}), batch_size=4),
    ],
    ids=["dict", "numpy", "dicts", "pairs", "DataLoader"],
)
def test_several_tensors_by_name(source):
    inputs = as_inputs(source)
    assert len(inputs) == 6
    batch = inputs.batch(torch.tensor([4, 1]))
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "ids": [[8, 9], [2, 3]],
        "mask": [[1, 1], [1, 1]],
    }
    assert batch["ids"].dtype == torch.int64


@pytest.mark.parametrize("source", [(IDS, MASK), Plain(lambda i: ((IDS[i], MASK[i]), 1))], ids=["tuple", "pairs"])
def test_several_tensors_by_position(source):
    ids, mask = as_inputs(source).batch(torch.tensor([5]))
    assert (ids.tolist(), mask.tolist()) == ([[10, 11]], [[1, 1]])


def test_several_tensors_are_augmented_together(rng):
    inputs = as_inputs((IDS, MASK), augment=lambda batch, _: (batch[0] + 1, batch[1]))
    assert inputs.batch(torch.tensor([0]), rng)[0].tolist() == [[1, 2]]
    broken = as_inputs((IDS, MASK), augment=lambda batch, _: (batch[0], batch[1][:1]))
    with pytest.raises(SettingError, match="a batch of 2 inputs, got tuple"):
        broken.batch(torch.tensor([0, 1]), rng)


def test_integers_are_valid_inputs():
    assert as_inputs(torch.arange(4)).batch(torch.tensor([3])).tolist() == [3]


def test_augmentation_needs_a_generator(rng):
    inputs = as_inputs(ROWS, augment=lambda batch, draw: batch + torch.rand(1, generator=draw) + 1)
    index = torch.tensor([0])
    assert inputs.batch(index).tolist() == [[0, 1]]
    assert not torch.equal(inputs.batch(index, rng), inputs.batch(index, rng))


def test_augmentation_that_cannot_work():
    with pytest.raises(SettingError, match="`augment` needs"):
        as_inputs(TensorInputs(ROWS), augment=lambda batch, _: batch)
    with pytest.raises(SettingError, match="`augment` must be a function"):
        as_inputs(ROWS, augment=True)


@pytest.mark.parametrize(
    ("augment", "received"),
    [(lambda *_: None, "NoneType"), (lambda batch, _: batch[1:], r"\[1, 2\]"), (lambda batch, _: batch.sum(), r"\[\]")],
)
def test_augmentation_must_return_the_batch(rng, augment, received):
    """The most common mistake is a missing `return`."""
    inputs = as_inputs(ROWS, augment=augment)
    with pytest.raises(SettingError, match=f"a batch of 2 inputs, got {received}"):
        inputs.batch(torch.tensor([0, 1]), rng)


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [(6, 2, [2, 2, 2]), (7, 3, [3, 4]), (5, 3, [3, 2]), (1, 4, [1]), (3, 1, [1, 1, 1]), (4, 9, [4])],
)
def test_a_last_batch_of_one_joins_the_batch_before(count, size, expected):
    parts = list(batches(count, size))
    assert [len(p) for p in parts] == expected
    assert torch.cat(parts).tolist() == list(range(count))


class TestHoldOut:
    def test_it_is_drawn_from_the_generator(self):
        learn, judged = hold_out(20, 0.25, torch.Generator().manual_seed(1))
        assert len(judged) == 5
        assert sorted(torch.cat([learn, judged]).tolist()) == list(range(20))
        again = hold_out(20, 0.25, torch.Generator().manual_seed(1))[1]
        other = hold_out(20, 0.25, torch.Generator().manual_seed(2))[1]
        assert torch.equal(again, judged)
        assert not torch.equal(other, judged)

    @pytest.mark.parametrize("share", [0.1, 0.9])
    def test_few_inputs_leave_one_for_each_side(self, share):
        assert [len(part) for part in hold_out(2, share, torch.Generator())] == [1, 1]

    def test_a_share_of_zero_holds_nothing_out(self):
        assert [part.tolist() for part in hold_out(3, 0.0, torch.Generator())] == [[0, 1, 2], []]

    def test_it_needs_two_inputs(self):
        with pytest.raises(SettingError, match=r"two unlabeled inputs or more .*got 1"):
            hold_out(1, 0.1, torch.Generator())
