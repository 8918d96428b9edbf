"""Balance a vote: give it the mix of classes that its members expect together.

Where clients' classes differ, some classes have large clients or many, and a vote names these too often. The average
does, too. No label is needed to see that: the mean of a prediction over the server's inputs is the mix of classes that
it expects, and it should be the mix of all clients' data.

    p̂[j, c] ∝ p[j, c] · b[c]   with b such that the mean of p̂³ (normalised) over the inputs is the target mix

The mix is that of the cubes because a vote of many members is flat: each input adds a little of every class. Its cubes,
which a student of the default variant learns, are about as sure as they are right.
"""

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from fedbe.errors import SettingError

EXPONENT = 3.0
PASSES = 10  # of iterative proportional fitting; ten more changed at most 1 % of the first choices
LIMIT = 10.0  # no class counts more than 10 times more, or less, than before
STANDARD_ERRORS = 3  # by which the members' mix must differ from the uniform one to be believed in part
MAX_COUNT = 1e15  # of one class in `class_mix`; larger numbers are mistakes, and the sum of the largest is infinite
_ONE = 2**32  # sums are of integers, so they depend neither on the order of the inputs nor on the number of threads


def expected_mix(probabilities: Tensor) -> Tensor:
    """The mean of probabilities [J, classes, …] over everything but the classes: [classes], float64 on the host.

    Example:
        >>> expected_mix(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    by_class = probabilities.cpu().transpose(0, 1).flatten(1)
    return (by_class.double() * _ONE).round().long().sum(1).double() / (_ONE * by_class.shape[1])


def target_mix(mixes: Tensor) -> Tensor:
    """The mix of classes that members expect together, shrunk towards the uniform mix as far as they disagree.

        λ · u + (1 − λ) · m̄   with m̄ = (1/M) Σ_m m_m, u = 1/classes and λ = min(1, (3 s / ‖m̄ − u‖)²),

    where s² = Σ_m ‖m_m − m̄‖² / (M (M − 1)) estimates the variance of m̄ (as in James and Stein's shrinkage).
    Members that agree (clients with the same mix) are believed, whatever their mix is. A mean that is within three
    standard errors of the uniform mix says little, as where each client has few classes, and the uniform mix is used.
    So a few hostile members do not choose the mix either: they disagree with the others.

    Args:
        mixes: m_m, one row for each of M ≥ 2 members: [M, classes].

    Example:
        >>> target_mix(torch.tensor([[0.9, 0.1], [0.9, 0.1]]))  # they agree
        tensor([0.9000, 0.1000])
        >>> target_mix(torch.tensor([[1.0, 0.0], [0.3, 0.7]]))  # s² = 0.245, ‖m̄ − u‖² = 0.045
        tensor([0.5000, 0.5000])
    """
    members, classes = mixes.shape
    mean = mixes.mean(0)
    uniform = torch.full_like(mean, 1 / classes)
    variance = (mixes - mean).square().sum() / (members * (members - 1))
    distance = (mean - uniform).square().sum()
    doubt = STANDARD_ERRORS**2 * variance
    return torch.lerp(mean, uniform, float(doubt / distance) if doubt < distance else 1.0)


def noticed_target(target: Tensor, probabilities: Tensor) -> Tensor:
    """The target mix, moved towards the mix that the vote has, as far as chance explains the distance between them.

        λ · m + (1 − λ) · target   with λ = min(1, s² / ‖m − target‖²)

    m is the mean over J inputs of the vote's cubes m_j (normalised), and s² = Σ_c Σ_j (m_jc − m_c)² / (J (J − 1))
    estimates the variance of m. The classes of 20 inputs differ from those of all inputs by chance; to give their vote
    the target mix would make it worse. With 10,000 inputs λ is small, and with one input the vote stays as it is.

    Args:
        target: the mix that the vote should have: [classes].
        probabilities: the vote [J, classes, …]; the pixels of an input count as one.

    Example:
        >>> vote = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])  # m = (2/3, 1/3), s² = 2/9, distance² = 1/18
        >>> noticed_target(torch.tensor([0.5, 0.5]), vote)
        tensor([0.6667, 0.3333], dtype=torch.float64)
    """
    cubes = _cubes(probabilities).flatten(2).mean(2) if probabilities.dim() > 2 else _cubes(probabilities)
    mix, count = expected_mix(cubes), len(cubes)
    if count < 2:
        return mix
    variance = (expected_mix(cubes.square()) - mix.square()).sum() / (count - 1)
    distance = (mix - target).square().sum()
    return torch.lerp(target.double(), mix, float(variance / distance) if variance < distance else 1.0)


def check_mix(mix: Sequence[float]) -> tuple[float, ...]:
    """The shares or counts of a setting as a tuple.

    Raises:
        SettingError: if they are not numbers from 0 to `MAX_COUNT`, or all are 0.

    Example:
        >>> check_mix([90, 10])
        (90, 10)
    """
    values = tuple(mix)
    valid = all(isinstance(v, Real) and not isinstance(v, bool) and 0 <= v <= MAX_COUNT for v in values)
    if not valid or (values and not any(values)):
        problem = f"`class_mix` must be numbers >= 0 and at most {MAX_COUNT:g}, not all of them 0, got {list(values)}"
        raise SettingError(problem[:200])
    return values


def known_mix(mix: Sequence[float], classes: int) -> Tensor:
    """The shares of the classes, as given by the server's owner: [classes], with the sum 1.

    Raises:
        SettingError: if there is not one number for each class.

    Example:
        >>> known_mix([90, 10], classes=2)
        tensor([0.9000, 0.1000], dtype=torch.float64)
    """
    if len(mix) != classes:
        raise SettingError(f"`class_mix` must have a number for each of the model's {classes} classes, got {len(mix)}")
    shares = torch.tensor(mix, dtype=torch.float64)
    return shares / shares.sum()


def balance(probabilities: Tensor, target: Tensor) -> Tensor:
    """Scale the classes so that the mean of the cubes over the inputs becomes the target mix.

    The factors of the cubes are found by iterative proportional fitting: ten times b[c] ← b[c] · target[c] / mix[c]. No
    class counts more than 10 times more, or less, than before.

    Args:
        probabilities: p [J, classes, …].
        target: the mix [classes].

    Returns:
        p̂, of the same shape and on the same device, in new memory.

    Example:
        >>> vote = torch.tensor([[0.9, 0.1], [0.6, 0.4]])  # names the first class twice
        >>> balance(vote, torch.tensor([0.5, 0.5])).argmax(1)
        tensor([0, 1])
    """
    shape = (-1, *(1,) * (probabilities.dim() - 2))  # classes are in dimension 1
    cubes = _cubes(probabilities)
    factors = torch.ones_like(target, dtype=torch.float64)
    for _ in range(PASSES):
        mix = expected_mix(_normalised(cubes * factors.view(shape)))
        factors = (factors * target / mix.clamp(min=1e-12)).clamp(LIMIT**-EXPONENT, LIMIT**EXPONENT)
    balanced = _normalised(probabilities.cpu().double() * (factors ** (1 / EXPONENT)).view(shape))
    return balanced.to(probabilities.dtype).to(probabilities.device)


def balance_by_members(probabilities: Tensor, mixes: Tensor) -> Tensor:
    """Give a vote [J, classes, …] the mix that its members expect together, as far as J inputs show another one.

    Args:
        probabilities: the vote.
        mixes: one row for each of M ≥ 2 members: [M, classes].
    """
    return balance(probabilities, noticed_target(target_mix(mixes), probabilities))


def _cubes(probabilities: Tensor) -> Tensor:
    return _normalised(probabilities.cpu().double() ** EXPONENT)


def _normalised(probabilities: Tensor) -> Tensor:
    return probabilities / probabilities.sum(1, keepdim=True)
