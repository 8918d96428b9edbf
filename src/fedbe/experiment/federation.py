"""What stays fixed while a federation trains: the data of the server and the clients, and the architecture."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Self, TypeGuard, overload

import torch
from torch import Tensor, nn

from fedbe import data, models
from fedbe.core import plugins
from fedbe.core.devices import CPU
from fedbe.core.random import generator, global_rng
from fedbe.data import Augment, Dataset, Loader, Task, make_loader
from fedbe.data.dataset import Shape, is_plain
from fedbe.data.splits import remaining, representative
from fedbe.errors import RecipeError, SettingError
from fedbe.experiment.recipe import Recipe


@dataclass(frozen=True)
class ModelSpec:
    """An architecture that every process can build for itself.

    Args:
        name: A network of `fedbe.models`, or module:function.
        classes: The number of classes.
        shape: The shape of one input; by position or name if there are several tensors.
        settings: Of the network.
        output: Which part of the network's output are the logits; see `ModelRunner`.
    """

    name: str
    classes: int
    shape: Shape
    settings: Mapping[str, Any] = field(default_factory=dict)
    output: str | int | None = None

    def build(self, source: torch.Generator) -> nn.Module:
        """Build the module with weights that are drawn from the generator.

        Raises:
            RecipeError: The function cannot be called, or does not return a module.
        """
        if is_shipped(self.name):
            if not is_single(self.shape):
                raise RecipeError(f"'{self.name}' takes one tensor, this data has several: give a model of your own")
            return models.build(self.name, self.classes, self.shape, source, **self.settings)
        with global_rng(source):
            module = plugins.call_function(
                self.name, RecipeError, classes=self.classes, shape=self.shape, **self.settings
            )
        if not isinstance(module, nn.Module):
            raise RecipeError(f"'{self.name}' must return a torch.nn.Module, got {type(module).__name__}")
        return module


class ClientParts(Sequence[Tensor]):
    """Which examples each client has: one tensor of indices, cut at offsets.

    Any number of clients are two tensors in shared memory. One tensor for each client would need one open file for
    each client and worker process.

    Args:
        parts: For each client, the indices of its examples, int64 [n_i].

    Example:
        >>> parts = ClientParts([torch.tensor([3, 4]), torch.tensor([7])])
        >>> len(parts), parts[1], parts.sizes
        (2, tensor([7]), [2, 1])
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._index = torch.cat(list(parts))
        self._offsets = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, client: int) -> Tensor: ...

    @overload
    def __getitem__(self, client: slice) -> list[Tensor]: ...

    def __getitem__(self, client: int | slice) -> Tensor | list[Tensor]:
        if isinstance(client, slice):
            return [self[i] for i in range(*client.indices(len(self)))]
        if not 0 <= client < len(self):
            raise IndexError(f"there are {len(self)} clients, no client {client}")
        return self._index[int(self._offsets[client]) : int(self._offsets[client + 1])]

    @property
    def sizes(self) -> list[int]:
        """How many examples each client has."""
        sizes: list[int] = self._offsets.diff().tolist()
        return sizes

    def share_(self) -> None:
        """Move the indices into shared memory."""
        for tensor in (self._index, self._offsets):
            tensor.share_memory_()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, eq=False)
class Federation:
    """The data of all parties. The loaders share one tensor of inputs.

    Attributes:
        model: The architecture.
        seed: The run's seed, from which the first weights are drawn.
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
    seed: int
    classes: tuple[str, ...]
    train: Loader
    labels: Tensor
    clients: ClientParts
    test: Loader
    test_labels: Tensor
    server: Loader | None
    server_labels: Tensor | None
    digest: str

    def build_model(self) -> nn.Module:
        """The model before round 1. Every process builds the same one: frozen parameters never travel."""
        return initial_weights(self.model, self.seed)

    def on(self, device: torch.device) -> Self:
        """The federation with its inputs on a device, copied there once. Labels and indices stay on the host."""
        if device == CPU:
            return self
        move = cache(lambda tensor: tensor.to(device))  # the loaders share tensors
        server = None if self.server is None else self.server.placed(move)
        return replace(self, train=self.train.placed(move), test=self.test.placed(move), server=server)

    def server_on(self, device: torch.device) -> Loader | None:
        """The server's data on a device, without the clients': for a process that runs only the server's step."""
        if self.server is None or device == CPU:
            return self.server
        return self.server.compact().placed(lambda tensor: tensor.to(device))

    def share_(self) -> Self:
        """Move all data into shared memory, so that worker processes read it without a copy."""
        for loader in (self.train, self.test, self.server):
            if loader is not None:
                loader.share_()
        self.clients.share_()
        for tensor in (self.labels, self.test_labels):
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
    if is_shipped(recipe.model.name):
        task = as_numbers(task)
    whole, task = task, with_validation(recipe, task)
    parts = divide(recipe, task.train, seed)
    train = _train_loader(recipe, task)
    server, server_labels, unlabeled_digest = _server_part(recipe, task, train, parts.server, seed, whole)
    return Federation(
        model=ModelSpec(
            recipe.model.name, len(task.train.classes), train.shape, recipe.model.settings(), recipe.model.output
        ),
        seed=seed,
        classes=task.train.classes,
        train=train,
        labels=task.train.labels,
        clients=ClientParts(parts.clients),
        test=train.like(task.test),
        test_labels=task.test.labels,
        server=server,
        server_labels=server_labels,
        digest=_digest([task.train.digest(), task.test.digest(), unlabeled_digest]),
    )


