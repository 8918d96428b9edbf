"""Hostile clients in a simulation: `[attack]` of a recipe. They work together and know all that there is to know.

The names and formulas of attacks on models are those of ByzFL, for a client's change Δ = w − w̄ instead of a gradient;
μ and σ are the mean and the standard deviation of the honest clients' changes, by coordinate. The attacks on
predictions are those of Roux et al. (ICLR 2025). There a client sends predictions; here the server computes them from
the client's model. So the strongest case is simulated: a model that looks honest and predicts what the attacker wants.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedbe.algorithms.server.robust import robust_mean
from fedbe.algorithms.vote import Member, Predictor
from fedbe.core.moments import weighted_mean
from fedbe.core.state import ModelState
from fedbe.core.updates import ClientId, ClientUpdate, Update
from fedbe.errors import SettingError, nearest

LABEL_FLIP = "label-flip"
SEARCHED = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)  # factors that `little-optimal` tries, with both signs


@dataclass(frozen=True, eq=False)
class View:
    """What the hostile clients know.

    Attributes:
        own: the changes that honest training would have given them, [a, P].
        honest: the changes of the honest clients, [h, P].
        strength: the factor of the attack.
        combine: a change that all hostile clients would send, [P] -> the change that the server would make of the
            round, [P].
        generator: for random numbers.
    """

    own: Tensor
    honest: Tensor
    strength: float
    combine: Callable[[Tensor], Tensor]
    generator: torch.Generator


# An attack on models: what the hostile clients send instead, [P] or [a, P].
ModelAttack = Callable[[View], Tensor]


def sign_flip(view: View) -> Tensor:
    """−s · Δ: the way back, far."""
    return -view.strength * view.own


def scaled(view: View) -> Tensor:
    """s · Δ: much too far."""
    return view.strength * view.own


def inner_product(view: View) -> Tensor:
    """−s · μ (Xie et al., 2020)."""
    return -view.strength * view.honest.mean(0)


def little(view: View) -> Tensor:
    """μ − s · σ, a little is enough (Baruch et al., 2019)."""
    return view.honest.mean(0) - view.strength * view.honest.std(0)


def little_optimal(view: View) -> Tensor:
    """μ + z · σ, with the z among ±`SEARCHED` that moves the server's result furthest from μ."""
    mean, std = view.honest.mean(0), view.honest.std(0)
    changes = (mean + sign * factor * std for factor in SEARCHED for sign in (-1.0, 1.0))
    return max(changes, key=lambda change: float((view.combine(change) - mean).double().norm()))


def mimic(view: View) -> Tensor:
    """The first honest client's change, so that it counts several times (Karimireddy et al., 2022)."""
    return view.honest[0]


def infinity(view: View) -> Tensor:
    """Infinite values."""
    return torch.full_like(view.own, torch.inf)


def gaussian(view: View) -> Tensor:
    """s · ε with ε ~ N(0, I)."""
    return view.strength * torch.randn(view.own.shape, generator=view.generator, dtype=view.own.dtype)


def loss_max(honest: Tensor) -> Tensor:
    """The class that the honest clients find least likely. Mean predictions [J, classes, …] -> classes [J, …].

    Example:
        >>> loss_max(torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]))
        tensor([2, 0])
    """
    return honest.argmin(1)


def class_prior(honest: Tensor) -> Tensor:
    """The class that is least like the honest clients' choice: the least correlated one over all inputs.

    Example:
        >>> class_prior(torch.tensor([[0.8, 0.2, 0.0], [0.3, 0.6, 0.1], [0.15, 0.05, 0.8]]))
        tensor([2, 2, 0])
    """
    columns = honest.movedim(1, 0).flatten(1).double()
    columns = columns - columns.mean(1, keepdim=True)
    norms = columns.norm(dim=1).clamp(min=1e-12)
    similarity = columns @ columns.T / norms.outer(norms)
    least_similar: Tensor = similarity.argmin(1)
    return least_similar[honest.argmax(1)]


