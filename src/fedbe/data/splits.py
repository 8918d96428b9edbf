"""Splits: which client has which training examples. Each is a function of (labels, settings, seed).

The server's part is drawn first. Every other example goes to exactly one client.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbe.core import random
from fedbe.errors import DataError, SettingError, check_option, check_settings

DEFAULT_MINOR_IMAGES = 10  # the paper's CIFAR-10 split


@dataclass(frozen=True, eq=False)
class Partition:
    """The result of a split: indices into the training data.

    Attributes:
        server: int64 [U], the examples of the server, sorted.
        clients: for client i, int64 [n_i], its examples, sorted.
    """

    server: Tensor
    clients: tuple[Tensor, ...]

    def counts(self, labels: Tensor, classes: int) -> Tensor:
        """How many examples of each class each client has: int64 [clients, classes].

        >>> partition = Partition(torch.tensor([0]), (torch.tensor([1, 2]), torch.tensor([3])))
        >>> partition.counts(torch.tensor([0, 1, 1, 0]), classes=2).tolist()
        [[0, 2], [1, 0]]
        """
        return torch.stack([torch.bincount(labels[index].flatten(), minlength=classes) for index in self.clients])


def split(kind: str, labels: Tensor, *, clients: int, server: int, seed: int, **settings: Any) -> Partition:
    """Divide training examples among a server and clients.

    The kinds and their settings:

    - "iid": equally many examples for each client, at random.
    - "step": each client has `major_classes` large classes (default 2). Of every other class it has `minor_images`
      examples (default 10). With `major_share` instead, the major clients of a class share that part of it, and its
      other clients share the rest.
    - "dirichlet": client n has the part q_c[n] of class c, where q_c ~ Dir(alpha·1); `alpha` is 0.1 by default.
    - "quantity": sizes differ, classes do not: client n has the part q[n] of all examples, where q ~ Dir(alpha·1);
      `alpha` is 0.5 by default. Each client has at least one example.
    - "shards": examples are sorted by class and cut into clients · `shards_per_client` shards (default 2), which are
      dealt at random (McMahan et al. 2017). The sizes of two shards differ by at most one example.
    - "column": by `ids`, int64 [N]. Equal ids go to the same client; clients are in the order of the ids.

    Args:
        kind: "iid", "step", "dirichlet", "quantity", "shards" or "column".
        labels: int64 [N], the labels of the training examples; or [N, …], for the kinds that do not look at classes.
        clients: number of clients.
        server: number of examples for the server. For "step" they have all classes in proportion; for the other
            kinds they are drawn uniformly.
        seed: seed of the split.
        settings: the settings of this kind. A setting that is None counts as not given.

    Returns:
        The partition of 0 … N − 1.

    Raises:
        SettingError: if a setting is unknown or out of range.
        DataError: if a client would have no example, or `ids` does not fit the labels.

    Example:
        >>> labels = torch.arange(10).repeat_interleave(5000)
        >>> partition = split("step", labels, clients=10, server=10_000, seed=0)
        >>> sorted(partition.counts(labels, 10)[0].tolist())
        [10, 10, 10, 10, 10, 10, 10, 10, 1960, 1960]
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    check_option("split", kind, SPLITS)
    parameters = inspect.signature(SPLITS[kind]).parameters.values()
    check_settings(f"the {kind} split", settings, [p.name for p in parameters if p.kind is p.KEYWORD_ONLY])
    if labels.dim() > 1 and kind in BY_CLASS:
        others = ", ".join(sorted(set(SPLITS) - BY_CLASS))
        raise DataError(
            f"the {kind} split needs one class for each example, but the labels are {list(labels.shape)}: "
            f"use one of {others}"
        )
    _check_sizes(len(labels), clients, server)
    draw = random.generator(seed, role=f"split-{kind}")
    server_index = (stratified if kind == "step" else uniform)(labels, server, draw)
    rest = remaining(len(labels), server_index)
    parts = SPLITS[kind](labels, rest, clients, draw, **settings)
    empty = [number for number, part in enumerate(parts) if not len(part)]
    if empty:
        raise DataError(
            f"the {kind} split leaves {len(empty)} of {clients} clients without an example, first {empty[0]}; "
            "use fewer clients, a smaller server part, more even settings or another seed"
        )
    return Partition(server_index, tuple(part.sort().values for part in parts))


def stratified(labels: Tensor, size: int, draw: torch.Generator) -> Tensor:
    """Draw `size` examples with each class in proportion to its count, rounded by largest remainder.

    Returns:
        Their sorted indices, int64 [size].

    Example:
        >>> labels = torch.tensor([0, 0, 0, 0, 1, 1])
        >>> labels[stratified(labels, 3, random.generator(0))].tolist()
        [0, 0, 1]
    """
    counts = torch.bincount(labels)
    quota, remainder = counts * size // len(labels), counts * size % len(labels)
    missing = size - int(quota.sum())
    quota[remainder.argsort(descending=True, stable=True)[:missing]] += 1
    chosen = [_shuffled(index, draw)[:n] for index, n in zip(_by_class(labels), quota.tolist(), strict=True)]
    return torch.cat(chosen).sort().values