def is_shipped(model: str) -> bool:
    """Whether a model's name is one of `fedbe.models`, and not module:function."""
    return ":" not in model


def as_numbers(task: Task) -> Task:
    """The task with token ids turned into numbers: fedbe's own networks have no embedding."""

    def converted(part: Dataset) -> Dataset:
        return replace(part, inputs=part.inputs.float()) if isinstance(part.inputs, Tensor) else part

    is_tokens = isinstance(task.train.inputs, Tensor) and task.train.inputs.dtype == torch.int64
    return Task(converted(task.train), converted(task.test)) if is_tokens else task


def with_validation(recipe: Recipe, task: Task) -> Task:
    """The task whose test part are `data.validation` of the training examples; without them, the task as it is."""
    size, train = recipe.data.validation, task.train
    if not size:
        return task
    if size >= len(train):
        raise RecipeError(f"data.validation must be below the {len(train)} training examples, got {size}")
    held_out = representative(train.labels, size, generator(0, role="validation"))
    return Task(train.subset(remaining(len(train), held_out)), train.subset(held_out, f"{train.name} (validation)"))


def divide(recipe: Recipe, train: Dataset, seed: int) -> data.Partition:
    """Divide the training examples among the server and the clients."""
    settings = recipe.split.settings()
    if recipe.split.kind == "column":
        settings["ids"] = train.client_ids
    clients, server = recipe.split.clients, recipe.data.server
    return data.split(recipe.split.kind, train.labels, clients=clients, server=server, seed=seed, **settings)


def _train_loader(recipe: Recipe, task: Task) -> Loader:
    mean, std = (None if v is None else torch.tensor(v) for v in (recipe.data.mean, recipe.data.std))
    try:
        return make_loader(task.train, mean=mean, std=std, augment=_augmentation(recipe, task))
    except SettingError as error:
        raise RecipeError(f"the table [data] does not fit this data set: {error}") from error


def _augmentation(recipe: Recipe, task: Task) -> Augment | None:
    if recipe.data.pad == 0 and not recipe.data.flip:
        return None
    if is_plain(task.train.inputs) or task.train.tensor.dim() != 4:
        raise RecipeError("data.pad and data.flip are for images, but this data set has none: remove them")
    if task.train.labels.dim() > 1:
        raise RecipeError("data.pad and data.flip would move the images, but not their labels: remove them")
    return Augment(recipe.data.pad, recipe.data.flip)


def _server_part(
    recipe: Recipe, task: Task, train: Loader, index: Tensor, seed: int, whole: Task
) -> tuple[Loader | None, Tensor | None, str]:
    """The server's data, its labels if they are known, and a digest of data that is not in the task.

    `whole` is the task with its own test data, where `task` measures on validation data.
    """
    if recipe.data.unlabeled is None:
        # Smaller sizes are subsets of larger ones, so that sizes can be compared.
        order = torch.randperm(len(index), generator=generator(seed, 0, "unlabeled"))[: recipe.data.unlabeled_size]
        used = index[order.sort().values]
        return (train.select(used), task.train.labels[used], "") if len(used) else (None, None, "")
    if not is_image(train.shape):
        raise RecipeError("data.unlabeled is for images, but this data set has none: use data.server")
    unlabeled = data.load_unlabeled(
        recipe.data.unlabeled,
        size=recipe.data.unlabeled_size,
        shape=train.shape,
        seed=seed,
        task=whole,
    )
    return train.like(unlabeled), None, hashlib.sha256(unlabeled.numpy().data).hexdigest()


def is_single(shape: Shape) -> TypeGuard[tuple[int, ...]]:
    """Whether an input is one tensor."""
    return not isinstance(shape, dict) and all(isinstance(size, int) for size in shape)


def is_image(shape: Shape) -> TypeGuard[tuple[int, int, int]]:
    """Whether inputs of this shape are images: (channels, height, width)."""
    return is_single(shape) and len(shape) == 3


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("/".join(parts).encode()).hexdigest()


def initial_weights(spec: ModelSpec, seed: int) -> nn.Module:
    """The model before round 1: the same for every method with this seed."""
    return spec.build(generator(seed, 0, "weights"))
