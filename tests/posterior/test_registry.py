"""The registry: the server fits every posterior with the same call."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fedbe import ClientUpdate, FedBE, Layout, ModelState, SettingError
from fedbe.posterior import POSTERIORS, Posterior, PosteriorSettings, get_posterior


@pytest.fixture
def fit(update, state):
    """Fit the posterior with this name to two clients that started from (1 1 | 0)."""
    layout = Layout(nn.Linear(2, 1))
    clients = [update(0, [4.0, 5.0, 2.0], 1), update(1, [1.0, -9.0, 0.0], 3)]

    def call(name, **settings):
        return get_posterior(name).fit_round(
            clients, previous=state([1.0, 1.0, 0.0]), layout=layout, settings=PosteriorSettings(**settings)
        )

    return call


@pytest.mark.parametrize(
    ("name", "mean"),
    [
        ("gaussian", [1.75, -5.5, 0.5]),  # (1·a + 3·b)/4
        ("dirichlet", [1.75, -5.5, 0.5]),
        ("gaussian-released", [3.25, 0.25, 0.5]),  # worked out in test_gaussian.py
    ],
)
def test_one_call_fits_every_posterior(fit, name, mean):
    posterior = fit(name)
    torch.testing.assert_close(posterior.mean_state.params, torch.tensor(mean))
    torch.testing.assert_close(posterior.mean["weight"], torch.tensor([mean[:2]]))
    states = posterior.sample_states(3, torch.Generator().manual_seed(0))
    models = posterior.sample(3, torch.Generator().manual_seed(0))
    for packed, named in zip(states, models, strict=True):
        assert packed.params.tolist() == [*named["weight"][0].tolist(), *named["bias"].tolist()]


def test_each_posterior_takes_its_settings(fit):
    assert fit("gaussian", scale=2.0, sample_buffers=True).scale == 2
    assert fit("gaussian", sample_buffers=True).sample_buffers
    assert fit("gaussian-released", scale=0.5).scale == 0.05  # 0.1 · scale
    assert fit("gaussian-released", sample_buffers=True).sample_buffers
    assert fit("dirichlet", alpha={0: 0.5, 1: 2.0}).alpha.tolist() == [0.5, 2]


def test_a_mistyped_name_gets_a_hint():
    with pytest.raises(SettingError, match="did you mean 'gaussian'"):
        get_posterior("gausian")


@pytest.mark.parametrize("settings", [{"scale": -1.0}, {"alpha": 0.0}, {"alpha": {0: 1.0, 1: -1.0}}])
def test_settings_are_checked_before_anything_is_fitted(settings):
    with pytest.raises(SettingError, match=f"`{next(iter(settings))}`"):
        PosteriorSettings(**settings)


@dataclass(frozen=True, eq=False)
class Constant(Posterior):
    """A new posterior: every sample is the previous global model."""

    state: ModelState

    @classmethod
    def fit_round(cls, updates, *, previous, layout, settings):  # noqa: ARG003
        return cls(previous, layout=layout)

    @property
    def mean_state(self):
        return self.state

    def sample_states(self, n, generator):  # noqa: ARG002
        return iter([self.state] * n)


@pytest.mark.parametrize(("posterior", "agree"), [("constant", True), ("gaussian", False)])
def test_a_row_is_all_that_a_new_posterior_needs(monkeypatch, rng, posterior, agree):
    monkeypatch.setitem(POSTERIORS, "constant", Constant)
    model = nn.Linear(2, 3)
    previous = {k: v.clone() for k, v in model.state_dict().items()}
    clients = [{k: v + torch.randn(v.shape, generator=rng) for k, v in previous.items()} for _ in range(3)]
    server = FedBE(model, unlabeled=torch.randn(50, 2, generator=rng), posterior=posterior, members="S")
    server.aggregate(previous, [ClientUpdate(state, 10) for state in clients])
    assert (server.info.step.disagreement == 0) == agree
