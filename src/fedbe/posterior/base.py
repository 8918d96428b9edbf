"""The interface of a posterior, and the settings that the server passes to one."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from numbers import Real
from typing import Self

import torch
from torch import Tensor, nn

from fedbe.core.layout import Layout
from fedbe.core.state import ModelState
from fedbe.core.updates import ClientId, ClientUpdate, Update, check_num_examples
from fedbe.errors import SettingError, StateError

MAX_ALPHA = 1e15  # the samples equal the mean to the last bit; far beyond it the draws overflow
Alpha = float | Mapping[ClientId, float]


@dataclass(frozen=True)
class PosteriorSettings:
    """The settings of all posteriors. Each posterior reads the fields that it knows.

    Args:
        scale: A factor for the standard deviation of a Gaussian; >= 0.
        alpha: The concentration of a Dirichlet; > 0. One number, or one for each client id.
        sample_buffers: Whether a Gaussian samples floating-point buffers like weights.
    """

    scale: float = 1.0
    alpha: Alpha = 1.0
    sample_buffers: bool = False

    def __post_init__(self) -> None:
        check_scale(self.scale)
        for alpha in self.alpha.values() if isinstance(self.alpha, Mapping) else [self.alpha]:
            check_alpha(alpha)


@dataclass(frozen=True, eq=False)
class Posterior(ABC):
    """A distribution p(w | D) over models, fitted to the models of one round's clients.

    A subclass implements `fit_round`, `mean_state` and `sample_states` on packed states: the server uses these. A user
    calls `mean` and `sample`, which give the same models as plain `state_dict`s.

    Args:
        layout: The names and shapes of the tensors. `mean` and `sample` need it.
    """

    layout: Layout | None = field(default=None, kw_only=True)

    @classmethod
    @abstractmethod
    def fit_round(
        cls, updates: Sequence[Update], *, previous: ModelState, layout: Layout, settings: PosteriorSettings
    ) -> Self:
        """Fit to the admitted updates of one round: the one call that the server makes for every posterior.

        Args:
            updates: The updates of the round's clients; they are not changed.
            previous: The global model that the clients started from.
            layout: The layout of the model.
            settings: The settings of all posteriors.
        """

    @property
    @abstractmethod
    def mean_state(self) -> ModelState:
        """The mean of the distribution."""

    @abstractmethod
    def sample_states(self, n: int, generator: torch.Generator) -> Iterator[ModelState]:
        """Yield n models. They are drawn one at a time, so only one of them needs to be in memory."""

    @property
    def mean(self) -> dict[str, Tensor]:
        """The mean of the distribution as a `state_dict`."""
        return self._named().unpack(self.mean_state)

    def sample(self, n: int, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
        """Draw models from the distribution.

        Args:
            n: The number of models.
            generator: The only source of randomness, a generator on the CPU.

        Returns:
            An iterator over n `state_dict`s. Each is drawn when it is asked for.

        Raises:
            StateError: The posterior was fitted to packed states without a layout.
        """
        return map(self._named().unpack, self.sample_states(n, generator))

    def _named(self) -> Layout:
        if self.layout is None:
            raise StateError("the names of the tensors are not known: fit to state_dicts, or give `model`")
        return self.layout


def pack_updates(
    updates: Iterable[ClientUpdate | Update], model: nn.Module | Layout | None
) -> tuple[Iterator[Update], Layout | None]:
    """Updates with packed states, and their layout: that of `model`, or else that of the first `state_dict`.

    The updates are packed one at a time. The layout is None if they are packed already and there is no `model`.
    """
    stream = iter(updates)
    first = next(stream, None)
    if first is None:
        raise StateError("`updates` is empty, so there is nothing to fit")
    _check_type(first)
    layout = Layout(model) if isinstance(model, nn.Module) else model
    if layout is None and not isinstance(first.state, ModelState):
        layout = Layout(first.state)
    return (_packed(update, layout) for update in chain([first], stream)), layout


def _packed(update: ClientUpdate | Update, layout: Layout | None) -> Update:
    _check_type(update)
    if isinstance(update, Update):
        return update
    what = f"the state of client {update.client_id!r}"
    client_id = "" if update.client_id is None else update.client_id
    if layout is not None:
        state = layout.packed(update.state, what)
    elif isinstance(update.state, ModelState):
        state = update.state
    else:
        raise StateError(f"{what} must be a ModelState, as the first one is, got {type(update.state).__name__}")
    return Update(client_id, state, check_num_examples(update.num_examples), {})


def _check_type(update: object) -> None:
    if not isinstance(update, ClientUpdate | Update):
        raise StateError(f"an update must be a ClientUpdate, got {type(update).__name__}")


def check_scale(scale: float) -> float:
    """The scale if it is finite and not negative; otherwise a SettingError."""
    if not 0 <= scale < math.inf:
        raise SettingError(f"`scale` must be >= 0 and finite, got {scale}")
    return scale


def check_alpha(alpha: float) -> float:
    """The concentration if it is positive and not too large; otherwise a SettingError."""
    is_number = isinstance(alpha, Real) and not isinstance(alpha, bool)
    if not is_number or not 0 < alpha <= MAX_ALPHA:
        raise SettingError(f"`alpha` must be a number > 0 and at most {MAX_ALPHA:g}, got {alpha!r}")
    return alpha
