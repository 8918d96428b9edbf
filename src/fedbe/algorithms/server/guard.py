"""The guard decides which updates are used, with a reason for each that is not. The round continues with the others.

It protects against broken clients, against single values that would spoil an average (`outliers`), and against clients
that claim more weight than one client should have (`influence`). It does not defend against clients that send wrong
models within these bounds: that is what the robust methods are for.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

from torch import Tensor

from fedbe.algorithms.server.influence import Capped
from fedbe.algorithms.server.limits import REPORTED, ClientWeights, Limits
from fedbe.algorithms.server.outliers import ChangeMeter, Measured, find_outliers, structure_changes
from fedbe.core.layout import Layout
from fedbe.core.normalization import negative_variance
from fedbe.core.state import ModelState
from fedbe.core.updates import ClientId, ClientUpdate, Update, check_num_examples
from fedbe.errors import AggregationError, StateError

MAX_ID_LENGTH = 100  # characters of a client id: it is in every line of the report and in every checkpoint
MAX_ID = 2**64
MAX_REASON_LENGTH = 300


def printable(text: str) -> str:
    """Text from a client without characters that could control a terminal.

    Example:
        >>> printable("\x1b[2Jdone")
        '?[2Jdone'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


@dataclass(frozen=True)
class SetAside:
    """A client whose update was not used, and the reason, in printable characters and cut to a sensible length."""

    client_id: ClientId | None
    reason: str

    def __post_init__(self) -> None:
        reason = self.reason
        if len(reason) > MAX_REASON_LENGTH:
            reason = reason[: MAX_REASON_LENGTH - 1] + "…"
        object.__setattr__(self, "reason", printable(reason))


@dataclass(frozen=True, eq=False)
class Admission:
    """The guard's result: the admitted updates in a fixed order, those set aside, and those that count less.

    `mean` is the weighted mean of the admitted updates, if the guard computed it.
    """

    admitted: tuple[Update, ...]
    set_aside: tuple[SetAside, ...]
    capped: tuple[Capped, ...] = ()
    mean: ModelState | None = None


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
    meter = ChangeMeter(previous, layout, memory)
    set_aside: list[SetAside] = []
    named: list[Update] = []
    anonymous: list[Update] = []
    for update in updates:
        try:
            checked = _checked(update, layout, extras, limits.client_weights)
        except StateError as error:
            set_aside.append(SetAside(_id_of(update), str(error)))
        else:
            (anonymous if update.client_id is None else named).append(checked)
    named.sort(key=lambda u: (isinstance(u.client_id, str), u.client_id))
    if len(anonymous) > 1:  # by content: equal ones are interchangeable
        anonymous.sort(key=_content)
    ordered = named + anonymous
    measured, mean = meter.measure(ordered, _counted(ordered, limits))
    clients: list[ClientId | None] = [*(u.client_id for u in named), *(None for _ in anonymous)]
    set_aside += [SetAside(c, str(m)) for c, m in zip(clients, measured, strict=True) if isinstance(m, StateError)]
    passed, duplicates = _without_duplicates([m for m in measured[: len(named)] if isinstance(m, Measured)])
    passed += _numbered([m for m in measured[len(named) :] if isinstance(m, Measured)])
    passed, restructured = _split(passed, structure_changes([m.update for m in passed], previous))
    passed, outliers = _without_outliers(passed, meter, limits)
    set_aside += duplicates + restructured + outliers
    if len(passed) < limits.min_clients:
        raise AggregationError(_too_few(len(passed), limits.min_clients, set_aside))
    admitted, capped = _capped([m.update for m in passed], limits)
    return Admission(admitted, tuple(set_aside), capped, mean if len(passed) == len(ordered) else None)


def _id_of(update: object) -> ClientId | None:
    try:
        return _client(getattr(update, "client_id", None))
    except StateError:
        return None


def _client(client: object) -> ClientId | None:
    if isinstance(client, str) and len(client) > MAX_ID_LENGTH:
        raise StateError(f"`client_id` must have at most {MAX_ID_LENGTH} characters, got {len(client)}")
    if client is None or isinstance(client, str):
        return client
    if isinstance(client, Integral) and not isinstance(client, bool):
        if abs(int(client)) >= MAX_ID:
            raise StateError("`client_id` must be a whole number of at most 64 bits, got a larger one")
        return int(client)
    raise StateError(f"`client_id` must be a whole number or a string, got {type(client).__name__}")


