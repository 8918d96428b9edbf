"""Which client is behind which node, who is asked next, and what each client should remember."""

import time
from collections.abc import Callable, Iterable, Mapping
from logging import INFO, WARNING

import torch
from flwr.app import Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from torch import Tensor

from fedbe.flower import wire
from fedbe.updates import ClientId

ASK_SECONDS = 120.0  # a deployed node starts a process, which imports torch, for every message


def sender(reply: Message, sent: Iterable[Message]) -> int:
    """The node that a reply stands for. For one that is gone Flower answers itself, under its own id."""
    to = (m.metadata.dst_node_id for m in sent if m.metadata.message_id == reply.metadata.reply_to_message_id)
    return next(to, reply.metadata.src_node_id)


class Nodes:
    """Flower's node ids are random; client ids, where clients say theirs, are the same in every run."""

    def __init__(self) -> None:
        self.clients: dict[int, ClientId] = {}  # node -> client, as far as they said
        self.memories: dict[ClientId, Mapping[str, Tensor]] = {}  # what each client should remember
        self._holders: dict[int, ClientId] = {}  # nodes that hold just that

    def client(self, node: int) -> ClientId:
        return self.clients.get(node, node)

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
                return nodes
            time.sleep(1)

    def sample(self, nodes: Iterable[int], size: int, generator: torch.Generator) -> list[int]:
        """`size` of the nodes, drawn from them in the order of their client ids, and in that order."""
        ordered = sorted(nodes, key=lambda n: (isinstance(self.client(n), str), self.client(n), n))
        drawn = torch.randperm(len(ordered), generator=generator)[:size]
        return [ordered[i] for i in sorted(drawn.tolist())]

    def identify(self, grid: Grid, nodes: Iterable[int]) -> None:
        """Ask the nodes that have not said it yet for their client ids."""
        ask = [Message(RecordDict(), n, wire.ASK) for n in nodes if n not in self.clients]
        for reply in grid.send_and_receive(ask, timeout=ASK_SECONDS) if ask else ():
            node = sender(reply, ask)
            said = None if reply.has_error() else wire.said_id(reply.content)
            if said is None:
                log(WARNING, "node %s does not say its client id; its node id is used", node)
            self.clients[node] = node if said is None else said

    def owed(self, node: int) -> tuple[str, Mapping[str, Tensor]]:
        """Where the client is to take its memory from, and the memory if it must be sent.

        A node holds it if its last reply in this run was used. Any other may have lost it (Flower keeps a client's
        state for one run only) or gone on from a reply that was not used.
        """
        client = self.client(node)
        if self._holders.pop(node, None) == client:
            return wire.OWN, {}
        memory = self.memories.get(client, {})
        return (wire.SENT if memory else wire.NONE), memory

    def note(
        self, spoke: Mapping[int, ClientId], used: set[ClientId], extras: Mapping[ClientId, Mapping[str, Tensor]]
    ) -> None:
        """Clients that were used remember what they had plus what they sent; the others did not move."""
        self.clients |= spoke
        self._holders |= {node: client for node, client in spoke.items() if client in used}
        for client in used & extras.keys():
            own = self.memories.get(client, {})
            self.memories[client] = {n: own.get(n, torch.zeros(())) + change for n, change in extras[client].items()}

    def forget(self, memories: Mapping[ClientId, Mapping[str, Tensor]]) -> None:
        """Begin with these memories, which no node holds yet."""
        self.memories, self._holders = dict(memories), {}
