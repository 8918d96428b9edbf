"""A client: local SGD with the rules of the server's method."""

import torch

from fedbe import LocalSettings
from fedbe.algorithms.client.lr_schedule import step_size
from fedbe.experiment.federation import initial_weights
from fedbe.flower import TrainReply, TrainRequest, client_app
from fedbe_baseline.dataset import get_recipe, load_federation


def train(request: TrainRequest) -> TrainReply:
    """Train on the client's part for one round, with the step size of that round."""
    torch.set_num_threads(1)  # here and not at import: the number holds for one thread, and Flower imports in another
    config = request.context.run_config
    training, federation = get_recipe(config).training, load_federation(config)
    lr = step_size(training.lr, request.round, training.rounds, training.schedule)
    settings = LocalSettings(
        training.epochs, training.batch_size, lr, training.lr_decay, training.momentum, training.weight_decay
    )
    index = federation.clients[int(request.client_id)]
    model = initial_weights(federation.model, int(config["seed"]))
    return request.fit(model, federation.train.select(index), federation.labels[index], settings)


app = client_app(train)
