"""Rules: hooks into the local training loop. A rule changes the gradient of every step; any tuple of rules composes.

A rule is a frozen dataclass of settings. Its `start` returns the running form for one client and one round. The running
form adds to the gradients after each backward pass (`correct`) and may send something back at the end (`finish`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from fedbe.core.layout import Layout
from fedbe.errors import SettingError, nearest


@dataclass(frozen=True, eq=False)
class LocalRun:
    """What a rule may know about one client's training in one round.

    Attributes:
        layout: where each parameter is in a vector [P].
        parameters: the trainable parameters, by name.
        start: the parameters [P] of the global model.
        broadcast: vectors [P] sent with the global model, by name (SCAFFOLD's "control").
        memory: vectors [P] that this client keeps between its rounds, by name.
    """

    layout: Layout
    parameters: Mapping[str, nn.Parameter]
    start: Tensor
    broadcast: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Mapping[str, Tensor] = field(default_factory=dict)

    def parts(self, vector: Tensor) -> list[Tensor]:
        """The pieces of a vector [P] that belong to the trainable parameters, in their order."""
        named = self.layout.unpack_params(vector)
        return [named[name] for name in self.parameters]

    def gradients(self) -> list[Tensor]:
        """The gradients of the trainable parameters, in their order."""
        # A parameter that the loss does not reach has no gradient; the rule's own term still holds for it.
        for p in self.parameters.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return [p.grad for p in self.parameters.values() if p.grad is not None]


@dataclass(frozen=True, eq=False)
class RuleResult:
    """What a rule returns at the end: `extras` go to the server, `memory` stays with the client."""

    extras: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Mapping[str, Tensor] = field(default_factory=dict)


class RunningRule(Protocol):
    """A rule at work for one client in one round."""

    def correct(self) -> None:
        """Add the rule's term to the gradients, after each backward pass."""

    def finish(self, end: Tensor, travelled: float) -> RuleResult:
        """What to send and to keep.

        Args:
            end: the trained parameters [P].
            travelled: how far the steps would go along a constant gradient of length 1; 0 without a step.
        """


class LocalRule(Protocol):
    """The settings of a rule."""

    def start(self, run: LocalRun) -> RunningRule:
        """The rule's running form for one client and one round."""


PROX_FORMS = ("squared", "unsquared")


@dataclass(frozen=True)
class Prox:
    """FedProx: the loss gains (μ/2)‖w − w̄‖², so the gradient gains μ (w − w̄).

    Attributes:
        proximal_mu: μ. With 0 this is FedAvg.
        prox_form: squared; or unsquared, the released program's (μ/2) Σ_l ‖w_l − w̄_l‖ over the tensors l whose name
            ends in "weight". Its gradient is (μ/2) (w_l − w̄_l)/‖w_l − w̄_l‖; biases are free.

    Raises:
        SettingError: μ is negative, or the form is unknown.

    Example:
        >>> parameter = nn.Parameter(torch.tensor([3.0]))  # w = 3, without a gradient of its own
        >>> run = LocalRun(Layout({"weight": parameter.data}), {"weight": parameter}, start=torch.tensor([1.0]))
        >>> Prox(proximal_mu=0.1).start(run).correct()
        >>> parameter.grad  # 0.1 · (3 − 1)
        tensor([0.2000])
    """

    proximal_mu: float = 0.001
    prox_form: str = "squared"

    def __post_init__(self) -> None:
        if not self.proximal_mu >= 0:
            raise SettingError(f"`proximal_mu` must be >= 0, got {self.proximal_mu}")
        if self.prox_form not in PROX_FORMS:
            raise SettingError(f"unknown prox_form '{self.prox_form}': {nearest(self.prox_form, PROX_FORMS)}")

    def start(self, run: LocalRun) -> RunningRule:
        return _RunningProx(self, run)


class _RunningProx:
    def __init__(self, rule: Prox, run: LocalRun) -> None:
        self._rule, self._run = rule, run
        self._center = run.parts(run.start)

    @torch.no_grad()
    def correct(self) -> None:
        if not self._rule.proximal_mu:
            return  # FedAvg to the bit, also for a parameter that the loss does not reach
        away = torch._foreach_sub(list(self._run.parameters.values()), self._center)
        if self._rule.prox_form == "unsquared":
            torch._foreach_mul_(away, [_pull(n, a) for n, a in zip(self._run.parameters, away, strict=True)])
        torch._foreach_add_(self._run.gradients(), away, alpha=self._rule.proximal_mu)

    def finish(self, end: Tensor, travelled: float) -> RuleResult:  # noqa: ARG002
        return RuleResult()


def _pull(name: str, away: Tensor) -> Tensor:
    """0.5/‖away‖ of a weight, 0 of another tensor; it stays on the device."""
    length = away.norm()
    is_free = "weight" not in name.rsplit(".", 1)[-1]
    return torch.zeros_like(length) if is_free else torch.where(length > 0, 0.5 / length, 0.0)


@dataclass(frozen=True)
class ControlVariate:
    """SCAFFOLD: every gradient gains c − c_i. Afterwards c_i⁺ = c_i − c + (w̄ − w_i)/T (option II of its paper).

    Without momentum T = K·η, as published. With momentum β the same gradient g moves the weights further: K steps of a
    constant g move them by η g Σ_{k=1..K} (1 − β^k)/(1 − β). T is this factor without g, so that c_i stays an average
    *gradient*; with T = K·η it would be about 1/(1 − β) times too large. Weight decay belongs to the local loss and is
    part of c_i.
    The client keeps c_i [P] and sends c_i⁺ − c_i [P] under the name "control"; c [P] is sent with the global model.

    Example:
        >>> parameter = nn.Parameter(torch.tensor([3.0]))
        >>> start, c = torch.tensor([3.0]), {"control": torch.tensor([0.5])}
        >>> run = LocalRun(Layout({"weight": parameter.data}), {"weight": parameter}, start, broadcast=c)
        >>> rule = ControlVariate().start(run)
        >>> rule.correct()
        >>> parameter.grad  # c − c_i, where c_i is still 0
        tensor([0.5000])
        >>> rule.finish(end=torch.tensor([1.0]), travelled=2.0).extras  # −c + (3 − 1)/2
        {'control': tensor([0.5000])}
    """

    def start(self, run: LocalRun) -> RunningRule:
        return _RunningControl(run)


class _RunningControl:
    NAME = "control"

    def __init__(self, run: LocalRun) -> None:
        self._run = run
        zero = torch.zeros_like(run.start)
        self._server = run.broadcast.get(self.NAME, zero)
        self._client = run.memory.get(self.NAME, zero)
        difference = self._server - self._client
        self._correction = run.parts(difference) if bool(difference.any()) else []

    @torch.no_grad()
    def correct(self) -> None:
        if self._correction:
            torch._foreach_add_(self._run.gradients(), self._correction)

    def finish(self, end: Tensor, travelled: float) -> RuleResult:
        if not travelled:
            return RuleResult(memory={self.NAME: self._client}, extras={self.NAME: torch.zeros_like(self._client)})
        change = (self._run.start - end) / travelled - self._server
        return RuleResult(extras={self.NAME: change}, memory={self.NAME: self._client + change})


@dataclass(frozen=True)
class Dynamic:
    """FedDyn (Acar et al. 2021): the loss gains −⟨g_i, w⟩ + (α/2)‖w − w̄‖², so the gradient gains α (w − w̄) − g_i.

    Afterwards g_i⁺ = g_i − α (w_i − w̄): at a minimum of the changed loss, the client's own gradient. It starts at 0.
    The client keeps g_i and sends g_i⁺ − g_i under the name "gradient". The server could compute that itself; sent, it
    lets a server restore the memory of a node that was restarted, as with SCAFFOLD.

    Attributes:
        dyn_alpha: α, the same as that of the server's stage.

    Raises:
        SettingError: α is not above 0.

    Example:
        >>> parameter = nn.Parameter(torch.tensor([3.0]))
        >>> run = LocalRun(Layout({"weight": parameter.data}), {"weight": parameter}, start=torch.tensor([1.0]))
        >>> rule = Dynamic(dyn_alpha=0.1).start(run)
        >>> rule.correct()
        >>> parameter.grad  # 0.1 · (3 − 1) − g_i, where g_i is still 0
        tensor([0.2000])
        >>> rule.finish(end=torch.tensor([2.0]), travelled=1.0).memory  # −0.1 · (2 − 1)
        {'gradient': tensor([-0.1000])}
    """

    dyn_alpha: float = 0.01

    def __post_init__(self) -> None:
        if not self.dyn_alpha > 0:
            raise SettingError(f"`dyn_alpha` must be > 0, got {self.dyn_alpha}")

    def start(self, run: LocalRun) -> RunningRule:
        return _RunningDynamic(self.dyn_alpha, run)


class _RunningDynamic:
    NAME = "gradient"

    def __init__(self, alpha: float, run: LocalRun) -> None:
        self._alpha, self._run = alpha, run
        self._center = run.parts(run.start)
        self._gradient = run.memory.get(self.NAME, torch.zeros_like(run.start))
        self._correction = run.parts(self._gradient)

    @torch.no_grad()
    def correct(self) -> None:
        gradients = self._run.gradients()
        away = torch._foreach_sub(list(self._run.parameters.values()), self._center)
        torch._foreach_add_(gradients, away, alpha=self._alpha)
        torch._foreach_sub_(gradients, self._correction)

    def finish(self, end: Tensor, travelled: float) -> RuleResult:  # noqa: ARG002
        change = self._alpha * (self._run.start - end)
        return RuleResult(extras={self.NAME: change}, memory={self.NAME: self._gradient + change})