# Attacks on models with the usual strength of each, and attacks on predictions. The remaining one is on labels.
MODEL_ATTACKS: Mapping[str, tuple[ModelAttack, float]] = {
    "sign-flip": (sign_flip, 10.0),
    "scaled": (scaled, 50.0),
    "inner-product": (inner_product, 1.5),
    "little": (little, 1.5),
    "little-optimal": (little_optimal, 1.0),
    "mimic": (mimic, 1.0),
    "infinity": (infinity, 1.0),
    "gaussian": (gaussian, 1.0),
}
VOTE_ATTACKS: Mapping[str, Callable[[Tensor], Tensor]] = {"loss-max": loss_max, "class-prior": class_prior}
ATTACKS = (LABEL_FLIP, *MODEL_ATTACKS, *VOTE_ATTACKS)


@dataclass(frozen=True)
class Attacker:
    """The hostile clients of a run.

    Attributes:
        kind: a name of `ATTACKS`.
        clients: how many; they are the first ones.
        strength: the factor s of an attack on models; None for its usual one.
        claim: the number of examples that each of them reports; None for the true one.
    """

    kind: str
    clients: int
    strength: float | None = None
    claim: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ATTACKS:
            raise SettingError(f"unknown attack '{self.kind}': {nearest(self.kind, ATTACKS)}")

    def flips_labels(self, client: int) -> bool:
        """Whether this client trains on wrong labels: class c becomes C − 1 − c."""
        return self.kind == LABEL_FLIP and client < self.clients

    def updates(
        self, sent: Sequence[Update], previous: ModelState, settings: Mapping[str, Any], generator: torch.Generator
    ) -> list[ClientUpdate]:
        """What the server receives.

        Args:
            sent: what all clients would send, as honest training gave it.
            previous: the global model that they started from.
            settings: of the server's method, which the attackers know.
            generator: for random numbers.
        """
        states = self._states(sent, previous, settings, generator)
        return [ClientUpdate(states.get(u.client_id, u.state), self._examples(u), u.client_id, u.extras) for u in sent]

    def _examples(self, update: Update) -> float:
        return self.claim if self.claim is not None and self._is_hostile(update) else update.num_examples

    def _is_hostile(self, update: Update) -> bool:
        return isinstance(update.client_id, int) and update.client_id < self.clients

    def _states(
        self, sent: Sequence[Update], previous: ModelState, settings: Mapping[str, Any], generator: torch.Generator
    ) -> dict[ClientId, ModelState]:
        """The models that hostile clients send instead of their own, by client."""
        hostile = [u for u in sent if self._is_hostile(u)]
        if self.kind not in MODEL_ATTACKS or not hostile:
            return {}
        rule, usual = MODEL_ATTACKS[self.kind]
        honest = [u for u in sent if not self._is_hostile(u)]
        rows = torch.stack([u.state.params for u in honest or hostile]) - previous.params

        def with_change(update: Update, change: Tensor) -> Update:
            return replace(update, state=replace(update.state, params=previous.params + change))

        def combine(change: Tensor) -> Tensor:
            given = [*(with_change(u, change) for u in hostile), *honest]
            return _server_mean(given, previous, settings) - previous.params

        own = torch.stack([u.state.params for u in hostile]) - previous.params
        view = View(own, rows, usual if self.strength is None else self.strength, combine, generator)
        changes = rule(view).expand_as(own)
        return {u.client_id: with_change(u, change).state for u, change in zip(hostile, changes, strict=True)}

    def predictor(self, predictor: Predictor) -> Predictor:
        """The server's predictor, with the predictions of hostile clients replaced by an attack on predictions."""
        if self.kind not in VOTE_ATTACKS:
            return predictor
        attack, names = VOTE_ATTACKS[self.kind], {f"client {client}" for client in range(self.clients)}

        def predict(members: Iterable[Member]) -> Iterator[Tensor]:
            listed = list(members)
            given = list(predictor(listed))
            honest = [p for m, p in zip(listed, given, strict=True) if m.name not in names] or given
            classes = attack(torch.stack(honest).mean(0))
            wanted = one_hot(classes, given[0].shape[1]).movedim(-1, 1).to(given[0].dtype)
            return (wanted if m.name in names else p for m, p in zip(listed, given, strict=True))

        return predict


def _server_mean(updates: Sequence[Update], previous: ModelState, settings: Mapping[str, Any]) -> Tensor:
    """The parameters that the server's mean would have, [P]."""
    rule = settings.get("robust", "none")
    if rule == "none":
        return weighted_mean([(u.state, u.num_examples) for u in updates]).params
    return robust_mean(updates, previous, rule, settings["hostile_fraction"]).params
