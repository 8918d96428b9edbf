"""The vote of several saved members, and files whose header says something else than their tensors."""

import resource
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedbe import models
from fedbe.errors import RunError
from fedbe.experiment.saved_model import VotingModel, load_trained_model
from fedbe.experiment.tensor_files import write_tensors

MODEL = {"name": "mlp", "classes": 2, "shape": [4], "settings": {"hidden": [8]}}
HEADER = {"model": MODEL, "classes": ["a", "b"], "mean": [0.0] * 4, "std": [1.0] * 4, "members": 1, "vote": "mean"}


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


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, None),
        *[({name: None}, f"its header has no '{name}'") for name in ("model", "mean", "std", "classes", "members")],
        ({"classes": 3}, "`classes` must be a list of names, got 3"),
        ({"members": -1}, "`members` must be a whole number >= 1, got -1"),
        ({"members": 0}, "`members` must be a whole number >= 1, got 0"),
        ({"members": 10**9}, "does not fit 'mlp'"),
        ({"mean": "x"}, "is damaged"),
        ({"classes": ["a"]}, "its header has 1 names of 2 classes"),
        (
            {"model": {**MODEL, "classes": 1}, "classes": ["a"]},
            "does not fit 'mlp' as it is now: `classes` must be >= 2",
        ),
        ({"mean": [[1], [1, 2]]}, "is damaged"),
        ({"model": {**MODEL, "settings": {"hidden": [12000, 12000]}}}, r"must be \[12000, 4\] and is \[8, 4\]"),
        ({"model": {**MODEL, "settings": {"hidden": [10**9, 10**9]}}}, "does not fit 'mlp'"),
        ({"model": {**MODEL, "classes": 10**7}}, r"must be \[10000000, 8\] and is \[2, 8\]"),
        ({"model": {**MODEL, "name": [1]}}, "is damaged"),
    ],
)
def test_a_header_with_a_valid_checksum_is_checked_and_takes_no_memory(tmp_path: Path, changes, sentence) -> None:
    network = models.build("mlp", 2, (4,), torch.Generator(), hidden=(8,))
    header = {name: value for name, value in (HEADER | changes).items() if value is not None}
    write_tensors(tmp_path / "model.safetensors", header, network.state_dict())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sentence is None:
        assert load_trained_model(tmp_path).predict_proba(torch.zeros(3, 4)).shape == (3, 2)
        return
    with pytest.raises(RunError, match=sentence):
        load_trained_model(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB; 12000 × 12000 are 576 MB