def _checked(update: ClientUpdate, layout: Layout, extras: Sequence[str], weights: ClientWeights) -> Update:
    """The update with a packed state, and with the weight that it is given; `ChangeMeter` checks its values."""
    if not isinstance(update, ClientUpdate):
        raise StateError(f"an update must be a ClientUpdate, got {type(update).__name__}")
    client = _client(update.client_id)
    examples = _weight(update, client, weights)
    state = layout.packed(update.state, "its state")
    if (name := negative_variance(state, layout)) is not None:
        raise StateError(f"its running variance '{name}' has values below zero")
    return Update("" if client is None else client, state, examples, _extras(update.extras, extras, layout))


def _weight(update: ClientUpdate, client: ClientId | None, weights: ClientWeights) -> float:
    if not isinstance(weights, Mapping):
        return check_num_examples(update.num_examples) if weights == REPORTED else 1.0
    if client is None or client not in weights:
        raise StateError("the server declared no number of examples for this client (`client_weights`)")
    return float(weights[client])


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
    return packed


def _without_duplicates(updates: list[Measured]) -> tuple[list[Measured], list[SetAside]]:
    """One update for each client id, in the given order.

    The same update twice counts once. Two that differ are both set aside: nobody can know which one is right, and the
    answer must not depend on the order of arrival.
    """
    by_client: dict[ClientId, list[Measured]] = {}
    for measured in updates:
        by_client.setdefault(measured.update.client_id, []).append(measured)
    kept, set_aside = [], []
    for client_id, group in by_client.items():
        if len(group) == 1 or len({_content(m.update) for m in group}) == 1:
            kept.append(group[0])
            set_aside += [SetAside(client_id, "the same update was received again; it counts once")] * (len(group) - 1)
        else:
            reason = f"{len(group)} different updates were received under this id"
            set_aside += [SetAside(client_id, reason)] * len(group)
    return kept, set_aside


def _content(update: Update) -> tuple[str, float]:
    extras = (update.extras[name] for name in sorted(update.extras))
    return update.state.digest(*extras), update.num_examples


def _numbered(anonymous: list[Measured]) -> list[Measured]:
    """Names for updates without an id."""
    return [replace(m, update=replace(m.update, client_id=f"anonymous {i}")) for i, m in enumerate(anonymous, start=1)]


def _without_outliers(
    updates: list[Measured], meter: ChangeMeter, limits: Limits
) -> tuple[list[Measured], list[SetAside]]:
    if not updates:
        return [], []
    weights = _counted([m.update for m in updates], limits)
    return _split(updates, find_outliers(updates, weights, meter, limits.max_norm_ratio, limits.max_change))


def _counted(updates: Sequence[Update], limits: Limits) -> list[float]:
    return limits.counted([(u.client_id, u.num_examples) for u in updates])


def _capped(updates: Sequence[Update], limits: Limits) -> tuple[tuple[Update, ...], tuple[Capped, ...]]:
    """The updates with the weights that they count with, and what was changed."""
    weights = _counted(updates, limits)
    reported, counted = sum(u.num_examples for u in updates), sum(weights)
    admitted, notes = [], []
    for update, weight in zip(updates, weights, strict=True):
        if weight == update.num_examples:
            admitted.append(update)
        else:
            admitted.append(replace(update, num_examples=weight))
            notes.append(Capped(update.client_id, update.num_examples / reported, weight / counted))
    return tuple(admitted), tuple(notes)


def _split(updates: Sequence[Measured], reasons: Mapping[int, str]) -> tuple[list[Measured], list[SetAside]]:
    """The updates without a reason against them, and the others with it. By position: ids can be forged."""
    kept = [m for i, m in enumerate(updates) if i not in reasons]
    return kept, [SetAside(updates[i].update.client_id, reason) for i, reason in reasons.items()]


def _too_few(usable: int, needed: int, set_aside: Sequence[SetAside]) -> str:
    reasons = "; ".join(f"client {s.client_id}: {s.reason}" for s in set_aside[:3])
    more = f"; and {len(set_aside) - 3} more" if len(set_aside) > 3 else ""
    why = f" Set aside: {reasons}{more}." if set_aside else ""
    return f"{usable} usable client updates, at least {needed} needed; the global model is unchanged.{why}"
