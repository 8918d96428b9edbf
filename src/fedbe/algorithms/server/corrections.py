"""Stages that correct the average without a vote: FedAdam and FedYogi, FedDyn, BatchNorm statistics."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedbe.algorithms.server.context import Draft, Round
from fedbe.algorithms.server.stages import Stage
from fedbe.core.layout import Layout
from fedbe.core.normalization import batch_norm_layers, recalibrated
from fedbe.errors import SettingError, check_option

ADAPTIVE_FORMS = ("adam", "yogi")


@dataclass(frozen=True)
class Adaptive(Stage):
    """FedAdam and FedYogi (Reddi et al. 2021, Algorithm 2): the mean change Δ = w̄ − w_last is a gradient for Adam.

        m ← β₁ m + (1 − β₁) Δ
        v ← β₂ v + (1 − β₂) Δ²  (adam),   v ← v − (1 − β₂) Δ² sign(v − Δ²)  (yogi)
        w ← w_last + η m / (√v + τ)

    m starts at 0 and v at τ²; there is no bias correction. Buffers are those of the average.

    Attributes:
        adaptive_form: adam or yogi.
        eta: η, the server's step size. It must be tuned; the default is not.
        beta1, beta2: β₁ and β₂.
        tau: τ, how adaptive the steps are; the smaller, the more.
    """

    adaptive_form: str = "adam"
    eta: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        check_option("adaptive_form", self.adaptive_form, ADAPTIVE_FORMS)
        for name in ("eta", "tau"):
            if not getattr(self, name) > 0:
                raise SettingError(f"`{name}` must be > 0, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise SettingError(f"`{name}` must be in [0, 1), got {getattr(self, name)}")

    @property
    def result(self) -> str:
        return "model"

    def memory_sizes(self, layout: Layout) -> dict[str, int]:
        return {"first moment": layout.size, "second moment": layout.size}

    def __call__(self, draft: Draft, round: Round) -> Draft:
        with round.info.timed("mean"):
            change = draft.state.params - round.previous.params
            first = draft.memory.get("first moment", torch.zeros_like(change))
            first = torch.lerp(change, first, self.beta1)
            second = self._second_moment(draft.memory.get("second moment"), change.square())
            params = round.previous.params + self.eta * first / (second.sqrt() + self.tau)
            memory = {**draft.memory, "first moment": first, "second moment": second}
            return replace(draft, state=replace(draft.state, params=params), memory=memory)

    def _second_moment(self, last: Tensor | None, square: Tensor) -> Tensor:
        if last is None:
            last = torch.full_like(square, self.tau**2)
        if self.adaptive_form == "adam":
            return torch.lerp(square, last, self.beta2)
        return last - (1 - self.beta2) * square * torch.sign(last - square)


@dataclass(frozen=True)
class DynamicUpdate(Stage):
    """FedDyn's server side (Acar et al. 2021), after a uniform mean w̄ of the cohort; N is the number of all clients.

        h ← h − (α/N) Σ_{i in cohort} (w_i − w_last);   w ← w̄ − h/α

    Attributes:
        dyn_alpha: α, the same as that of the clients' rule.
    """

    dyn_alpha: float = 0.01

    def __post_init__(self) -> None:
        if not self.dyn_alpha > 0:
            raise SettingError(f"`dyn_alpha` must be > 0, got {self.dyn_alpha}")

    @property
    def result(self) -> str:
        return "model"

    def memory_sizes(self, layout: Layout) -> dict[str, int]:
        return {"drift": layout.size}

    def __call__(self, draft: Draft, round: Round) -> Draft:
        total = round.total_clients()
        with round.info.timed("mean"):
            drift = draft.memory.get("drift", torch.zeros_like(draft.state.params)).clone()
            for update in round.updates:
                drift.sub_(update.state.params - round.previous.params, alpha=self.dyn_alpha / total)
            params = draft.state.params - drift / self.dyn_alpha
            memory = {**draft.memory, "drift": drift}
            return replace(draft, state=replace(draft.state, params=params), memory=memory)


@dataclass(frozen=True)
class Recalibrate(Stage):
    """The average's BatchNorm statistics are recomputed on the server's unlabeled inputs; its weights stay.

    A model without BatchNorm stays as it is and needs no inputs.
    """

    replaces_model: ClassVar[bool] = True

    @property
    def result(self) -> str:
        return "model"

    def needs_unlabeled(self, module: nn.Module) -> bool:
        return bool(batch_norm_layers(module))

    def __call__(self, draft: Draft, round: Round) -> Draft:
        context = round.context
        if not self.needs_unlabeled(context.runner.module):
            return draft
        with round.info.timed("mean"):
            return replace(draft, state=recalibrated(context.runner, draft.state, context.unlabeled()))
