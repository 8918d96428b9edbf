"""The client. It need not know which method the server runs."""

import torch

from digits_app.task import Net, load_partition, to_pixels
from fedbe import LocalSettings
from fedbe.flower import TrainReply, TrainRequest, client_app


def train(request: TrainRequest) -> TrainReply:
    """Train a few epochs of SGD on this client's digits."""
    torch.set_num_threads(1)  # here, because the number holds for the thread that sets it; the model is small
    config = request.context.run_config
    train_data, _, partition = load_partition(int(config["clients"]), int(config["seed"]))
    index = partition.clients[int(request.client_id)]
    settings = LocalSettings(epochs=int(config["epochs"]), batch_size=40, lr=0.05)
    return request.fit(Net(), to_pixels(train_data, index), train_data.labels[index], settings)


app = client_app(train)
