"""The replies of a round, read one at a time: each becomes a ClientUpdate or is set aside with a reason."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import Tensor

from fedbe.algorithms.methods import Method
from fedbe.algorithms.server.guard import SetAside
from fedbe.algorithms.server.limits import Limits
from fedbe.core.layout import Layout
from fedbe.core.updates import MAX_METRICS, ClientId, ClientUpdate, is_num_examples
from fedbe.errors import StateError
from fedbe.flower import messages
from fedbe.flower.arrays import pack_params, pack_state, split_extras
from fedbe.flower.nodes import NodeManager, log, sender

# Arrays that a client's own mods may add, which are then ignored: some, and some for each of the model's.
EXTRA_ARRAYS, EXTRA_STATES = 100, 2
# The function that Flower's FedAvg uses if the user gives none.
AVERAGE_METRICS = FlowerFedAvg().train_metrics_aggr_fn


@dataclass(frozen=True, eq=False)
class ValidReply:
    """A reply that could be read: its node, its content without the arrays, and the packed extras."""

    node: int
    content: RecordDict
    extras: Mapping[str, Tensor]


class RoundReplies:
    """The replies of one round. Iterating converts one reply at a time and frees the arrays of its message.

    Attributes:
        nodes: the nodes that replied, including those that replied with an error.
        valid: the replies that could be read, by client.
        set_aside: the clients without a usable reply, with reasons. Complete after the iteration.
    """

    def __init__(
        self,
        replies: Iterable[Message],
        sent: Sequence[Message],
        nodes: NodeManager,
        method: Method,
        layout: Layout,
        weight_key: str,
    ) -> None:
        self._node_manager, self._method, self._layout, self._weight_key = nodes, method, layout, weight_key
        self._messages = [(sender(m, sent), m) for m in replies]
        self.nodes = {node for node, _ in self._messages}
        self.valid: dict[ClientId, ValidReply] = {}
        self.set_aside: list[SetAside] = []
        without_error = [(node, m) for node, m in self._messages if not m.has_error()]
        for node, message in without_error:
            client = messages.reported_id(message.content)
            nodes.clients.setdefault(node, node if client is None else client)
        self._nodes_per_client = Counter(nodes.client(node) for node, _ in without_error)

    def log_count(self, caller: str) -> None:
        """The line of Flower's own strategies about the replies."""
        failed = sum(message.has_error() for _, message in self._messages)
        log.info("%s: Received %s results and %s failures", caller, len(self._messages) - failed, failed)

    def __iter__(self) -> Iterator[ClientUpdate]:
        for node, message in self._messages:
            client = self._node_manager.client(node)
            try:
                update = self._read_update(node, message, client)
            except StateError as error:
                self.set_aside.append(SetAside(client, str(error)))
            else:
                self.valid[client] = ValidReply(node, message.content, update.extras)  # type: ignore[arg-type]
                yield update

    def _read_update(self, node: int, message: Message, client: ClientId) -> ClientUpdate:
        check_no_error(message)
        records = list(message.content.array_records.values())
        try:
            self._check_client(node, message.content, client)
            if len(records) != 1:
                raise StateError(f"its reply must have one ArrayRecord, got {len(records)}")
            return self._read_record(records[0], num_examples(message.content, self._weight_key), client)
        finally:
            for record in records:  # free the arrays; the metrics stay
                for name in list(record):  # `clear` takes minutes for a record of 10⁵ names
                    del record[name]

    def _check_client(self, node: int, content: RecordDict, client: ClientId) -> None:
        """Check that the node may reply for this client and that it trained as instructed."""
        reported = messages.reported_id(content)
        if reported not in (None, client):
            raise StateError(f"it now reports client id {reported}: the client id of a node must not change in a run")
        if self._nodes_per_client[client] > 1:
            raise StateError(
                f"{self._nodes_per_client[client]} nodes replied with this client id: give each node a different one"
            )
        applied_method = content.config_records.get(messages.RECORD, ConfigRecord()).get("method")
        if self._method.rules and applied_method != self._method.name:
            raise StateError(
                f"it did not apply the rules of {self._method.title}: use fedbe.flower.client_app and request.fit there"
            )
        if self._node_manager.lacked_memory(node):
            raise StateError("it trained without its memory, because the server did not know which client it is")

    def _read_record(self, record: ArrayRecord, examples: float, client: ClientId) -> ClientUpdate:
        most = EXTRA_ARRAYS + len(self._layout.all_keys) * (1 + EXTRA_STATES + len(self._method.extras))
        if len(record) > most:  # before any of them is looked at
            raise StateError(f"its reply must have at most {most} arrays for this model, got {len(record)}")
        arrays, extras = split_extras(record)
        state = pack_state(arrays, self._layout, "its state")
        packed = {}
        for name in self._method.extras:
            if name not in extras:
                raise StateError(f"the extra '{name}', which clients of this method send, is missing")
            packed[name] = pack_params(extras[name], self._layout, f"its extra '{name}'")
        return ClientUpdate(state, examples, client, packed)


