"""May this update enter? A verdict with a reason; whoever is set aside, the round goes on with the rest.

The guard protects against broken and careless clients, and against single values that would poison an average.
It is no defence against clients that lie within bounds (no Byzantine-robust aggregation).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from statistics import median

import torch
from torch import Tensor

from fedbe.core.normalization import negative_variance
from fedbe.core.state import Layout, ModelState
from fedbe.core.updates import ClientId, ClientUpdate, Update, check_num_examples
from fedbe.errors import AggregationError, SettingError, StateError

MOST_STEPS = 1e4  # times the usual: steps, unlike lengths, differ as much as the clients' data do


@dataclass(frozen=True)
class Limits:
    """min_clients: fewer usable updates than this, and the round has no result.

    max_norm_ratio: a client whose change is longer than this many times the median of all changes (those that are
    not zero) is set aside; needs three clients to compare. So is one with such an extra: SCAFFOLD's are changes too.
    Honest clients differ by the amount of data and epochs, so it is wide.
    """

    min_clients: int = 1
    max_norm_ratio: float = 100.0

    def __post_init__(self) -> None:
        check_count("min_clients", self.min_clients)
        if not isinstance(self.max_norm_ratio, Real) or not self.max_norm_ratio > 1:
            raise SettingError(f"`max_norm_ratio` must be a number > 1, got {self.max_norm_ratio!r}")


def printable(text: str) -> str:
    """What a client says, without what could move a terminal's cursor.

    >>> printable("\x1b[2Jdone")
    '?[2Jdone'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def check_count(name: str, value: object) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise SettingError(f"`{name}` must be a whole number >= 1, got {value!r}")


@dataclass(frozen=True)
class SetAside:
    """A client whose update was not used, and why, in characters that a terminal only shows."""

    client_id: ClientId | None
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))


@dataclass(frozen=True, eq=False)
class Admission:
    admitted: tuple[Update, ...]
    set_aside: tuple[SetAside, ...]


def admit(
    updates: Iterable[ClientUpdate],
    previous: ModelState,
    layout: Layout,
    limits: Limits,
    extras: Sequence[str],
    memory: Mapping[str, Tensor],
) -> Admission:
    """Check every update against the model and against its peers; order those that pass.

    `extras` names what the method's rules must send back, `memory` holds what the server made of earlier ones. The
    order is by client id, then by content for updates without one, so the result does not depend on arrival. Nothing
    that was given is changed.
    """
    aside: list[SetAside] = []
    named: list[Update] = []
    anonymous: list[Update] = []
    for update in updates:
        try:
            checked = _checked(update, layout, extras)
        except StateError as error:
            aside.append(SetAside(_id_of(update), str(error)))
        else:
            (anonymous if update.client_id is None else named).append(checked)
    passed, doubles = _without_doubles(named)
    passed, rebuilt = _without_rebuilt(passed + _numbered(anonymous), previous)
    passed, wild = _without_wild(passed, previous, memory, limits.max_norm_ratio)
    aside += doubles + rebuilt + wild
    if len(passed) < limits.min_clients:
        raise AggregationError(_too_few(len(passed), limits.min_clients, aside))
    return Admission(tuple(passed), tuple(aside))


def _id_of(update: object) -> ClientId | None:
    try:
        return _client(getattr(update, "client_id", None))
    except StateError:
        return None


def _client(client: object) -> ClientId | None:
    if client is None or isinstance(client, str):
        return client
    if isinstance(client, Integral) and not isinstance(client, bool):
        return int(client)
    raise StateError(f"`client_id` must be a whole number or a string, got {type(client).__name__}")


def _checked(update: ClientUpdate, layout: Layout, extras: Sequence[str]) -> Update:
    if not isinstance(update, ClientUpdate):
        raise StateError(f"an update must be a ClientUpdate, got {type(update).__name__}")
    client = _client(update.client_id)
    examples = check_num_examples(update.num_examples)
    state = layout.packed(update.state, "its state")
    for what, vector in (("parameters", state.params), ("buffers", state.buffers)):
        if not bool(torch.isfinite(vector).all()):
            raise StateError(f"its {what} hold NaN or infinite values")
    if (name := negative_variance(state, layout)) is not None:
        raise StateError(f"its running variance '{name}' has values below zero")
    return Update("" if client is None else client, state, examples, _extras(update.extras, extras, layout))


def _extras(
    given: Mapping[str, Mapping[str, Tensor] | Tensor], names: Sequence[str], layout: Layout
) -> dict[str, Tensor]:
    if names and not isinstance(given, Mapping):
        raise StateError(f"its extras must be a mapping, got {type(given).__name__}")
    packed = {}
    for name in names:
        if name not in given:
            raise StateError(f"it lacks the extra '{name}' that this method's clients send")
        packed[name] = layout.pack_params(given[name], f"its extra '{name}'")
        if not bool(torch.isfinite(packed[name]).all()):
            raise StateError(f"its extra '{name}' holds NaN or infinite values")
    return packed


