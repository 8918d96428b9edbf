import importlib
import io
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing

from fedbe.core.inputs import tensors_of
from fedbe.core.random import generator
from fedbe.data import Augment, BatchLoader
from fedbe.data.loader import channel_statistics
from fedbe.data.plain_loader import PlainLoader
from fedbe.errors import DataError, SettingError

PIXELS = torch.randint(0, 256, (30, 8, 6, 3), dtype=torch.uint8, generator=generator(0, role="test-pixels"))
ZERO, ONE = torch.zeros(3), torch.ones(3)
EVERY = torch.arange(len(PIXELS))


def plain(images):
    """Normalisation with mean 0 and deviation 1: values in [0, 1], channels first."""
    return images.permute(0, 3, 1, 2).float() / 255


def possible_views(image, pad, flip):
    """Every possible result of pad, flip and crop of one image [H, W, C]."""
    height, width, channels = image.shape
    views = []
    for source in [image, image.flip(1)] if flip else [image]:
        canvas = torch.zeros(height + 2 * pad, width + 2 * pad, channels, dtype=torch.uint8)
        canvas[pad : pad + height, pad : pad + width] = source
        views += [
            canvas[top : top + height, left : left + width] for top in range(2 * pad + 1) for left in range(2 * pad + 1)
        ]
    return torch.stack(views)


def test_channel_statistics_computed_by_hand():
    images = torch.tensor([[[[0, 10], [255, 10]]], [[[255, 10], [255, 10]]]], dtype=torch.uint8)
    mean, std = channel_statistics(images)
    assert mean.tolist() == pytest.approx([0.75, 10 / 255])
    assert std.tolist() == pytest.approx([0.1875**0.5, 1.0])  # the second channel is constant
    mean, std = channel_statistics(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    assert mean.tolist() == [2.0, 5.0]
    assert std.tolist() == [1.0, 1.0]


def test_channel_statistics_agree_with_float64():
    mean, std = channel_statistics(PIXELS)
    values = PIXELS.double() / 255
    torch.testing.assert_close(mean.double(), values.mean((0, 1, 2)), rtol=1e-6, atol=0)
    torch.testing.assert_close(std.double(), values.std((0, 1, 2), correction=0), rtol=1e-6, atol=0)


def test_plain_batch_is_normalised_channels_last():
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 1.0, 2.0])
    loader = BatchLoader(PIXELS, mean=mean, std=std, augment=Augment())
    index = torch.tensor([4, 0, 4])
    batch = loader.batch(index)
    expected = (plain(PIXELS[index]) - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)
    torch.testing.assert_close(batch, expected)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert loader.shape == tuple(batch.shape[1:]) == (3, 8, 6)


def test_without_a_generator_nothing_is_random():
    loader = BatchLoader(PIXELS, augment=Augment())
    assert torch.equal(loader.batch(EVERY), loader.batch(EVERY))
    assert not torch.equal(loader.batch(EVERY, generator(0)), loader.batch(EVERY))


def test_default_statistics_make_mean_zero_and_deviation_one():
    batch = BatchLoader(PIXELS).batch(EVERY)
    torch.testing.assert_close(batch.mean((0, 2, 3)), ZERO, atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.std((0, 2, 3), correction=0), ONE, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("pad", "flip"), [(2, True), (4, True), (2, False), (0, True)])
def test_augmented_images_equal_a_naive_implementation(pad, flip):
    loader = BatchLoader(PIXELS, mean=ZERO, std=ONE, augment=Augment(pad, flip))
    index = torch.tensor([3, 3, 7, 0, 29, 3])
    draw = generator(1)
    seen = set()
    for _ in range(60):
        for image, got in zip(index.tolist(), loader.batch(index, draw), strict=True):
            views = plain(possible_views(PIXELS[image], pad, flip))
            same = [number for number, view in enumerate(views) if torch.allclose(view, got, atol=1e-6)]
            assert len(same) == 1
            seen.add(same[0])
    # 360 draws of at most 162 results.
    ways = (2 * pad + 1) ** 2 * (1 + flip)
    assert len(seen) > 0.8 * ways


def test_corners_and_directions_are_uniform():
    pixels = torch.zeros(1, 3, 3, 1, dtype=torch.uint8)
    pixels[0, 1, 0, 0] = 255  # one bright pixel shows both the crop and the flip
    loader = BatchLoader(pixels, mean=torch.zeros(1), std=torch.ones(1), augment=Augment(pad=1))
    batch = loader.batch(torch.zeros(18_000, dtype=torch.int64), generator(2)).flatten(1)
    where = batch.argmax(1)[batch.sum(1) > 0]
    counts = torch.bincount(where, minlength=9).view(3, 3) / 18_000
    # Rows: moved by −1, 0 or 1. Columns: from 0 to 0 or 1 or out; mirrored, from 2 to 2 or 1 or out.
    expected = torch.tensor([[1 / 18, 2 / 18, 1 / 18]] * 3)
    torch.testing.assert_close(counts, expected, atol=0.008, rtol=0)


def test_an_empty_batch_is_empty():
    loader = BatchLoader(PIXELS, augment=Augment())
    none = torch.zeros(0, dtype=torch.int64)
    assert loader.batch(none, generator(0)).shape == loader.batch(none).shape == (0, 3, 8, 6)


def test_a_batch_is_a_function_of_the_generator():
    loader = BatchLoader(PIXELS, augment=Augment())
    assert torch.equal(loader.batch(EVERY, generator(5)), loader.batch(EVERY, generator(5)))
    assert not torch.equal(loader.batch(EVERY, generator(5)), loader.batch(EVERY, generator(6)))


