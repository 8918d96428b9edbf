"""What every posterior offers."""

from collections.abc import Iterator
from typing import Protocol

import torch

from fedbe.core.state import ModelState


class Posterior(Protocol):
    """A distribution p(w | D) over models."""

    @property
    def mean(self) -> ModelState:
        """The mean of the distribution."""

    def sample(self, n: int, generator: torch.Generator) -> Iterator[ModelState]:
        """n models, one after the other, so that only one of them needs to be in memory."""
