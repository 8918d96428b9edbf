"""Balance a vote: give it the mix of classes that its members expect together.

Where clients' classes differ, some classes have large clients or many, and a vote names these too often. The average
does, too. No label is needed to see that: the mean of a prediction over the server's inputs is the mix of classes that
it expects, and it should be the mix of all clients' data.

    p̂[j, c] ∝ p[j, c] · b[c]   with b such that the mean of p̂³ (normalised) over the inputs is the target mix

The mix is that of the cubes because a vote of many members is flat: each input adds a little of every class. Its cubes,
which a student of the default variant learns, are about as sure as they are right.
"""

import torch
from torch import Tensor

EXPONENT = 3.0
PASSES = 10  # of iterative proportional fitting; ten more changed at most 1 % of the first choices
LIMIT = 10.0  # no class counts more than 10 times more, or less, than before
STANDARD_ERRORS = 3  # by which the members' mix must differ from the uniform one to be believed in part
_ONE = 2**32  # sums are of integers, so they depend neither on the order of the inputs nor on the number of threads


def class_mix(probabilities: Tensor) -> Tensor:
    """The mean of probabilities [J, classes, …] over everything but the classes: [classes], float64 on the host.

    Example:
        >>> class_mix(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
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


def balance(probabilities: Tensor, target: Tensor) -> Tensor:
    """Scale the classes so that the mean of the cubes over the inputs becomes the target mix.

    The factors of the cubes are found by iterative proportional fitting: ten times b[c] ← b[c] · target[c] / mix[c]. No
    class counts more than 10 times more, or less, than before.

    Args:
        probabilities: p [J, classes, …]. J should be large: the mean of few inputs does not show their mix.
        target: the mix [classes].

    Returns:
        p̂, of the same shape and on the same device, in new memory.

    Example:
        >>> vote = torch.tensor([[0.9, 0.1], [0.6, 0.4]])  # names the first class twice
        >>> balance(vote, torch.tensor([0.5, 0.5])).argmax(1)
        tensor([0, 1])
    """
    shape = (-1, *(1,) * (probabilities.dim() - 2))  # classes are in dimension 1
    cubes = _normalised(probabilities.cpu().double() ** EXPONENT)
    factors = torch.ones_like(target, dtype=torch.float64)
    for _ in range(PASSES):
        mix = class_mix(_normalised(cubes * factors.view(shape)))
        factors = (factors * target / mix.clamp(min=1e-12)).clamp(LIMIT**-EXPONENT, LIMIT**EXPONENT)
    balanced = _normalised(probabilities.cpu().double() * (factors ** (1 / EXPONENT)).view(shape))
    return balanced.to(probabilities.dtype).to(probabilities.device)


def _normalised(probabilities: Tensor) -> Tensor:
    return probabilities / probabilities.sum(1, keepdim=True)
