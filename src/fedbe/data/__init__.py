"""Data: embedded, real and the user's own; every split of the paper; batches made whole."""

from fedbe.data.auxiliary import unlabeled
from fedbe.data.dataset import Dataset, Task
from fedbe.data.loader import Augment, BatchLoader
from fedbe.data.sources import known, load_task
from fedbe.data.splits import Split, split

__all__ = ["Augment", "BatchLoader", "Dataset", "Split", "Task", "known", "load_task", "split", "unlabeled"]
