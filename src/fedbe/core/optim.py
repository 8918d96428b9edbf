"""The one optimizer of clients and server: SGD with momentum, by torch's own fused kernel.

torch.optim.SGD would do the same, but making one imports torch's compiler: two seconds in every process, more than
a round of a small federation takes.
"""

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd as fused_sgd

from fedbe.core.model_runner import ModelRunner
from fedbe.core.normalization import names_without_decay


class SGD:
    """v ← momentum·v + (g + weight_decay·w);  w ← w − lr·v, with v = 0 at the start.

    Weight decay does not touch normalisation layers. A parameter that the loss does not reach stays as it is.
    """

    def __init__(self, runner: ModelRunner, momentum: float, weight_decay: float) -> None:
        spared = names_without_decay(runner.module)
        named = runner.trainable()
        self._momentum = momentum
        self._groups = [
            _Group([p for n, p in named if n not in spared], weight_decay),
            _Group([p for n, p in named if n in spared], 0.0),
        ]

    def zero_grad(self) -> None:
        for group in self._groups:
            for parameter in group.parameters:
                parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for group in self._groups:
            group.step(lr, self._momentum)


class _Group:
    def __init__(self, parameters: list[nn.Parameter], weight_decay: float) -> None:
        self.parameters, self._weight_decay = parameters, weight_decay
        self._velocity: dict[int, Tensor | None] = {}

    def step(self, lr: float, momentum: float) -> None:
        reached = [(i, p) for i, p in enumerate(self.parameters) if p.grad is not None]
        if not reached:
            return
        velocity = [self._velocity.get(i) for i, _ in reached]
        if any(v is not None for v in velocity):
            # The kernel takes all velocities or none; 0 is what a parameter reached for the first time has.
            velocity = [torch.zeros_like(p) if v is None else v for v, (_, p) in zip(velocity, reached, strict=True)]
        fused_sgd(
            [p for _, p in reached],
            [p.grad for _, p in reached if p.grad is not None],
            velocity,
            fused=True,
            weight_decay=self._weight_decay,
            momentum=momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        self._velocity.update({i: v for (i, _), v in zip(reached, velocity, strict=True)})
