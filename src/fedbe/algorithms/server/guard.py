"""The guard decides which updates are used, with a reason for each that is not. The round continues with the others.

It protects against broken clients, and against single values that would spoil an average. It does not defend against
clients that send wrong models within its bounds: there is no Byzantine-robust aggregation here.
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

# The limit for counters, as a ratio to the median: unlike norms, steps differ as much as the clients' data do.
MAX_STEPS_RATIO = 1e4


@dataclass(frozen=True)
class Limits:
    """When an update or a round is refused.

    Attributes:
        min_clients: with fewer usable updates than this the round has no result.
        max_norm_ratio: a client is set aside if the norm of its change is more than this many times the median of all
            changes that are not zero. The same holds for its extras: SCAFFOLD's are changes, too. It needs three
            clients to compare. Honest clients differ in data and epochs, so the default is wide.
    """

    min_clients: int = 1
    max_norm_ratio: float = 100.0

    def __post_init__(self) -> None:
        check_count("min_clients", self.min_clients)
        if not isinstance(self.max_norm_ratio, Real) or not self.max_norm_ratio > 1:
            raise SettingError(f"`max_norm_ratio` must be a number > 1, got {self.max_norm_ratio!r}")


def printable(text: str) -> str:
    """Text from a client without characters that could control a terminal.

    Example:
        >>> printable("\x1b[2Jdone")
        '?[2Jdone'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def check_count(name: str, value: object) -> None:
    """Refuse a setting that is not a whole number >= 1."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise SettingError(f"`{name}` must be a whole number >= 1, got {value!r}")


@dataclass(frozen=True)
class SetAside:
    """A client whose update was not used, and the reason, in printable characters."""

    client_id: ClientId | None
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))


@dataclass(frozen=True, eq=False)
class Admission:
    """The guard's result: the admitted updates in a fixed order, and those set aside."""

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
    """Check every update against the model and against the other updates.

    Args:
        updates: the clients' replies, in any order. They are not changed.
        previous: the global model that the clients started from.
        layout: the names and shapes of the model's tensors.
        limits: when an update or the round is refused.
        extras: names of what the method's rules must send back.
        memory: what the server made of earlier extras.

    Returns:
        The admitted updates, ordered by client id, then by content for those without one. So the result does not
        depend on the order of arrival.

    Raises:
        AggregationError: if fewer than `limits.min_clients` updates are usable.
    """
    set_aside: list[SetAside] = []
    named: list[Update] = []
    anonymous: list[Update] = []
    for update in updates:
        try:
            checked = _checked(update, layout, extras)
        except StateError as error:
            set_aside.append(SetAside(_id_of(update), str(error)))
        else:
            (anonymous if update.client_id is None else named).append(checked)
    passed, duplicates = _without_duplicates(named)
    passed, restructured = _without_restructured(passed + _numbered(anonymous), previous)
    passed, outliers = _without_outliers(passed, previous, memory, limits.max_norm_ratio)
    set_aside += duplicates + restructured + outliers
    if len(passed) < limits.min_clients:
        raise AggregationError(_too_few(len(passed), limits.min_clients, set_aside))
    return Admission(tuple(passed), tuple(set_aside))


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


def _without_duplicates(updates: list[Update]) -> tuple[list[Update], list[SetAside]]:
    """One update for each client id, in the order of the ids.

    The same update twice counts once. Two that differ are both set aside: nobody can know which one is right, and the
    answer must not depend on the order of arrival.
    """
    by_client: dict[ClientId, list[Update]] = {}
    for update in updates:
        by_client.setdefault(update.client_id, []).append(update)
    kept, set_aside = [], []
    for client_id in sorted(by_client, key=lambda c: (isinstance(c, str), c)):
        group = by_client[client_id]
        if len(group) == 1 or len({_content(u) for u in group}) == 1:
            kept.append(group[0])
            set_aside += [SetAside(client_id, "the same update was received again; it counts once")] * (len(group) - 1)
        else:
            reason = f"{len(group)} different updates were received under this id"
            set_aside += [SetAside(client_id, reason)] * len(group)
    return kept, set_aside


def _content(update: Update) -> tuple[str, float]:
    extras = (update.extras[name] for name in sorted(update.extras))
    return update.state.digest(*extras), update.num_examples


def _numbered(anonymous: list[Update]) -> list[Update]:
    """Updates without an id, in the order of their content: equal ones are interchangeable."""
    ordered = sorted(anonymous, key=_content) if len(anonymous) > 1 else anonymous
    return [replace(u, client_id=f"anonymous {i}") for i, u in enumerate(ordered, start=1)]


