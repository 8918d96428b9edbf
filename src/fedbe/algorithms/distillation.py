"""Distil a vote into one model: pseudo-labels, and SGD or SWA on them (Section 4 of the paper)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import get_swa_multi_avg_fn

from fedbe.core.inputs import Inputs, batches
from fedbe.core.model_runner import ModelRunner
from fedbe.core.normalization import check_batch, recalibrate
from fedbe.core.optim import SGD
from fedbe.core.random import global_rng
from fedbe.core.state import ModelState
from fedbe.errors import AggregationError, SettingError, nearest

OPTIMIZERS = ("swa", "sgd")
LOSSES = ("cross_entropy", "kl_over_classes")


@dataclass(frozen=True)
class DistillSettings:
    """How the student is trained. The defaults are the paper's; steps are mini-batches.

    optimizer            swa: average of points along a cyclic step size; sgd: constant step size, last point
    distill_epochs        passes over the server's inputs
    distill_batch_size         inputs in a mini-batch
    distill_lr            step size at the start of each SWA cycle, or SGD's constant one
    distill_lr_min        step size at the end of each SWA cycle
    swa_cycle_steps      length of a cycle; a point is collected at its end …
    swa_start_steps      … if that lies after this step
    distill_momentum      momentum of SGD, also within SWA
    distill_weight_decay  not on normalisation layers
    loss                 cross_entropy: −(1/J) Σ_j p̂_j·log p_j; kl_over_classes: the released program's KL, averaged
                         over examples and classes
    """

    optimizer: str = "swa"
    distill_epochs: int = 20
    distill_batch_size: int = 128
    distill_lr: float = 1e-3
    distill_lr_min: float = 4e-4
    swa_cycle_steps: int = 25
    swa_start_steps: int = 250
    distill_momentum: float = 0.9
    distill_weight_decay: float = 0.0
    loss: str = "cross_entropy"

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise SettingError(f"unknown optimizer '{self.optimizer}': {nearest(self.optimizer, OPTIMIZERS)}")
        if self.loss not in LOSSES:
            raise SettingError(f"unknown loss '{self.loss}': {nearest(self.loss, LOSSES)}")
        for name in ("distill_epochs", "distill_batch_size", "swa_cycle_steps"):
            if getattr(self, name) < 1:
                raise SettingError(f"`{name}` must be >= 1, got {getattr(self, name)}")
        for name in ("distill_lr", "distill_lr_min"):
            if not getattr(self, name) > 0:
                raise SettingError(f"`{name}` must be > 0, got {getattr(self, name)}")
        if self.optimizer == "swa" and self.distill_lr_min > self.distill_lr:
            raise SettingError(
                "`distill_lr_min` must not be above `distill_lr`, "
                f"got {self.distill_lr_min} and {self.distill_lr}: set both"
            )
        for name in ("swa_start_steps", "distill_weight_decay"):
            if not getattr(self, name) >= 0:
                raise SettingError(f"`{name}` must be >= 0, got {getattr(self, name)}")
        if not 0 <= self.distill_momentum < 1:
            raise SettingError(f"`distill_momentum` must be in [0, 1), got {self.distill_momentum}")


@dataclass(frozen=True)
class Schedule:
    """The step size of each step i = 1, 2, … and the steps after which a point is collected.

    SWA (Izmailov et al.): lr(i) = (1 − t) lr_max + t lr_min with t = ((i − 1) mod c + 1)/c; a point is collected
    at each end of a cycle (i mod c = 0) with i > start. SGD: lr(i) = lr_max, only the last point counts.
    """

    lr: float
    lr_min: float
    cycle: int
    start: int
    swa: bool

    def step_size(self, i: int) -> float:
        if not self.swa:
            return self.lr
        t = ((i - 1) % self.cycle + 1) / self.cycle
        return (1 - t) * self.lr + t * self.lr_min

    def collects(self, i: int) -> bool:
        return self.swa and i % self.cycle == 0 and i > self.start


def schedule(settings: DistillSettings, total_steps: int) -> Schedule:
    """The schedule for a distillation of `total_steps`.

    Where the server has so few inputs that not one cycle ends after `swa_start_steps`, SWA would do nothing: then
    the schedule shrinks to the paper's proportions (its 10,000 images make 1,580 steps: start after a sixth of
    them, about sixty cycles), with cycles of at least 5 steps.

    >>> s = schedule(DistillSettings(), 60)
    >>> s.start, s.cycle
    (10, 5)
    """
    cycle, start = settings.swa_cycle_steps, settings.swa_start_steps
    swa = settings.optimizer == "swa"
    if swa and (total_steps // cycle) * cycle <= start:
        cycle = min(cycle, max(5, total_steps // 60), total_steps)
        start = min(total_steps // 6, total_steps // cycle * cycle - 1)
    return Schedule(settings.distill_lr, settings.distill_lr_min, cycle, start, swa)


def sharpen(probabilities: Tensor, exponent: float = 2.0) -> Tensor:
    """p̂[c] = p[c]^e / Σ_c' p[c']^e over dimension 1; e = 1 changes nothing.

    >>> sharpen(torch.tensor([[0.75, 0.25]]))
    tensor([[0.9000, 0.1000]])
    """
    # The largest is scaled to 1 first: with many classes a high power of all of them could vanish.
    powered = (probabilities / probabilities.amax(1, keepdim=True)) ** exponent
    return powered / powered.sum(1, keepdim=True)


def loss_function(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """(logits, target probabilities) -> the scalar that is minimised."""
    if name == "cross_entropy":
        return functional.cross_entropy
    # Not reduction="mean": torch warns that this is not the mathematical KL, which is the point of this variant.
    return lambda logits, target: functional.kl_div(logits.log_softmax(1), target, reduction="none").mean()


def distill(
    runner: ModelRunner,
    start: ModelState,
    inputs: Inputs,
    targets: Tensor,
    settings: DistillSettings,
    generator: torch.Generator,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> ModelState:
    """Train the model `start` to predict `targets` [J, classes, …] (or class labels [J, …]) on the inputs.

    Returns the last SGD point, or the mean of the collected SWA points with BatchNorm statistics measured anew.
    """
    check_batch(runner.module, min(len(inputs), settings.distill_batch_size))
    runner.load(start)
    runner.module.train()
    parameters = [p for _, p in runner.trainable()]
    steps = sum(1 for _ in batches(len(inputs), settings.distill_batch_size)) * settings.distill_epochs
    plan = schedule(settings, steps)
    optimizer = SGD(runner, settings.distill_momentum, settings.distill_weight_decay)
    loss_of = loss_function(settings.loss) if targets.is_floating_point() else functional.cross_entropy
    targets = targets.to(runner.device)
    average: list[Tensor] = []
    collected = 0
    with global_rng(generator):
        for i, index in enumerate(_epochs(len(inputs), settings, generator), start=1):
            optimizer.zero_grad()
            loss = loss_of(runner.logits(inputs.batch(index, generator)), targets[index.to(runner.device)])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step(plan.step_size(i))
            if plan.collects(i):
                average, collected = _collect(average, parameters, collected)
            if progress is not None:
                progress(i, steps)
    if collected:
        _put(parameters, average)
        recalibrate(runner, inputs)
    student = runner.read()
    if not student.finite():
        raise AggregationError(
            "distillation diverged to values that are not finite: lower `distill_lr` "
            f"(now {settings.distill_lr}); the global model is unchanged"
        )
    return student


def _epochs(count: int, settings: DistillSettings, generator: torch.Generator) -> Iterator[Tensor]:
    for _ in range(settings.distill_epochs):
        yield from batches(count, settings.distill_batch_size, torch.randperm(count, generator=generator))


@torch.no_grad()
def _collect(average: list[Tensor], now: list[nn.Parameter], collected: int) -> tuple[list[Tensor], int]:
    if not collected:
        return [p.detach().clone() for p in now], 1
    get_swa_multi_avg_fn()(average, now, collected)  # type: ignore[no-untyped-call]
    return average, collected + 1


@torch.no_grad()
def _put(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
