import numpy as np
import pytest
import torch
from PIL import Image

from fedbe.data import Dataset, Task, load_task, load_unlabeled
from fedbe.data.auxiliary import SHARED_IMAGES, match_shape
from fedbe.errors import DataError, SettingError


def source(train=20, test=5, shape=(8, 8, 3), name="other", first=0):
    count = train + test
    values = torch.arange(first, first + count, dtype=torch.uint8)
    values = values.view(count, 1, 1, 1).expand(count, *shape).contiguous()
    labels = torch.zeros(count, dtype=torch.int64)
    parts = [Dataset(name, values[i], labels[i], ("a",)) for i in (slice(None, train), slice(train, None))]
    return Task(*parts)


MINE = source(name="mine", first=100)


def numbers(images):
    return images[:, 0, 0, 0].tolist()


def test_training_images_come_first_and_a_smaller_size_is_a_prefix():
    every = load_unlabeled(source(), size=None, shape=(3, 8, 8), seed=0, task=MINE)
    assert sorted(numbers(every)[:20]) == list(range(20))
    assert sorted(numbers(every)[20:]) == list(range(20, 25))
    assert numbers(every)[:20] != list(range(20))
    assert numbers(every)[20:] != list(range(20, 25))
    some = load_unlabeled(source(), size=7, shape=(3, 8, 8), seed=0, task=MINE)
    assert numbers(some) == numbers(every)[:7]
    assert numbers(load_unlabeled(source(), size=7, shape=(3, 8, 8), seed=1, task=MINE)) != numbers(some)


def test_shared_images_of_the_two_cifars_are_left_out():
    # Each image is one pixel with its number as colour, so that 60,000 images stay small.
    count = 60_000
    values = torch.arange(count)
    pixels = torch.stack([values % 256, values // 256 % 256, values // 65_536], 1).to(torch.uint8).view(count, 1, 1, 3)
    label = torch.zeros(count, dtype=torch.int64)
    for task, name in (("cifar10", "cifar100"), ("cifar100", "cifar10")):
        parts = Task(
            Dataset(name, pixels[:50_000], label[:50_000], ("a",)),
            Dataset(name, pixels[50_000:], label[50_000:], ("a",)),
        )
        tasks = [source(name=other) for other in (task, "digits")]
        images = load_unlabeled(parts, size=None, shape=(3, 1, 1), seed=0, task=tasks[0]).view(-1, 3).long()
        index = images[:, 0] + 256 * images[:, 1] + 65_536 * images[:, 2]
        assert sorted(set(range(count)) - set(index.tolist())) == sorted(SHARED_IMAGES[task, name])
        assert len(load_unlabeled(parts, size=None, shape=(3, 1, 1), seed=0, task=tasks[1])) == count


def test_images_are_resized_as_by_pillow():
    image = torch.randint(0, 256, (1, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    small = match_shape(image, (3, 32, 32))
    pillow = np.asarray(Image.fromarray(image[0].numpy()).resize((32, 32), Image.Resampling.BILINEAR))
    assert small.shape == (1, 32, 32, 3)
    assert small.is_contiguous()
    assert np.abs(small[0].numpy().astype(int) - pillow.astype(int)).max() <= 1
    assert match_shape(image, (3, 48, 20)).shape == (1, 48, 20, 3)


def test_grey_and_colour():
    colour = torch.tensor([[[[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]]]], dtype=torch.uint8)
    assert match_shape(colour, (1, 1, 4)).flatten().tolist() == [76, 150, 29, 255]
    grey = torch.tensor([[[[7]]]], dtype=torch.uint8)
    assert match_shape(grey, (3, 1, 1)).flatten().tolist() == [7, 7, 7]
    with pytest.raises(DataError, match="4 channels cannot be converted"):
        match_shape(torch.zeros(1, 2, 2, 4, dtype=torch.uint8), (3, 2, 2))


def test_impossible_arguments_are_errors():
    with pytest.raises(SettingError, match="`size` must be 1 … 25"):
        load_unlabeled(source(), size=26, shape=(3, 8, 8), seed=0, task=MINE)
    with pytest.raises(DataError, match="must be images, but swissroll has vectors"):
        load_unlabeled("swissroll", size=3, shape=(3, 8, 8), seed=0, task=MINE)


def test_own_data_of_one_name_are_compared_by_their_images():
    other = source(name="mine")
    assert len(load_unlabeled(other, size=None, shape=(3, 8, 8), seed=0, task=MINE)) == 25
    halves = source(name="mine", first=110)  # 15 of its 25 images are the task's
    images = load_unlabeled(halves, size=None, shape=(3, 8, 8), seed=0, task=MINE)
    assert sorted(numbers(images)) == list(range(125, 135))
    with pytest.raises(SettingError, match="`size` must be 1 … 10"):
        load_unlabeled(halves, size=11, shape=(3, 8, 8), seed=0, task=MINE)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_task_itself_is_refused_however_it_is_divided(tmp_path, seed):
    """Without a test part, the fifth that is held out depends on the seed."""
    images = np.arange(50, dtype=np.uint8)[:, None, None].repeat(4, 1).repeat(4, 2)
    np.savez(tmp_path / "mine.npz", inputs=images, labels=np.arange(50) % 2)
    np.savez(tmp_path / "copy.npz", inputs=images[::-1], labels=np.arange(50) % 2)
    task = load_task(tmp_path / "mine.npz")
    for name in ("mine", "copy"):
        with pytest.raises(SettingError, match="own test images"):
            load_unlabeled(tmp_path / f"{name}.npz", size=3, shape=(1, 4, 4), seed=seed, task=task)


@pytest.mark.parametrize(("task", "other"), [("cifar10-16px", "cifar10"), ("cifar10", "cifar10-16px")])
def test_two_sizes_of_one_set_are_the_same_images(task, other):
    with pytest.raises(SettingError, match="own test images"):
        load_unlabeled(source(name=other), size=3, shape=(3, 8, 8), seed=0, task=source(name=task, first=100))


def test_digits_for_a_colour_task():
    assert load_unlabeled("digits", size=11, shape=(3, 32, 32), seed=0, task=MINE).shape == (11, 32, 32, 3)
