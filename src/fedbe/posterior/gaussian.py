"""The diagonal Gaussian over models: Eq. 5 of the paper."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from fedbe.core.layout import Layout
from fedbe.core.moments import Moments
from fedbe.core.state import ModelState
from fedbe.core.updates import ClientUpdate, Update
from fedbe.posterior.base import Posterior, PosteriorSettings, check_scale, pack_updates


@dataclass(frozen=True, eq=False)
class DiagonalGaussian(Posterior):
    """N(μ, Σ) with a diagonal Σ: a sample is μ + scale · √Σ ⊙ ε with ε ~ N(0, I).

    Floating-point buffers of a sample (BatchNorm's running statistics) are those of the mean. With `sample_buffers`
    they are sampled like weights, as the authors' released program does. A running variance can then be negative, and
    `fedbe.core.normalization.clamp_variances` corrects it.

    Args:
        mu: The mean μ.
        std: √Σ of the parameters [P].
        buffer_std: √Σ of the buffers [B].
        scale: A factor for the standard deviation; 0 gives the mean.
        sample_buffers: Whether buffers are sampled like weights.
        layout: The names and shapes of the tensors.
    """

    mu: ModelState
    std: Tensor
    buffer_std: Tensor
    scale: float = 1.0
    sample_buffers: bool = False

    @property
    def mean_state(self) -> ModelState:
        return self.mu

    def sample_states(self, n: int, generator: torch.Generator) -> Iterator[ModelState]:
        for _ in range(n):
            params = self._draw(self.mu.params, self.std, generator)
            buffers = self.mu.buffers
            if self.sample_buffers:
                buffers = self._draw(buffers, self.buffer_std, generator)
            yield ModelState(params, buffers, self.mu.counters)

    def _draw(self, mean: Tensor, std: Tensor, generator: torch.Generator) -> Tensor:
        # The noise is drawn on the CPU, so that a seed gives the same numbers on every device.
        noise = torch.randn(mean.shape, dtype=mean.dtype, generator=generator).to(mean.device)
        return torch.addcmul(mean, noise, std, value=self.scale)


class Gaussian(DiagonalGaussian):
    """The Gaussian of Eq. 5. For clients i with models w_i and n_i of n examples:

        μ = Σ_i (n_i/n) w_i;   Σ = Σ_i (n_i/n) (w_i − μ)²

    Where all clients agree, every sample equals the mean.

    Example:
        >>> clients = [
        ...     ClientUpdate(state={"w": torch.tensor([1.0, 2.0])}, num_examples=1),
        ...     ClientUpdate(state={"w": torch.tensor([5.0, 2.0])}, num_examples=1),
        ... ]
        >>> posterior = Gaussian.fit(clients)
        >>> posterior.mean
        {'w': tensor([3., 2.])}
        >>> posterior.std
        tensor([2., 0.])
        >>> [float(model["w"][1]) for model in posterior.sample(3, torch.Generator().manual_seed(0))]
        [2.0, 2.0, 2.0]
    """

    @classmethod
    def fit(
        cls,
        updates: Iterable[ClientUpdate | Update],
        *,
        scale: float = 1.0,
        sample_buffers: bool = False,
        model: nn.Module | Layout | None = None,
    ) -> Self:
        """Fit to the models of several clients, one model at a time.

        Args:
            updates: The clients' models with their numbers of examples. They are not changed.
            scale: A factor for the standard deviation; >= 0.
            sample_buffers: Whether buffers are sampled like weights.
            model: The module of the states, or its layout. Without it, every floating-point tensor of a `state_dict`
                counts as a parameter. Needed if the model has BatchNorm or tied weights.

        Raises:
            SettingError: `scale` is negative or not finite.
            StateError: There is no update, or the states do not fit each other.
        """
        packed, layout = pack_updates(updates, model)
        moments = Moments(variance=True)
        moments.add_all((update.state, update.num_examples) for update in packed)
        return cls.from_moments(moments, scale=scale, sample_buffers=sample_buffers, layout=layout)

    @classmethod
    def from_moments(
        cls, moments: Moments, *, scale: float = 1.0, sample_buffers: bool = False, layout: Layout | None = None
    ) -> Self:
        """Make the Gaussian of moments that were streamed or merged elsewhere; they may grow further."""
        variance, buffer_variance = moments.variance
        mean = moments.mean.clone()
        return cls(mean, variance.sqrt(), buffer_variance.sqrt(), check_scale(scale), sample_buffers, layout=layout)

    @classmethod
    def fit_round(
        cls,
        updates: Sequence[Update],
        *,
        previous: ModelState,  # noqa: ARG003
        layout: Layout,
        settings: PosteriorSettings,
    ) -> Self:
        return cls.fit(updates, scale=settings.scale, sample_buffers=settings.sample_buffers, model=layout)
