"""Who has which images: every split of the paper, each a function of (labels, settings, seed).

The server's part is drawn first and belongs to no client; every other image goes to exactly one client.
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
from fedbe.errors import DataError, SettingError, nearest


@dataclass(frozen=True, eq=False)
class Split:
    """Indices into the training data: server int64 [U], clients a tuple of int64 [n_i]; each sorted."""

    server: Tensor
    clients: tuple[Tensor, ...]

    def counts(self, labels: Tensor, classes: int) -> Tensor:
        """How many images of each class each client has: int64 [clients, classes].

        >>> part = Split(torch.tensor([0]), (torch.tensor([1, 2]), torch.tensor([3])))
        >>> part.counts(torch.tensor([0, 1, 1, 0]), classes=2).tolist()
        [[0, 2], [1, 0]]
        """
        return torch.stack([torch.bincount(labels[own], minlength=classes) for own in self.clients])


def split(kind: str, labels: Tensor, *, clients: int, server: int, seed: int, **settings: Any) -> Split:
    """Divide the images with these labels (int64 [N]) among a server (`server` images) and `clients` clients.

    "iid"        equally many images to each client, at random
    "step"       each client has `major_classes` large classes (default 2); of every other class it has
                 `minor_images` (default 10) or, if `major_share` is given, an even part of what that leaves
    "dirichlet"  client n has the part q_c[n] of class c, where q_c ~ Dir(alpha·1), alpha 0.1 by default
    "column"     by `ids`, int64 [N]: equal ids, same client, in the order of the ids

    For "step" the server has all classes in proportion, else a plain random part. A setting that is None
    counts as not given.

    >>> labels = torch.arange(10).repeat_interleave(5000)
    >>> parts = split("step", labels, clients=10, server=10_000, seed=0)
    >>> sorted(parts.counts(labels, 10)[0].tolist())
    [10, 10, 10, 10, 10, 10, 10, 10, 1960, 1960]
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    _check(kind, len(labels), clients, server, settings)
    draw = random.generator(seed, role=f"split-{kind}")
    own = (stratified if kind == "step" else _at_random)(labels, server, draw)
    rest = torch.ones(len(labels), dtype=torch.bool).index_fill_(0, own, False).nonzero().flatten()
    parts = KINDS[kind](labels, rest, clients, draw, **settings)
    empty = [number for number, part in enumerate(parts) if not len(part)]
    if empty:
        raise DataError(
            f"the {kind} split leaves {len(empty)} of {clients} clients without an image, first {empty[0]}; "
            "use fewer clients, a smaller server part, more even settings or another seed"
        )
    return Split(own, tuple(part.sort().values for part in parts))


def stratified(labels: Tensor, size: int, draw: torch.Generator) -> Tensor:
    """A random part with each class in proportion to its count, by largest remainder: sorted int64 [size].

    >>> stratified(torch.tensor([0, 0, 0, 0, 1, 1]), 3, random.generator(0)).shape
    torch.Size([3])
    """
    counts = torch.bincount(labels)
    whole, remainder = counts * size // len(labels), counts * size % len(labels)
    missing = size - int(whole.sum())
    whole[remainder.argsort(descending=True, stable=True)[:missing]] += 1
    chosen = [_shuffled(own, draw)[:n] for own, n in zip(_by_class(labels), whole.tolist(), strict=True)]
    return torch.cat(chosen).sort().values


def _by_class(labels: Tensor) -> Sequence[Tensor]:
    """The places of each class 0 … max, in ascending order."""
    return torch.split(labels.argsort(stable=True), torch.bincount(labels).tolist())


def _at_random(labels: Tensor, size: int, draw: torch.Generator) -> Tensor:
    return torch.randperm(len(labels), generator=draw)[:size].sort().values


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
    """Of class c with n_c images, each of its minor clients has `minor_images`, or all of them together
    n_c·(1 − major_share); its major clients share the rest. Where that does not divide, the images left over
    go one each to those clients that have fewest. A class that is major for nobody (with fewer than
    classes / major_classes clients) is spread over all clients.
    """
    if minor_images is not None and major_share is not None:
        raise SettingError("`minor_images` and `major_share` both say what minor clients get; give one of them")
    if major_share is not None and not 0 < major_share <= 1:
        raise SettingError(f"`major_share` must be > 0 and at most 1, got {major_share}")
    each = 10 if minor_images is None else minor_images
    counts = torch.bincount(labels[rest], minlength=int(labels.max()) + 1)
    major = _majors(clients, len(counts), major_classes, draw)
    piles: list[tuple[int, int, Tensor]] = []  # class, images, the clients who share them
    for c, count in enumerate(counts.tolist()):
        majors, minors = major[:, c].nonzero().flatten(), (~major[:, c]).nonzero().flatten()
        if not len(majors) or not len(minors):
            piles.append((c, count, torch.arange(clients)))
            continue
        if major_share is None:
            _check_minor(c, count, clients, each)
        to_minors = each * len(minors) if major_share is None else round(count * (1 - major_share))
        piles += [(c, to_minors, minors), (c, count - to_minors, majors)]
    return _deal(labels, rest, _spread(piles, clients, len(counts)), draw)


