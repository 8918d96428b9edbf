"""Who votes: the members of an ensemble, made from the clients' models, the average and a posterior's samples."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fedbe.ensemble import Member, parse_members
from fedbe.errors import SettingError, nearest
from fedbe.norm import STATISTICS, keep_valid
from fedbe.posterior import DirectionGaussian, DirectionMoments, Dirichlet, Gaussian, Posterior
from fedbe.servers.context import Draft, Round
from fedbe.updates import ClientId

POSTERIORS = ("gaussian", "gaussian-released", "dirichlet")


@dataclass(frozen=True)
class Teacher:
    """The settings of an ensemble.

    members     any of S (samples), A (the average: the draft that the student starts from), C (clients)
    samples     M, how many models are sampled
    posterior   gaussian (Eq. 5), gaussian-released (the authors' program), dirichlet (Eq. 7)
    scale       multiplies the Gaussian's standard deviation
    alpha       the Dirichlet's parameter, one for all clients or one for each client id
    statistics  BatchNorm statistics of Gaussian samples: averaged, sampled or recalibrated (see `norm`)
    """

    members: str = "SAC"
    samples: int = 10
    posterior: str = "gaussian"
    scale: float = 1.0
    alpha: float | Mapping[ClientId, float] = 1.0
    statistics: str = "averaged"

    def __post_init__(self) -> None:
        kinds = parse_members(self.members)
        if self.posterior not in POSTERIORS:
            raise SettingError(f"unknown posterior '{self.posterior}': {nearest(self.posterior, POSTERIORS)}")
        if self.statistics not in STATISTICS:
            raise SettingError(f"unknown statistics '{self.statistics}': {nearest(self.statistics, STATISTICS)}")
        if "S" in kinds and self.samples < 1:
            raise SettingError(f"`samples` must be >= 1 when members include S, got {self.samples}")
        if not self.scale >= 0:
            raise SettingError(f"`scale` must be >= 0, got {self.scale}")
        if not isinstance(self.alpha, Mapping) and not self.alpha > 0:
            raise SettingError(f"`alpha` must be > 0, got {self.alpha}")

    def fit(self, round: Round) -> Posterior:
        """p(w | D) from this round's client models."""
        sampled = self.statistics == "sampled"
        if self.posterior == "dirichlet":
            return Dirichlet.fit(round.updates, alpha=self.alpha)
        if self.posterior == "gaussian":
            return Gaussian.fit(round.updates, scale=self.scale, sample_buffers=sampled)
        layout = round.context.bench.layout
        stream = DirectionMoments(round.previous, layout.params, layout.buffers)
        for update in round.updates:
            stream.add(update.state)
        return DirectionGaussian.of(stream, scale=self.scale, sample_buffers=sampled)

    def voters(self, draft: Draft, round: Round) -> Iterator[Member]:
        """The members in a fixed order: samples, average, clients; samples are drawn one at a time."""
        posterior = None
        if "S" in self.members:
            with round.info.timed("fit"):
                posterior = self.fit(round)
        return self._drawn(posterior, draft, round)

    def _drawn(self, posterior: Posterior | None, draft: Draft, round: Round) -> Iterator[Member]:
        if posterior is not None:
            layout = round.context.bench.layout
            drawn = posterior.sample(self.samples, round.context.generator("posterior"))
            for i, state in enumerate(drawn, start=1):
                valid = keep_valid(state, layout)
                yield Member(f"sample {i}", valid, recalibrate=self.statistics == "recalibrated")
        if "A" in self.members:
            yield Member("average", draft.state)
        if "C" in self.members:
            yield from (Member(f"client {u.client}", u.state) for u in round.updates)

    def count(self, round: Round) -> int:
        """How many members `voters` will give."""
        return ("S" in self.members) * self.samples + ("A" in self.members) + ("C" in self.members) * len(round.updates)
