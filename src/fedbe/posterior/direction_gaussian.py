"""The Gaussian of the authors' released program, over the directions in which clients changed the model."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedbe.core.moments import Moments
from fedbe.core.state import Layout, ModelState, Slot
from fedbe.core.updates import ClientUpdate, Update
from fedbe.posterior.base import Posterior, PosteriorSettings, check_scale, draw_normal, pack_updates

NOISE = 0.1
MIN_VARIANCE = 1e-5


@dataclass(frozen=True, eq=False)
class DirectionGaussian(Posterior):
    """The released form. For each tensor of the model, and clients i = 1 … k with the change g_i = w_i − w_previous:

        r_i = ‖g_i‖;   u_i = g_i / r_i   (0 where g_i is 0)
        r̄, ū, σ² = the plain means of r_i and u_i, and the variance of u_i (at least 1e-5)

    A sample is w_previous + r̄ (ū + 0.1 · scale · σ ⊙ ε) with ε ~ N(0, I). Clients are not weighted by their examples.
    Buffers of a sample are those of the mean, or follow the same formula with `sample_buffers`.

    Args:
        previous: The global model w_previous that the clients started from.
        direction: ū.
        std: σ of the parameters [P].
        buffer_std: σ of the buffers [B].
        length: r̄ of each parameter's tensor [P].
        buffer_length: r̄ of each buffer's tensor [B].
        scale: A factor for the noise; 0 gives the mean.
        sample_buffers: Whether buffers are sampled like weights.
        layout: The names and shapes of the tensors.
    """

    previous: ModelState
    direction: ModelState
    std: Tensor
    buffer_std: Tensor
    length: Tensor
    buffer_length: Tensor
    scale: float = 1.0
    sample_buffers: bool = False

    @classmethod
    def fit(
        cls,
        updates: Iterable[ClientUpdate | Update],
        previous: ModelState,
        *,
        layout: Layout,
        scale: float = 1.0,
        sample_buffers: bool = False,
    ) -> Self:
        """Fit to the clients' models, one at a time, in two models' worth of memory.

        Args:
            updates: The clients' models. They are not changed.
            previous: The global model that the clients started from.
            layout: The layout of the model.
            scale: A factor for the noise; >= 0.
            sample_buffers: Whether buffers are sampled like weights.

        Raises:
            SettingError: `scale` is negative or not finite.
            StateError: There is no update, or a state does not fit the layout.
        """
        packed, _ = pack_updates(updates, layout)
        moments = Moments(variance=True)
        dtype = previous.params.dtype
        lengths, buffer_lengths = (torch.zeros(len(slots), dtype=dtype) for slots in (layout.params, layout.buffers))
        for update in packed:
            params, buffers = update.state.params - previous.params, update.state.buffers - previous.buffers
            lengths += _normalize_(params, layout.params)
            buffer_lengths += _normalize_(buffers, layout.buffers)
            moments.add(ModelState(params, buffers, update.state.counters), 1.0)
        std, buffer_std = (variance.clamp(min=MIN_VARIANCE).sqrt_() for variance in moments.variance)
        device = previous.params.device
        return cls(
            previous,
            moments.mean,
            std,
            buffer_std,
            _spread(lengths / moments.weight, layout.params).to(device),
            _spread(buffer_lengths / moments.weight, layout.buffers).to(device),
            check_scale(scale),
            sample_buffers,
            layout=layout,
        )

    @classmethod
    def fit_round(
        cls, updates: Sequence[Update], *, previous: ModelState, layout: Layout, settings: PosteriorSettings
    ) -> Self:
        scale, sample_buffers = settings.scale, settings.sample_buffers
        return cls.fit(updates, previous, layout=layout, scale=scale, sample_buffers=sample_buffers)

    @property
    def mean_state(self) -> ModelState:
        params = torch.addcmul(self.previous.params, self.length, self.direction.params)
        buffers = torch.addcmul(self.previous.buffers, self.buffer_length, self.direction.buffers)
        return ModelState(params, buffers, self.direction.counters)

    def sample_states(self, n: int, generator: torch.Generator) -> Iterator[ModelState]:
        mean, noise = self.mean_state, NOISE * self.scale
        for _ in range(n):
            params = draw_normal(mean.params, self.length * self.std, noise, generator)
            buffers = mean.buffers
            if self.sample_buffers:
                buffers = draw_normal(buffers, self.buffer_length * self.buffer_std, noise, generator)
            yield ModelState(params, buffers, mean.counters)


def _normalize_(change: Tensor, slots: Sequence[Slot]) -> Tensor:
    """Scale each tensor's part of `change` to length 1, in place; the lengths before that, one for each tensor."""
    lengths = torch.zeros(len(slots), dtype=change.dtype)
    for i, slot in enumerate(slots):
        part = change[slot.start : slot.stop]
        length = part.norm()
        lengths[i] = length.cpu()
        if length > 0:
            part.div_(length)
    return lengths


def _spread(values: Tensor, slots: Sequence[Slot]) -> Tensor:
    """A vector in which each tensor's value is repeated for all of its elements."""
    sizes = torch.tensor([slot.stop - slot.start for slot in slots], dtype=torch.long)
    return values.repeat_interleave(sizes)