def _without_doubles(updates: list[Update]) -> tuple[list[Update], list[SetAside]]:
    """One update for each client id, in the order of the ids.

    The same update twice counts once; two that differ are both set aside, because which of them is right cannot
    be known and must not depend on arrival.
    """
    by_client: dict[ClientId, list[Update]] = {}
    for update in updates:
        by_client.setdefault(update.client_id, []).append(update)
    kept, aside = [], []
    for client in sorted(by_client, key=lambda c: (isinstance(c, str), c)):
        group = by_client[client]
        if len(group) == 1 or len({_content(u) for u in group}) == 1:
            kept.append(group[0])
            aside += [SetAside(client, "the same update came again; it counts once")] * (len(group) - 1)
        else:
            aside += [SetAside(client, f"{len(group)} updates came under this id and they differ")] * len(group)
    return kept, aside


def _content(update: Update) -> tuple[str, float]:
    extras = (update.extras[name] for name in sorted(update.extras))
    return update.state.digest(*extras), update.num_examples


def _numbered(anonymous: list[Update]) -> list[Update]:
    """Updates without an id, in the order of their content: equal ones are interchangeable."""
    ordered = sorted(anonymous, key=_content) if len(anonymous) > 1 else anonymous
    return [replace(u, client_id=f"anonymous {i}") for i, u in enumerate(ordered, start=1)]


def _without_rebuilt(updates: list[Update], previous: ModelState) -> tuple[list[Update], list[SetAside]]:
    """Those who left the model's structure as it is.

    An array of integers that half or more of those who trained left alone is structure, such as the positions that an
    embedding is asked for: a strange one would end whoever uses the model. A single integer is a counter.
    """
    structure = [name for name, last in previous.counters.items() if last.ndim]
    if not structure:
        return updates, []
    everybody = range(len(updates))
    trained = [i for i in everybody if not torch.equal(updates[i].state.params, previous.params)] or everybody
    aside: dict[int, SetAside] = {}
    for name in structure:
        changed = [i for i in everybody if not torch.equal(updates[i].state.counters[name], previous.counters[name])]
        if 2 * len(set(changed) & set(trained)) <= len(trained):
            reason = f"it changed the integers in '{name}', which are not for training"
            aside |= {i: SetAside(updates[i].client_id, reason) for i in changed}
    return [u for i, u in enumerate(updates) if i not in aside], list(aside.values())


def _without_wild(
    updates: list[Update], previous: ModelState, memory: Mapping[str, Tensor], ratio: float
) -> tuple[list[Update], list[SetAside]]:
    if len(updates) < 3:
        return updates, []
    aside: dict[int, SetAside] = {}

    def compare(what: str, norms: list[float], floor: float, limit: float = ratio) -> None:
        # Clients that trained nothing say nothing about those that did. The floor is there so that rounding noise
        # around a model that hardly moves is not "wild".
        usual = max(median([n for n in norms if n > 0] or norms), floor, 1e-6)
        for i, norm in enumerate(norms):
            if norm > limit * usual:
                reason = f"{what} {norm:.3g} where {usual:.3g} is usual (limit {limit:g} times that)"
                aside.setdefault(i, SetAside(updates[i].client_id, reason))

    changes, floors = {}, {}
    for part in ("params", "buffers"):
        last = getattr(previous, part).double()
        changes[part] = [float((getattr(u.state, part) - last).norm()) for u in updates]
        floors[part] = 1e-3 * float(last.norm())
        compare(f"its {part} changed by", changes[part], floors[part])
    for name, before in previous.counters.items():
        grown = [float((u.state.counters[name].double() - before.double()).clamp(min=0).norm()) for u in updates]
        compare(f"its '{name}' grew by", grown, 1.0, limit=max(ratio, MOST_STEPS))
    for name in updates[0].extras:
        # SCAFFOLD: c_i⁺ − c_i + c = (x − y_i)/(K η), the client's way in another unit, also for one that is new among
        # clients that have settled. So the limits of the parameters hold for it, in that unit.
        known = memory[name].double() if name in memory else 0.0
        norms = [float((u.extras[name].double() + known).norm()) for u in updates]
        rates = [norm / moved for norm, moved in zip(norms, changes["params"], strict=True) if moved > 0]
        compare(f"its extra '{name}' has length", norms, floors["params"] * median(rates or [0.0]))
    return [u for i, u in enumerate(updates) if i not in aside], list(aside.values())


def _too_few(usable: int, needed: int, aside: Sequence[SetAside]) -> str:
    reasons = "; ".join(f"client {s.client_id}: {s.reason}" for s in aside[:3])
    more = f"; and {len(aside) - 3} more" if len(aside) > 3 else ""
    why = f" Set aside: {reasons}{more}." if aside else ""
    return f"{usable} usable client updates, at least {needed} needed; the global model is unchanged.{why}"
