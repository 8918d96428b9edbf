"""The vote of several saved members."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedbe.experiment.saved_model import VotingModel


class Constant(nn.Module):
    """Logits whose softmax is the given probabilities, for any input."""

    def __init__(self, *probabilities: float) -> None:
        super().__init__()
        self._logits = torch.tensor([probabilities]).log()

    def forward(self, x: Tensor) -> Tensor:
        return self._logits.expand(len(x), -1)


def first_vote(predictions: Iterable[Tensor]) -> Tensor:
    return next(iter(predictions))


def test_softmax_of_the_output_is_the_vote() -> None:
    members, x = [Constant(0.9, 0.1), Constant(0.5, 0.5)], torch.zeros(2, 3)
    assert torch.allclose(VotingModel(members)(x).softmax(1), torch.tensor([0.7, 0.3]).expand(2, 2))
    assert torch.allclose(VotingModel(members, first_vote)(x).softmax(1), torch.tensor([0.9, 0.1]).expand(2, 2))
