"""FedBE in a plain training loop: ten clients with two or three digits each, 300 unlabeled images at the server.

python examples/library_loop.py
"""

from typing import Any

import torch
from torch import nn

import fedbe
from fedbe.core.random import generator
from fedbe.data import Partition, Task, load_task, make_loader, split


def federate(
    model: nn.Module, task: Task, partition: Partition, settings: fedbe.LocalSettings, rounds: int, **options: Any
) -> float:
    """Train a federation round by round, print each round's test accuracy, and return the last one.

    Args:
        model: The architecture and the first weights.
        task: Training and test data.
        partition: The examples of the server and of each client.
        settings: Of the clients' SGD.
        rounds: Rounds of communication.
        **options: Of `fedbe.FedBE`.
    """
    train = make_loader(task.train)
    test = train.like(task.test)
    server = fedbe.FedBE(model, unlabeled=train.select(partition.server), seed=0, **options)
    print(server)
    runner = fedbe.ModelRunner(model)  # a client's model
    global_state = model.state_dict()
    accuracy = 0.0
    for round in range(1, rounds + 1):
        updates = []
        for client, index in enumerate(partition.clients):  # in a real federation each client does this itself
            trained = fedbe.train(
                runner,
                runner.layout.pack(global_state),
                train.select(index),
                task.train.labels[index],
                settings,
                generator(0, round, "train", client),
            )
            updates.append(fedbe.ClientUpdate(trained.state, num_examples=len(index), client_id=client))
        global_state = server.aggregate(global_state, updates)
        predicted = server.predict_proba(global_state, test).argmax(1)
        accuracy = float((predicted == task.test.labels).double().mean())
        print(f"round {round}: test accuracy {100 * accuracy:.1f} %")
    return accuracy


def main() -> float:
    torch.manual_seed(0)
    task = load_task("digits")
    partition = split("step", task.train.labels, clients=10, server=300, seed=0, minor_images=1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    settings = fedbe.LocalSettings(epochs=5, lr=0.05)
    return federate(model, task, partition, settings, rounds=3)


if __name__ == "__main__":
    main()
