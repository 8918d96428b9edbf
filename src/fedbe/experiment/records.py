"""The form of run.json and of a line of rounds.jsonl, checked when they are read: all other code can rely on it."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedbe.algorithms.server.guard import SetAside
from fedbe.algorithms.server.influence import Capped
from fedbe.core.updates import ClientId

MAX_NUMBER = 1e100  # larger numbers are damage, and their sums and squares would overflow
METRICS = ("test", "test_average", "test_ensemble")  # of a model; a number that is not known is null
COSTS = ("seconds", "memory_mb", "bytes")
JUDGED = ("average", "ensemble", "student")  # metrics on the server's own inputs

Check = Callable[[str, Any], None]  # what is checked, and its value; raises a ValueError


def clients_record(
    clients: Iterable[ClientId], set_aside: Iterable[SetAside], capped: Iterable[Capped]
) -> dict[str, Any]:
    """Who took part in a round, as a part of its line in rounds.jsonl: plain numbers and texts."""
    caps = [str(c) for c in capped]
    return {
        "clients": list(clients),
        "set_aside": [{"client": s.client_id, "reason": s.reason} for s in set_aside],
        **({"capped": caps} if caps else {}),
    }


def check_record(record: Any) -> None:
    """Raise a ValueError, which says what is wrong, unless a line of rounds.jsonl has the form that its readers use."""
    _table(_anything)("the line", record)
    if type(record.get("round")) is not int or not 1 <= record["round"] < 10**9:
        raise ValueError(f"`round` must be a whole number >= 1, got {_shown(record.get('round'))}")
    for name in METRICS:
        _metrics(name, record.get(name, {}))
    for name in COSTS:
        _table(_number)(name, record.get(name, {}))
    _optional(_number_or_nan)("train_loss", record.get("train_loss"))
    _table(_metrics)("test_clients", record.get("test_clients", {}))
    _list(_aside)("set_aside", record.get("set_aside", []))
    _list(_text)("capped", record.get("capped", []))
    _server(record.get("server", {}))
    _check_characters(record)


def check_info(info: Mapping[str, Any]) -> None:
    """Raise a ValueError, which says what is wrong, unless run.json has the form that its readers use."""
    for name in ("method", "precision", "device", "created"):
        _text(name, info[name])
    if type(info["seed"]) is not int or abs(info["seed"]) >= 2**63:
        raise ValueError(f"`seed` must be a whole number of 64 bits, got {_shown(info['seed'])}")
    _table(_text)("made_with", info["made_with"])
    _optional(_table(_text))("identity", info["identity"])
    _optional(_text)("finished", info["finished"])
    _optional(_metrics)("final", info["final"])
    if info["finished"] is not None and "accuracy" not in (info["final"] or {}):
        raise ValueError("a finished run must have a final accuracy")
    _check_characters(info)


def _server(server: Any) -> None:
    _table(_anything)("server", server)
    for name in JUDGED:
        _metrics(f"server.{name}", server.get(name, {}))
    _table(_optional(_number_or_nan))("server.members", server.get("members", {}))
    _optional(_number_or_nan)("server.disagreement", server.get("disagreement"))
    _list(_text)("server.left_out", server.get("left_out", []))
    gate = server.get("gate", {})
    _table(_anything)("server.gate", gate)
    _table(_number_or_nan)("server.gate", {name: value for name, value in gate.items() if name != "accepted"})
    if type(gate.get("accepted", False)) is not bool:
        raise ValueError(f"`server.gate.accepted` must be true or false, got {_shown(gate['accepted'])}")


def _metrics(what: str, value: Any) -> None:
    _table(_optional(_number_or_nan))(what, value)
    if "accuracy" in value:
        _number(f"{what}.accuracy", value["accuracy"])


def _aside(what: str, value: Any) -> None:
    if not isinstance(value, dict) or not isinstance(value.get("reason"), str) or "client" not in value:
        raise ValueError(f"`{what}` must have a client and a reason, got {_shown(value)}")
    if not isinstance(value["client"], str | int | None):
        raise ValueError(f"`{what}.client` must be a whole number or a text, got {_shown(value['client'])}")


def _number(what: str, value: Any) -> None:
    if type(value) not in (int, float) or not abs(value) <= MAX_NUMBER:
        raise ValueError(f"`{what}` must be a finite number, got {_shown(value)}")


def _number_or_nan(what: str, value: Any) -> None:
    if type(value) is not float or math.isfinite(value):
        _number(what, value)


def _text(what: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"`{what}` must be a text, got {_shown(value)}")


def _anything(_what: str, _value: Any) -> None:
    pass


def _optional(check: Check) -> Check:
    return lambda what, value: None if value is None else check(what, value)


def _table(check: Check) -> Check:
    def check_all(what: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"`{what}` must be a table, got {_shown(value)}")
        for name, part in value.items():
            check(f"{what}.{name}", part)

    return check_all


def _list(check: Check) -> Check:
    def check_all(what: str, value: Any) -> None:
        if not isinstance(value, list):
            raise ValueError(f"`{what}` must be a list, got {_shown(value)}")
        for part in value:
            check(what, part)

    return check_all


def _check_characters(value: Any) -> None:
    """Half a surrogate pair is valid JSON, but cannot be printed or written: that is a UnicodeEncodeError."""
    json.dumps(value, ensure_ascii=False).encode()


def _shown(value: Any) -> str:
    """A value for a message, short: a number may have 4,000 digits."""
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
