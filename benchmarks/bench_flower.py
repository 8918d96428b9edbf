"""CPU seconds of one aggregation: fedbe's FedAvg (guard included) next to Flower's own, in turn in one process.

python -m benchmarks flower
"""

import logging
import statistics
import time
from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.supercore.task_identity import TaskIdentity
from rich.console import Console
from torch import nn

import fedbe.flower

CLIENTS, LAYERS, WIDTH, TURNS = 10, 10, 1024, 15


class Nodes:
    """All that a strategy asks of Flower's grid."""

    def get_node_ids(self) -> Iterable[int]:
        """The ids of the nodes."""
        return range(1, CLIENTS + 1)


def reply(message: Message, number: int, model: nn.Module) -> Message:
    """What client `number` sends back."""
    message.metadata.__dict__["_message_id"] = f"message {number}"
    moved = ArrayRecord({name: tensor + 0.001 * number for name, tensor in model.state_dict().items()})
    content = RecordDict({"arrays": moved, "metrics": MetricRecord({"num-examples": 10 + number})})
    return Message(content, reply_to=message)


def seconds(strategy: FlowerFedAvg, model: nn.Module) -> float:
    """CPU seconds of `configure_train` and `aggregate_train` in one round, until the replies are freed."""
    arrays = ArrayRecord(model.state_dict())
    begin = time.process_time()
    sent = list(strategy.configure_train(1, arrays, ConfigRecord(), Nodes()))  # type: ignore[arg-type]
    spent = time.process_time() - begin
    replies = [reply(message, number, model) for number, message in enumerate(sent)]
    time.sleep(0.1)  # torch's threads wait actively for some milliseconds after they made the replies
    begin = time.process_time()
    strategy.aggregate_train(1, replies)
    replies.clear()  # ours has freed their arrays, Flower's leaves that to its caller
    return spent + time.process_time() - begin


def main() -> None:
    """Print the seconds of both and their ratio."""
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # Flower's runtime sets these
    logging.getLogger("flwr").setLevel(logging.ERROR)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    flower, fed = FlowerFedAvg(fraction_evaluate=0.0), fedbe.flower.FedAvg(model=model, fraction_evaluate=0.0)
    ours, theirs = [], []
    for _ in range(TURNS + 1):
        theirs.append(seconds(flower, model))
        ours.append(seconds(fed, model))
    ratios = [a / b for a, b in zip(ours[1:], theirs[1:], strict=True)]  # the first turn warms up
    Console().print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {CLIENTS} clients, {TURNS} turns: "
        f"fedbe {statistics.median(ours[1:]):.3f} s, Flower {statistics.median(theirs[1:]):.3f} s, "
        f"ratio {statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})"
    )
