"""Replies of a round, one at a time: each becomes a ClientUpdate, or is set aside with a reason."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from torch import Tensor

from fedbe.algorithms.methods import Method
from fedbe.algorithms.server.guard import SetAside
from fedbe.core.state import Layout
from fedbe.core.updates import ClientId, ClientUpdate
from fedbe.errors import StateError
from fedbe.flower import wire
from fedbe.flower.arrays import expected, expected_extra, read, split
from fedbe.flower.nodes import Nodes, sender


@dataclass(frozen=True, eq=False)
class Good:
    """A reply that could be read: who sent it, what came beside the arrays, and the packed extras."""

    node: int
    content: RecordDict
    extras: Mapping[str, Tensor]


class Replies:
    """The replies of one round. Iterating converts them one by one and lets go of each message's arrays.

    nodes      who replied, be it with an error
    good       the replies that could be read, by client
    set_aside  who sent nothing usable, and why
    """

    def __init__(
        self,
        messages: Iterable[Message],
        sent: Sequence[Message],
        nodes: Nodes,
        method: Method,
        layout: Layout,
        weight: str,
    ) -> None:
        self._nodes, self._method, self._layout, self._weight = nodes, method, layout, weight
        self._messages = [(sender(m, sent), m) for m in messages]
        self.nodes = {node for node, _ in self._messages}
        self.good: dict[ClientId, Good] = {}
        self.set_aside: list[SetAside] = []
        speaking = [(node, m) for node, m in self._messages if not m.has_error()]
        for node, message in speaking:
            said = wire.said_id(message.content)
            nodes.clients.setdefault(node, node if said is None else said)
        self._claims = Counter(nodes.client(node) for node, _ in speaking)

    def __iter__(self) -> Iterator[ClientUpdate]:
        for node, message in self._messages:
            client = self._nodes.client(node)
            try:
                update = self._update(node, message, client)
            except StateError as error:
                self.set_aside.append(SetAside(client, str(error)))
            else:
                self.good[client] = Good(node, message.content, update.extras)  # type: ignore[arg-type]
                yield update

    def _update(self, node: int, message: Message, client: ClientId) -> ClientUpdate:
        check_worked(message)
        records = list(message.content.array_records.values())
        try:
            self._check(node, message.content, client)
            if len(records) != 1:
                raise StateError(f"its reply must have one ArrayRecord, got {len(records)}")
            return self._read(records[0], weight_of(message.content, self._weight), client)
        finally:
            for record in records:
                record.clear()  # the message's own copy; the metrics beside it stay

    def _check(self, node: int, content: RecordDict, client: ClientId) -> None:
        """May this node speak for this client, and did it do what it was asked for?"""
        if (said := wire.said_id(content)) not in (None, client):
            raise StateError(f"it now says that it is client {said}: a node's client id stays for the whole run")
        if self._claims[client] > 1:
            raise StateError(f"{self._claims[client]} nodes replied under this client id: give each one of its own")
        followed = content.config_records.get(wire.RECORD, ConfigRecord()).get("method")
        if self._method.rules and followed != self._method.name:
            raise StateError(
                f"it did not follow the rules of {self._method.title}: use fedbe.flower.client_app and job.fit there"
            )
        if self._nodes.lacked(node):
            raise StateError("it trained without its memory, because the server could not tell which client it is")

    def _read(self, record: ArrayRecord, examples: float, client: ClientId) -> ClientUpdate:
        own, beside = split(record)
        state = read(own, expected(self._layout), "its state")
        if missing := [name for name in self._method.extras if name not in beside]:
            raise StateError(f"it lacks the extra '{missing[0]}' that this method's clients send")
        extras = {n: read(beside[n], expected_extra(self._layout), f"its extra '{n}'") for n in self._method.extras}
        packed = {n: self._layout.pack_params(t, f"its extra '{n}'") for n, t in extras.items()}
        return ClientUpdate(state, examples, client, packed)


def weight_of(content: RecordDict, key: str) -> float:
    """The number of examples in a reply; the guard judges whether it is a sensible one."""
    if len(content.metric_records) != 1:
        raise StateError(f"its reply must have one MetricRecord, got {len(content.metric_records)}")
    found = next(iter(content.metric_records.values())).get(key)
    if not isinstance(found, int | float):
        raise StateError(f"its metrics must have the number '{key}', got {str(found)[:80]}")
    return found


def check_worked(message: Message) -> None:
    """A message that is an error becomes a StateError with the last line that says something of its traceback."""
    if message.has_error():
        lines = [line.strip() for line in (message.error.reason or "").splitlines() if line.strip()]
        raise StateError(f"it failed: {lines[-1][:200] if lines else 'no reason was given'}")


def comparable(contents: Iterable[tuple[ClientId, RecordDict]]) -> list[RecordDict]:
    """Those whose metrics are finite and have the most common form (names and lengths): only they can be averaged."""
    finite = []
    for client, content in contents:
        metrics = next(iter(content.metric_records.values()))
        if np.isfinite(np.hstack(list(metrics.values()))).all():
            finite.append((client, _form(metrics), content))
        else:
            log(WARNING, "the metrics of client %s are left out: they hold NaN or infinite values", client)
    common = Counter(form for _, form, _ in finite).most_common(1)
    for client, form, _ in finite:
        if form != common[0][0]:
            log(WARNING, "the metrics of client %s are left out: most have other names or lengths", client)
    return [content for _, form, content in finite if form == common[0][0]]


def _form(metrics: MetricRecord) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, len(v) if isinstance(v, list) else -1) for name, v in metrics.items()))
