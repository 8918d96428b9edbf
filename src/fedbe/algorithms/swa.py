"""Stochastic weight averaging (Izmailov et al. 2018): a cyclic step size, and the mean of the cycles' end points."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_swa_multi_avg_fn


@dataclass(frozen=True)
class SWASchedule:
    """The step size of each step i = 1, 2, … and the steps after which a point is collected.

        lr(i) = (1 − t) lr_max + t lr_min   with t = ((i − 1) mod c + 1)/c

    A point is collected at the end of each cycle (i mod c = 0) with i > start.

    Attributes:
        lr, lr_min: step sizes at the beginning and at the end of a cycle.
        cycle_steps: c, the length of a cycle.
        start_steps: no point is collected up to this step.

    Example:
        >>> schedule = SWASchedule(lr=1.0, lr_min=0.5, cycle_steps=2, start_steps=2)
        >>> [schedule.step_size(i) for i in (1, 2, 3)], [schedule.collects(i) for i in (2, 3, 4)]
        ([0.75, 0.5, 0.75], [False, False, True])
    """

    lr: float
    lr_min: float
    cycle_steps: int
    start_steps: int

    def step_size(self, i: int) -> float:
        """lr(i)."""
        t = ((i - 1) % self.cycle_steps + 1) / self.cycle_steps
        return (1 - t) * self.lr + t * self.lr_min

    def collects(self, i: int) -> bool:
        """Whether the point after step i enters the mean."""
        return i % self.cycle_steps == 0 and i > self.start_steps

    def fitted(self, total_steps: int) -> "SWASchedule":
        """This schedule, or a shorter one if it would collect nothing in `total_steps`.

        The shorter one has the paper's proportions. Its 10,000 images make 1,580 steps: it starts after a sixth of them
        and has about sixty cycles. A cycle has at least 5 steps.

        Example:
            >>> s = SWASchedule(1e-3, 4e-4, cycle_steps=25, start_steps=250).fitted(60)
            >>> s.start_steps, s.cycle_steps
            (10, 5)
        """
        if (total_steps // self.cycle_steps) * self.cycle_steps > self.start_steps:
            return self
        cycle = min(self.cycle_steps, max(5, total_steps // 60), total_steps)
        start = min(total_steps // 6, total_steps // cycle * cycle - 1)
        return SWASchedule(self.lr, self.lr_min, cycle, start)


class WeightAverage:
    """The running mean of the parameters of a module that is being trained."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._mean: list[Tensor] = []
        self.count = 0

    @torch.no_grad()
    def collect(self) -> None:
        """Add the parameters as they are now to the mean."""
        if not self.count:
            self._mean = [p.detach().clone() for p in self._parameters]
        else:
            get_swa_multi_avg_fn()(self._mean, self._parameters, self.count)  # type: ignore[no-untyped-call]
        self.count += 1

    @torch.no_grad()
    def apply_(self) -> None:
        """Replace the parameters by their mean."""
        for parameter, value in zip(self._parameters, self._mean, strict=True):
            parameter.copy_(value)
