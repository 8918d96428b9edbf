"""What the stages of one server step share, and what they report."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedbe.algorithms.ensemble import Member, MemberReport, Predictor, Vote, local_predictor
from fedbe.core.inputs import Inputs
from fedbe.core.metrics import Metrics
from fedbe.core.model_runner import ModelRunner
from fedbe.core.random import generator
from fedbe.core.state import ModelState
from fedbe.core.updates import Update
from fedbe.errors import SettingError


@dataclass
class StepInfo:
    """What happened in one step. Qualities are on the server's own inputs and need labels for them."""

    members: tuple[MemberReport, ...] = ()
    left_out: tuple[str, ...] = ()
    disagreement: float | None = None
    ensemble: Metrics | None = None
    average: Metrics | None = None
    student: Metrics | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time spent within to the seconds of a phase."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin

    def note(self, vote: Vote) -> None:
        self.members, self.left_out = vote.members, vote.left_out
        self.disagreement, self.ensemble = vote.disagreement, vote.metrics


@dataclass(frozen=True, eq=False)
class Context:
    """The server's means in one round.

    inputs, labels  the server's own data; labels are used for reports and by the oracle targets only
    rounds          how many rounds there will be, if that is known (for distilling in a share of them)
    total_clients   how many clients there are in all, of which the updates are a part (SCAFFOLD)
    predictor       how members are asked; None asks the module on the runner
    progress        called with (phase, done, total)
    """

    runner: ModelRunner
    seed: int
    round: int
    inputs: Inputs | None = None
    labels: Tensor | None = None
    rounds: int | None = None
    total_clients: int | None = None
    predictor: Predictor | None = None
    progress: Callable[[str, int, int], None] | None = None

    def generator(self, role: str) -> torch.Generator:
        return generator(self.seed, self.round, role)

    def unlabeled(self) -> Inputs:
        if self.inputs is None:
            raise SettingError("this method asks models about inputs that the server owns: give `unlabeled`")
        return self.inputs

    def ask(self) -> Predictor:
        return self.predictor or local_predictor(self.runner, self.unlabeled())

    def tell(self, phase: str) -> Callable[[int, int], None] | None:
        """A progress callback for one phase."""
        progress = self.progress
        return None if progress is None else lambda done, total: progress(phase, done, total)


@dataclass(frozen=True, eq=False)
class Draft:
    """The model in the making, what the server remembers, and members that are kept instead of a model."""

    state: ModelState
    memory: Mapping[str, Tensor]
    members: tuple[Member, ...] = ()


@dataclass(frozen=True, eq=False)
class Round:
    """What a stage works on besides the draft: the round's updates and the model they started from."""

    updates: Sequence[Update]
    previous: ModelState
    context: Context
    info: StepInfo