def remaining(count: int, index: Tensor) -> Tensor:
    """The indices 0 … count − 1 without those in `index`, in ascending order."""
    return torch.ones(count, dtype=torch.bool).index_fill_(0, index, False).nonzero().flatten()


def _by_class(labels: Tensor) -> Sequence[Tensor]:
    """The indices of each class 0 … max(labels), in ascending order."""
    return torch.split(labels.argsort(stable=True), torch.bincount(labels).tolist())


def uniform(labels: Tensor, size: int, draw: torch.Generator) -> Tensor:
    """Draw `size` examples uniformly; returns their sorted indices, int64 [size]."""
    return torch.randperm(len(labels), generator=draw)[:size].sort().values


def representative(labels: Tensor, size: int, draw: torch.Generator) -> Tensor:
    """Draw `size` examples to measure on: stratified where each example has one class, else uniformly."""
    return (stratified if labels.dim() == 1 else uniform)(labels, size, draw)


def _shuffled(index: Tensor, draw: torch.Generator) -> Tensor:
    return index[torch.randperm(len(index), generator=draw)]


def _iid(_: Tensor, rest: Tensor, clients: int, draw: torch.Generator) -> Sequence[Tensor]:
    return _shuffled(rest, draw).tensor_split(clients)


def _step(
    labels: Tensor,
    rest: Tensor,
    clients: int,
    draw: torch.Generator,
    *,
    major_classes: int = 2,
    minor_images: int | None = None,
    major_share: float | None = None,
) -> Sequence[Tensor]:
    """Give each minor client of class c `minor_images` of its n_c examples, or all of them n_c·(1 − major_share).

    The major clients of the class share the rest. A remainder goes to the clients with the fewest examples, one example
    each. A class that is major for no client (fewer clients than classes / major_classes) is shared by all clients.
    """
    if minor_images is not None and major_share is not None:
        raise SettingError("`minor_images` and `major_share` exclude each other; give one of them")
    if major_share is not None and not 0 < major_share <= 1:
        raise SettingError(f"`major_share` must be > 0 and at most 1, got {major_share}")
    counts = _class_counts(labels, rest)
    is_major = _major_classes(clients, len(counts), major_classes, draw)
    shares: list[tuple[int, int, Tensor]] = []  # class, examples, the clients who share them
    for label, count in enumerate(counts.tolist()):
        majors, minors = is_major[:, label].nonzero().flatten(), (~is_major[:, label]).nonzero().flatten()
        if not len(majors) or not len(minors):
            shares.append((label, count, torch.arange(clients)))
            continue
        if major_share is None:
            to_minors = len(minors) * _minor_size(minor_images, label, count, clients)
        else:
            to_minors = round(count * (1 - major_share))
        shares += [(label, to_minors, minors), (label, count - to_minors, majors)]
    return _deal(labels, rest, _count_table(shares, clients, len(counts)), draw)


def _class_counts(labels: Tensor, index: Tensor) -> Tensor:
    """Images of each class of `labels` among those at `index`: int64 [classes]."""
    return torch.bincount(labels[index], minlength=int(labels.max()) + 1)


def _major_classes(clients: int, classes: int, major_classes: int, draw: torch.Generator) -> Tensor:
    """Which classes are major for which client: bool [clients, classes].

    Each client takes the classes taken least often so far; ties are broken at random. So two classes never differ
    by more than one, and they are equal if clients · major_classes is a multiple of the number of classes.
    """
    if not 1 <= major_classes <= classes:
        raise SettingError(f"`major_classes` must be 1 … {classes}, the number of classes, got {major_classes}")
    is_major = torch.zeros(clients, classes, dtype=torch.bool)
    for client in range(clients):
        priority = is_major.sum(0) + torch.rand(classes, generator=draw)
        is_major[client, priority.argsort()[:major_classes]] = True
    return is_major


def _minor_size(minor_images: int | None, label: int, count: int, clients: int) -> int:
    examples = DEFAULT_MINOR_IMAGES if minor_images is None else minor_images
    if examples < 0 or examples * clients > count:
        raise SettingError(
            f"`minor_images` must be 0 … {count // clients}, because class {label} has {count} examples for "
            f"{clients} clients, got {examples}"
        )
    return examples


def _count_table(shares: Sequence[tuple[int, int, Tensor]], clients: int, classes: int) -> Tensor:
    """Divide each share evenly, the remainder to its clients with the fewest examples: int64 [clients, classes]."""
    table = torch.zeros(clients, classes, dtype=torch.int64)
    for label, count, sharers in shares:
        table[sharers, label] += count // len(sharers)
    for label, count, sharers in shares:
        fewest = table[sharers].sum(1).argsort(stable=True)[: count % len(sharers)]
        table[sharers[fewest], label] += 1
    return table


