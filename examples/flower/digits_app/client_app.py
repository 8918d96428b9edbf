"""What a client does. It need not know which method the server runs."""

import torch

from digits_app.task import Net, parts, pixels
from fedbe.algorithms.client import LocalSettings
from fedbe.flower import TrainReply, TrainRequest, client_app

torch.set_num_threads(1)  # the model is small


def train(request: TrainRequest) -> TrainReply:
    """A few epochs of SGD on this client's digits."""
    config = request.context.run_config
    data, _, split = parts(int(config["clients"]), int(config["seed"]))
    index = split.clients[int(request.client_id)]
    settings = LocalSettings(epochs=int(config["epochs"]), batch_size=40, lr=0.05)
    return request.fit(Net(), pixels(data, index), data.labels[index], settings)


app = client_app(train)