def num_examples(content: RecordDict, key: str) -> float:
    """The number of examples in a reply. The guard checks its value."""
    if len(content.metric_records) != 1:
        raise StateError(f"its reply must have one MetricRecord, got {len(content.metric_records)}")
    value = next(iter(content.metric_records.values())).get(key)
    if not isinstance(value, int | float):
        raise StateError(f"its metrics must have the number '{key}', got {str(value)[:80]}")
    return value


def check_no_error(message: Message) -> None:
    """StateError with the last line of the traceback if the message is an error."""
    if message.has_error():
        lines = [line.strip() for line in (message.error.reason or "").splitlines() if line.strip()]
        raise StateError(f"it failed: {lines[-1][:200] if lines else 'no reason was given'}")


def describe_unreadable(set_aside: Sequence[SetAside]) -> str:
    """The first three clients whose replies could not be read, as the end of an error message."""
    if not set_aside:
        return ""
    shown = "; ".join(f"client {s.client_id}: {s.reason}" for s in set_aside[:3])
    more = f"; and {len(set_aside) - 3} more" if len(set_aside) > 3 else ""
    return f" Unreadable: {shown}{more}."


def average_metrics(
    contents: Sequence[tuple[ClientId, RecordDict]],
    aggregate: Callable[[list[RecordDict], str], MetricRecord],
    weight_key: str,
    limits: Limits,
) -> MetricRecord | None:
    """Average the metrics of replies; None if there are none.

    Flower's own average gets only the replies that it can average, weighted as updates are (`client_weights`, caps).
    A user's function gets all replies as they are.
    """
    is_default = aggregate is AVERAGE_METRICS
    chosen = [content for _, content in contents]
    if is_default:
        chosen = _counted(_comparable(contents, weight_key), weight_key, limits)
    return aggregate(chosen, weight_key) if chosen else None


def _counted(contents: Sequence[tuple[ClientId, RecordDict]], weight_key: str, limits: Limits) -> list[RecordDict]:
    """The replies with the numbers of examples that they count with: these weigh their metrics."""
    claims = [(client, float(num_examples(content, weight_key))) for client, content in contents]
    return [
        content if weight == claim else RecordDict({"metrics": MetricRecord({**_metrics(content), weight_key: weight})})
        for (_, content), (_, claim), weight in zip(contents, claims, limits.counted(claims), strict=True)
        if weight
    ]


def _metrics(content: RecordDict) -> MetricRecord:
    return next(iter(content.metric_records.values()))


def _comparable(contents: Iterable[tuple[ClientId, RecordDict]], weight_key: str) -> list[tuple[ClientId, RecordDict]]:
    """The replies whose metrics can be averaged: finite, and with the most common names and lengths."""
    finite = []
    for client, content in contents:
        metrics = _metrics(content)
        problem = _problem(metrics, weight_key)
        if problem is None:
            finite.append((client, _form(metrics), content))
        else:
            log.warning("the metrics of client %s are left out: %s", client, problem)
    most_common = Counter(form for _, form, _ in finite).most_common(1)
    for client, form, _ in finite:
        if form != most_common[0][0]:
            log.warning("the metrics of client %s are left out: their names or lengths differ from most", client)
    return [(client, content) for client, form, content in finite if form == most_common[0][0]]


def _problem(metrics: MetricRecord, weight_key: str) -> str | None:
    """Why the metrics of a reply cannot be averaged, whatever the others sent; None if they can."""
    if not is_num_examples(metrics.get(weight_key)):
        return "its number of examples is not a weight"
    numbers = np.hstack(list(metrics.values()))
    if numbers.size > MAX_METRICS:
        return f"they are more than {MAX_METRICS} numbers"
    return None if np.isfinite(numbers).all() else "they contain NaN or infinite values"


def _form(metrics: MetricRecord) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, len(v) if isinstance(v, list) else -1) for name, v in metrics.items()))