def _without_restructured(updates: list[Update], previous: ModelState) -> tuple[list[Update], list[SetAside]]:
    """The updates that left the model's structure as it is.

    An array of integers is structure if at least half of the clients that trained left it alone, such as the position
    ids of an embedding. A wrong one would break every later use of the model. A single integer is a counter.
    """
    reasons: dict[int, str] = {}
    trained = [i for i, u in enumerate(updates) if not torch.equal(u.state.params, previous.params)]
    trained = trained or list(range(len(updates)))
    for name, last in previous.counters.items():
        if not last.ndim:
            continue
        changed = [i for i, u in enumerate(updates) if not torch.equal(u.state.counters[name], last)]
        if 2 * len(set(changed) & set(trained)) <= len(trained):
            reasons |= dict.fromkeys(changed, f"it changed the integers in '{name}', which are not for training")
    return _split(updates, reasons)


def _without_outliers(
    updates: list[Update], previous: ModelState, memory: Mapping[str, Tensor], ratio: float
) -> tuple[list[Update], list[SetAside]]:
    """The updates whose changes are not far larger than those of the others."""
    if len(updates) < 3:
        return updates, []
    reasons: dict[int, str] = {}

    def compare(what: str, norms: list[float], floor: float, limit: float = ratio) -> None:
        for i, reason in _outliers(what, norms, floor, limit).items():
            reasons.setdefault(i, reason)

    changes = {part: _changes(part, updates, previous) for part in ("params", "buffers")}
    floors = {part: 1e-3 * float(getattr(previous, part).double().norm()) for part in changes}
    for part, norms in changes.items():
        compare(f"its {part} changed by", norms, floors[part])
    for name, before in previous.counters.items():
        grown = [float((u.state.counters[name].double() - before.double()).clamp(min=0).norm()) for u in updates]
        compare(f"its '{name}' grew by", grown, 1.0, max(ratio, MAX_STEPS_RATIO))
    for name in updates[0].extras:
        norms = _extra_norms(name, updates, memory)
        rates = [norm / moved for norm, moved in zip(norms, changes["params"], strict=True) if moved > 0]
        compare(f"its extra '{name}' has norm", norms, floors["params"] * median(rates or [0.0]))
    return _split(updates, reasons)


def _changes(part: str, updates: Sequence[Update], previous: ModelState) -> list[float]:
    """‖w_i − w̄‖ of each client's params or buffers."""
    last = getattr(previous, part).double()
    return [float((getattr(u.state, part) - last).norm()) for u in updates]


def _extra_norms(name: str, updates: Sequence[Update], memory: Mapping[str, Tensor]) -> list[float]:
    """The norm of each client's extra, measured from the server's own.

    SCAFFOLD: c_i⁺ − c_i + c = (x − y_i)/(K η). That is the client's change in another unit, also for a new client among
    clients that have settled. So the limits of the parameters hold for it, in that unit.
    """
    known = memory[name].double() if name in memory else 0.0
    return [float((u.extras[name].double() + known).norm()) for u in updates]


def _outliers(what: str, norms: Sequence[float], floor: float, ratio: float) -> dict[int, str]:
    """A reason for each position whose norm is more than `ratio` times the usual one.

    The usual norm is the median of those that are not zero: clients that trained nothing do not count. Below `floor`,
    differences are rounding noise around a model that hardly moves.
    """
    usual = max(median([n for n in norms if n > 0] or norms), floor, 1e-6)
    return {
        i: f"{what} {norm:.3g} where {usual:.3g} is usual (limit {ratio:g} times that)"
        for i, norm in enumerate(norms)
        if norm > ratio * usual
    }


def _split(updates: Sequence[Update], reasons: Mapping[int, str]) -> tuple[list[Update], list[SetAside]]:
    """The updates without a reason against them, and the others with it. By position: ids can be forged."""
    kept = [u for i, u in enumerate(updates) if i not in reasons]
    return kept, [SetAside(updates[i].client_id, reason) for i, reason in reasons.items()]


def _too_few(usable: int, needed: int, set_aside: Sequence[SetAside]) -> str:
    reasons = "; ".join(f"client {s.client_id}: {s.reason}" for s in set_aside[:3])
    more = f"; and {len(set_aside) - 3} more" if len(set_aside) > 3 else ""
    why = f" Set aside: {reasons}{more}." if set_aside else ""
    return f"{usable} usable client updates, at least {needed} needed; the global model is unchanged.{why}"
