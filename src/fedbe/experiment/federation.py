"""What stays fixed while a federation trains: the data of the server and the clients, and the architecture."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor, nn

from fedbe import data, models
from fedbe.core import plugins
from fedbe.core.random import generator, global_rng
from fedbe.data import Augment, BatchLoader, Dataset, Task
from fedbe.errors import RecipeError, SettingError
from fedbe.experiment.recipe import Recipe


@dataclass(frozen=True)
class ModelSpec:
    """An architecture that every process can build for itself.

    Args:
        name: A network of `fedbe.models`, or module:function.
        classes: The number of classes.
        shape: The shape of one input.
        settings: Of the network.
    """

    name: str
    classes: int
    shape: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def build(self, source: torch.Generator) -> nn.Module:
        """Build the module with weights that are drawn from the generator.

        Raises:
            RecipeError: The function cannot be called, or does not return a module.
        """
        if ":" not in self.name:
            return models.build(self.name, self.classes, self.shape, source, **self.settings)
        with global_rng(source):
            module = plugins.call_function(
                self.name, RecipeError, classes=self.classes, shape=self.shape, **self.settings
            )
        if not isinstance(module, nn.Module):
            raise RecipeError(f"'{self.name}' must return a torch.nn.Module, got {type(module).__name__}")
        return module


@dataclass(frozen=True, eq=False)
class Federation:
    """The data of all parties. The loaders share one tensor of inputs.

    Attributes:
        model: The architecture.
        classes: The names of the classes.
        train: The training data of all clients.
        labels: Its labels.
        clients: For each client, the indices of its examples in `train`.
        test: The test data.
        test_labels: Its labels.
        server: The server's unlabeled data; None if it has none.
        server_labels: Its labels if they are known. They are used for reports and by the oracle targets only.
        digest: A digest of all data.
    """

    model: ModelSpec
    classes: tuple[str, ...]
    train: BatchLoader
    labels: Tensor
    clients: tuple[Tensor, ...]
    test: BatchLoader
    test_labels: Tensor
    server: BatchLoader | None
    server_labels: Tensor | None
    digest: str

    def share_(self) -> Self:
        """Move all data into shared memory, so that worker processes read it without a copy."""
        for loader in (self.train, self.test, self.server):
            if loader is not None:
                loader.share_()
        for tensor in (self.labels, self.test_labels, *self.clients):
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        return self


def prepare(recipe: Recipe, seed: int, task: Task | None = None) -> Federation:
    """Load the data and divide it as the recipe says; a function of (recipe, seed).

    Args:
        recipe: The recipe.
        seed: The run's seed.
        task: The data set, if it is already loaded.

    Raises:
        DataError: The data is missing.
        RecipeError: The recipe's settings do not fit the data.
    """
    task = task or data.load_task(recipe.data.source)
    parts = divide(recipe, task.train, seed)
    train = _train_loader(recipe, task)
    server, server_labels, unlabeled_digest = _server_part(recipe, task, train, parts.server, seed)
    return Federation(
        model=ModelSpec(recipe.model.name, len(task.train.classes), train.shape, recipe.model.settings()),
        classes=task.train.classes,
        train=train,
        labels=task.train.labels,
        clients=parts.clients,
        test=train.like(task.test),
        test_labels=task.test.labels,
        server=server,
        server_labels=server_labels,
        digest=_digest([task.train.digest(), task.test.digest(), unlabeled_digest]),
    )


def divide(recipe: Recipe, train: Dataset, seed: int) -> data.Partition:
    """Divide the training examples among the server and the clients."""
    settings = recipe.split.settings()
    if recipe.split.kind == "column":
        settings["ids"] = train.client_ids
    clients, server = recipe.split.clients, recipe.data.server
    return data.split(recipe.split.kind, train.labels, clients=clients, server=server, seed=seed, **settings)


def _train_loader(recipe: Recipe, task: Task) -> BatchLoader:
    mean, std = (None if v is None else torch.tensor(v) for v in (recipe.data.mean, recipe.data.std))
    try:
        return BatchLoader(task.train, mean=mean, std=std, augment=_augmentation(recipe, task))
    except SettingError as error:
        raise RecipeError(f"the table [data] does not fit this data set: {error}") from error


def _augmentation(recipe: Recipe, task: Task) -> Augment | None:
    if recipe.data.pad == 0 and not recipe.data.flip:
        return None
    if task.train.inputs.dim() != 4:
        raise RecipeError("data.pad and data.flip are for images, but this data set has vectors: remove them")
    return Augment(recipe.data.pad, recipe.data.flip)


def _server_part(
    recipe: Recipe, task: Task, train: BatchLoader, index: Tensor, seed: int
) -> tuple[BatchLoader | None, Tensor | None, str]:
    """The server's data, its labels if they are known, and a digest of data that is not in the task."""
    if recipe.data.unlabeled is None:
        # Smaller sizes are subsets of larger ones, so that sizes can be compared.
        order = torch.randperm(len(index), generator=generator(seed, 0, "unlabeled"))[: recipe.data.unlabeled_size]
        used = index[order.sort().values]
        return (train.select(used), task.train.labels[used], "") if len(used) else (None, None, "")
    if not is_image(train.shape):
        raise RecipeError("data.unlabeled is for images, but this data set has vectors: use data.server")
    unlabeled = data.load_unlabeled(
        recipe.data.unlabeled,
        size=recipe.data.unlabeled_size,
        shape=train.shape,
        seed=seed,
        task=task.train.name,
    )
    return train.like(unlabeled), None, hashlib.sha256(unlabeled.numpy().data).hexdigest()


def is_image(shape: tuple[int, ...]) -> TypeGuard[tuple[int, int, int]]:
    """Whether inputs of this shape are images: (channels, height, width)."""
    return len(shape) == 3


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("/".join(parts).encode()).hexdigest()


def initial_weights(spec: ModelSpec, seed: int) -> nn.Module:
    """The model before round 1: the same for every method with this seed."""
    return spec.build(generator(seed, 0, "weights"))
