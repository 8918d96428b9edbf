"""Update transforms: what happens to admitted updates before any stage sees them.

The mean, the posterior and the vote all work on the transformed updates. Clipping, noise and robust weights belong
here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from fedbe.algorithms.server.context import Round
from fedbe.core.updates import Update
from fedbe.errors import SettingError


class Transform(Protocol):
    """updates -> updates.

    A transform is a small frozen dataclass; its fields become settings. It reads `round.updates`, may use
    `round.previous` and `round.context.generator(role)`, and changes no argument.
    """

    def __call__(self, round: Round) -> Sequence[Update]: ...


@dataclass(frozen=True)
class ClipNorm:
    """Bound how far one client can move the model: w_i ← w̄ + (w_i − w̄) · min(1, C/‖w_i − w̄‖).

    w̄ is the global model that the clients started from. Only parameters are clipped: buffers and extras stay.

    Attributes:
        max_update_norm: C, the largest Euclidean norm of a client's change.

    Raises:
        SettingError: C is not above 0, or infinite.

    Example:
        >>> from fedbe.algorithms.methods import get_method
        >>> from dataclasses import replace
        >>> clipped = replace(get_method("fedbe"), transforms=(ClipNorm(max_update_norm=1.0),))
        >>> clipped.settings()["max_update_norm"]
        1.0
    """

    max_update_norm: float = 10.0

    def __post_init__(self) -> None:
        if not (self.max_update_norm > 0 and math.isfinite(self.max_update_norm)):
            raise SettingError(f"`max_update_norm` must be > 0 and finite, got {self.max_update_norm}")

    def __call__(self, round: Round) -> Sequence[Update]:
        return [self._clip(update, round) for update in round.updates]

    def _clip(self, update: Update, round: Round) -> Update:
        change = update.state.params - round.previous.params
        norm = float(change.double().norm())
        if norm <= self.max_update_norm:
            return update
        params = torch.add(round.previous.params, change, alpha=self.max_update_norm / norm)
        return replace(update, state=replace(update.state, params=params))
