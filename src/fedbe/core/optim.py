"""The optimizers of clients and server: SGD with momentum, and Adam for FedDF, with torch's fused kernels.

torch.optim.SGD and Adam compute the same, but creating one imports torch's compiler. That takes two seconds in every
process, more than a round of a small federation.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.optim.adam import adam as fused_adam
from torch.optim.sgd import sgd as fused_sgd

from fedbe.core.model_runner import ModelRunner
from fedbe.core.normalization import names_without_decay


class Optimizer(ABC):
    """Changes the trainable parameters of a runner in place. A parameter without a gradient does not change.

    Args:
        runner: The runner whose trainable parameters are changed in place.
        momentum: The factor of the velocity (SGD), or β₁ (Adam); from 0 to below 1.
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
        self._groups: list[tuple[list[nn.Parameter], float]] = [
            ([p for n, p in trainable if n not in without_decay], weight_decay),
            ([p for n, p in trainable if n in without_decay], 0.0),
        ]
        self._state: dict[Tensor, tuple[Tensor, ...]] = {}

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameters, _ in self._groups:
            for parameter in parameters:
                parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update all parameters that have a gradient, with the step size `lr`."""
        for group, weight_decay in self._groups:
            parameters: list[Tensor] = [p for p in group if p.grad is not None]
            for parameter in parameters:
                if parameter not in self._state:
                    self._state[parameter] = self._start(parameter)
            if parameters:
                gradients = [p.grad for p in parameters if p.grad is not None]
                columns = [list(column) for column in zip(*(self._state[p] for p in parameters), strict=True)]
                self._update(parameters, gradients, columns, lr, weight_decay)

    @abstractmethod
    def _start(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """What is kept for a parameter between steps, before the first one."""

    @abstractmethod
    def _update(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        state: list[list[Tensor]],
        lr: float,
        weight_decay: float,
    ) -> None:
        """One step. `state` has a list for each kept tensor, in the order of the parameters."""


class SGD(Optimizer):
    """v ← momentum · v + (g + weight_decay · w);  w ← w − lr · v, with v = 0 at the start."""

    def _start(self, parameter: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros_like(parameter),)

    def _update(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        state: list[list[Tensor]],
        lr: float,
        weight_decay: float,
    ) -> None:
        (velocities,) = state
        fused_sgd(
            parameters,
            gradients,
            velocities,  # type: ignore[arg-type]
            fused=True,
            weight_decay=weight_decay,
            momentum=self._momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


class Adam(Optimizer):
    """Adam (Kingma and Ba) with β₁ = momentum, β₂ = 0.999, ε = 1e-8 and bias correction. g gains weight_decay · w."""

    def _start(self, parameter: Tensor) -> tuple[Tensor, ...]:
        steps = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return torch.zeros_like(parameter), torch.zeros_like(parameter), steps

    def _update(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        state: list[list[Tensor]],
        lr: float,
        weight_decay: float,
    ) -> None:
        first, second, steps = state
        fused_adam(
            parameters,
            gradients,
            first,
            second,
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=self._momentum,
            beta2=0.999,
            lr=lr,
            weight_decay=weight_decay,
            eps=1e-8,
            maximize=False,
        )
