"""Convex combinations of client models with Dirichlet weights: Eq. 7 of the paper."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import nn

from fedbe.core.layout import Layout
from fedbe.core.moments import weighted_mean
from fedbe.core.random import numpy_generator
from fedbe.core.state import ModelState
from fedbe.core.updates import ClientUpdate, Update
from fedbe.errors import SettingError
from fedbe.posterior.base import Alpha, Posterior, PosteriorSettings, check_alpha, pack_updates


@dataclass(frozen=True, eq=False)
class Dirichlet(Posterior):
    """Mixtures of the clients' models w_i with n_i examples (Eq. 7):

        w = Σ_i (γ_i n_i / Σ_j γ_j n_j) w_i   with γ ~ Dir(α)

    The mean is the model at γ = α/Σα, which is FedAvg's average if all α are equal: the ratio in Eq. 7 has no closed
    mean for unequal n_i. Buffers are mixed with the same weights, so they stay within the clients' range.

    Args:
        updates: The clients' models and numbers of examples.
        alpha: The concentration α of each client [k].
        layout: The names and shapes of the tensors.

    Example:
        >>> clients = [
        ...     ClientUpdate(state={"w": torch.tensor([1.0, 2.0])}, num_examples=1),
        ...     ClientUpdate(state={"w": torch.tensor([5.0, 2.0])}, num_examples=3),
        ... ]
        >>> posterior = Dirichlet.fit(clients, alpha=0.5)
        >>> posterior.mean
        {'w': tensor([4., 2.])}
        >>> model, = posterior.sample(1, torch.Generator().manual_seed(0))
        >>> 1.0 <= float(model["w"][0]) <= 5.0
        True
    """

    updates: Sequence[Update]
    alpha: np.ndarray

    @classmethod
    def fit(
        cls,
        updates: Iterable[ClientUpdate | Update],
        *,
        alpha: Alpha = 1.0,
        model: nn.Module | Layout | None = None,
    ) -> Self:
        """Fit to the models of several clients. All of them stay in memory.

        Args:
            updates: The clients' models with their numbers of examples. They are not changed.
            alpha: The concentration: one number > 0 for all clients, or one for each client id. A whole number may
                be written as a string (7 or "7"), because the keys of TOML are strings.
            model: The module of the states, or its layout. Without it, the first `state_dict` gives the layout.

        Raises:
            SettingError: A concentration is missing or out of range.
            StateError: There is no update, or the states do not fit each other.
        """
        packed, layout = pack_updates(updates, model)
        kept = tuple(packed)
        alphas = [check_alpha(_alpha_of(update, alpha)) for update in kept]
        return cls(kept, np.array(alphas, dtype=np.float64), layout=layout)

    @classmethod
    def fit_round(
        cls,
        updates: Sequence[Update],
        *,
        previous: ModelState,  # noqa: ARG003
        layout: Layout,
        settings: PosteriorSettings,
    ) -> Self:
        return cls.fit(updates, alpha=settings.alpha, model=layout)

    @property
    def mean_state(self) -> ModelState:
        return self.mix(self.alpha / self.alpha.sum())

    def sample_states(self, n: int, generator: torch.Generator) -> Iterator[ModelState]:
        rng = numpy_generator(generator)
        for _ in range(n):
            yield self.mix(rng.dirichlet(self.alpha))

    def mix(self, gamma: np.ndarray | Sequence[float]) -> ModelState:
        """The model at the point γ [k] of the simplex; a corner is that client's model."""
        weights = self.weights(gamma)
        return weighted_mean([(u.state, w) for u, w in zip(self.updates, weights, strict=True) if w > 0])

    def weights(self, gamma: np.ndarray | Sequence[float]) -> list[float]:
        """The share γ_i n_i / Σ_j γ_j n_j of each client in the model at γ."""
        num_examples = np.array([u.num_examples for u in self.updates], np.float64)
        parts = np.asarray(gamma, dtype=np.float64) * num_examples
        return [float(p) for p in parts / parts.sum()]


class UniformDirichlet(Dirichlet):
    """The released program's form: Σ_i γ_i w_i with γ ~ Dir(α). The clients' numbers of examples do not matter."""

    def weights(self, gamma: np.ndarray | Sequence[float]) -> list[float]:
        """The share γ_i of each client in the model at γ."""
        return [float(g) for g in np.asarray(gamma, dtype=np.float64) / np.sum(gamma)]


def _alpha_of(update: Update, alpha: Alpha) -> float:
    if not isinstance(alpha, Mapping):
        return alpha
    for key in (update.client_id, str(update.client_id)):
        if key in alpha:
            return alpha[key]
    raise SettingError(f"`alpha` must name every client, got none for {update.client_id!r}")
