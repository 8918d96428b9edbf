import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedbe import Dirichlet
from fedbe.errors import SettingError
from fedbe.posterior.registry import get_posterior

A, B, C = [[1.0, 2.0], [3.0, 4.0]], [[5.0, 2.0], [7.0, 0.0]], [[0.0, 0.0], [0.0, 19.0]]


@pytest.fixture
def fitted(update):
    """Three clients with 10, 20 and 40 examples."""

    def make(alpha=1.0):
        return Dirichlet.fit([update("a", A, 10), update("b", B, 20), update("c", C, 40)], alpha=alpha)

    return make


def test_mixing_weights_by_hand(fitted):
    # γ n = (.5·10, .3·20, .2·40) = (5, 6, 8), sum 19
    gamma = [0.5, 0.3, 0.2]
    np.testing.assert_allclose(fitted().weights(gamma), [5 / 19, 6 / 19, 8 / 19], rtol=1e-15)
    # 19 w = 5 A + 6 B + 8 C = [5+30, 10+12; 15+42, 20+0+152]
    expected = torch.tensor([35.0, 22, 57, 172]) / 19
    torch.testing.assert_close(fitted().mix(gamma).params, expected)


@pytest.mark.parametrize(("corner", "client"), [(0, A), (1, B), (2, C)])
def test_a_corner_is_that_client(fitted, corner, client):
    gamma = [float(i == corner) for i in range(3)]
    assert fitted().mix(gamma).params.tolist() == [v for row in client for v in row]


def test_the_mean_is_the_average_for_one_alpha(fitted):
    # (10 A + 20 B + 40 C)/70, whatever the one alpha is
    expected = torch.tensor([110.0, 60, 170, 800]) / 70
    for alpha in (0.1, 1.0, 7.0):
        torch.testing.assert_close(fitted(alpha).mean_state.params, expected)


def test_alpha_for_each_client_is_matched_by_id(fitted):
    # γ = (1, 3, 6)/10; γ n ∝ (10, 60, 240), sum 310
    model = fitted({"c": 6.0, "a": 1.0, "b": 3.0}).mean_state
    expected = torch.tensor([10 + 300.0, 20 + 120, 30 + 420, 40 + 0 + 240 * 19]) / 310
    torch.testing.assert_close(model.params, expected)


def test_one_client_is_given_back_exactly(update, rng):
    values = torch.randn(4, generator=rng)
    only = Dirichlet.fit([update(0, values, 3)], alpha=0.5)
    assert all(torch.equal(s.params, values) for s in (only.mean_state, *only.sample_states(3, rng)))


def test_samples_stay_within_the_clients(fitted, rng):
    low = torch.tensor([A, B, C]).amin(0).reshape(-1)
    high = torch.tensor([A, B, C]).amax(0).reshape(-1)
    for sample in fitted(0.1).sample_states(200, rng):
        assert bool(((sample.params >= low - 1e-5) & (sample.params <= high + 1e-5)).all())


@pytest.mark.parametrize(
    "alpha",
    [0, -1.0, float("nan"), float("inf"), True, "x", {"a": 1.0, "b": 0.0, "c": 1.0}, {"a": 1, "b": "x", "c": 1}],
)
def test_alpha_must_be_a_positive_number(fitted, alpha):
    with pytest.raises(SettingError, match="`alpha` must be a number > 0"):
        fitted(alpha)


def test_client_ids_may_be_written_as_strings(update):
    """The keys of TOML are strings."""
    clients = [update(i, torch.eye(3)[i]) for i in range(3)]
    posterior = Dirichlet.fit(clients, alpha={"0": 1.0, "1": 2.0, 2: 3.0})
    assert posterior.alpha.tolist() == [1.0, 2.0, 3.0]


def test_alpha_must_name_every_client(fitted):
    with pytest.raises(SettingError, match="none for 'c'"):
        fitted({"a": 1.0, "b": 1.0})


DRAWS = 4000


def _gammas(update, alpha, sizes=(1, 1, 1)) -> np.ndarray:
    """Clients that are the unit vectors, so a sampled model *is* its mixing weights: [DRAWS, 3]."""
    clients = [update(i, torch.eye(3)[i], n) for i, n in enumerate(sizes)]
    drawn = Dirichlet.fit(clients, alpha=alpha).sample_states(DRAWS, torch.Generator().manual_seed(0))
    return torch.stack([s.params for s in drawn]).double().numpy()


@pytest.mark.parametrize("alpha", [(0.1, 0.1, 0.1), (0.5, 0.5, 0.5), (1.0, 1.0, 1.0), (0.5, 2.0, 4.0)])
class TestStatistics:
    """Bounds of five standard errors; the fourth moment for that of the variance comes from the draws."""

    def test_moments_and_marginals(self, update, alpha):
        gamma = _gammas(update, dict(enumerate(alpha)))
        reference = stats.dirichlet(alpha)
        np.testing.assert_allclose(gamma.sum(1), 1, atol=1e-6)
        error = np.sqrt(reference.var() / DRAWS)
        assert (abs(gamma.mean(0) - reference.mean()) <= 5 * error).all()
        square = (gamma - reference.mean()) ** 2
        assert (abs(square.mean(0) - reference.var()) <= 5 * square.std(0) / math.sqrt(DRAWS)).all()
        # Kolmogorov and Smirnov on a grid that spares the ends: float32 cannot tell 1e-9 from 0.
        grid = np.linspace(0.01, 0.99, 99)
        for i, a in enumerate(alpha):
            seen = (gamma[:, i, None] <= grid).mean(0)
            gap = abs(seen - stats.beta(a, sum(alpha) - a).cdf(grid)).max()
            assert gap <= 2.5 / math.sqrt(DRAWS)  # P(√n D > 2.5) = 7e-6

    def test_unequal_sizes_reweight_the_same_draws(self, update, alpha):
        sizes = np.array([10.0, 20.0, 40.0])
        equal = _gammas(update, dict(enumerate(alpha)))
        parts = equal * sizes
        expected = parts / parts.sum(1, keepdims=True)
        np.testing.assert_allclose(_gammas(update, dict(enumerate(alpha)), sizes), expected, atol=2e-5)


def test_the_released_form_ignores_the_numbers_of_examples(update):
    clients = [update("a", A, 10), update("b", B, 20), update("c", C, 40)]
    released = get_posterior("dirichlet-released").fit(clients)
    # .5 A + .3 B + .2 C
    torch.testing.assert_close(released.mix([0.5, 0.3, 0.2]).params, torch.tensor([2.0, 1.6, 3.6, 5.8]))
    torch.testing.assert_close(released.mean_state.params, torch.tensor([6.0, 4.0, 10.0, 23.0]) / 3)
