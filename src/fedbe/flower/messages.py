"""What server and clients tell each other in addition to arrays.

server to client  keys that start with "fedbe." in the one ConfigRecord of the message: method and the settings of its
                  rules, seed, the source of the client's memory, and the name under which the client reports its
                  number of examples. There is no second record: clients and Flower's mods may expect one
client to server  a ConfigRecord called "fedbe": the client's id, and the method whose rules it applied
"""

import json
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

from flwr.app import ConfigRecord, Context, RecordDict

from fedbe.algorithms.methods import Method, get_method
from fedbe.core.updates import ClientId
from fedbe.errors import SettingError

RECORD = "fedbe"
PREFIX = "fedbe."  # of our keys in the server's ConfigRecord
ROUND = "server-round"  # Flower's own key
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

    def add_to(self, config: ConfigRecord) -> ConfigRecord:
        """A copy of a message's ConfigRecord with these instructions; `read_instructions` reads them."""
        rules = {f.name: getattr(rule, f.name) for rule in self.method.rules for f in fields(rule)}  # type: ignore[arg-type]
        ours = {
            "method": self.method.name,
            "rules": json.dumps(rules),
            "seed": str(self.seed),  # as text: integers in a record are limited to 64 bits
            "memory": self.memory,
            "weight": self.weight_key,
        }
        return ConfigRecord({**config, ROUND: self.round, **{PREFIX + key: value for key, value in ours.items()}})


def read_instructions(content: RecordDict) -> TrainInstructions:
    """The instructions in a message. A message from another library's strategy asks for plain training."""
    config = {key: value for record in content.config_records.values() for key, value in record.items()}
    number = _checked_round(config.get(ROUND, 0))
    ours = {key.removeprefix(PREFIX): str(value) for key, value in config.items() if key.startswith(PREFIX)}
    if not ours:
        return TrainInstructions(get_method("fedavg"), 0, number)
    try:
        rules: dict[str, Any] = dict(json.loads(ours["rules"]))
        method = get_method(ours["method"], **rules)
        return TrainInstructions(method, int(ours["seed"]), number, ours["memory"], ours["weight"])
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise SettingError(f"the server's instructions cannot be read: {error}"[:300]) from error


def users_config(content: RecordDict) -> ConfigRecord:
    """The ConfigRecord of the ServerApp (`train_config`), without our instructions."""
    record = next(iter(content.config_records.values()), ConfigRecord())
    return ConfigRecord({key: value for key, value in record.items() if not key.startswith(PREFIX)})


def _checked_round(value: object) -> int:
    if not isinstance(value, int):
        raise SettingError(f"`round` must be a whole number, got {value!r}"[:200])
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