def test_bfloat16_is_float32_rounded_once():
    loader = BatchLoader(PIXELS, augment=Augment())
    half = loader.to(torch.bfloat16)
    assert loader.dtype is torch.float32
    got = half.batch(EVERY, generator(3))
    assert got.dtype is torch.bfloat16
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(got, loader.batch(EVERY, generator(3)).bfloat16())


def test_select_of_select_shares_the_pixels():
    pixels = PIXELS.clone()
    loader = BatchLoader(pixels)
    part = loader.select(torch.tensor([5, 6, 7, 8])).select(torch.tensor([3, 0]))
    assert len(part) == 2
    assert len(loader) == 30
    before = part.batch(torch.tensor([0, 1]))
    assert torch.equal(before, loader.batch(torch.tensor([8, 5])))
    pixels[8] = 255 - pixels[8]
    assert not torch.equal(part.batch(torch.tensor([0])), before[:1])


@pytest.mark.parametrize(
    "loader",
    [BatchLoader(PIXELS, augment=Augment(1)), PlainLoader({"ids": torch.arange(60).view(30, 2)})],
    ids=["images", "tokens"],
)
def test_a_compact_loader_has_the_same_batches_and_no_other_examples(loader):
    part, counts = loader.select(torch.tensor([7, 2, 5])), []
    compact = part.compact()
    compact.placed(lambda tensor: counts.append(len(tensor)) or tensor)
    assert counts[0] == 3
    first, second = (tensors_of(p.batch(torch.tensor([2, 0]), generator(1))) for p in (part, compact))
    assert all(map(torch.equal, first, second))
    assert compact.compact() is compact


def test_like_keeps_statistics_augmentation_and_dtype():
    loader = BatchLoader(PIXELS, augment=Augment(1), dtype=torch.bfloat16)
    other = loader.like(PIXELS[:2] // 2)
    assert torch.equal(other.mean, loader.mean)
    assert torch.equal(other.std, loader.std)
    assert (other.augment, other.dtype) == (loader.augment, loader.dtype)


def test_vectors_are_standardised_and_never_augmented():
    loader = BatchLoader(torch.tensor([[1.0, 10.0], [3.0, 10.0]]))
    assert loader.shape == (2,)
    expected = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    assert torch.equal(loader.batch(torch.tensor([0, 1]), generator(0)), expected)
    assert torch.equal(loader.batch(torch.tensor([0, 1])), expected)


def test_batch_does_not_change_the_data():
    before = PIXELS.clone()
    BatchLoader(PIXELS, augment=Augment()).batch(EVERY, generator(0))
    vectors = torch.tensor([[1.0], [3.0]])
    BatchLoader(vectors).batch(torch.tensor([0, 1]))
    assert torch.equal(PIXELS, before)
    assert vectors.flatten().tolist() == [1.0, 3.0]


WORKER = """
import torch

def work(loader, orders, answers):
    orders.get(timeout=60)
    answers.put(loader.batch(torch.tensor([1])).sum().item())
"""


@pytest.mark.e2e
def test_worker_processes_read_the_same_memory(tmp_path, monkeypatch):
    (tmp_path / "loader_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path)  # a spawned process finds the function by its module's name
    work = importlib.import_module("loader_worker").work
    pixels = PIXELS.clone()
    loader = BatchLoader(pixels, mean=ZERO, std=ONE)
    assert not pixels.is_shared()
    assert loader.share_() is loader
    assert pixels.is_shared()
    context = torch.multiprocessing.get_context("spawn")
    orders, answers = context.Queue(), context.Queue()
    worker = context.Process(target=work, args=(loader.select(torch.tensor([0, 3])), orders, answers))
    worker.start()  # sends the loader
    pixels[3] = 255 - pixels[3]  # the worker sees this change only in shared memory
    orders.put("read")
    total = answers.get(timeout=60)
    worker.join()
    assert total == pytest.approx(plain(pixels[3:4]).sum().item(), rel=1e-5)
    assert total != pytest.approx(plain(PIXELS[3:4]).sum().item(), rel=1e-3)


def test_a_shared_loader_is_sent_as_a_handle():
    loader = BatchLoader(torch.zeros(200, 32, 32, 3, dtype=torch.uint8), mean=ZERO, std=ONE).share_()
    sent = io.BytesIO()
    ForkingPickler(sent).dump(loader)
    assert sent.tell() < 10_000  # the pixels are 614,400 bytes


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"data": PIXELS.float()}, DataError, "inputs must be uint8"),
        ({"data": torch.zeros(2, 3), "augment": Augment()}, SettingError, "`augment` crops and flips images"),
        ({"data": PIXELS, "mean": torch.zeros(2)}, SettingError, "`mean` must have one value"),
        ({"data": PIXELS, "std": torch.tensor([1.0, 0.0, 1.0])}, SettingError, "`std` must be finite and > 0"),
        ({"data": PIXELS[:0]}, DataError, "at least one example"),
        ({"data": PIXELS, "dtype": torch.int64}, SettingError, "`dtype` must be a floating type"),
    ],
)
def test_impossible_arguments_are_errors(arguments, error, sentence):
    data = arguments.pop("data")
    with pytest.raises(error, match=sentence):
        BatchLoader(data, **arguments)


def test_negative_pad_is_refused():
    with pytest.raises(SettingError, match=r"`pad` must be .*got -1"):
        Augment(pad=-1)
