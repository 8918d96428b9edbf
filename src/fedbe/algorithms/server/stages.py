"""The server's stages. A method is a short tuple of them; each takes the draft and returns the next one."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedbe.algorithms.ensemble import EnsembleSettings
from fedbe.algorithms.server.context import Context, Draft, Round
from fedbe.algorithms.server.robust import ROBUST_RULES, robust_mean
from fedbe.core.layout import Layout
from fedbe.core.moments import weighted_mean
from fedbe.core.state import ModelState
from fedbe.core.updates import Update
from fedbe.errors import SettingError, StateError, check_option

MEAN_WEIGHTS = ("examples", "uniform")
MOMENTUM_FORMS = ("heavy-ball", "damped", "released")


class Stage(ABC):
    """draft, round -> next draft. A stage changes no argument but `round.info`.

    A stage is a small frozen dataclass; its fields become settings. It says what it is and what it needs:

    Attributes:
        result: what the model is after this stage ("average", "student", …); None if the model stays as it was.
        keeps_members: whether models are kept, whose vote is the prediction.
        replaces_model: whether the average becomes something else. The hook of `server_step` runs before such a stage.
        needs_rounds: whether the stage must know how many rounds there will be.
        releases_mean: whether all that the stage makes of the updates is their plain mean. Noise for differential
            privacy is calibrated for that.
    """

    replaces_model: ClassVar[bool] = False
    keeps_members: ClassVar[bool] = False

    @property
    def result(self) -> str | None:
        return None

    @property
    def needs_rounds(self) -> bool:
        return False

    @property
    def releases_mean(self) -> bool:
        return False

    def needs_unlabeled(self, module: nn.Module) -> bool:  # noqa: ARG002
        """Whether the server needs unlabeled inputs for this model."""
        return False

    def memory_sizes(self, layout: Layout) -> dict[str, int]:  # noqa: ARG002
        """What the stage keeps between rounds: the length of each vector, by name."""
        return {}

    def check_memory(self, memory: Mapping[str, Tensor], round: int, layout: Layout) -> None:
        """A StateError unless a saved memory has what this stage keeps after so many rounds: nothing or all of it."""
        check_names(memory, self.memory_sizes(layout), self.memory_sizes(layout) if round else (), round)

    def voting_ensemble(self, draft: Draft, context: Context) -> EnsembleSettings | None:  # noqa: ARG002
        """The ensemble that this stage makes in this round, if it makes one."""
        return None

    @abstractmethod
    def __call__(self, draft: Draft, round: Round) -> Draft:
        """The next draft."""


def check_names(memory: Mapping[str, Tensor], known: Iterable[str], needed: Collection[str], round: int) -> None:
    """A StateError unless a saved memory has exactly the needed ones of the known names."""
    for name in known:
        if (name in memory) != (name in needed):
            state = "lacks" if name in needed else "must not have"
            raise StateError(f"`memory` {state} '{name}' after round {round}: give what `state_dict` returned")


@dataclass(frozen=True)
class Mean(Stage):
    """FedAvg: w̄ = Σ_i (n_i/n) w_i (Eq. 2).

    Attributes:
        mean_weights: examples, as above; or uniform, w̄ = (1/k) Σ_i w_i over the k clients of the round.
        robust: none, as above; or a mean that hostile clients cannot move far: median, trimmed, krum, geometric or
            clip-median (see `robust`). It counts each client once. A student starts from it.
        hostile_fraction: the part of the clients that may be hostile, for trimmed and krum.
    """

    mean_weights: str = "examples"
    robust: str = "none"
    hostile_fraction: float = 0.3

    def __post_init__(self) -> None:
        check_option("mean_weights", self.mean_weights, MEAN_WEIGHTS)
        check_option("robust", self.robust, ROBUST_RULES)
        if not 0 <= self.hostile_fraction < 0.5:
            raise SettingError(f"`hostile_fraction` must be in [0, 0.5), got {self.hostile_fraction}")

    @property
    def result(self) -> str:
        return "average"

    @property
    def releases_mean(self) -> bool:
        return self.robust == "none"

    @property
    def _is_weighted(self) -> bool:
        return self.robust == "none" and self.mean_weights == "examples"

    def of(self, updates: Sequence[Update], previous: ModelState) -> ModelState:
        """The mean of these updates; `previous` is the global model that the clients started from."""
        if self.robust != "none":
            return robust_mean(updates, previous, self.robust, self.hostile_fraction)
        return weighted_mean([(u.state, u.num_examples if self._is_weighted else 1.0) for u in updates])

    def __call__(self, draft: Draft, round: Round) -> Draft:
        with round.info.timed("mean"):
            # The guard has computed the weighted mean already, where no transform changed the updates.
            state = round.weighted_mean() if self._is_weighted else self.of(round.updates, round.previous)
            return replace(draft, state=state)


@dataclass(frozen=True)
class Momentum(Stage):
    """FedAvgM: momentum on the mean update Δ = w̄ − w_last. The next model is w_last + m.

    Attributes:
        beta: β, the momentum.
        momentum_form: heavy-ball, m ← β m + Δ (Hsu et al.); damped, m ← β m + (1 − β) Δ; or released, the authors'
            program: rounds 1 and 2 are plain averages with m = Δ, later rounds are damped.
    """

    beta: float = 0.9
    momentum_form: str = "heavy-ball"

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise SettingError(f"`beta` must be in [0, 1), got {self.beta}")
        check_option("momentum_form", self.momentum_form, MOMENTUM_FORMS)

    def memory_sizes(self, layout: Layout) -> dict[str, int]:
        return {"momentum": layout.size}

    @property
    def result(self) -> str:
        return "model"

    def __call__(self, draft: Draft, round: Round) -> Draft:
        with round.info.timed("mean"):
            change = draft.state.params - round.previous.params
            buffer = draft.memory.get("momentum", torch.zeros_like(change))
            # w_last + m, written from w̄ so that β = 0 gives w̄ without rounding: m − Δ is β m, or β (m − Δ) if damped.
            extra = self.beta * (buffer if self.momentum_form == "heavy-ball" else buffer - change)
            if self.momentum_form == "released" and round.context.round <= 2:
                extra = torch.zeros_like(change)
            state = replace(draft.state, params=draft.state.params + extra)
            return replace(draft, state=state, memory={**draft.memory, "momentum": change + extra})


@dataclass(frozen=True)
class ControlUpdate(Stage):
    """SCAFFOLD's server side: c ← c + (1/N) Σ_{i in cohort} (c_i⁺ − c_i), where N is the number of all clients."""

    def memory_sizes(self, layout: Layout) -> dict[str, int]:
        return {"control": layout.size}

    def __call__(self, draft: Draft, round: Round) -> Draft:
        total = round.total_clients()
        with round.info.timed("mean"):
            control = draft.memory.get("control", torch.zeros_like(draft.state.params)).clone()
            for update in round.updates:
                control.add_(update.extras["control"], alpha=1.0 / total)
            return replace(draft, memory={**draft.memory, "control": control})


@dataclass(frozen=True)
class KeepMembers(Stage):
    """1-Ensemble: the members themselves are the result. Predictions are their vote; no model is distilled."""

    replaces_model: ClassVar[bool] = True
    keeps_members: ClassVar[bool] = True

    ensemble: EnsembleSettings = field(default_factory=EnsembleSettings)

    def __post_init__(self) -> None:
        if self.ensemble.has_past:
            raise SettingError("`members` must not include P where members are kept: there is no earlier round")
        if self.ensemble.balance or self.ensemble.class_mix:
            raise SettingError("votes of kept members are not balanced, because they also vote on single inputs")

    @property
    def result(self) -> str:
        return "kept members' vote"

    def needs_unlabeled(self, module: nn.Module) -> bool:
        return self.ensemble.needs_unlabeled(module)

    def voting_ensemble(self, draft: Draft, context: Context) -> EnsembleSettings:  # noqa: ARG002
        return self.ensemble

    def __call__(self, draft: Draft, round: Round) -> Draft:
        return replace(draft, members=tuple(round.members(self.ensemble, draft.state)))
