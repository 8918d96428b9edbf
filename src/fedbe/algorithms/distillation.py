"""Distil a vote into one model: sharpened targets, and SGD or SWA on them (Section 4 of the paper), or Adam (FedDF)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from fedbe.algorithms.early_stopping import EarlyStopping
from fedbe.algorithms.swa import SWASchedule, WeightAverage
from fedbe.core.devices import to_device
from fedbe.core.gradients import backward_in_parts, backward_whole
from fedbe.core.inputs import Inputs, batches, hold_out
from fedbe.core.model_runner import ModelRunner
from fedbe.core.normalization import check_batch, recalibrate
from fedbe.core.optim import SGD, Adam, Optimizer
from fedbe.core.random import global_rng
from fedbe.core.state import ModelState
from fedbe.errors import AggregationError, SettingError, nearest

OPTIMIZERS = ("swa", "sgd", "adam")
HELD_OUT = 0.1  # the part of the inputs that early stopping measures on
LOSSES = ("cross_entropy", "kl_over_classes")
TARGETS = ("ensemble", "labels")


@dataclass(frozen=True)
class DistillSettings:
    """How the student learns. The defaults are the paper's. A step is one mini-batch.

    Attributes:
        optimizer: swa (the mean of points along a cyclic step size), sgd (the last point, with a constant step size) or
            adam (the last point, with a step size that falls to 0 along a cosine).
        distill_epochs: passes over the server's inputs.
        distill_batch_size: inputs in a mini-batch.
        distill_patience_epochs: early stopping. A tenth of the inputs is not learned from. The student's loss on them,
            against the vote, is measured after every epoch; after so many epochs without a lower one the student with
            the lowest is taken. 0 for no early stopping.
        distill_lr: step size at the beginning of each SWA cycle, SGD's constant step size, or Adam's first.
        distill_lr_min: step size at the end of each SWA cycle.
        swa_cycle_steps: length of a cycle. A point is collected at its end …
        swa_start_steps: … if that is after this step.
        distill_momentum: momentum of SGD, also within SWA; Adam's β₁.
        distill_weight_decay: does not apply to normalisation layers …
        distill_decay_norms: … unless this is true, as in the released program.
        loss: cross_entropy, −(1/J) Σ_j p̂_j·log p_j; or kl_over_classes, the released program's KL divergence, which is
            averaged over examples and classes.
        sharpening: exponent e of the targets, p̂ ∝ p^e.
        targets: ensemble (the vote) or labels (the server's true labels: the oracle of Table 3).
        augment: whether inputs are augmented while the student learns. They never are while the members vote.
        distill_follow: whether the step sizes follow those of the clients (see `algorithms.pace`).
        distill_until: the fraction of all rounds, from the first, in which a student learns. Later the average stays.
    """

    optimizer: str = "swa"
    distill_epochs: int = 20
    distill_patience_epochs: int = 0
    distill_batch_size: int = 128
    distill_lr: float = 1e-3
    distill_lr_min: float = 4e-4
    swa_cycle_steps: int = 25
    swa_start_steps: int = 250
    distill_momentum: float = 0.9
    distill_weight_decay: float = 0.0
    distill_decay_norms: bool = False
    loss: str = "cross_entropy"
    sharpening: float = 2.0
    targets: str = "ensemble"
    augment: bool = True
    distill_follow: bool = False
    distill_until: float = 1.0

    def __post_init__(self) -> None:
        for name, options in (("optimizer", OPTIMIZERS), ("loss", LOSSES), ("targets", TARGETS)):
            if getattr(self, name) not in options:
                raise SettingError(f"unknown {name} '{getattr(self, name)}': {nearest(getattr(self, name), options)}")
        for name in ("distill_epochs", "distill_batch_size", "swa_cycle_steps"):
            self._check(name, getattr(self, name) >= 1, "must be >= 1")
        for name in ("distill_lr", "distill_lr_min", "sharpening"):
            self._check(name, getattr(self, name) > 0, "must be > 0")
        for name in ("swa_start_steps", "distill_weight_decay", "distill_patience_epochs"):
            self._check(name, getattr(self, name) >= 0, "must be >= 0")
        self._check("distill_momentum", 0 <= self.distill_momentum < 1, "must be in [0, 1)")
        self._check("distill_until", 0 <= self.distill_until <= 1, "must be from 0 to 1")
        if self.optimizer == "swa" and self.distill_patience_epochs:
            raise SettingError(
                "`distill_patience_epochs` needs the optimizer sgd or adam: SWA has no single last point"
            )
        if self.optimizer == "swa" and self.distill_lr_min > self.distill_lr:
            raise SettingError(
                "`distill_lr_min` must not be above `distill_lr`, "
                f"got {self.distill_lr_min} and {self.distill_lr}: set both"
            )

    def _check(self, name: str, valid: bool, expected: str) -> None:
        if not valid:
            raise SettingError(f"`{name}` {expected}, got {getattr(self, name)}")

    def is_active(self, round: int, rounds: int | None) -> bool:
        """Whether a student learns in this round.

        Args:
            round: the number of the round, from 1.
            rounds: how many rounds there will be. It may be None if `distill_until` is 1.

        Example:
            >>> [r for r in range(1, 41) if DistillSettings(distill_until=0.3).is_active(r, 40)][-1]
            12
        """
        if self.distill_until == 1:
            return True
        if rounds is None:
            raise SettingError("`distill_until` needs to know how many rounds there will be: give `rounds`")
        # 0.3 · R in floating point can fall on the wrong side of a round.
        return round - 1 < self.distill_until * rounds - 1e-9

    def scaled(self, factor: float) -> "DistillSettings":
        """The same settings with all step sizes multiplied by `factor`."""
        return replace(self, distill_lr=self.distill_lr * factor, distill_lr_min=self.distill_lr_min * factor)

    def swa_schedule(self, total_steps: int) -> SWASchedule | None:
        """The SWA schedule for a distillation of `total_steps`; None for other optimizers."""
        if self.optimizer != "swa":
            return None
        schedule = SWASchedule(self.distill_lr, self.distill_lr_min, self.swa_cycle_steps, self.swa_start_steps)
        return schedule.fitted(total_steps)

    def step_size(self, i: int, total_steps: int) -> float:
        """lr(i) of step i = 1, 2, … without SWA: SGD's constant, or Adam's (lr/2) (1 + cos(π (i − 1)/total)).

        Example:
            >>> settings = DistillSettings(optimizer="adam", distill_lr=1.0)
            >>> [round(settings.step_size(i, 4), 3) for i in (1, 3)]
            [1.0, 0.5]
        """
        if self.optimizer == "sgd":
            return self.distill_lr
        return 0.5 * self.distill_lr * (1 + math.cos(math.pi * (i - 1) / total_steps))


def sharpen(probabilities: Tensor, exponent: float = 2.0) -> Tensor:
    """p̂[c] = p[c]^e / Σ_c' p[c']^e.

    Args:
        probabilities: [J, classes, …]; classes are in dimension 1.
        exponent: e. With 1 nothing changes; with more the largest probability grows.

    Example:
        >>> sharpen(torch.tensor([[0.75, 0.25]]))
        tensor([[0.9000, 0.1000]])
    """
    # Scale the largest to 1 first: with many classes a high power of all of them could underflow to 0.
    powered = (probabilities / probabilities.amax(1, keepdim=True)) ** exponent
    return powered / powered.sum(1, keepdim=True)


def loss_function(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """(logits, target probabilities) -> the scalar that is minimised. `name` is one of `LOSSES`."""
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
    """Train the model `start` to predict the targets.

    Args:
        runner: runs the model.
        start: the student before it learns, in FedBE the average.
        inputs: the server's J inputs.
        targets: probabilities [J, classes, …], or class labels [J, …].
        settings: how the student learns.
        generator: all random numbers follow from it (order of inputs, augmentation, dropout).
        progress: called with (steps done, all steps).

    Returns:
        The last point, or the mean of the SWA points with BatchNorm statistics recomputed on the inputs, or, with early
        stopping, the point with the lowest loss on the inputs that were not learned from. If the steps were too large,
        its values are not finite: see `check_student`.
    """
    learned, held_out = hold_out(len(inputs), HELD_OUT if settings.distill_patience_epochs else 0.0, generator)
    check_batch(runner.module, min(len(learned), settings.distill_batch_size))
    runner.load(start)
    runner.module.train()
    steps = sum(1 for _ in batches(len(learned), settings.distill_batch_size)) * settings.distill_epochs
    swa = settings.swa_schedule(steps)
    average = WeightAverage([p for _, p in runner.trainable()])
    optimizer = _optimizer(runner, settings)
    loss_of = loss_function(settings.loss) if targets.is_floating_point() else functional.cross_entropy
    targets = targets.to(runner.device)
    stopping = EarlyStopping(settings.distill_patience_epochs, runner, inputs, targets, held_out, loss_of)
    augmentation = generator if settings.augment else None
    # A loss over labels is not a mean over all examples if it ignores some.
    gradients = backward_in_parts if targets.is_floating_point() else backward_whole
    i = 0  # steps done
    with global_rng(generator, runner.device), gradients(runner, inputs) as backward:
        for _ in range(settings.distill_epochs):
            order = torch.randperm(len(learned), generator=generator)
            for chosen in batches(len(learned), settings.distill_batch_size, order):
                i, index = i + 1, learned[chosen]
                optimizer.zero_grad()
                batch = inputs.batch(index, augmentation)
                backward(batch, targets[to_device(index, runner.device)], loss_of)
                optimizer.step(settings.step_size(i, steps) if swa is None else swa.step_size(i))
                if swa is not None and swa.collects(i):
                    average.collect()
                if progress is not None:
                    progress(i, steps)
            if stopping.ends():
                break
    if average.count:
        average.apply_()
        recalibrate(runner, inputs)
    return stopping.best or runner.read()


def _optimizer(runner: ModelRunner, settings: DistillSettings) -> Optimizer:
    kind = Adam if settings.optimizer == "adam" else SGD
    return kind(
        runner,
        settings.distill_momentum,
        settings.distill_weight_decay,
        decay_norms=settings.distill_decay_norms,
    )


def check_student(student: ModelState, settings: DistillSettings) -> None:
    """AggregationError if the student has values that are not finite."""
    if not student.finite():
        raise AggregationError(
            "distillation diverged to values that are not finite: lower `distill_lr` "
            f"(now {settings.distill_lr}); the global model is unchanged"
        )
