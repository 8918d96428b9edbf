import io

import torch
from rich.console import Console

from fedbe.data.plot import bubble, split_table

COUNTS = torch.tensor([[100, 0, 1], [25, 60, 0]])
CLASSES = ("ape", "bear, brown", "cat")


def printed(counts, classes):
    console = Console(file=io.StringIO(), width=100)
    console.print(split_table(counts, classes, "a title"))
    return console.file.getvalue()


def test_terminal_shows_every_client_class_and_total():
    lines = printed(COUNTS, CLASSES).splitlines()
    assert lines[0].strip() == "a title"
    assert lines[1].split() == ["client", "ape", "bear", "cat", "examples"]
    assert lines[2].split() == ["0", "⬤", "·", "101"]
    assert lines[3].split() == ["1", "∙", "•", "85"]
    assert "· up to 20   ⬤ up to 100 examples of a class" in lines[4]


def test_only_zero_is_blank():
    assert bubble(0, 50) == " "
    assert all(bubble(count, 5000) != " " for count in (1, 10, 4999, 5000))


def test_a_large_split_is_truncated_with_a_note():
    text = printed(torch.ones(60, 200, dtype=torch.int64), tuple(f"class {n}" for n in range(200)))
    assert "40 of 60 clients, 20 of 200 classes" in text
