"""FedBE's server step as a reader of the paper would write it: plain PyTorch, DataLoader, default threads and layout.

The reference of `benchmarks.bench_server`. Lists of state_dicts in, one state_dict out.
"""

import copy
import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.plain_loop import Images

Weights = dict[str, Tensor]


def fit_and_sample(clients: Sequence[Weights], count: int) -> tuple[Weights, list[Weights]]:
    """The mean of the clients, and samples of the Gaussian with their mean and variance (Eq. 5)."""
    stacked = {name: torch.stack([weights[name] for weights in clients]) for name in clients[0]}
    mean = {name: tensors.mean(0) for name, tensors in stacked.items()}
    std = {name: tensors.var(0, unbiased=False).sqrt() for name, tensors in stacked.items()}
    return mean, [{name: mean[name] + std[name] * torch.randn_like(std[name]) for name in mean} for _ in range(count)]


@torch.no_grad()
def vote(model: nn.Module, members: Sequence[Weights], images: Images) -> Tensor:
    """The mean of all members' predictions."""
    model.eval()
    plain = TensorDataset((images.images.float() / 255 - 0.47) / 0.25)
    predictions = []
    for weights in members:
        model.load_state_dict(weights)
        predictions.append(torch.cat([model(batch).softmax(1) for (batch,) in DataLoader(plain, batch_size=500)]))
    return torch.stack(predictions).mean(0)


def distill(model: nn.Module, start: Weights, images: Images, targets: Tensor, epochs: int) -> Weights:
    """SGD with a cyclic step size from the mean, on the sharpened vote; the mean of the end points of the cycles."""
    targets = targets.square() / targets.square().sum(1, keepdim=True)
    model.load_state_dict(start)
    model.train()
    average, step = AveragedModel(model), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    data = Images(images.images, targets)
    for _ in range(epochs):
        for batch, target in DataLoader(data, batch_size=128, shuffle=True):
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 - 6e-4 * ((step - 1) % 25 + 1) / 25
            optimizer.zero_grad()
            functional.cross_entropy(model(batch), target).backward()
            optimizer.step()
            if step % 25 == 0 and step > 250:
                average.update_parameters(model)
    return copy.deepcopy(average.module.state_dict())


def seconds_of(model: nn.Module, clients: Sequence[Weights], samples: int, images: Images, epochs: int) -> list[float]:
    """The seconds of fit and samples, of the vote, and of the distillation."""
    times = [time.perf_counter()]
    mean, drawn = fit_and_sample(clients, samples)
    times.append(time.perf_counter())
    targets = vote(model, [mean, *drawn, *clients], images)
    times.append(time.perf_counter())
    distill(model, mean, images, targets, epochs)
    times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]
