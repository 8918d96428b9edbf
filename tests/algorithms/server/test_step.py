"""The hook of the step, and samples that are drawn once."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from fedbe import ClientUpdate, Gaussian
from fedbe.algorithms.ensemble import EnsembleSettings
from fedbe.algorithms.methods import METHODS, get_method
from fedbe.algorithms.server.context import Context
from fedbe.algorithms.server.stages import Stage
from fedbe.algorithms.server.step import server_step
from fedbe.core.inputs import TensorInputs
from fedbe.core.model_runner import ModelRunner

QUICK = {"num_samples": 2, "distill_epochs": 1, "distill_batch_size": 8}


def vector(state):
    return torch.cat([state.params, state.buffers])


@pytest.fixture
def step():
    """step(name, on_draft=…): one server step of a method with three clients around a global model."""

    def run(name, on_draft=None, **settings):
        torch.manual_seed(0)
        runner = ModelRunner(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
        start = runner.read()
        near = lambda i: replace(start, params=start.params + 0.1 * i * torch.ones_like(start.params))  # noqa: E731
        method = get_method(name, "paper")
        extras = {extra: torch.zeros_like(start.params) for extra in method.extras}
        updates = [ClientUpdate(near(i), 10 + i, i, extras) for i in range(3)]
        method = method.with_settings({k: v for k, v in (QUICK | settings).items() if k in method.settings()})
        context = Context(runner, 0, 1, TensorInputs(torch.randn(24, 4)))
        return server_step(method.stages, start, updates, {}, context, extras=method.extras, on_draft=on_draft), start

    return run


@pytest.mark.parametrize("name", METHODS)
def test_the_hook_sees_the_draft_before_the_model_is_replaced_and_changes_nothing(step, name):
    drafts = []
    seen, _ = step(name, lambda draft, round: drafts.append((vector(draft.state).clone(), len(round.updates))))
    plain, _ = step(name)
    ((params, count),) = drafts
    assert count == 3
    assert torch.equal(vector(seen.state), vector(plain.state))
    kept_model = not any(s.replaces_model for s in get_method(name).stages) or name == "1-ensemble"
    assert torch.equal(params, vector(seen.state)) == kept_model


def test_samples_that_were_kept_are_not_drawn_again(step, monkeypatch):
    fits = []
    fit_round = Gaussian.fit_round
    monkeypatch.setattr(Gaussian, "fit_round", lambda *a, **k: fits.append(1) or fit_round(*a, **k))
    settings = EnsembleSettings(members="S", num_samples=2)
    kept, _ = step("fedbe", lambda _, round: round.keep_samples(settings))
    assert len(fits) == 1
    plain, _ = step("fedbe")
    assert len(fits) == 2
    assert torch.equal(kept.state.params, plain.state.params)


def test_other_samples_than_the_kept_ones_are_drawn(step):
    result, _ = step("fedbe", lambda _, round: round.keep_samples(EnsembleSettings(members="S", num_samples=5)))
    assert [m.name for m in result.info.members][:3] == ["sample 1", "sample 2", "average"]


def test_a_stage_of_one_s_own_needs_no_more_than_a_call():
    @dataclass(frozen=True)
    class Half(Stage):
        rate: float = 0.5

        def __call__(self, draft, round):
            params = torch.lerp(round.previous.params, draft.state.params, self.rate)
            return replace(draft, state=replace(draft.state, params=params))

    assert not Half().needs_rounds
    assert not Half().needs_unlabeled(nn.Linear(1, 1))
    assert Half().result is None
    assert not Half.replaces_model
    method = replace(get_method("fedavg"), stages=(*get_method("fedavg").stages, Half()))
    assert method.settings() == get_method("fedavg").settings() | {"rate": 0.5}
    assert method.result == "average"


def test_results_of_methods():
    results = {name: method.result for name, method in METHODS.items()}
    assert results == {
        "fedavg": "average", "fedavgm": "model", "fedprox": "average", "scaffold": "average",
        "v-distillation": "student", "1-ensemble": "kept members' vote", "fedbe": "student", "fedbe-sgd": "student",
        "fedbe+fedprox": "student", "fedbe+fedavgm": "student", "fedbe+scaffold": "student",
        "fedavg-bn": "model", "fedadam": "model", "fedyogi": "model", "feddyn": "model", "feddf": "student",
        "past-averages": "student", "fedavg-median": "average", "fedbe-median": "student",
    }  # fmt: skip
    assert get_method("fedbe", "tuned").result == get_method("fedbe", "auto").result == "model"
