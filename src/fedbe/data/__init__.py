"""Data sets, the splits of the paper, and batches.

`load_task` reads a data set from any source. `split` divides its training images among a server and clients.
`make_loader` gives batches: normalised and augmented images and vectors, or tokens and several tensors as they are.
`load_unlabeled` reads unlabeled images from another data set.
"""

from fedbe.data.auxiliary import load_unlabeled
from fedbe.data.dataset import Dataset, Task
from fedbe.data.loader import Augment, BatchLoader
from fedbe.data.plain_loader import Loader, PlainLoader, make_loader
from fedbe.data.sources import dataset_names, load_task
from fedbe.data.splits import Partition, split

__all__ = [
    "Augment",
    "BatchLoader",
    "Dataset",
    "Loader",
    "Partition",
    "PlainLoader",
    "Task",
    "dataset_names",
    "load_task",
    "load_unlabeled",
    "make_loader",
    "split",
]
