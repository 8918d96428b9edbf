"""Replies of a round, one at a time: each becomes a ClientUpdate, or is set aside with a reason."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedbe.errors import StateError
from fedbe.flower import wire
from fedbe.flower.arrays import expected, expected_extra, read, split
from fedbe.flower.nodes import sender
from fedbe.guard import SetAside
from fedbe.methods import Method
from fedbe.states import Layout
from fedbe.updates import ClientId, ClientUpdate


class Replies:
    """The replies of one round. Iterating converts them one by one and lets go of each message's arrays.

    set_aside  who sent nothing usable, and why
    contents   what else came, by client: metrics
    nodes      which node spoke for which client
    extras     the packed extras, by client
    """

    def __init__(
        self,
        messages: Iterable[Message],
        sent: Sequence[Message],
        known: Mapping[int, ClientId],
        method: Method,
        layout: Layout,
        weight: str,
    ) -> None:
        self._messages, self._sent, self._known = messages, sent, known
        self._method, self._layout, self._weight = method, layout, weight
        self.set_aside: list[SetAside] = []
        self.contents: dict[ClientId, RecordDict] = {}
        self.nodes: dict[int, ClientId] = {}
        self.extras: dict[ClientId, Mapping[str, Tensor]] = {}

    def __iter__(self) -> Iterator[ClientUpdate]:
        for message in self._messages:
            node = sender(message, self._sent)
            said = None if message.has_error() else wire.said_id(message.content)
            client = self._known.get(node, node) if said is None else said
            self.nodes[node] = client
            try:
                update = self._update(message, client)
            except StateError as error:
                self.set_aside.append(SetAside(client, str(error)))
            else:
                self.contents[client] = message.content
                yield update

    def _update(self, message: Message, client: ClientId) -> ClientUpdate:
        if message.has_error():
            raise StateError(f"it failed: {_line(message.error.reason)}")
        content = message.content
        examples = weight_of(content, self._weight)
        if len(content.array_records) != 1:
            raise StateError(f"its reply must have one ArrayRecord, got {len(content.array_records)}")
        followed = content.config_records.get(wire.RECORD, ConfigRecord()).get("method")
        if self._method.rules and followed != self._method.name:
            raise StateError(f"it did not follow the rules of {self._method.title}: use fedbe.flower.client_app there")
        record = next(iter(content.array_records.values()))
        try:
            return self._read(record, examples, client)
        finally:
            record.clear()  # the message's own copy; the metrics beside it stay

    def _read(self, record: ArrayRecord, examples: float, client: ClientId) -> ClientUpdate:
        own, beside = split(record)
        state = read(own, expected(self._layout), "its state")
        if missing := [name for name in self._method.extras if name not in beside]:
            raise StateError(f"it lacks the extra '{missing[0]}' that this method's clients send")
        extras = {n: read(beside[n], expected_extra(self._layout), f"its extra '{n}'") for n in self._method.extras}
        packed = {n: self._layout.pack_params(t, f"its extra '{n}'") for n, t in extras.items()}
        if packed:
            self.extras[client] = packed
        return ClientUpdate(state, examples, client, packed)


def weight_of(content: RecordDict, key: str) -> float:
    """The number of examples in a reply; the guard judges whether it is a sensible one."""
    if len(content.metric_records) != 1:
        raise StateError(f"its reply must have one MetricRecord, got {len(content.metric_records)}")
    found = next(iter(content.metric_records.values())).get(key)
    if not isinstance(found, int | float):
        raise StateError(f"its metrics must have the number '{key}', got {found!r}")
    return found


def alike(contents: Iterable[RecordDict]) -> list[RecordDict]:
    """Those whose metrics have the most common form (names and lengths): only they can be averaged."""
    forms = [(_form(c), c) for c in contents]
    if not forms:
        return []
    common, _ = Counter(form for form, _ in forms).most_common(1)[0]
    return [c for form, c in forms if form == common]


def _form(content: RecordDict) -> tuple[tuple[str, int], ...]:
    metrics: MetricRecord = next(iter(content.metric_records.values()))
    return tuple(sorted((name, len(v) if isinstance(v, list) else -1) for name, v in metrics.items()))


def _line(reason: str | None) -> str:
    """The last line that says something of what may be a traceback."""
    lines = [line.strip() for line in (reason or "").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no reason was given"
