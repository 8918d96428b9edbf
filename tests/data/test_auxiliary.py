import numpy as np
import pytest
import torch
from PIL import Image

from fedbe.data import Dataset, Task, load_unlabeled
from fedbe.data.auxiliary import SHARED_IMAGES, match_shape
from fedbe.errors import DataError, SettingError


def source(train=20, test=5, shape=(8, 8, 3), name="other"):
    count = train + test
    values = torch.arange(count, dtype=torch.uint8).view(count, 1, 1, 1).expand(count, *shape).contiguous()
    labels = torch.zeros(count, dtype=torch.int64)
    parts = [Dataset(name, values[i], labels[i], ("a",)) for i in (slice(None, train), slice(train, None))]
    return Task(*parts)


def numbers(images):
    return images[:, 0, 0, 0].tolist()


def test_training_images_come_first_and_a_smaller_size_is_a_prefix():
    every = load_unlabeled(source(), size=None, shape=(3, 8, 8), seed=0, task="mine")
    assert sorted(numbers(every)[:20]) == list(range(20))
    assert sorted(numbers(every)[20:]) == list(range(20, 25))
    assert numbers(every)[:20] != list(range(20))
    assert numbers(every)[20:] != list(range(20, 25))
    some = load_unlabeled(source(), size=7, shape=(3, 8, 8), seed=0, task="mine")
    assert numbers(some) == numbers(every)[:7]
    assert numbers(load_unlabeled(source(), size=7, shape=(3, 8, 8), seed=1, task="mine")) != numbers(some)


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
        images = load_unlabeled(parts, size=None, shape=(3, 1, 1), seed=0, task=task).view(-1, 3).long()
        index = images[:, 0] + 256 * images[:, 1] + 65_536 * images[:, 2]
        assert sorted(set(range(count)) - set(index.tolist())) == sorted(SHARED_IMAGES[task, name])
        assert len(load_unlabeled(parts, size=None, shape=(3, 1, 1), seed=0, task="digits")) == count


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
        load_unlabeled(source(), size=26, shape=(3, 8, 8), seed=0, task="mine")
    with pytest.raises(SettingError, match="own test images"):
        load_unlabeled(source(name="mine"), size=3, shape=(3, 8, 8), seed=0, task="mine")
    with pytest.raises(DataError, match="must be images, but swissroll has vectors"):
        load_unlabeled("swissroll", size=3, shape=(3, 8, 8), seed=0, task="mine")


def test_digits_for_a_colour_task():
    assert load_unlabeled("digits", size=11, shape=(3, 32, 32), seed=0, task="cifar10").shape == (11, 32, 32, 3)
