"""Convex combinations of client models with Dirichlet weights: Eq. 7 of the paper."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np
import torch

from fedbe.core.moments import weighted_mean
from fedbe.core.random import numpy_generator
from fedbe.core.state import ModelState
from fedbe.core.updates import ClientId, Update
from fedbe.errors import SettingError

MOST_ALPHA = 1e15  # the mean to the last bit; far beyond it the draws overflow


@dataclass(frozen=True, eq=False)
class Dirichlet:
    """w = Σ_i (γ_i n_i / Σ_j γ_j n_j) w_i with γ ~ Dir(α).

    `mean` is the model at γ = α/Σα (FedAvg's average when all α are equal): the ratio in Eq. 7 has no closed mean
    for unequal n_i. Buffers are mixed with the same weights, so they stay within the range of the clients'.
    """

    updates: Sequence[Update]
    alpha: np.ndarray

    @classmethod
    def fit(cls, updates: Sequence[Update], *, alpha: float | Mapping[ClientId, float] = 1.0) -> "Dirichlet":
        """`alpha`: one number for all clients, or one for each client id (7 or "7": TOML has no other keys)."""
        return cls(tuple(updates), _alphas(updates, alpha))

    @property
    def mean(self) -> ModelState:
        return self.mix(self.alpha / self.alpha.sum())

    def sample(self, n: int, generator: torch.Generator) -> Iterator[ModelState]:
        rng = numpy_generator(generator)
        for _ in range(n):
            yield self.mix(rng.dirichlet(self.alpha))

    def mix(self, gamma: np.ndarray | Sequence[float]) -> ModelState:
        """The model at the point γ of the simplex; a corner is that client's own model."""
        weights = self.weights(gamma)
        return weighted_mean([(u.state, w) for u, w in zip(self.updates, weights, strict=True) if w > 0])

    def weights(self, gamma: np.ndarray | Sequence[float]) -> list[float]:
        """γ_i n_i / Σ_j γ_j n_j: how much of each client goes into the model at γ."""
        parts = np.asarray(gamma, dtype=np.float64) * np.array([u.num_examples for u in self.updates], np.float64)
        return [float(p) for p in parts / parts.sum()]


def _alphas(updates: Sequence[Update], alpha: float | Mapping[ClientId, float]) -> np.ndarray:
    if isinstance(alpha, Mapping):
        keys = [u.client_id if u.client_id in alpha else str(u.client_id) for u in updates]
        if missing := [u.client_id for u, key in zip(updates, keys, strict=True) if key not in alpha]:
            raise SettingError(f"`alpha` must name every client, got none for {missing[0]!r}")
        values = [alpha[key] for key in keys]
    else:
        values = [alpha] * len(updates)
    for value in values:
        check_alpha(value)
    return np.array(values, dtype=np.float64)


def check_alpha(alpha: float) -> None:
    number = isinstance(alpha, Real) and not isinstance(alpha, bool)
    if not number or not 0 < alpha <= MOST_ALPHA:
        raise SettingError(f"`alpha` must be a number > 0 and at most {MOST_ALPHA:g}, got {alpha!r}")
