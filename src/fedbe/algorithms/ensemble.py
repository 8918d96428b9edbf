"""The vote of many models: Eq. 4, p(y|x) ≈ (1/M) Σ_m p(y|x; w_m), member by member, in constant memory."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbe.core.inputs import Inputs, batches
from fedbe.core.metrics import Metrics, compute_metrics, confidence
from fedbe.core.model_runner import ModelRunner
from fedbe.core.state import ModelState
from fedbe.errors import AggregationError, SettingError

MEMBER_KINDS = {"S": "samples of the posterior", "A": "the average", "C": "the clients"}


@dataclass(frozen=True, eq=False)
class Member:
    """One voter: `name` says what it is (sample 1, average, client 3)."""

    name: str
    state: ModelState


# How members become probabilities [J, classes, …], in the order of the members. The simulator hands in one that
# asks its worker processes; the default asks the module on the runner.
Predictor = Callable[[Iterable[Member]], Iterator[Tensor]]


@dataclass(frozen=True)
class MemberReport:
    name: str
    confidence: float
    metrics: Metrics | None = None


@dataclass(frozen=True, eq=False)
class Vote:
    """The mean probabilities [J, classes, …] and what is known about those who voted.

    disagreement: how often two members, drawn at random, name different classes (None for a single member).
    left_out: names of members whose predictions were not finite.
    """

    probabilities: Tensor
    members: tuple[MemberReport, ...]
    disagreement: float | None
    metrics: Metrics | None = None
    left_out: tuple[str, ...] = ()


def parse_members(letters: str) -> frozenset[str]:
    """The kinds in a word like "SAC".

    >>> sorted(parse_members("SC"))
    ['C', 'S']
    """
    kinds = frozenset(letters)
    if not kinds or len(kinds) != len(letters) or kinds - MEMBER_KINDS.keys():
        raise SettingError(
            f"`members` must be one or more of S ({MEMBER_KINDS['S']}), A ({MEMBER_KINDS['A']}), "
            f"C ({MEMBER_KINDS['C']}), each once, like 'SAC'; got '{letters}'"
        )
    return kinds


@torch.no_grad()
def predict(runner: ModelRunner, state: ModelState, inputs: Inputs) -> Tensor:
    """Probabilities [J, classes, …] of one model, in evaluation mode, on plain inputs."""
    runner.load(state)
    runner.module.eval()
    probabilities: Tensor | None = None
    for index in batches(len(inputs), runner.plan.batch_size):
        part = runner.logits(inputs.batch(index)).softmax(1)
        if probabilities is None:
            probabilities = part.new_empty((len(inputs), *part.shape[1:]))
        probabilities[index[0] : index[-1] + 1] = part
    assert probabilities is not None, "inputs are checked at the door to be at least one"
    return probabilities


def local_predictor(runner: ModelRunner, inputs: Inputs) -> Predictor:
    """The predictor of this process: every member on the same runner, one after the other."""

    def run(members: Iterable[Member]) -> Iterator[Tensor]:
        for member in members:
            yield predict(runner, member.state, inputs)

    return run


def vote(members: Iterable[Member], predictor: Predictor, labels: Tensor | None = None) -> Vote:
    """Average the members' probabilities; labels, if there are any, are for the report only.

    A member whose predictions are not finite cannot vote: it is left out, by name.
    Disagreement is 1 − mean_j Σ_c v_jc (v_jc − 1) / (M (M − 1)), with v_jc the members that name class c.
    """
    reports: list[MemberReport] = []
    names: list[str] = []
    left_out: list[str] = []
    total: Tensor | None = None
    votes: Tensor | None = None

    def noted() -> Iterator[Member]:
        for member in members:
            names.append(member.name)
            yield member

    for position, part in enumerate(predictor(noted())):
        name = names[position]
        if not bool(torch.isfinite(part).all()):
            left_out.append(name)
            continue
        if total is None or votes is None:
            total, votes = torch.zeros_like(part), torch.zeros_like(part, dtype=torch.int16)
        total += part
        votes.scatter_add_(1, part.argmax(1, keepdim=True), torch.ones_like(votes[:, :1]))
        judged = None if labels is None else compute_metrics(part, labels)
        reports.append(MemberReport(name, confidence(part), judged))
    if total is None or votes is None:
        raise AggregationError("no member of the ensemble gave finite predictions: the global model is unchanged")
    count = len(reports)
    mean = total.div_(count)
    agreement = (votes.double() * (votes - 1)).sum(1).mean() / (count * (count - 1)) if count > 1 else None
    return Vote(
        probabilities=mean,
        members=tuple(reports),
        disagreement=None if agreement is None else 1.0 - float(agreement),
        metrics=None if labels is None else compute_metrics(mean, labels),
        left_out=tuple(left_out),
    )
