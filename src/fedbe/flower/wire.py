"""What the two sides say to each other besides arrays: one ConfigRecord called "fedbe" in every message.

server to client  method and its rules' settings, seed, round, where the client's memory is to come from, and under
                  which name it is to say how many examples it has
client to server  the client's id, and the method whose rules it followed
"""

import json
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

from flwr.app import ConfigRecord, Context, RecordDict

from fedbe.algorithms import methods
from fedbe.algorithms.methods import Method
from fedbe.core.updates import ClientId
from fedbe.errors import SettingError

RECORD = "fedbe"
ASK = "query.fedbe"  # the message that asks a node for its client id
MEMORY = "memory-"  # extras that begin so are what the client itself should remember
OWN, SENT, NONE = "own", "sent", "none"
LONGEST_ID = 100  # characters of a client id: it is in every line of the report and in every checkpoint


@dataclass(frozen=True)
class Order:
    """What a client needs to know to train as its server's method says."""

    method: Method
    seed: int
    round: int
    memory: str = OWN
    weight: str = "num-examples"

    def record(self) -> ConfigRecord:
        rules = {f.name: getattr(rule, f.name) for rule in self.method.rules for f in fields(rule)}  # type: ignore[arg-type]
        return ConfigRecord(
            {
                "method": self.method.name,
                "rules": json.dumps(rules),
                "seed": str(self.seed),  # any whole number; a record's own are limited to 64 bits
                "round": self.round,
                "memory": self.memory,
                "weight": self.weight,
            }
        )


def read_order(content: RecordDict) -> Order:
    """The order in a message; one from a strategy that is not ours asks for plain training."""
    said = content.config_records.get(RECORD)
    if said is None:
        rounds = [c["server-round"] for c in content.config_records.values() if "server-round" in c]
        return Order(methods.get("fedavg"), 0, _whole(rounds[0]) if rounds else 0)
    try:
        rules: dict[str, Any] = json.loads(str(said["rules"]))
        method = methods.get(str(said["method"]), **rules)
        seed, number = int(str(said["seed"])), _whole(said["round"])
        return Order(method, seed, number, str(said["memory"]), str(said["weight"]))
    except (KeyError, ValueError) as error:
        raise SettingError(f"the server's order cannot be read: {error}") from error


def _whole(value: object) -> int:
    if not isinstance(value, int):
        raise SettingError(f"`round` must be a whole number, got {value!r}")
    return value


def client_id(context: Context) -> ClientId | None:
    """`client-id` or `partition-id` of the node's configuration: the same in every run. None if it has neither."""
    for key in ("client-id", "partition-id"):
        if (found := context.node_config.get(key)) is not None:
            if isinstance(found, int) and not isinstance(found, bool):
                return found
            if not _usable(name := str(found)):
                raise SettingError(f"`{key}` must have at most {LONGEST_ID} printable characters, got {name[:120]!r}")
            return name
    return None


def signature(context: Context, followed: str | None = None) -> ConfigRecord:
    """What a client says about itself."""
    client = client_id(context)
    said = {} if client is None else {"client": client}
    return ConfigRecord(said if followed is None else {**said, "method": followed})  # type: ignore[arg-type]


def said_id(content: RecordDict) -> ClientId | None:
    """The client id in a reply, if it has a usable one."""
    found = content.config_records.get(RECORD, ConfigRecord()).get("client")
    return found if _usable(found) else None


def _usable(client: object) -> TypeGuard[ClientId]:
    if isinstance(client, str):
        return len(client) <= LONGEST_ID and client.isprintable()
    return isinstance(client, int) and not isinstance(client, bool)
