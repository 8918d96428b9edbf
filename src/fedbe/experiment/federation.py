"""What stays fixed while a federation trains: everybody's data, and the architecture of the model."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from fedbe import data, models
from fedbe.core import plugins
from fedbe.core.random import generator, global_rng
from fedbe.data import Augment, BatchLoader, Dataset, Task
from fedbe.errors import RecipeError
from fedbe.experiment.recipe import Recipe


@dataclass(frozen=True)
class ModelSpec:
    """An architecture that every process can build for itself: a name or module:function, and its settings."""

    name: str
    classes: int
    shape: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def build(self, source: torch.Generator) -> nn.Module:
        """The module, its weights drawn from the generator."""
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
    """Feeds share one tensor of pixels; clients are index tensors into the training data.

    Labels of the server's images are known to the simulator only: they go into reports and the oracle rows.
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

    def share_(self) -> "Federation":
        """Move all data into shared memory, for worker processes to read without a copy."""
        for feed in (self.train, self.test, self.server):
            if feed is not None:
                feed.share_()
        for tensor in (self.labels, self.test_labels, *self.clients):
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        return self


def prepare(recipe: Recipe, seed: int, task: Task | None = None) -> Federation:
    """Load the data and divide it, as the recipe says; a function of (recipe, seed)."""
    task = task or data.load_task(recipe.data.source)
    parts = divide(recipe, task.train, seed)
    train = BatchLoader(task.train, augment=_augmentation(recipe, task))
    server, server_labels, foreign = _server_part(recipe, task, train, parts.server, seed)
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
        digest=_digest([task.train.digest(), task.test.digest(), foreign]),
    )


def divide(recipe: Recipe, train: Dataset, seed: int) -> data.Partition:
    """Who has which of the training images."""
    settings = recipe.split.settings()
    if recipe.split.kind == "column":
        settings["ids"] = train.client_ids
    clients, server = recipe.split.clients, recipe.data.server
    return data.split(recipe.split.kind, train.labels, clients=clients, server=server, seed=seed, **settings)


def _augmentation(recipe: Recipe, task: Task) -> Augment | None:
    if recipe.data.pad == 0 and not recipe.data.flip:
        return None
    if task.train.inputs.dim() != 4:
        raise RecipeError("data.pad and data.flip are for images, but this data set has vectors: remove them")
    return Augment(recipe.data.pad, recipe.data.flip)


def _server_part(
    recipe: Recipe, task: Task, train: BatchLoader, index: Tensor, seed: int
) -> tuple[BatchLoader | None, Tensor | None, str]:
    if recipe.data.unlabeled is None:
        # A smaller part is a part of a larger one, so that sizes can be compared.
        order = torch.randperm(len(index), generator=generator(seed, 0, "unlabeled"))[: recipe.data.unlabeled_size]
        used = index[order.sort().values]
        return (train.select(used), task.train.labels[used], "") if len(used) else (None, None, "")
    if not is_image(train.shape):
        raise RecipeError("data.unlabeled is for images, but this data set has vectors: use data.server")
    foreign = data.load_unlabeled(
        recipe.data.unlabeled,
        size=recipe.data.unlabeled_size,
        shape=train.shape,
        seed=seed,
        task=task.train.name,
    )
    return train.like(foreign), None, hashlib.sha256(foreign.numpy().data).hexdigest()


def is_image(shape: tuple[int, ...]) -> TypeGuard[tuple[int, int, int]]:
    return len(shape) == 3


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("/".join(parts).encode()).hexdigest()


def initial_weights(spec: ModelSpec, seed: int) -> nn.Module:
    """The model before round 1: the same for every method with this seed."""
    return spec.build(generator(seed, 0, "weights"))
