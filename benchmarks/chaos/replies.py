"""One of five clients sends anything: the server's result is that of the others, or near it."""

import random
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor, nn

from benchmarks.chaos.common import Tally
from benchmarks.chaos.fuzz import mutated
from fedbe import ClientUpdate, Server, get_method
from fedbe.errors import FedBEError, StateError
from fedbe.flower import FedAvg, to_record

TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # Flower's runtime sets these for a ServerApp
CLIENTS = 5  # the last one is hostile
NEAR = 100.0  # what the guard's bounds leave to one client of five, on this model
ODD: list[object] = [
    None, 3, "x", [], {}, float("nan"), 1e15, -1, 2**70, torch.zeros(2), np.float16("inf"), b"x", True
]  # fmt: skip


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def _honest(start: dict[str, Tensor], client: int) -> dict[str, Tensor]:
    return {name: v + 0.01 * client if v.is_floating_point() else v for name, v in start.items()}


def _count(tally: Tally, clean: dict[str, Tensor], aggregate: Callable[[], dict[str, Tensor]]) -> None:
    tally.tried += 1
    try:
        result = aggregate()
    except FedBEError:
        tally.lost += 1  # the others were there: the round has a result
    except Exception:
        tally.raw += 1
        traceback.print_exc()
    else:
        tally.differing += any(
            not torch.allclose(result[name].double(), clean[name].double(), atol=NEAR) for name in clean
        )


def library(count: int, draw: random.Random) -> Tally:
    """Updates with anything in place of tensors, numbers and ids."""
    tally, module = Tally(), _model()
    start = module.state_dict()
    updates = [ClientUpdate(_honest(start, i), 10, i) for i in range(CLIENTS - 1)]
    clean = Server("fedavg", module).aggregate(start, updates)
    for _ in range(count):
        state: dict[Any, object] = dict(start)
        name = draw.choice(list(start))
        huge = [torch.full_like(start[name], v) for v in (3e38, 1e9, -1e30)] if start[name].is_floating_point() else []
        state[draw.choice([name, name, "extra", 7])] = draw.choice([*ODD, *huge])
        # Half of the numbers and ids are honest, so that most replies have one thing wrong.
        examples, client = draw.choice([10, draw.choice(ODD)]), draw.choice([4, draw.choice(ODD)])
        update = ClientUpdate(state, examples, client)  # type: ignore[arg-type]
        _count(tally, clean, lambda update=update: Server("fedavg", module).aggregate(start, [*updates, update]))  # type: ignore[misc]
    return tally


def nvflare(count: int, draw: random.Random) -> Tally:
    """Models and metas of NVFlare with anything in them. What cannot be read is left out, as in the controller."""
    from nvflare.app_common.abstract.fl_model import FLModel

    from fedbe.nvflare import messages
    from fedbe.nvflare.controller import average_metrics

    tally, module = Tally(), _model()
    start = module.state_dict()
    method = get_method("fedavg")
    updates = [ClientUpdate(_honest(start, i), 10, i) for i in range(CLIENTS - 1)]
    clean = Server(method, module).aggregate(start, updates)

    def aggregate() -> dict[str, Tensor]:
        server, odd = Server(method, module), draw.choice([*ODD, 10**400, np.zeros(3)])
        params: dict[Any, Any] = messages.to_arrays(start)
        name, kind = draw.choice(list(params)), draw.choice(["<f4", "<f8", "<c8", "<i8", "?", "<U3"])
        wrong = np.zeros(draw.choice([(), (7, 7), (500, 1, 1), (0,), params[name].shape]), kind)
        params[draw.choice([name, name, "extra", 7])] = draw.choice([odd, wrong, wrong])
        extras = draw.choice([odd, {"x": odd}])
        meta = {"fedbe": draw.choice([odd, {"method": odd}, {"num_examples": odd, "extras": extras}])}
        result = FLModel(params_type=draw.choice(["FULL", "DIFF"]), params=params, meta=meta)
        result.metrics = draw.choice([odd, {"loss": odd}])
        received = []
        with suppress(StateError):
            received.append(messages.read_update(result, "site-5", method, server.runner.layout, start))
        state = server.aggregate(start, [*updates, *received])
        average_metrics([("site-5", update.num_examples, result.metrics) for update in received], server.limits)
        return state

    for _ in range(count):
        _count(tally, clean, aggregate)
    return tally


