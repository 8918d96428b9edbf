"""The only optimizer of clients and server: SGD with momentum, with torch's fused kernel.

torch.optim.SGD computes the same, but creating one imports torch's compiler. That takes two seconds in every process,
more than a round of a small federation.
"""

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd as fused_sgd

from fedbe.core.model_runner import ModelRunner
from fedbe.core.normalization import names_without_decay


class SGD:
    """v ← momentum · v + (g + weight_decay · w);  w ← w − lr · v, with v = 0 at the start.

    A parameter without a gradient does not change.

    Args:
        runner: The runner whose trainable parameters are changed in place.
        momentum: The factor of the velocity v, from 0 to below 1.
        weight_decay: The factor of the weights; >= 0.
        decay_norms: Whether weight decay is applied to normalization layers, too.
        decay_biases: Whether weight decay is applied to the biases of other layers (parameters called "bias").
    """

    def __init__(
        self,
        runner: ModelRunner,
        momentum: float,
        weight_decay: float,
        *,
        decay_norms: bool = False,
        decay_biases: bool = True,
    ) -> None:
        without_decay = set() if decay_norms else names_without_decay(runner.module)
        trainable = runner.trainable()
        if not decay_biases:
            without_decay |= {name for name, _ in trainable if name.rsplit(".", 1)[-1] == "bias"}
        self._momentum = momentum
        self._groups = [
            _Group([p for n, p in trainable if n not in without_decay], weight_decay),
            _Group([p for n, p in trainable if n in without_decay], 0.0),
        ]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for group in self._groups:
            for parameter in group.parameters:
                parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update all parameters that have a gradient, with the step size `lr`."""
        for group in self._groups:
            group.step(lr, self._momentum)


class _Group:
    """Parameters with one weight decay, and their velocities."""

    def __init__(self, parameters: list[nn.Parameter], weight_decay: float) -> None:
        self.parameters, self._weight_decay = parameters, weight_decay
        self._velocities: dict[Tensor, Tensor] = {}

    def step(self, lr: float, momentum: float) -> None:
        parameters: list[Tensor] = [p for p in self.parameters if p.grad is not None]
        for parameter in parameters:
            if parameter not in self._velocities:
                self._velocities[parameter] = torch.zeros_like(parameter)
        if parameters:
            fused_sgd(
                parameters,
                [p.grad for p in parameters if p.grad is not None],
                [self._velocities[p] for p in parameters],
                fused=True,
                weight_decay=self._weight_decay,
                momentum=momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