def _majors(clients: int, classes: int, major_classes: int, draw: torch.Generator) -> Tensor:
    """Which classes are major for which client: bool [clients, classes], each class equally often.

    Each client takes the classes taken least often so far, ties broken at random. At every moment two classes
    differ by at most one, so they are equal where clients · major_classes is a multiple of the classes.
    """
    if not 1 <= major_classes <= classes:
        raise SettingError(f"`major_classes` must be 1 … {classes}, the number of classes, got {major_classes}")
    major = torch.zeros(clients, classes, dtype=torch.bool)
    for client in range(clients):
        taken = major.sum(0) + torch.rand(classes, generator=draw)
        major[client, taken.argsort()[:major_classes]] = True
    return major


def _check_minor(label: int, count: int, clients: int, minor_images: int) -> None:
    if minor_images < 0 or minor_images * clients > count:
        raise SettingError(
            f"`minor_images` must be 0 … {count // clients}, because class {label} has {count} images for "
            f"{clients} clients, got {minor_images}"
        )


def _spread(piles: Sequence[tuple[int, int, Tensor]], clients: int, classes: int) -> Tensor:
    """Share each pile evenly, then what is left over with those who have fewest: int64 [clients, classes]."""
    table = torch.zeros(clients, classes, dtype=torch.int64)
    for label, count, takers in piles:
        table[takers, label] += count // len(takers)
    for label, count, takers in piles:
        poorest = table[takers].sum(1).argsort(stable=True)[: count % len(takers)]
        table[takers[poorest], label] += 1
    return table


def _dirichlet(
    labels: Tensor, rest: Tensor, clients: int, draw: torch.Generator, *, alpha: float = 0.1
) -> Sequence[Tensor]:
    """Hsu et al. 2019: client n has images ⌊n_c·Q[n−1]⌉ … ⌊n_c·Q[n]⌉ of class c, Q the running sum of q_c."""
    if not (alpha > 0 and math.isfinite(alpha)):
        raise SettingError(f"`alpha` must be > 0 and finite, got {alpha}")
    rng = random.numpy_generator(draw)
    counts = torch.bincount(labels[rest], minlength=int(labels.max()) + 1).numpy()
    parts = rng.dirichlet(np.full(clients, alpha), size=len(counts))
    cuts = np.rint(counts[:, None] * parts.cumsum(1).clip(max=1)).astype(np.int64)
    cuts[:, -1] = counts
    return _deal(labels, rest, torch.from_numpy(np.diff(cuts, axis=1, prepend=0).T.copy()), draw)


def _deal(labels: Tensor, rest: Tensor, table: Tensor, draw: torch.Generator) -> Sequence[Tensor]:
    """Deal the images `rest` at random such that client n has table[n, c] of class c."""
    hands: list[list[Tensor]] = [[] for _ in table]
    # Not strict: where the server took all of the last classes, the table has columns of zeros for them.
    for places, counts in zip(_by_class(labels[rest]), table.T.tolist(), strict=False):
        pile = rest[_shuffled(places, draw)]
        for hand, part in zip(hands, torch.split(pile, counts), strict=True):
            hand.append(part)
    return [torch.cat(hand) for hand in hands]


def _column(
    labels: Tensor, rest: Tensor, clients: int, _: torch.Generator, *, ids: Tensor | None = None
) -> Sequence[Tensor]:
    if ids is None or ids.shape != labels.shape:
        got = "none" if ids is None else f"shape {list(ids.shape)}"
        raise DataError(f"the column split needs `ids`, one client id for each of {len(labels)} images, got {got}")
    names = torch.unique(ids)
    if len(names) != clients:
        raise SettingError(f"`clients` must be {len(names)}, the number of distinct ids, got {clients}")
    return [rest[ids[rest] == name] for name in names]


KINDS: Mapping[str, Callable[..., Sequence[Tensor]]] = {
    "iid": _iid,
    "step": _step,
    "dirichlet": _dirichlet,
    "column": _column,
}


def _check(kind: str, images: int, clients: int, server: int, settings: Mapping[str, Any]) -> None:
    if kind not in KINDS:
        raise SettingError(f"unknown split '{kind}': {nearest(kind, KINDS)}")
    allowed = [p.name for p in inspect.signature(KINDS[kind]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for name in settings:
        if name not in allowed:
            takes = "takes " + ", ".join(allowed) if allowed else "takes no settings"
            raise SettingError(f"the {kind} split has no setting `{name}`; it {takes}")
    if clients < 1:
        raise SettingError(f"`clients` must be 1 or more, got {clients}")
    if server < 0:
        raise SettingError(f"`server` must be 0 or more images, got {server}")
    if server + clients > images:
        raise SettingError(
            f"`server` ({server} images) and {clients} clients with an image each need {server + clients} "
            f"images, but the data has {images}; make one of them smaller"
        )
