import pytest
import torch

from fedbe.data import Dataset, Task
from fedbe.errors import DataError

IMAGES = torch.arange(48, dtype=torch.uint8).view(4, 2, 2, 3)
LABELS = torch.tensor([0, 1, 1, 0])


def made(inputs=IMAGES, labels=LABELS, classes=("a", "b"), client_ids=None):
    return Dataset("mine", inputs, labels, classes, client_ids)


def test_subset_takes_inputs_labels_and_clients_in_order():
    part = made(client_ids=torch.tensor([7, 8, 9, 7])).subset(torch.tensor([3, 1]))
    assert torch.equal(part.inputs, IMAGES[[3, 1]])
    assert part.labels.tolist() == [0, 1]
    assert part.client_ids.tolist() == [7, 8]
    assert len(part) == 2


def test_digest_depends_on_content_not_on_names():
    same = Dataset("other name", IMAGES.clone(), LABELS.clone(), ("x", "y"))
    changed = IMAGES.clone()
    changed[3, 1, 1, 2] += 1
    assert made().digest() == same.digest()
    assert made().digest() != made(inputs=changed).digest()
    assert made().digest() != made(labels=torch.tensor([0, 1, 1, 1])).digest()
    assert made().digest() != made(inputs=IMAGES.view(4, 3, 2, 2)).digest()
    mine, yours = (made(client_ids=torch.tensor(ids)) for ids in ([0, 0, 1, 1], [0, 1, 1, 1]))
    assert len({made().digest(), mine.digest(), yours.digest()}) == 3  # client ids are content


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"inputs": IMAGES.float()}, r"inputs must be uint8"),
        ({"inputs": torch.full((4, 2), torch.nan)}, "inputs must be finite"),
        ({"labels": LABELS[:3]}, r"`labels` must be.*got int64 \[3\]"),
        ({"labels": LABELS.int()}, r"got int32 \[4\]"),
        ({"labels": LABELS + 1}, "labels of 2 classes .*got 1 … 2"),
        ({"client_ids": torch.zeros(3, dtype=torch.int64)}, r"`client_ids` must be int64 of shape \[4\]"),
    ],
)
def test_wrong_shapes_types_and_values_are_errors(change, sentence):
    with pytest.raises(DataError, match=sentence):
        made(**change)


def test_task_needs_one_shape_and_the_same_classes():
    with pytest.raises(DataError, match="one shape"):
        Task(made(), made(inputs=IMAGES.view(4, 4, 1, 3)))
    with pytest.raises(DataError, match="same classes"):
        Task(made(), made(classes=("a", "c")))
