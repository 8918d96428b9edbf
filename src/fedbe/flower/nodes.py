"""Which client is behind which node, who is asked next, and what each client should remember."""

import time
from collections.abc import Callable, Iterable, Mapping
from logging import INFO, WARNING

import torch
from flwr.app import Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from torch import Tensor

from fedbe.core.updates import ClientId
from fedbe.flower import wire

ASK_SECONDS = 120.0  # a deployed node starts a process, which imports torch, for every message


def sender(reply: Message, sent: Iterable[Message]) -> int:
    """The node that a reply stands for. For one that is gone Flower answers itself, under its own id."""
    to = (m.metadata.dst_node_id for m in sent if m.metadata.message_id == reply.metadata.reply_to_message_id)
    return next(to, reply.metadata.src_node_id)


class Nodes:
    """Flower's node ids are random; client ids, where clients say theirs, are the same in every run.

    A node is the client that it first said it is, until the run ends: one that could change its id could take the
    place, and be sent the memory, of one client after the other.
    """

    def __init__(self, memories: Mapping[ClientId, Mapping[str, Tensor]] | None = None) -> None:
        self.clients: dict[int, ClientId] = {}  # node -> client, from its first word on
        self.memories = dict(memories or {})  # what each client should remember
        self._online: list[int] = []
        self._asked: set[int] = set()  # nodes that answered the question for their id, whatever they said
        self._holders: dict[int, ClientId] = {}  # nodes that hold just what their client should remember
        self._given: dict[int, ClientId] = {}  # whose memory the node's last order gave it

    def client(self, node: int) -> ClientId:
        return self.clients.get(node, node)

    @property
    def count(self) -> int:
        """How many clients are known, those that only a checkpoint knows included."""
        return len({*self.clients.values(), *self.memories})

    def wait(self, grid: Grid, needed: int, tell: Callable[[int, int], None] = lambda *_: None) -> list[int]:
        """All connected nodes, as soon as they are enough; if they are not at once, `tell` hears (online, needed)."""
        told = None
        while True:
            nodes = list(grid.get_node_ids())
            enough = len(nodes) >= needed
            if len(nodes) != told and (told is not None or not enough):
                log(INFO, "%s of %s nodes are online", len(nodes), needed)
                tell(len(nodes), needed)
                told = len(nodes)
            if enough:
                self._online = nodes
                return nodes
            time.sleep(1)

    def sample(self, nodes: Iterable[int], size: int, generator: torch.Generator) -> list[int]:
        """`size` of the nodes, drawn from them in the order of their client ids, and in that order."""
        ordered = sorted(nodes, key=lambda n: (isinstance(self.client(n), str), self.client(n), n))
        drawn = torch.randperm(len(ordered), generator=generator)[:size]
        return [ordered[i] for i in sorted(drawn.tolist())]

    def identify(self, grid: Grid, nodes: Iterable[int]) -> None:
        """Ask the nodes that have not said it yet for their client ids."""
        ask = [Message(RecordDict(), n, wire.ASK) for n in nodes if n not in self.clients and n not in self._asked]
        for reply in grid.send_and_receive(ask, timeout=ASK_SECONDS) if ask else ():
            node = sender(reply, ask)
            said = None if reply.has_error() else wire.said_id(reply.content)
            self._asked.add(node)
            if said is None:
                log(WARNING, "node %s does not say its client id; its node id is used", node)
            else:
                self.clients[node] = said

    def owed(self, node: int) -> tuple[str, Mapping[str, Tensor]]:
        """Where the client is to take its memory from, and the memory if it must be sent.

        A node holds it if its last reply in this run was used. Any other may have lost it (Flower keeps a client's
        state for one run only) or gone on from a reply that was not used. Nobody is sent what two nodes claim.
        """
        client = self.client(node)
        self._given.pop(node, None)
        if self._holders.pop(node, None) == client:
            self._given[node] = client
            return wire.OWN, {}
        if client not in self.memories or sum(self.client(n) == client for n in self._online) > 1:
            return wire.NONE, {}
        self._given[node] = client
        return wire.SENT, self.memories[client]

    def lacked(self, node: int) -> bool:
        """Did the node train without the memory that its client has here?"""
        client = self.client(node)
        return client in self.memories and self._given.get(node) != client

    def note(self, used: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Nodes whose replies were used, and their extras: they remember what they had plus what they sent."""
        for node, extras in used.items():
            client = self.client(node)
            self._holders[node] = client
            if extras:
                own = self.memories.get(client, {})
                self.memories[client] = {n: own.get(n, torch.zeros(())) + change for n, change in extras.items()}
