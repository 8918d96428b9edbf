"""What the two sides say to each other besides arrays: one ConfigRecord called "fedbe" in every message.

server to client  method and its rules' settings, seed, round, and where the client's memory is to come from
client to server  the client's id, and the method whose rules it followed
"""

import json
from dataclasses import dataclass, fields
from typing import Any

from flwr.app import ConfigRecord, Context, RecordDict

from fedbe import methods
from fedbe.errors import SettingError
from fedbe.methods import Method
from fedbe.updates import ClientId

RECORD = "fedbe"
ASK = "query.fedbe"  # the message that asks a node for its client id
MEMORY = "memory-"  # extras that begin so are what the client itself should remember
OWN, SENT, NONE = "own", "sent", "none"


@dataclass(frozen=True)
class Order:
    """What a client needs to know to train as its server's method says."""

    method: Method
    seed: int
    round: int
    memory: str = OWN

    def record(self) -> ConfigRecord:
        rules = {f.name: getattr(rule, f.name) for rule in self.method.rules for f in fields(rule)}  # type: ignore[arg-type]
        return ConfigRecord(
            {
                "method": self.method.name,
                "rules": json.dumps(rules),
                "seed": str(self.seed),  # any whole number; a record's own are limited to 64 bits
                "round": self.round,
                "memory": self.memory,
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
        return Order(method, int(str(said["seed"])), _whole(said["round"]), str(said["memory"]))
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
            return found if isinstance(found, int | str) and not isinstance(found, bool) else str(found)
    return None


def signature(context: Context, method: Method | None = None) -> ConfigRecord:
    """What a client says about itself."""
    client = client_id(context)
    said = {} if client is None else {"client": client}
    return ConfigRecord(said if method is None else {**said, "method": method.name})  # type: ignore[arg-type]


def said_id(content: RecordDict) -> ClientId | None:
    """The client id in a reply, if it has a usable one."""
    found = content.config_records.get(RECORD, ConfigRecord()).get("client")
    return found if isinstance(found, int | str) and not isinstance(found, bool) else None
