"""The one optimizer of clients and server: SGD with momentum, as torch has it."""

import torch

from fedbe.norm import undecayed
from fedbe.workbench import Workbench


def sgd(bench: Workbench, lr: float, momentum: float, weight_decay: float) -> torch.optim.SGD:
    """SGD for the module on the bench; weight decay does not touch normalisation layers.

    v ← momentum·v + (g + weight_decay·w);  w ← w − lr·v, with v = 0 at the start.
    """
    spared = undecayed(bench.module)
    named = bench.trainable()
    groups = [
        {"params": [p for n, p in named if n not in spared], "weight_decay": weight_decay},
        {"params": [p for n, p in named if n in spared], "weight_decay": 0.0},
    ]
    return torch.optim.SGD([g for g in groups if g["params"]], lr=lr, momentum=momentum, fused=True)