class _Nodes:
    """All that a strategy asks of Flower's grid here: the nodes."""

    def get_node_ids(self) -> list[int]:
        return list(range(1, CLIENTS + 1))

    def send_and_receive(self, messages: Any, **_: object) -> list[Message]:  # noqa: ARG002
        return []


def flower(count: int, draw: random.Random) -> Tally:
    """Messages of Flower with damaged arrays, wrong records, numbers, ids and errors."""
    tally, module = Tally(), _model()
    start = module.state_dict()
    clean = Server("fedavg", module).aggregate(
        start, [ClientUpdate(_honest(start, i), 10, i) for i in range(CLIENTS - 1)]
    )

    def aggregate() -> dict[str, Tensor]:
        strategy = FedAvg(module, min_available_nodes=1)
        sent = list(strategy.configure_train(1, to_record(start), ConfigRecord(), _Nodes()))  # type: ignore[arg-type]
        for number, message in enumerate(sent):
            message.metadata.__dict__["_message_id"] = str(number)
        replies = [Message(_reply(_honest(start, i), i), reply_to=m) for i, m in enumerate(sent[:-1])]
        record, _ = strategy.aggregate_train(1, [*replies, _hostile(start, sent[-1], draw)])
        assert record is not None
        return {name: torch.from_numpy(array.numpy()) for name, array in record.items()}

    for _ in range(count):
        _count(tally, clean, aggregate)
    return tally


def _reply(state: dict[str, Tensor], client: object) -> RecordDict:
    return RecordDict(
        {
            "arrays": to_record(state),
            "metrics": MetricRecord({"num-examples": 10}),
            "fedbe": ConfigRecord({"client": client}),  # type: ignore[dict-item]
        }
    )


def _hostile(start: dict[str, Tensor], sent: Message, draw: random.Random) -> Message:
    """A reply with one to three things wrong."""
    content = _reply(start, draw.choice([4, 4, 0, "x" * 500, "\x1b[2J", -(2**60)]))
    changes = (_damage_array, _relabel_array, _rename, _odd_metrics, _odd_records)
    for change in draw.sample(changes, draw.randint(1, 3)):
        change(content, draw)
    if draw.random() < 0.03:
        return Message(Error(1, "x\n" * draw.choice([0, 1, 10_000])), reply_to=sent)
    return Message(content, reply_to=sent)


def _damage_array(content: RecordDict, draw: random.Random) -> None:
    for record in filter(None, content.array_records.values()):
        name = draw.choice(list(record))
        array = record[name]
        record[name] = Array(array.dtype, array.shape, array.stype, mutated(array.data, draw))


def _relabel_array(content: RecordDict, draw: random.Random) -> None:
    for record in filter(None, content.array_records.values()):
        name = draw.choice(list(record))
        array, kind = record[name], draw.choice(["float32", "object", "float64", "x", ""])
        shape = draw.choice([array.shape, (), (2**40,), (-1,), (0, 0)])
        record[name] = Array(kind, shape, draw.choice([array.stype, "pickle"]), array.data)


def _rename(content: RecordDict, draw: random.Random) -> None:
    for record in filter(None, content.array_records.values()):
        name = draw.choice(list(record))
        array = record.pop(name)
        record[draw.choice(["", "x" * 10_000, f"extra/{name}", name.upper(), "🙂"])] = array


def _odd_metrics(content: RecordDict, draw: random.Random) -> None:
    value: Any = draw.choice([float("nan"), float("inf"), -1, 0, 2**62, 1e15, [1, 2], 1e-300])
    content["metrics"] = MetricRecord({draw.choice(["num-examples", "num-examples", "other"]): value})


def _odd_records(content: RecordDict, draw: random.Random) -> None:
    kind = draw.randrange(4)
    if kind == 0:
        content["more"] = ArrayRecord()
    elif kind == 1:
        content["more"] = MetricRecord({"num-examples": 10})
    elif kind == 2:
        del content["metrics"]
    else:
        client: Any = draw.choice([b"x", [1], 1.5, "y"])
        content["fedbe"] = ConfigRecord({"client": client, "method": "none"})
