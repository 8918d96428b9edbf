"""The vote of many models (Eq. 4 of the paper), and the rules that combine their predictions.

    p(y|x) ≈ (1/M) Σ_m p(y|x; w_m)

Members predict one after the other, so memory does not grow with their number (unless a rule needs all of them).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbe.algorithms.balance import balance, balance_by_members, expected_mix, known_mix
from fedbe.core.inputs import Inputs, batches
from fedbe.core.metrics import Metrics, compute_metrics, confidence
from fedbe.core.model_runner import ModelRunner
from fedbe.core.state import ModelState
from fedbe.errors import AggregationError, SettingError, nearest

# The predictions of the members, one tensor [J, classes, …] each -> one tensor of the same shape.
VoteRule = Callable[[Iterable[Tensor]], Tensor]


def mean_vote(predictions: Iterable[Tensor]) -> Tensor:
    """The mean of the members' probabilities: (1/M) Σ_m p_m (Eq. 4).

    Args:
        predictions: at least one tensor of probabilities [J, classes, …]. They are read one at a time.

    Returns:
        Probabilities of the same shape, in new memory.

    Example:
        >>> mean_vote([torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]])])
        tensor([[0.7500, 0.2500]])
    """
    total: Tensor | None = None
    count = 0
    for part in predictions:
        total = part.clone() if total is None else total.add_(part)
        count += 1
    assert total is not None, "`vote` hands over at least one prediction"
    return total.div_(count)


def logits_vote(predictions: Iterable[Tensor]) -> Tensor:
    """The softmax of the members' mean logits (FedDF), from their probabilities: p ∝ exp((1/M) Σ_m log p_m).

    A member's log-probabilities are its logits minus one number for each input, which the softmax removes again.
    Probabilities below 1e-38 count as 1e-38.

    Example:
        >>> logits_vote([torch.tensor([[0.8, 0.2]]), torch.tensor([[0.5, 0.5]])])  # √.4 : √.1 = 2 : 1
        tensor([[0.6667, 0.3333]])
    """
    tiny = torch.finfo(torch.float32).tiny
    return mean_vote(part.clamp(min=tiny).log() for part in predictions).softmax(1)


def softened_vote(predictions: Iterable[Tensor]) -> Tensor:
    """The mean of the members' softened probabilities: (1/M) Σ_m q_m with q_m ∝ √p_m, a softmax at temperature 2.

    A client that has trained on few classes is surest where it knows least. Softened, it outvotes the others less
    often. Where all members agree on p, the vote is q, and `sharpening` e gives p^(e/2).

    Args:
        predictions: at least one tensor of probabilities [J, classes, …]. They are read one at a time.

    Returns:
        Probabilities of the same shape, in new memory.

    Example:
        >>> softened_vote([torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])])
        tensor([[0.6250, 0.3750]])
    """
    return mean_vote(_softened(part) for part in predictions)


def _softened(probabilities: Tensor) -> Tensor:
    roots = probabilities.sqrt()
    return roots.div_(roots.sum(1, keepdim=True))


def median_vote(predictions: Iterable[Tensor]) -> Tensor:
    """The median of the members' probabilities, normalized to sum to 1: members below half cannot decide.

    All predictions are in memory at once.

    Example:
        >>> median_vote([torch.tensor([[0.8, 0.2]]), torch.tensor([[0.6, 0.4]]), torch.tensor([[0.0, 1.0]])])
        tensor([[0.6000, 0.4000]])
    """
    return _trimmed(torch.stack(list(predictions)), 0.5)


def trimmed_vote(predictions: Iterable[Tensor]) -> Tensor:
    """The mean of the probabilities without the smallest and the largest three tenths, normalized to sum to 1."""
    return _trimmed(torch.stack(list(predictions)), 0.3)


def consensus_vote(predictions: Iterable[Tensor]) -> Tensor:
    """The weighted mean Σ_m a_m p_m: members that are far from the median vote p̃ count little.

    a_m ∝ exp(−(d_m/d)²), where d_m is the mean of |p_m − p̃| and d the median of all d_m.

    Example:
        >>> consensus_vote([torch.tensor([[0.8, 0.2]]), torch.tensor([[0.7, 0.3]]), torch.tensor([[0.0, 1.0]])])
        tensor([[0.7269, 0.2731]])
    """
    stacked = torch.stack(list(predictions))
    distances = (stacked - _trimmed(stacked, 0.5)).abs().flatten(1).double().mean(1)
    weights = torch.exp(-(distances / distances.median().clamp(min=1e-12)).square())
    weights = (weights / weights.sum()).to(stacked.dtype)
    return torch.einsum("m,m...->...", weights, stacked)


def _trimmed(stacked: Tensor, fraction: float) -> Tensor:
    """The normalized mean of each probability without that part of the smallest and of the largest values."""
    count = len(stacked)
    cut = min(int(fraction * count), (count - 1) // 2)
    middle = stacked.sort(dim=0).values[cut : count - cut].mean(dim=0).clamp_(min=1e-12)
    return middle.div_(middle.sum(1, keepdim=True))


# Every rule by its name: `--set settings.vote=NAME`. A new rule is a function and a row here.
VOTE_RULES: dict[str, VoteRule] = {
    "mean": mean_vote,
    "softened": softened_vote,
    "logits": logits_vote,
    "median": median_vote,
    "trimmed": trimmed_vote,
    "consensus": consensus_vote,
}


def get_vote_rule(name: str) -> VoteRule:
    """The vote rule of that name.

    Raises:
        SettingError: if there is no such rule.
    """
    if name not in VOTE_RULES:
        raise SettingError(f"unknown vote '{name}': {nearest(name, VOTE_RULES)}")
    return VOTE_RULES[name]


@dataclass(frozen=True, eq=False)
class Member:
    """One model that votes. `name` says which: "sample 1", "average", "client 3"."""

    name: str
    state: ModelState


# Turns members into probabilities [J, classes, …], in the order of the members. The simulator's predictor asks worker
# processes; `local_predictor` asks the model runner of this process.
Predictor = Callable[[Iterable[Member]], Iterator[Tensor]]


@dataclass(frozen=True)
class MemberReport:
    """What is known about one member's predictions; `metrics` only where labels were given."""

    name: str
    confidence: float
    metrics: Metrics | None = None


