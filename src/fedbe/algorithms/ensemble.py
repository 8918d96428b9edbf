"""Who votes: samples of a posterior, the average, averages of earlier rounds and the clients' models.

Three steps, each a function: `fit_posterior`, `sample_models`, `list_members`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from fedbe.algorithms.balance import check_mix
from fedbe.algorithms.vote import Member, get_vote_rule
from fedbe.core.inputs import Inputs
from fedbe.core.layout import Layout
from fedbe.core.model_runner import ModelRunner
from fedbe.core.normalization import STATISTICS, batch_norm_layers, clamp_variances, recalibrated
from fedbe.core.state import ModelState
from fedbe.core.updates import ClientId, Update
from fedbe.errors import SettingError, nearest
from fedbe.posterior import Posterior, PosteriorSettings, get_posterior

MEMBER_KINDS = {
    "S": "samples of the posterior",
    "A": "the average",
    "P": "averages of earlier rounds",
    "C": "the clients",
}


def parse_members(letters: str) -> frozenset[str]:
    """The kinds of members in a word such as "SAC".

    Raises:
        SettingError: for an empty word, another letter, a letter that occurs twice, or P alone.

    Example:
        >>> sorted(parse_members("SC"))
        ['C', 'S']
    """
    kinds = frozenset(letters)
    if not kinds or len(kinds) != len(letters) or kinds - MEMBER_KINDS.keys():
        known = ", ".join(f"{letter} ({kind})" for letter, kind in MEMBER_KINDS.items())
        raise SettingError(f"`members` must be one or more of {known}, each once, like 'SAC'; got '{letters}'")
    if letters == "P":
        raise SettingError("`members` must not be 'P' alone: the first round has no earlier averages; give 'AP'")
    return kinds


@dataclass(frozen=True)
class EnsembleSettings:
    """Who votes, and how the votes are combined.

    Attributes:
        members: one or more of S (samples), A (the average that the student starts from), P (averages of earlier
            rounds, before they were distilled) and C (the clients).
        num_samples: M, how many models are sampled, if members include S.
        num_past: how many earlier averages vote.
        posterior: gaussian (Eq. 5) or dirichlet (Eq. 7); -released after the name: the form of the authors' program.
        scale: multiplies the Gaussian's standard deviation.
        alpha: the Dirichlet's parameter, one number for all clients or one for each client id.
        statistics: BatchNorm statistics of samples: recalibrated, averaged or sampled (see `core.normalization`).
        vote: the rule that combines the members' probabilities (`VOTE_RULES`).
        balance: whether the vote gets the mix of classes that its members expect together (see `algorithms.balance`).
        class_mix: the mix of classes of the server's inputs, where it is known: a share or a count for each class. The
            vote gets this mix, whatever `balance` says.
    """

    members: str = "SAC"
    num_samples: int = 10
    num_past: int = 3
    posterior: str = "gaussian"
    scale: float = 1.0
    alpha: float | Mapping[ClientId, float] = 1.0
    statistics: str = "recalibrated"
    vote: str = "mean"
    balance: bool = False
    class_mix: Sequence[float] = ()

    def __post_init__(self) -> None:
        kinds = parse_members(self.members)
        get_posterior(self.posterior)
        if self.statistics not in STATISTICS:
            raise SettingError(f"unknown statistics '{self.statistics}': {nearest(self.statistics, STATISTICS)}")
        if "S" in kinds and self.num_samples < 1:
            raise SettingError(f"`num_samples` must be >= 1 when members include S, got {self.num_samples}")
        if "P" in kinds and self.num_past < 1:
            raise SettingError(f"`num_past` must be >= 1 when members include P, got {self.num_past}")
        get_vote_rule(self.vote)
        object.__setattr__(self, "class_mix", check_mix(self.class_mix))
        _ = self.posterior_settings  # checks scale and alpha

    @property
    def posterior_settings(self) -> PosteriorSettings:
        """What every posterior is fitted with."""
        return PosteriorSettings(self.scale, self.alpha, sample_buffers=self.statistics == "sampled")

    @property
    def has_samples(self) -> bool:
        """Whether sampled models vote."""
        return "S" in self.members

    @property
    def has_past(self) -> bool:
        """Whether averages of earlier rounds vote."""
        return "P" in self.members

    def needs_unlabeled(self, module: nn.Module) -> bool:
        """Whether making the members of such a model needs the server's inputs (to recalibrate BatchNorm)."""
        return self.has_samples and self.recalibrates(module)

    def recalibrates(self, module: nn.Module) -> bool:
        """Whether the BatchNorm statistics of samples are recomputed on the server's inputs."""
        return self.statistics == "recalibrated" and bool(batch_norm_layers(module))

    def samples_like(self, other: "EnsembleSettings") -> bool:
        """Whether both settings draw the same models from one round's updates."""
        same = {"members": "S", "vote": "mean", "balance": False, "class_mix": (), "num_past": 1}
        return replace(self, **same) == replace(other, **same)  # type: ignore[arg-type]

    def count(self, num_clients: int) -> int:
        """How many members vote, at most, when `num_clients` clients took part. The first rounds have fewer of P.

        Example:
            >>> EnsembleSettings(members="SA", num_samples=5).count(10)
            6
        """
        sizes = {"S": self.num_samples, "A": 1, "P": self.num_past, "C": num_clients}
        return sum(sizes[kind] for kind in self.members)


def fit_posterior(
    settings: EnsembleSettings, updates: Sequence[Update], previous: ModelState, layout: Layout
) -> Posterior:
    """p(w | D), fitted to the models that the clients sent in this round.

    Args:
        settings: names the posterior and holds its parameters.
        updates: the admitted updates.
        previous: the global model that the clients started from.
        layout: the names and shapes of the model's tensors.
    """
    posterior = get_posterior(settings.posterior)
    return posterior.fit_round(updates, previous=previous, layout=layout, settings=settings.posterior_settings)


def sample_models(
    settings: EnsembleSettings,
    posterior: Posterior,
    runner: ModelRunner,
    inputs: Inputs | None,
    generator: torch.Generator,
) -> Iterator[ModelState]:
    """M models drawn from the posterior, one at a time, with valid BatchNorm statistics.

    `inputs` are the server's inputs. They are used only where statistics are recalibrated.
    """
    recalibrates = settings.recalibrates(runner.module)
    for state in posterior.sample_states(settings.num_samples, generator):
        if not recalibrates:
            yield clamp_variances(state, runner.layout)
            continue
        assert inputs is not None, "`needs_unlabeled` is checked before a round begins"
        yield recalibrated(runner, state, inputs)


def list_members(
    settings: EnsembleSettings,
    samples: Iterable[ModelState],
    average: ModelState,
    updates: Sequence[Update],
    past: Sequence[ModelState] = (),
) -> Iterator[Member]:
    """The members in a fixed order: samples, average, past averages, clients. Samples are drawn one at a time."""
    if "S" in settings.members:
        for i, state in enumerate(samples, start=1):
            yield Member(f"sample {i}", state)
    if "A" in settings.members:
        yield Member("average", average)
    if "P" in settings.members:
        yield from (Member(f"past {i}", state) for i, state in enumerate(past, start=1))
    if "C" in settings.members:
        yield from (Member(f"client {update.client_id}", update.state) for update in updates)
