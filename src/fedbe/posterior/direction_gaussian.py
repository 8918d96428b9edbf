"""The Gaussian of the authors' released program, over the directions in which clients changed the model."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from fedbe.core.layout import Layout, Slot
from fedbe.core.moments import Moments
from fedbe.core.state import ModelState
from fedbe.core.updates import Update
from fedbe.posterior.base import PosteriorSettings
from fedbe.posterior.gaussian import DiagonalGaussian

NOISE = 0.1
MIN_VARIANCE = 1e-5


class DirectionGaussian(DiagonalGaussian):
    """The released form. For each tensor of the model, and clients i with the change g_i = w_i − w_previous:

        r_i = ‖g_i‖;   u_i = g_i / r_i   (0 where g_i is 0)
        r̄, ū = the plain means of r_i and u_i;   σ² = the variance of u_i, at least 1e-5
        μ = w_previous + r̄ ū;   √Σ = r̄ σ

    A sample is μ + 0.1 · scale · √Σ ⊙ ε with ε ~ N(0, I). Clients are not weighted by their examples. Buffers follow
    the same formulas.
    """

    @classmethod
    def fit_round(
        cls, updates: Sequence[Update], *, previous: ModelState, layout: Layout, settings: PosteriorSettings
    ) -> Self:
        """Fit to the clients' models, one at a time."""
        directions = Moments(variance=True)
        lengths, buffer_lengths = torch.zeros(len(layout.params)), torch.zeros(len(layout.buffers))
        for update in updates:
            params, buffers = update.state.params - previous.params, update.state.buffers - previous.buffers
            lengths = lengths + _normalize_(params, layout.params)
            buffer_lengths = buffer_lengths + _normalize_(buffers, layout.buffers)
            directions.add(ModelState(params, buffers, update.state.counters), 1.0)
        length = _repeat(lengths / directions.weight, layout.params).to(previous.params.device)
        buffer_length = _repeat(buffer_lengths / directions.weight, layout.buffers).to(previous.params.device)
        std, buffer_std = (variance.clamp(min=MIN_VARIANCE).sqrt_() for variance in directions.variance)
        mean = directions.mean
        return cls(
            ModelState(
                torch.addcmul(previous.params, length, mean.params),
                torch.addcmul(previous.buffers, buffer_length, mean.buffers),
                mean.counters,
            ),
            length * std,
            buffer_length * buffer_std,
            NOISE * settings.scale,
            settings.sample_buffers,
            layout=layout,
        )


def _normalize_(change: Tensor, slots: Sequence[Slot]) -> Tensor:
    """Scale each tensor's part of `change` to length 1, in place; return the lengths, one for each tensor."""
    lengths = torch.zeros(len(slots), dtype=change.dtype)
    for i, slot in enumerate(slots):
        part = change[slot.start : slot.stop]
        length = part.norm()
        lengths[i] = length.cpu()
        if length > 0:
            part.div_(length)
    return lengths


def _repeat(values: Tensor, slots: Sequence[Slot]) -> Tensor:
    """Repeat each tensor's value for all of its elements."""
    sizes = torch.tensor([slot.stop - slot.start for slot in slots], dtype=torch.long)
    return values.repeat_interleave(sizes)