@dataclass(frozen=True, eq=False)
class Vote:
    """The result of a vote.

    Attributes:
        probabilities: the combined prediction [J, classes, …].
        members: one report for each member that voted.
        disagreement: the probability that two members, drawn at random, name different classes; None for one member.
        metrics: of the combined prediction, where labels were given.
        left_out: names of members whose predictions were not finite.
    """

    probabilities: Tensor
    members: tuple[MemberReport, ...]
    disagreement: float | None
    metrics: Metrics | None = None
    left_out: tuple[str, ...] = ()


@torch.no_grad()
def predict(runner: ModelRunner, state: ModelState, inputs: Inputs) -> Tensor:
    """Probabilities [J, classes, …] of one model in evaluation mode. Inputs are not augmented."""
    runner.load(state)
    runner.module.eval()
    probabilities: Tensor | None = None
    for index in batches(len(inputs), runner.plan.batch_size):
        part = runner.logits(inputs.batch(index)).softmax(1)
        if probabilities is None:
            probabilities = part.new_empty((len(inputs), *part.shape[1:]))
        probabilities[index[0] : index[-1] + 1] = part
    assert probabilities is not None, "the public interface checks that there is at least one input"
    return probabilities


def local_predictor(runner: ModelRunner, inputs: Inputs) -> Predictor:
    """A predictor that runs all members in this process, one after the other, on one module."""

    def run(members: Iterable[Member]) -> Iterator[Tensor]:
        for member in members:
            yield predict(runner, member.state, inputs)

    return run


class _Ballots:
    """Collects what the report says about each member while its predictions pass by on their way to the rule."""

    def __init__(self, labels: Tensor | None, notes_mixes: bool) -> None:
        self._labels = labels
        self._notes_mixes = notes_mixes
        self.mixes: list[Tensor] = []  # the mean prediction of each member, if a vote is balanced
        self._choices: Tensor | None = None  # [J, classes, …]: how many members name each class
        self.reports: list[MemberReport] = []
        self.left_out: list[str] = []

    def admit(self, name: str, part: Tensor) -> bool:
        """Record one member's predictions. False if they are not finite: then the member does not vote."""
        if not bool(torch.isfinite(part).all()):
            self.left_out.append(name)
            return False
        if self._choices is None:
            self._choices = torch.zeros_like(part, dtype=torch.int16)
        first_choice = part.argmax(1, keepdim=True)
        self._choices.scatter_add_(1, first_choice, torch.ones_like(first_choice, dtype=torch.int16))
        if self._notes_mixes:
            self.mixes.append(expected_mix(part))
        metrics = None if self._labels is None else compute_metrics(part, self._labels)
        self.reports.append(MemberReport(name, confidence(part), metrics))
        return True

    def disagreement(self) -> float | None:
        """1 − mean_j Σ_c v_jc (v_jc − 1) / (M (M − 1)), where v_jc members name class c for input j."""
        count = len(self.reports)
        if self._choices is None or count < 2:
            return None
        choices = self._choices.cpu()
        pairs = (choices.double() * (choices - 1)).sum(1).mean()
        return 1.0 - float(pairs / (count * (count - 1)))


def vote(
    members: Iterable[Member],
    predictor: Predictor,
    labels: Tensor | None = None,
    *,
    rule: VoteRule = mean_vote,
    balanced: bool = False,
    class_mix: Sequence[float] = (),
) -> Vote:
    """Let the members predict and combine their predictions.

    Args:
        members: the voters. They are drawn one at a time.
        predictor: turns members into probabilities, in their order.
        labels: true labels [J, …] of the inputs. They are used for the report only.
        rule: combines the predictions; the default is the mean.
        balanced: whether the combined prediction gets the mix of classes that the members expect together.
        class_mix: the mix that it gets instead, where that is known: a share or a count for each class.

    Returns:
        The combined prediction and a report on each member. A member whose predictions are not finite does not vote.

    Raises:
        AggregationError: if no member gives finite predictions.
        SettingError: if `class_mix` does not have one number for each class.
    """
    ballots = _Ballots(labels, balanced)
    names: list[str] = []

    def named() -> Iterator[Member]:
        for member in members:
            names.append(member.name)
            yield member

    predictions = (p for i, p in enumerate(predictor(named())) if ballots.admit(names[i], p))
    first = next(predictions, None)
    if first is None:
        raise AggregationError("no member of the ensemble gave finite predictions: the global model is unchanged")

    def valid() -> Iterator[Tensor]:
        yield first
        yield from predictions

    combined = rule(valid())
    if class_mix:
        combined = balance(combined, known_mix(class_mix, combined.shape[1]))
    elif len(ballots.mixes) > 1:
        combined = balance_by_members(combined, torch.stack(ballots.mixes))
    return Vote(
        probabilities=combined,
        members=tuple(ballots.reports),
        disagreement=ballots.disagreement(),
        metrics=None if labels is None else compute_metrics(combined, labels),
        left_out=tuple(ballots.left_out),
    )
