import io

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from fedbe.data.plot import bubble, in_terminal, legend_counts, to_png
from fedbe.errors import DataError

COUNTS = torch.tensor([[100, 0, 1], [25, 60, 0]])
CLASSES = ("ape", "bear, brown", "cat")


def printed(counts, classes):
    console = Console(file=io.StringIO(), width=100)
    console.print(in_terminal(counts, classes, "a title"))
    return console.file.getvalue()


def test_terminal_shows_every_client_class_and_total():
    lines = printed(COUNTS, CLASSES).splitlines()
    assert lines[0].strip() == "a title"
    assert lines[1].split() == ["client", "ape", "bear", "cat", "images"]
    assert lines[2].split() == ["0", "⬤", "·", "101"]
    assert lines[3].split() == ["1", "∙", "•", "85"]
    assert "· up to 20   ⬤ up to 100 images of a class" in lines[4]


def test_only_nothing_is_blank():
    assert bubble(0, 50) == " "
    assert all(bubble(count, 5000) != " " for count in (1, 10, 4999, 5000))


def test_a_large_split_is_cut_and_says_so():
    text = printed(torch.ones(60, 200, dtype=torch.int64), tuple(f"class {n}" for n in range(200)))
    assert "40 of 60 clients, 20 of 200 classes" in text


def test_png_bubbles_have_areas_in_proportion(tmp_path):
    path = tmp_path / "split.png"
    counts = torch.tensor([[400, 100]])
    to_png(counts, ("a", "b"), "", path)
    image = np.asarray(Image.open(path).convert("RGB")).astype(int)
    teal = np.abs(image - [15, 118, 110]).sum(2) < 60
    columns = teal.any(0).nonzero()[0]
    blobs = np.split(columns, (np.diff(columns) > 1).nonzero()[0] + 1)
    areas = [teal[:, blob[0] : blob[-1] + 1].sum() for blob in blobs]
    assert areas[0] / areas[1] == pytest.approx(4, rel=0.1)


def test_a_class_may_be_called_like_a_formula(tmp_path):
    """The first would lose its signs, the second end the command."""
    to_png(COUNTS, ("$0-$50", "$100^$200", "cat"), "from $1 to $2", tmp_path / "prices.png")
    to_png(COUNTS, ("0-50", "100^200", "cat"), "from 1 to 2", tmp_path / "plain.png")
    assert (tmp_path / "prices.png").read_bytes() != (tmp_path / "plain.png").read_bytes()


def test_png_is_replaced_whole(tmp_path):
    path = tmp_path / "split.png"
    path.write_bytes(b"old")
    to_png(COUNTS, CLASSES, "a title", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["split.png"]
    with pytest.raises(DataError, match=r"cannot write .*unharmed"):
        to_png(COUNTS, CLASSES, "a title", tmp_path / "nowhere" / "split.png")


@pytest.mark.parametrize("largest", [1, 2, 9, 10, 61, 351, 1960, 50_000])
def test_legend_is_rising_and_ends_with_the_largest(largest):
    values = legend_counts(largest)
    assert values == sorted(set(values))
    assert values[0] >= 1
    assert values[-1] == largest
