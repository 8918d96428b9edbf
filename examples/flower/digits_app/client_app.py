"""What a client does. It need not know which method the server runs."""

import torch

from digits_app.task import Net, parts, pixels
from fedbe.algorithms.client import LocalSettings
from fedbe.flower import Job, Reply, client_app

torch.set_num_threads(1)  # the model is small


def train(job: Job) -> Reply:
    """A few epochs of SGD on this client's own digits."""
    config = job.context.run_config
    data, _, split = parts(int(config["clients"]), int(config["seed"]))
    own = split.clients[int(job.client_id)]
    settings = LocalSettings(epochs=int(config["epochs"]), batch_size=40, lr=0.05)
    return job.fit(Net(), pixels(data, own), data.labels[own], settings)


app = client_app(train)
