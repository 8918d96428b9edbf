from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from fedbe import ClientUpdate, Server
from fedbe.algorithms.ensemble import EnsembleSettings
from fedbe.algorithms.methods import get_method
from fedbe.algorithms.server.context import Context, Round, StepInfo
from fedbe.algorithms.server.transforms import ClipNorm
from fedbe.core.model_runner import ModelRunner
from fedbe.errors import AggregationError, SettingError


@pytest.fixture
def round_of(state):
    def make(updates, previous=(1.0, 1.0, 1.0, 1.0)):
        runner = ModelRunner(nn.Linear(2, 2, bias=False))
        return Round(updates, state(previous), Context(runner, 0, 1), StepInfo())

    return make


@dataclass(frozen=True)
class OnlyFirst:
    """Keeps the first `count` updates."""

    count: int = 1

    def __call__(self, round):
        return round.updates[: self.count]


class TestClipNorm:
    def test_by_hand(self, round_of, update):
        # changes (3 4 0 0) of norm 5, clipped to 1: (0.6 0.8 0 0); and (0 0 0.5 0) of norm 0.5, left alone
        far, near = update(0, [4.0, 5, 1, 1], 2), update(1, [1.0, 1, 1.5, 1], 3)
        clipped = ClipNorm(max_update_norm=1.0)(round_of([far, near]))
        torch.testing.assert_close(clipped[0].state.params, torch.tensor([1.6, 1.8, 1, 1]))
        assert clipped[1] is near
        assert (clipped[0].client_id, clipped[0].num_examples) == (0, 2)
        assert far.state.params.tolist() == [4, 5, 1, 1]

    @pytest.mark.parametrize("norm", [0.0, -1.0, float("inf"), float("nan")])
    def test_norms_that_cannot_work(self, norm):
        with pytest.raises(SettingError, match="max_update_norm"):
            ClipNorm(norm)


def _aggregate(name, transforms, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    method = replace(get_method(name, "paper"), transforms=transforms)
    server = Server(method, model, unlabeled=torch.randn(20, 4), **settings)
    start = model.state_dict()
    updates = [ClientUpdate({k: v + i + 1 for k, v in start.items()}, 5, i) for i in range(3)]
    return server, start, server.aggregate(start, updates)


QUICK = {"num_samples": 2, "distill_epochs": 1}


@pytest.mark.parametrize(("name", "settings"), [("fedavg", {}), ("fedbe", QUICK)])
def test_every_stage_sees_the_transformed_updates(name, settings):
    server, _, _ = _aggregate(name, (OnlyFirst(),), **settings)
    assert server.info.clients == (0,)
    if name == "fedbe":
        assert [m.name for m in server.info.step.members] == ["sample 1", "sample 2", "average", "client 0"]


def test_transforms_run_in_order_and_their_fields_are_settings():
    server, start, new = _aggregate("fedavg", (ClipNorm(), OnlyFirst(count=3)), max_update_norm=1e-3, count=1)
    change = torch.cat([(new[k] - start[k]).flatten() for k in start])
    assert float(change.norm()) == pytest.approx(1e-3, rel=1e-3)
    assert "transform" in server.info.step.seconds


def test_transforms_that_leave_nobody():
    with pytest.raises(AggregationError, match="left no client update"):
        _aggregate("fedavg", (OnlyFirst(count=0),))


def test_without_transforms_nothing_is_timed():
    server, _, _ = _aggregate("fedavg", ())
    assert "transform" not in server.info.step.seconds


@dataclass(frozen=True)
class Zero:
    """Sets all weights to zero, and fits a posterior to the old ones."""

    def __call__(self, round):
        round.fit_posterior(EnsembleSettings(members="S", num_samples=2))
        return [replace(u, state=replace(u.state, params=torch.zeros_like(u.state.params))) for u in round.updates]


def test_a_posterior_of_other_updates_is_not_used():
    server, _, _ = _aggregate("fedbe", (Zero(),), members="S", **QUICK)
    assert [m.confidence for m in server.info.step.members] == pytest.approx([1 / 3, 1 / 3])