def _dirichlet(
    labels: Tensor, rest: Tensor, clients: int, draw: torch.Generator, *, alpha: float = 0.1
) -> Sequence[Tensor]:
    """Hsu et al. 2019: client n has examples ⌊n_c·Q[n−1]⌉ … ⌊n_c·Q[n]⌉ of class c, Q the running sum of q_c."""
    if not (alpha > 0 and math.isfinite(alpha)):
        raise SettingError(f"`alpha` must be > 0 and finite, got {alpha}")
    rng = random.numpy_generator(draw)
    counts = _class_counts(labels, rest).numpy()
    parts = rng.dirichlet(np.full(clients, alpha), size=len(counts))
    cuts = np.rint(counts[:, None] * parts.cumsum(1).clip(max=1)).astype(np.int64)
    cuts[:, -1] = counts
    return _deal(labels, rest, torch.from_numpy(np.diff(cuts, axis=1, prepend=0).T.copy()), draw)


def _quantity(_: Tensor, rest: Tensor, clients: int, draw: torch.Generator, *, alpha: float = 0.5) -> Sequence[Tensor]:
    """Every client gets one example. The others are divided by q ~ Dir(alpha·1), as in `_dirichlet`."""
    if not (alpha > 0 and math.isfinite(alpha)):
        raise SettingError(f"`alpha` must be > 0 and finite, got {alpha}")
    parts = random.numpy_generator(draw).dirichlet(np.full(clients, alpha))
    free = len(rest) - clients
    cuts = np.rint(free * parts.cumsum().clip(max=1)).astype(np.int64)
    cuts[-1] = free
    sizes = 1 + np.diff(cuts, prepend=0)
    return torch.split(_shuffled(rest, draw), sizes.tolist())


def _shards(
    labels: Tensor, rest: Tensor, clients: int, draw: torch.Generator, *, shards_per_client: int = 2
) -> Sequence[Tensor]:
    """Sort by class (at random within a class), cut into equal shards, give each client some at random."""
    count = clients * shards_per_client
    if shards_per_client < 1 or count > len(rest):
        raise SettingError(f"`shards_per_client` must be 1 … {len(rest) // clients}, got {shards_per_client}")
    mixed = _shuffled(rest, draw)
    shards = mixed[labels[mixed].argsort(stable=True)].tensor_split(count)
    order = torch.randperm(count, generator=draw).view(clients, shards_per_client)
    return [torch.cat([shards[number] for number in row]) for row in order.tolist()]


def _deal(labels: Tensor, rest: Tensor, table: Tensor, draw: torch.Generator) -> Sequence[Tensor]:
    """Deal the examples `rest` at random such that client n has table[n, c] examples of class c."""
    parts: list[list[Tensor]] = [[] for _ in table]
    # Not strict: if the server took all examples of the last classes, the table has columns of zeros for them.
    for index, counts in zip(_by_class(labels[rest]), table.T.tolist(), strict=False):
        examples = rest[_shuffled(index, draw)]
        for part, dealt in zip(parts, torch.split(examples, counts), strict=True):
            part.append(dealt)
    return [torch.cat(part) for part in parts]


def _column(
    labels: Tensor, rest: Tensor, clients: int, _: torch.Generator, *, ids: Tensor | None = None
) -> Sequence[Tensor]:
    if ids is None or ids.shape != labels.shape[:1]:
        received = "none" if ids is None else f"shape {list(ids.shape)}"
        raise DataError(
            f"the column split needs `ids`, one client id for each of {len(labels)} examples, got {received}"
        )
    distinct = torch.unique(ids)
    if len(distinct) != clients:
        raise SettingError(f"`clients` must be {len(distinct)}, the number of distinct ids, got {clients}")
    return [rest[ids[rest] == client_id] for client_id in distinct]


SPLITS: Mapping[str, Callable[..., Sequence[Tensor]]] = {
    "iid": _iid,
    "step": _step,
    "dirichlet": _dirichlet,
    "quantity": _quantity,
    "shards": _shards,
    "column": _column,
}
BY_CLASS = {"step", "dirichlet", "shards"}  # the kinds that look at the class of each example


def _check_sizes(examples: int, clients: int, server: int) -> None:
    if clients < 1:
        raise SettingError(f"`clients` must be 1 or more, got {clients}")
    if server < 0:
        raise SettingError(f"`server` must be 0 or more examples, got {server}")
    if server + clients > examples:
        raise SettingError(
            f"`server` ({server} examples) and {clients} clients with an example each need {server + clients} "
            f"examples, but the data has {examples}; make one of them smaller"
        )
