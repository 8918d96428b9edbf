"""Hostile clients in a simulation: `[attack]` of a recipe. They work together and know all that there is to know.

The names and formulas of attacks on models are those of ByzFL, for a client's change Δ = w − w̄ instead of a gradient;
μ and σ are the mean and the standard deviation of the honest clients' changes, by coordinate. The attacks on
predictions are those of Roux et al. (ICLR 2025), with their hidden forms. There a client sends predictions; here the
server computes them from the client's model. So the strongest case is simulated: a model that looks honest and
predicts what the attacker wants.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedbe.algorithms.server.stages import Mean
from fedbe.algorithms.vote import Member, Predictor
from fedbe.core.state import ModelState
from fedbe.core.updates import ClientId, ClientUpdate, Update
from fedbe.errors import SettingError, nearest

LABEL_FLIP = "label-flip"
SEARCHED = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)  # factors that `little-optimal` tries, with both signs


@dataclass(frozen=True, eq=False)
class View:
    """What the hostile clients know.

    Attributes:
        trained: the changes that honest training would have given them, [a, P].
        honest: the changes of the honest clients, [h, P].
        strength: the factor of the attack.
        combine: a change that all hostile clients would send, [P] -> the change that the server would make of the
            round, [P].
        generator: for random numbers.
    """

    trained: Tensor
    honest: Tensor
    strength: float
    combine: Callable[[Tensor], Tensor]
    generator: torch.Generator


# An attack on models: what the hostile clients send instead, [P] or [a, P].
ModelAttack = Callable[[View], Tensor]


def sign_flip(view: View) -> Tensor:
    """−s · Δ: the way back, far."""
    return -view.strength * view.trained


def scaled(view: View) -> Tensor:
    """s · Δ: much too far."""
    return view.strength * view.trained


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
    return torch.full_like(view.trained, torch.inf)


def gaussian(view: View) -> Tensor:
    """s · ε with ε ~ N(0, I)."""
    return view.strength * torch.randn(view.trained.shape, generator=view.generator, dtype=view.trained.dtype)


# An attack on predictions: those of the honest members [m, J, classes, …] and the hostile share of the vote -> what the
# hostile members predict, [J, classes, …].
VoteAttack = Callable[[Tensor, float], Tensor]


def loss_max(honest: Tensor, share: float) -> Tensor:  # noqa: ARG001
    """All on the class that the honest members find least likely.

    Example:
        >>> loss_max(torch.tensor([[[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]]), 0.4)
        tensor([[0., 0., 1.],
                [1., 0., 0.]])
    """
    return _certain(honest.mean(0).argmin(1), honest)


def class_prior(honest: Tensor, share: float) -> Tensor:  # noqa: ARG001
    """All on the class that is least like the honest members' choice.

    Example:
        >>> class_prior(torch.tensor([[[0.8, 0.2, 0.0], [0.3, 0.6, 0.1], [0.15, 0.05, 0.8]]]), 0.4)
        tensor([[0., 0., 1.],
                [0., 0., 1.],
                [1., 0., 0.]])
    """
    mean = honest.mean(0)
    least_similar: Tensor = _similarity(mean).argmin(1)
    return _certain(least_similar[mean.argmax(1)], honest)


def hidden_loss_max(honest: Tensor, share: float) -> Tensor:
    """`loss_max` that stays among the honest predictions: for each input a copy of one of them.

    It is the p with the largest cross entropy between ȳ, the mean of the honest predictions, and the vote
    (1 − share) ȳ + share p. Each prediction by itself is an honest one, so no bound on single predictions finds it.

    Example:
        >>> hidden_loss_max(torch.tensor([[[0.9, 0.1]], [[0.6, 0.4]], [[0.8, 0.2]]]), 0.4)
        tensor([[0.6000, 0.4000]])
    """
    mean = honest.mean(0)
    vote = ((1 - share) * mean + share * honest).clamp(min=1e-12)
    return _copied(honest, -(mean * vote.log()).sum(2))


def hidden_class_prior(honest: Tensor, share: float) -> Tensor:  # noqa: ARG001
    """`class_prior` that stays among the honest predictions: a copy of the one that is least like the honest choice.

    Example:
        >>> one = torch.tensor([[0.8, 0.2, 0.0], [0.3, 0.6, 0.1], [0.15, 0.05, 0.8]])
        >>> bool(torch.equal(hidden_class_prior(one[None], 0.4), one))
        True
    """
    mean = honest.mean(0)
    similarity = _similarity(mean)[mean.argmax(1)].movedim(-1, 1)  # of each class to the choice, [J, classes, …]
    return _copied(honest, -(similarity * honest).sum(2))


def _similarity(mean: Tensor) -> Tensor:
    """The correlation of classes over all inputs. Predictions [J, classes, …] -> [classes, classes]."""
    columns = mean.movedim(1, 0).flatten(1).double()
    columns = columns - columns.mean(1, keepdim=True)
    norms = columns.norm(dim=1).clamp(min=1e-12)
    correlation: Tensor = columns @ columns.T / norms.outer(norms)
    return correlation


def _certain(classes: Tensor, honest: Tensor) -> Tensor:
    """Probability 1 for these classes [J, …]."""
    return one_hot(classes, honest.shape[2]).movedim(-1, 1).to(honest.dtype)


def _copied(honest: Tensor, score: Tensor) -> Tensor:
    """For each input the prediction of the honest member with the largest score [m, J, …]."""
    chosen = score.argmax(0).unsqueeze(0).unsqueeze(2)
    return honest.gather(0, chosen.expand(1, *honest.shape[1:]))[0]


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
VOTE_ATTACKS: Mapping[str, VoteAttack] = {
    "loss-max": loss_max,
    "class-prior": class_prior,
    "hidden-loss-max": hidden_loss_max,
    "hidden-class-prior": hidden_class_prior,
}
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

        mean = Mean(**{f.name: settings[f.name] for f in fields(Mean) if f.name in settings})

        def with_change(update: Update, change: Tensor) -> Update:
            return replace(update, state=replace(update.state, params=previous.params + change))

        def combine(change: Tensor) -> Tensor:
            given = [*(with_change(u, change) for u in hostile), *honest]
            return mean.of(given, previous).params - previous.params

        trained = torch.stack([u.state.params for u in hostile]) - previous.params
        view = View(trained, rows, usual if self.strength is None else self.strength, combine, generator)
        changes = rule(view).expand_as(trained)
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
            wanted = attack(torch.stack(honest), 1 - len(honest) / len(given))
            return (wanted if m.name in names else p for m, p in zip(listed, given, strict=True))

        return predict
