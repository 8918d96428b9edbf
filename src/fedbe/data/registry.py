"""Names of data sets, and `load`, the one door to all of them."""

from pathlib import Path

from fedbe import seeds
from fedbe.data import embedded
from fedbe.data.dataset import Dataset, Task
from fedbe.data.split import stratified
from fedbe.errors import DataError, nearest


def known() -> tuple[str, ...]:
    """The names that `load` understands without a path."""
    return ("digits", "swissroll")


def load(source: object, *, root: Path | None = None, seed: int = 0) -> Task:
    """Load a data set."""
    del root
    if source == "digits":
        return hold_out(embedded.digits(), seed)
    if source == "swissroll":
        return embedded.swissroll(seed)
    raise DataError(f"unknown data set '{source}': {nearest(str(source), known())}")


def hold_out(data: Dataset, seed: int) -> Task:
    """A stratified fifth as test data, the rest to train on: for sources that bring no test part."""
    import torch

    test = stratified(data.labels, len(data) // 5, seeds.generator(seed, role="hold-out"))
    train = torch.ones(len(data), dtype=torch.bool).index_fill_(0, test, False).nonzero().flatten()
    return Task(data.subset(train), data.subset(test))
