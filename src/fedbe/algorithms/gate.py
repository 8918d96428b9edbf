"""The gate: without a single label, decide whether the student replaces the average, and how large its steps are.

A part of the server's inputs is kept out of the distillation. Afterwards, on these inputs, the gate asks who agrees
more with the vote, the student or the average that it started from. Unless the student does, by more than chance
explains and by enough to make up for what it forgets, the average stays, and the next student takes smaller steps. When
the smallest steps are refused too, the server rests, longer each time, and then tries again.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fedbe.errors import SettingError, check_option

# (predictions [H, classes, …], the vote on the same inputs) -> a score of each input [H, …]; the higher mean wins.
Judge = Callable[[Tensor, Tensor], Tensor]


def agreement(prediction: Tensor, vote: Tensor) -> Tensor:
    """1 where both name the same class, 0 elsewhere: [argmax p_j = argmax v_j].

    Args:
        prediction: probabilities [H, classes, …].
        vote: probabilities of the same shape.

    Example:
        >>> agreement(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([[0.6, 0.4], [0.8, 0.2]])).tolist()
        [1.0, 0.0]
    """
    return (prediction.argmax(1) == vote.argmax(1)).double()


def soft_agreement(prediction: Tensor, vote: Tensor) -> Tensor:
    """The vote's probability of the class that the prediction names: v_j[argmax p_j].

    An input on which the vote is sure counts more than one on which it hesitates.

    Example:
        >>> p, v = torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([[0.6, 0.4], [0.8, 0.2]])
        >>> [round(score, 2) for score in soft_agreement(p, v).tolist()]
        [0.6, 0.2]
    """
    return vote.gather(1, prediction.argmax(1, keepdim=True)).double().squeeze(1)


# Every judge by its name: `--set settings.gate=NAME`. A new judge is a function and a row here.
JUDGES: dict[str, Judge] = {"agreement": agreement, "soft-agreement": soft_agreement}
GATE_MEMORY = ("gate_refusals", "gate_rest")


@dataclass(frozen=True)
class GateSettings:
    """Whether a student is judged, and what follows from a refusal.

    Attributes:
        gate: off (every student replaces the average), or the judge: agreement, soft-agreement.
        gate_margin: how many standard errors the student must be above the average,
        gate_gain: and by how much at least. Every student forgets a little of what the clients have learned from
            labels, so agreeing with the vote a little more often does not pay.
        gate_share: the part of the server's inputs that is kept out of the distillation, drawn again in each round.
        gate_backoff: after a refusal the next student's step sizes are multiplied by this.
        gate_tries: after so many refusals in a row of smaller and smaller steps, the server rests.
    """

    gate: str = "off"
    gate_margin: float = 1.0
    gate_gain: float = 0.0
    gate_share: float = 0.1
    gate_backoff: float = 0.3
    gate_tries: int = 1

    def __post_init__(self) -> None:
        check_option("gate", self.gate, ("off", *JUDGES))
        for name in ("gate_share", "gate_backoff"):
            if not 0 < getattr(self, name) < 1:
                raise SettingError(f"`{name}` must be between 0 and 1, got {getattr(self, name)}")
        if self.gate_margin < 0:
            raise SettingError(f"`gate_margin` must be >= 0, got {self.gate_margin}")
        if not 0 <= self.gate_gain < 1:
            raise SettingError(f"`gate_gain` must be >= 0 and < 1, got {self.gate_gain}")
        if self.gate_tries < 1:
            raise SettingError(f"`gate_tries` must be >= 1, got {self.gate_tries}")

    @property
    def is_on(self) -> bool:
        """Whether students are judged."""
        return self.gate != "off"


@dataclass(frozen=True)
class GateState:
    """What the gate remembers between rounds.

    Attributes:
        refusals: how many refusals the next step sizes answer to.
        rest: how many rounds are left without a distillation.

    Example:
        >>> settings, state = GateSettings(gate="agreement", gate_tries=1), GateState()
        >>> state = state.after(False, settings)          # refused: smaller steps
        >>> state.factor(settings), state.rest
        (0.3, 0)
        >>> state = state.after(False, settings)          # refused again: rest one round, then try again
        >>> state.rest, state.after(False, settings).rest  # and two rounds, and four …
        (1, 2)
    """

    refusals: int = 0
    rest: int = 0

    @classmethod
    def of(cls, memory: Mapping[str, Tensor]) -> "GateState":
        """The state in the server's memory; a fresh one if there is none."""
        return cls(*(int(memory[name]) if name in memory else 0 for name in GATE_MEMORY))

    def stored_in(self, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The server's memory with this state in it."""
        values = (self.refusals, self.rest)
        return {**memory, **{n: torch.tensor([float(v)]) for n, v in zip(GATE_MEMORY, values, strict=True)}}

    def factor(self, settings: GateSettings) -> float:
        """What the step sizes are multiplied by: backoff^refusals, but not below backoff^tries."""
        return settings.gate_backoff ** min(self.refusals, settings.gate_tries)

    def rested(self) -> "GateState":
        """The state after a round of rest."""
        return GateState(self.refusals, self.rest - 1)

    def after(self, accepted: bool, settings: GateSettings) -> "GateState":
        """The state after a student was accepted or refused. A rest doubles with every refused try after it."""
        if accepted:
            return GateState(min(self.refusals, settings.gate_tries), 0)
        refusals = self.refusals + 1
        beyond = refusals - settings.gate_tries
        return GateState(refusals, 2 ** (min(beyond, 16) - 1) if beyond > 0 else 0)


@dataclass(frozen=True)
class Judgement:
    """What the gate decided in one round.

    Attributes:
        average, student: their mean scores on the inputs that were kept out; 0 for a student that diverged.
        margin: by how much the student must be above the average.
        lr: the step size at which the student learned.
    """

    average: float
    student: float
    margin: float
    lr: float

    @property
    def accepted(self) -> bool:
        """Whether the student replaces the average."""
        return self.student - self.average > self.margin

    def as_record(self) -> dict[str, float | bool]:
        """The judgement for rounds.jsonl."""
        return asdict(self) | {"accepted": self.accepted}


def judge(settings: GateSettings, average: Tensor, student: Tensor, vote: Tensor, lr: float) -> Judgement:
    """Compare two predictions [H, classes, …] with the vote on the inputs that were kept out.

    With d_j the student's score minus the average's on input j, the margin is the larger one of `gate_gain` and
    `gate_margin` standard errors of the mean of d: max(gate_gain, gate_margin · std(d)/√H). The pixels or words of one
    input depend on each other, so d_j is their mean. A student whose predictions are not finite has the score 0.
    """
    score = JUDGES[settings.gate]
    average, student, vote = average.cpu(), student.cpu(), vote.cpu()
    of_average = score(average, vote)
    of_student = score(student, vote) if bool(student.isfinite().all()) else torch.zeros_like(of_average)
    difference = (of_student - of_average).reshape(len(vote), -1).mean(1)
    error = float(difference.std(correction=0)) / len(difference) ** 0.5
    margin = max(settings.gate_gain, settings.gate_margin * error)
    return Judgement(float(of_average.mean()), float(of_student.mean()), margin, lr)
