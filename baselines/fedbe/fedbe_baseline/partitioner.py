"""The paper's Step split for flwr-datasets: each client has a few major classes and few images of the others.

federated = FederatedDataset(dataset="uoft-cs/cifar10", partitioners={"train": StepPartitioner(10)})
part = federated.load_partition(0)
"""

from typing import Any

import torch
from flwr_datasets.partitioner import Partitioner

from fedbe.data import Partition, split


class StepPartitioner(Partitioner):  # type: ignore[misc]
    """Divide a data set by the Step split; the same indices as `kind = "step"` in a recipe of fedbe.

    Args:
        num_partitions: the number of clients.
        partition_by: the column of the labels.
        major_classes: how many classes are large at a client.
        minor_images: how many images it has of each other class.
        server_images: images that no client gets, all classes in proportion: the server's unlabeled images.
        seed: determines the split.
    """

    def __init__(
        self,
        num_partitions: int,
        partition_by: str = "label",
        major_classes: int = 2,
        minor_images: int = 10,
        server_images: int = 10_000,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._num_partitions, self._partition_by = num_partitions, partition_by
        self._settings = {"major_classes": major_classes, "minor_images": minor_images}
        self._server_images, self._seed = server_images, seed
        self._indices: Partition | None = None

    @property
    def num_partitions(self) -> int:
        """The number of clients."""
        return self._num_partitions

    def load_partition(self, partition_id: int) -> Any:
        """The images of one client, as a `datasets.Dataset`."""
        if not 0 <= partition_id < self._num_partitions:
            raise ValueError(f"partition_id must be from 0 to {self._num_partitions - 1}, got {partition_id}")
        return self.dataset.select(self._split().clients[partition_id].tolist())

    def load_server_partition(self) -> Any:
        """The server's images, as a `datasets.Dataset`. Their labels are not for training."""
        return self.dataset.select(self._split().server.tolist())

    def _split(self) -> Partition:
        if self._indices is None:
            labels = torch.tensor(self.dataset[self._partition_by])
            sizes = {"clients": self._num_partitions, "server": self._server_images, "seed": self._seed}
            self._indices = split("step", labels, **sizes, **self._settings)
        return self._indices
