import math

import pytest
import torch
from torch import nn

from fedbe import Gaussian, Layout, ModelState, Moments
from fedbe.core.updates import Update
from fedbe.errors import SettingError
from fedbe.posterior import DirectionGaussian, PosteriorSettings

A, B = [[1.0, 2.0], [3.0, 4.0]], [[5.0, 2.0], [7.0, 0.0]]


class TestPaper:
    def test_mean_and_std_by_hand(self, update):
        # n = 1 and 3: mean [4 2; 6 1], variance [3 0; 3 3] (worked out in tests/core/test_moments.py)
        fitted = Gaussian.fit([update(0, A, 1), update(1, B, 3)])
        assert fitted.mean_state.params.tolist() == [4, 2, 6, 1]
        torch.testing.assert_close(fitted.std, torch.tensor([3.0, 0, 3, 3]).sqrt())

    @pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
    def test_a_sample_is_mean_plus_scale_times_std_times_noise(self, update, scale):
        fitted = Gaussian.fit([update(0, A, 1), update(1, B, 3)], scale=scale)
        (sample,) = fitted.sample_states(1, torch.Generator().manual_seed(1))
        noise = torch.randn(4, generator=torch.Generator().manual_seed(1))
        expected = torch.tensor([4.0, 2, 6, 1]) + scale * math.sqrt(3) * torch.tensor([1.0, 0, 1, 1]) * noise
        torch.testing.assert_close(sample.params, expected)
        assert sample.params[1] == 2  # clients agree here, so there is nothing to draw

    def test_scale_zero_is_the_mean(self, update, rng):
        fitted = Gaussian.fit([update(0, A, 1), update(1, B, 3)], scale=0.0)
        assert all(torch.equal(s.params, fitted.mean_state.params) for s in fitted.sample_states(3, rng))

    @pytest.mark.parametrize("clients", [1, 4])
    def test_clients_that_agree_leave_nothing_to_sample(self, update, rng, clients):
        values = torch.randn(4, generator=rng) * 100
        fitted = Gaussian.fit([update(i, values, 1 + i) for i in range(clients)])
        assert not fitted.std.any()
        assert all(torch.equal(s.params, values) for s in fitted.sample_states(3, rng))

    def test_buffers_are_the_mean_s_unless_sampled(self, state, rng):
        moments = Moments(variance=True)
        moments.add(state(A, [1.0, 1.0]), 1)
        moments.add(state(B, [3.0, 1.0]), 1)
        plain = next(iter(Gaussian.from_moments(moments).sample_states(1, rng)))
        assert plain.buffers.tolist() == [2, 1]
        drawn = next(iter(Gaussian.from_moments(moments, sample_buffers=True).sample_states(1, rng)))
        assert drawn.buffers[0] != 2
        assert drawn.buffers[1] == 1

    def test_it_does_not_move_when_its_moments_go_on(self, state):
        moments = Moments(variance=True)
        moments.add(state(A), 1)
        fitted = Gaussian.from_moments(moments)
        moments.add(state(B), 3)
        assert fitted.mean_state.params.tolist() == [1, 2, 3, 4]

    def test_samples_are_drawn_one_at_a_time(self, update, rng):
        fitted = Gaussian.fit([update(0, A), update(1, B)])
        endless = fitted.sample_states(10**9, rng)
        first, second = next(endless), next(endless)
        assert not torch.equal(first.params, second.params)

    @pytest.mark.parametrize("scale", [-1.0, float("nan")])
    def test_scale_must_not_be_negative(self, update, scale):
        with pytest.raises(SettingError, match="`scale` must be >= 0"):
            Gaussian.fit([update(0, A)], scale=scale)


def _released(module: nn.Module, last: ModelState, states: list[ModelState], **settings: object) -> DirectionGaussian:
    updates = [Update(i, state, 1.0, {}) for i, state in enumerate(states)]
    return DirectionGaussian.fit_round(
        updates, previous=last, layout=Layout(module), settings=PosteriorSettings(**settings)
    )


