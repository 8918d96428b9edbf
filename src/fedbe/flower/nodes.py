"""Which client each node is, which nodes are sampled, and what each client remembers between rounds."""

import time
from collections.abc import Callable, Iterable, Mapping
from logging import getLogger

import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedbe.core.updates import ClientId, changed_memory
from fedbe.flower import messages

log = getLogger("flwr")  # Flower's own: its lines and ours are shown together
IDENTIFY_SECONDS = 120.0  # for every message a deployed node starts a process, which imports torch


def sender(reply: Message, sent: Iterable[Message]) -> int:
    """The node that a reply is for. Flower itself answers for an unavailable node, under its own node id."""
    targets = (m.metadata.dst_node_id for m in sent if m.metadata.message_id == reply.metadata.reply_to_message_id)
    return next(targets, reply.metadata.src_node_id)


class NodeManager:
    """Maps Flower's random node ids to client ids, which are the same in every run, and keeps client memories.

    The first client id that a node reports is fixed until the run ends. Otherwise a node could change its id and
    receive the memory of one client after another.

    Attributes:
        clients: node id -> client id, for the nodes that reported one.
        memories: client id -> the client's memory, by name.
    """

    def __init__(self, memories: Mapping[ClientId, Mapping[str, Tensor]] | None = None) -> None:
        self.clients: dict[int, ClientId] = {}
        self.memories = dict(memories or {})
        self._online: list[int] = []
        self._identified: set[int] = set()  # nodes that answered the request for their id, even without one
        self._up_to_date: dict[int, ClientId] = {}  # nodes that hold the current memory of this client
        self._memory_given: dict[int, ClientId] = {}  # whose memory the node trains with in this round

    def client(self, node: int) -> ClientId:
        """The client id of a node; its node id if it reported none."""
        return self.clients.get(node, node)

    @property
    def count(self) -> int:
        """The number of known clients, including clients known only from a checkpoint."""
        return len({*self.clients.values(), *self.memories})

    def wait(self, grid: Grid, needed: int, notify: Callable[[int, int], None] = lambda *_: None) -> list[int]:
        """Wait until `needed` nodes are online and return all that are.

        If there are too few at first, `notify(online, needed)` is called, and again at each change.
        """
        reported = None
        while True:
            nodes = list(grid.get_node_ids())
            enough = len(nodes) >= needed
            if len(nodes) != reported and (reported is not None or not enough):
                log.info("%s of %s nodes are online", len(nodes), needed)
                notify(len(nodes), needed)
                reported = len(nodes)
            if enough:
                self._online = nodes
                return nodes
            time.sleep(1)

    def sample(self, nodes: Iterable[int], size: int, generator: torch.Generator) -> list[int]:
        """Draw `size` nodes without replacement. Nodes are drawn and returned in the order of their client ids."""
        ordered = sorted(nodes, key=lambda n: (isinstance(self.client(n), str), self.client(n), n))
        drawn = torch.randperm(len(ordered), generator=generator)[:size]
        return [ordered[i] for i in sorted(drawn.tolist())]

    def identify(self, grid: Grid, nodes: Iterable[int]) -> None:
        """Ask nodes for their client ids; nodes that answered before are not asked again."""
        unknown = [n for n in nodes if n not in self.clients and n not in self._identified]
        queries = [Message(RecordDict(), n, messages.IDENTIFY) for n in unknown]
        for reply in grid.send_and_receive(queries, timeout=IDENTIFY_SECONDS) if queries else ():
            node = sender(reply, queries)
            client = None if reply.has_error() else messages.reported_id(reply.content)
            self._identified.add(node)
            if client is None:
                log.warning("node %s does not report a client id; its node id is used", node)
            else:
                self.clients[node] = client

    def memory_for(self, node: int) -> tuple[str, Mapping[str, Tensor]]:
        """Where the node's client gets its memory from (KEPT, SENT or NONE), and the memory if it must be sent.

        A node is up to date if its last reply in this run was used. Any other node may have lost its memory, because
        Flower keeps a client's state for one run only, or may have moved on from a reply that was not used. If two
        online nodes claim one client id, the memory is sent to neither.
        """
        client = self.client(node)
        self._memory_given.pop(node, None)
        if self._up_to_date.pop(node, None) == client:
            self._memory_given[node] = client
            return messages.KEPT, {}
        if client not in self.memories or sum(self.client(n) == client for n in self._online) > 1:
            return messages.NONE, {}
        self._memory_given[node] = client
        return messages.SENT, self.memories[client]

    def lacked_memory(self, node: int) -> bool:
        """Whether the node trained without the memory that the server has for its client."""
        client = self.client(node)
        return client in self.memories and self._memory_given.get(node) != client

    def update(self, used: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Update memories after a round: node -> extras of its used reply, which are the change of its memory."""
        for node, extras in used.items():
            client = self.client(node)
            self._up_to_date[node] = client
            if extras:
                self.memories[client] = changed_memory(self.memories.get(client, {}), extras)
