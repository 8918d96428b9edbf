"""Who votes: the members of an ensemble, made from the clients' models, the average and a posterior's samples."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from fedbe.algorithms.ensemble import Member, parse_members
from fedbe.algorithms.server.context import Context, Draft, Round
from fedbe.core.normalization import STATISTICS, batch_norm_layers, clamp_variances, recalibrate
from fedbe.core.state import ModelState
from fedbe.core.updates import ClientId
from fedbe.errors import SettingError, nearest
from fedbe.posterior import Posterior, PosteriorSettings, get_posterior


@dataclass(frozen=True)
class Teacher:
    """The settings of an ensemble.

    members     any of S (samples), A (the average: the draft that the student starts from), C (clients)
    samples     M, how many models are sampled
    posterior   gaussian (Eq. 5), gaussian-released (the authors' program), dirichlet (Eq. 7)
    scale       multiplies the Gaussian's standard deviation
    alpha       the Dirichlet's parameter, one for all clients or one for each client id
    statistics  BatchNorm statistics of samples: recalibrated, averaged or sampled (see `norm`)
    """

    members: str = "SAC"
    num_samples: int = 10
    posterior: str = "gaussian"
    scale: float = 1.0
    alpha: float | Mapping[ClientId, float] = 1.0
    statistics: str = "recalibrated"

    def __post_init__(self) -> None:
        kinds = parse_members(self.members)
        get_posterior(self.posterior)
        if self.statistics not in STATISTICS:
            raise SettingError(f"unknown statistics '{self.statistics}': {nearest(self.statistics, STATISTICS)}")
        if "S" in kinds and self.num_samples < 1:
            raise SettingError(f"`num_samples` must be >= 1 when members include S, got {self.num_samples}")
        _ = self.posterior_settings

    @property
    def posterior_settings(self) -> PosteriorSettings:
        """What every posterior is fitted with; made once when the teacher is, to check the values."""
        return PosteriorSettings(self.scale, self.alpha, sample_buffers=self.statistics == "sampled")

    def needs_unlabeled(self, module: nn.Module) -> bool:
        """Whether its members, models like this one, cannot even be made without the server's inputs."""
        return "S" in self.members and self._recalibrates(module)

    def fit(self, round: Round) -> Posterior:
        """p(w | D) from this round's client models."""
        return get_posterior(self.posterior).fit_round(
            round.updates,
            previous=round.previous,
            layout=round.context.runner.layout,
            settings=self.posterior_settings,
        )

    def voters(self, draft: Draft, round: Round) -> Iterator[Member]:
        """The members in a fixed order: samples, average, clients; samples are drawn one at a time."""
        posterior = None
        if "S" in self.members:
            with round.info.timed("fit"):
                posterior = self.fit(round)
        return self._drawn(posterior, draft, round)

    def _drawn(self, posterior: Posterior | None, draft: Draft, round: Round) -> Iterator[Member]:
        if posterior is not None:
            drawn = posterior.sample_states(self.num_samples, round.context.generator("posterior"))
            for i, state in enumerate(drawn, start=1):
                yield Member(f"sample {i}", self._mended(state, round.context))
        if "A" in self.members:
            yield Member("average", draft.state)
        if "C" in self.members:
            yield from (Member(f"client {u.client_id}", u.state) for u in round.updates)

    def _mended(self, state: ModelState, context: Context) -> ModelState:
        """A sample with BatchNorm statistics that can be."""
        runner = context.runner
        if not self._recalibrates(runner.module):
            return clamp_variances(state, runner.layout)
        runner.load(state)
        recalibrate(runner, context.unlabeled())
        return runner.read()

    def _recalibrates(self, module: nn.Module) -> bool:
        return self.statistics == "recalibrated" and bool(batch_norm_layers(module))

    def count(self, round: Round) -> int:
        """How many members `voters` will give."""
        return (
            ("S" in self.members) * self.num_samples
            + ("A" in self.members)
            + ("C" in self.members) * len(round.updates)
        )