class TestReleased:
    # Linear(2, 1): weight (2 numbers) and bias (1 number), last = (1 1 | 0).
    # client 1 changed by (3 4 | 2):    lengths 5 and 2, directions (.6 .8 | 1)
    # client 2 changed by (0 −10 | 0):  lengths 10 and 0, directions (0 −1 | 0)
    # mean length r̄ = 7.5 | 1;   mean direction ū = (.3 −.1 | .5)
    # variance of the directions: (.09 .81 | .25), std (.3 .9 | .5)
    # mean model = last + r̄ ū = (1 + 2.25, 1 − .75 | .5);   noise of std 0.1 r̄ σ = (.225 .675 | .05)
    LAST, ONE, TWO = [1.0, 1.0, 0.0], [4.0, 5.0, 2.0], [1.0, -9.0, 0.0]

    def test_by_hand(self, state):
        fitted = _released(nn.Linear(2, 1), state(self.LAST), [state(self.ONE), state(self.TWO)])
        torch.testing.assert_close(fitted.mean_state.params, torch.tensor([3.25, 0.25, 0.5]))
        (sample,) = fitted.sample_states(1, torch.Generator().manual_seed(2))
        noise = torch.randn(3, generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(sample.params, fitted.mean_state.params + torch.tensor([0.225, 0.675, 0.05]) * noise)

    def test_scale_multiplies_the_noise(self, state):
        states = [state(self.ONE), state(self.TWO)]
        once, twice = (
            next(_released(nn.Linear(2, 1), state(self.LAST), states, scale=s).sample_states(1, torch.Generator()))
            for s in (1.0, 2.0)
        )
        mean = torch.tensor([3.25, 0.25, 0.5])
        torch.testing.assert_close(twice.params - mean, 2 * (once.params - mean))

    def test_the_variance_has_a_floor(self, state):
        # Equal clients: variance 0, so std = √1e-5; lengths 5 and 2: noise 0.1 · length · √1e-5
        fitted = _released(nn.Linear(2, 1), state(self.LAST), [state(self.ONE)] * 3)
        torch.testing.assert_close(fitted.mean_state.params, torch.tensor(self.ONE))
        (sample,) = fitted.sample_states(1, torch.Generator().manual_seed(2))
        noise = torch.randn(3, generator=torch.Generator().manual_seed(2))
        expected = torch.tensor(self.ONE) + 0.1 * math.sqrt(1e-5) * torch.tensor([5.0, 5.0, 2.0]) * noise
        torch.testing.assert_close(sample.params, expected)

    def test_buffers_follow_the_same_formula(self, state):
        module = nn.BatchNorm1d(2, affine=False)
        module.scale = nn.Parameter(torch.zeros(1))
        layout = Layout(module)
        assert [s.name for s in layout.buffers] == ["running_mean", "running_var"]
        # running_mean changes by (3 4) and (0 −10), as the weight above; running_var by (0 0) in both
        last = state([0.0], [1.0, 1.0, 1.0, 1.0])
        clients = [state([0.0], [4.0, 5.0, 1.0, 1.0]), state([0.0], [1.0, -9.0, 1.0, 1.0])]
        kept = next(_released(module, last, clients).sample_states(1, torch.Generator()))
        torch.testing.assert_close(kept.buffers, torch.tensor([3.25, 0.25, 1.0, 1.0]))
        drawn = next(
            _released(module, last, clients, sample_buffers=True).sample_states(1, torch.Generator().manual_seed(2))
        )
        draw = torch.Generator().manual_seed(2)
        torch.randn(1, generator=draw)  # the parameter's noise comes first
        noise = torch.randn(4, generator=draw) * torch.tensor([0.225, 0.675, 0.0, 0.0])
        torch.testing.assert_close(drawn.buffers, kept.buffers + noise)

    def test_the_last_model_and_the_clients_are_not_changed(self, state, rng):
        last, one = state(self.LAST), state(self.ONE)
        list(_released(nn.Linear(2, 1), last, [one, state(self.TWO)]).sample_states(2, rng))
        assert last.params.tolist() == self.LAST
        assert one.params.tolist() == self.ONE


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
class TestStatistics:
    """4,000 draws of 4 coordinates: each bound is five standard errors, so a false alarm has odds of 1e-6."""

    DRAWS = 4000

    @pytest.fixture
    def draws(self, update, scale):
        # n = 1, 2, 5 examples; the fourth coordinate is the same for all clients
        fitted = Gaussian.fit(
            [update(0, [0.0, 1, -4, 9], 1), update(1, [2.0, 1.5, 0, 9], 2), update(2, [-1.0, 0, 8, 9], 5)], scale=scale
        )
        samples = torch.stack([s.params for s in fitted.sample_states(self.DRAWS, torch.Generator().manual_seed(0))])
        return fitted, (samples - fitted.mean_state.params).double()

    def test_moments(self, draws, scale):
        fitted, away = draws
        std = scale * fitted.std.double()
        assert bool((away.mean(0).abs() <= 5 * std / math.sqrt(self.DRAWS) + 1e-6).all())
        ratio = away[:, :3].var(0) / std[:3] ** 2
        assert bool(((ratio - 1).abs() <= 5 * math.sqrt(2 / self.DRAWS)).all())
        assert not away[:, 3].any()

    def test_coordinates_are_independent(self, draws):
        correlation = torch.corrcoef(draws[1][:, :3].T) - torch.eye(3)
        assert float(correlation.abs().max()) <= 5 / math.sqrt(self.DRAWS)

    @pytest.mark.parametrize(("width", "share"), [(1, 0.6827), (2, 0.9545)])
    def test_coverage(self, draws, scale, width, share):
        fitted, away = draws
        within = (away[:, :3].abs() <= width * scale * fitted.std[:3]).double().mean(0)
        assert bool(((within - share).abs() <= 5 * math.sqrt(share * (1 - share) / self.DRAWS)).all())
