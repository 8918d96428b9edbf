"""Data: embedded, real and the user's own; every split of the paper; batches made whole."""

from fedbe.data.dataset import Dataset, Task
from fedbe.data.feed import Augment, Feed
from fedbe.data.foreign import unlabeled
from fedbe.data.registry import known, load
from fedbe.data.split import Split, split

__all__ = ["Augment", "Dataset", "Feed", "Split", "Task", "known", "load", "split", "unlabeled"]
