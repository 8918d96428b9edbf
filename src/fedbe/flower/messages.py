"""What server and clients tell each other in addition to arrays: one ConfigRecord called "fedbe" in every message.

server to client  method and the settings of its rules, seed, round, the source of the client's memory, and the name
                  under which the client reports its number of examples
client to server  the client's id, and the method whose rules it applied
"""

import json
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

from flwr.app import ConfigRecord, Context, RecordDict

from fedbe.algorithms.methods import Method, get_method
from fedbe.core.updates import ClientId
from fedbe.errors import SettingError

RECORD = "fedbe"
IDENTIFY = "query.fedbe"  # the type of the message that asks a node for its client id
MEMORY_PREFIX = "memory-"  # extras whose names start like this are the client's memory
KEPT, SENT, NONE = "own", "sent", "none"  # the client's memory: kept at the client, in this message, or none
MAX_ID_LENGTH = 100  # characters of a client id: it is in every line of the report and in every checkpoint


@dataclass(frozen=True)
class TrainInstructions:
    """What a client must know to train by the server's method.

    Attributes:
        method: the method, with the settings of its rules.
        seed: the server's seed.
        round: the round, from 1.
        memory: where the client's memory is: KEPT, SENT or NONE.
        weight_key: the name under which the client reports its number of examples.
    """

    method: Method
    seed: int
    round: int
    memory: str = KEPT
    weight_key: str = "num-examples"

    def to_record(self) -> ConfigRecord:
        """The instructions as a record for a message; `read_instructions` reads it."""
        rules = {f.name: getattr(rule, f.name) for rule in self.method.rules for f in fields(rule)}  # type: ignore[arg-type]
        return ConfigRecord(
            {
                "method": self.method.name,
                "rules": json.dumps(rules),
                "seed": str(self.seed),  # as text: integers in a record are limited to 64 bits
                "round": self.round,
                "memory": self.memory,
                "weight": self.weight_key,
            }
        )


def read_instructions(content: RecordDict) -> TrainInstructions:
    """The instructions in a message. A message from another library's strategy asks for plain training."""
    record = content.config_records.get(RECORD)
    if record is None:
        rounds = [c["server-round"] for c in content.config_records.values() if "server-round" in c]
        return TrainInstructions(get_method("fedavg"), 0, _checked_round(rounds[0]) if rounds else 0)
    try:
        rules: dict[str, Any] = json.loads(str(record["rules"]))
        method = get_method(str(record["method"]), **rules)
        seed, number = int(str(record["seed"])), _checked_round(record["round"])
        return TrainInstructions(method, seed, number, str(record["memory"]), str(record["weight"]))
    except (KeyError, ValueError) as error:
        raise SettingError(f"the server's instructions cannot be read: {error}") from error


def _checked_round(value: object) -> int:
    if not isinstance(value, int):
        raise SettingError(f"`round` must be a whole number, got {value!r}")
    return value


def client_id(context: Context) -> ClientId | None:
    """`client-id` or `partition-id` of the node's configuration, the same in every run. None if both are missing."""
    for key in ("client-id", "partition-id"):
        value = context.node_config.get(key)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        name = str(value)
        if not _valid_id(name):
            raise SettingError(f"`{key}` must have at most {MAX_ID_LENGTH} printable characters, got {name[:120]!r}")
        return name
    return None


def client_record(context: Context, applied_method: str | None = None) -> ConfigRecord:
    """The record in which a client reports its id and the method whose rules it applied."""
    client = client_id(context)
    record = {} if client is None else {"client": client}
    return ConfigRecord(record if applied_method is None else {**record, "method": applied_method})  # type: ignore[arg-type]


def reported_id(content: RecordDict) -> ClientId | None:
    """The client id in a reply; None if it has no valid one."""
    client = content.config_records.get(RECORD, ConfigRecord()).get("client")
    return client if _valid_id(client) else None


def _valid_id(client: object) -> TypeGuard[ClientId]:
    if isinstance(client, str):
        return len(client) <= MAX_ID_LENGTH and client.isprintable()
    return isinstance(client, int) and not isinstance(client, bool)
