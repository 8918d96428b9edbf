"""Diagonal Gaussians over models: Eq. 5 of the paper, and the form of the authors' released program."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbe.core.moments import Moments
from fedbe.core.state import ModelState, Slot
from fedbe.core.updates import Update
from fedbe.errors import SettingError


@dataclass(frozen=True, eq=False)
class Gaussian:
    """N(μ, Σ_diag) with μ = Σ_i (n_i/n) w_i and Σ = Σ_i (n_i/n)(w_i − μ)² (Eq. 5; variant `paper`).

    A sample is μ + scale · √Σ ⊙ ε with ε ~ N(0, I); `scale` multiplies the standard deviation, so 0 gives μ.
    Buffers (BatchNorm's running statistics) are those of the mean; with `sample_buffers` they are drawn
    like weights, as the released program does, and then it is for `norm.keep_valid` to mend them.
    """

    mean: ModelState
    std: Tensor
    buffer_std: Tensor
    scale: float = 1.0
    sample_buffers: bool = False

    @classmethod
    def fit(cls, updates: Iterable[Update], *, scale: float = 1.0, sample_buffers: bool = False) -> "Gaussian":
        moments = Moments(variance=True)
        for update in updates:
            moments.add(update.state, update.num_examples)
        return cls.of(moments, scale=scale, sample_buffers=sample_buffers)

    @classmethod
    def of(cls, moments: Moments, *, scale: float = 1.0, sample_buffers: bool = False) -> "Gaussian":
        """From moments that were streamed or merged elsewhere."""
        variance, buffer_variance = moments.variance
        mean = moments.mean.clone()  # the moments may go on to take in more
        return cls(mean, variance.sqrt(), buffer_variance.sqrt(), check_scale(scale), sample_buffers)

    def sample(self, n: int, generator: torch.Generator) -> Iterator[ModelState]:
        for _ in range(n):
            params = _draw(self.mean.params, self.std, self.scale, generator)
            buffers = self.mean.buffers
            if self.sample_buffers:
                buffers = _draw(buffers, self.buffer_std, self.scale, generator)
            yield ModelState(params, buffers, self.mean.counters)


class DirectionMoments:
    """The stream behind the variant `released`, tensor by tensor (l): each client's change is scaled to length 1.

        g_i = w_i − w_last;   r_i = ‖g_i‖;   u_i = g_i / r_i   (0 where g_i is 0)

    It keeps the unweighted mean and variance of u_i and the mean of r_i: two models' worth of memory and one
    number a tensor. Buffers follow the same formula.
    """

    def __init__(self, last: ModelState, slots: Sequence[Slot], buffer_slots: Sequence[Slot]) -> None:
        self.last = last
        self._slots = (tuple(slots), tuple(buffer_slots))
        self._moments = Moments(variance=True)
        self._lengths: list[Tensor] = [torch.zeros(len(s), dtype=last.params.dtype) for s in self._slots]

    def add(self, state: ModelState) -> None:
        self._moments.add(
            ModelState(
                self._unit(state.params - self.last.params, 0),
                self._unit(state.buffers - self.last.buffers, 1),
                state.counters,
            ),
            1.0,
        )

    def _unit(self, change: Tensor, kind: int) -> Tensor:
        for i, slot in enumerate(self._slots[kind]):
            part = change[slot.start : slot.stop]
            length = part.norm()
            self._lengths[kind][i] += length.cpu()
            if length > 0:
                part.div_(length)
        return change

    def moments(self) -> Moments:
        return self._moments

    def lengths(self, kind: int) -> Tensor:
        """The mean length of each tensor's change, spread over its elements."""
        mean = self._lengths[kind] / self._moments.weight
        sizes = torch.tensor([s.stop - s.start for s in self._slots[kind]], dtype=torch.long)
        return mean.repeat_interleave(sizes).to(self.last.params.device)


@dataclass(frozen=True, eq=False)
class DirectionGaussian:
    """The authors' released form: a sample is w_last + r̄ · (ū + 0.1 · scale · σ ⊙ ε), tensor by tensor.

    ū and σ² are the unweighted mean and variance (not below 1e-5) of the clients' unit directions and r̄ is the
    mean length of their changes (see `DirectionMoments`).
    """

    last: ModelState
    direction: ModelState
    std: Tensor
    buffer_std: Tensor
    length: Tensor
    buffer_length: Tensor
    scale: float = 1.0
    sample_buffers: bool = False

    NOISE = 0.1
    SMALLEST_VARIANCE = 1e-5

    @classmethod
    def of(cls, stream: DirectionMoments, *, scale: float = 1.0, sample_buffers: bool = False) -> "DirectionGaussian":
        moments = stream.moments()
        std, buffer_std = (v.clamp(min=cls.SMALLEST_VARIANCE).sqrt_() for v in moments.variance)
        length, buffer_length = stream.lengths(0), stream.lengths(1)
        return cls(
            stream.last, moments.mean, std, buffer_std, length, buffer_length, check_scale(scale), sample_buffers
        )

    @property
    def mean(self) -> ModelState:
        params = torch.addcmul(self.last.params, self.length, self.direction.params)
        buffers = torch.addcmul(self.last.buffers, self.buffer_length, self.direction.buffers)
        return ModelState(params, buffers, self.direction.counters)

    def sample(self, n: int, generator: torch.Generator) -> Iterator[ModelState]:
        mean, noise = self.mean, self.NOISE * self.scale
        for _ in range(n):
            params = _draw(mean.params, self.length * self.std, noise, generator)
            buffers = mean.buffers
            if self.sample_buffers:
                buffers = _draw(buffers, self.buffer_length * self.buffer_std, noise, generator)
            yield ModelState(params, buffers, mean.counters)


def _draw(mean: Tensor, std: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    # Drawn on the CPU, so that a seed means the same numbers on every device.
    noise = torch.randn(mean.shape, dtype=mean.dtype, generator=generator).to(mean.device)
    return torch.addcmul(mean, noise, std, value=scale)


def check_scale(scale: float) -> float:
    if not 0 <= scale < math.inf:
        raise SettingError(f"`scale` must be >= 0 and finite, got {scale}")
    return scale
