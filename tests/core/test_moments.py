import pytest
import torch

from fedbe import ModelState, Moments
from fedbe.core.moments import weighted_mean
from fedbe.core.state import PIECE, FragmentedState
from fedbe.errors import StateError

# Two 2×2 states with 1 and 3 examples, used throughout:
#   a = [1 2; 3 4], b = [5 2; 7 0]
#   mean = (1·a + 3·b)/4 = [(1+15)/4, (2+6)/4; (3+21)/4, 4/4] = [4 2; 6 1]
#   variance = (1·(a−mean)² + 3·(b−mean)²)/4 = [(9+3)/4, 0; (9+3)/4, (9+3)/4] = [3 0; 3 3]
A, B = [[1.0, 2.0], [3.0, 4.0]], [[5.0, 2.0], [7.0, 0.0]]
MEAN, VARIANCE = [4.0, 2.0, 6.0, 1.0], [3.0, 0.0, 3.0, 3.0]


class TestMoments:
    def test_mean_and_variance_with_unequal_weights(self, state):
        moments = Moments(variance=True)
        moments.add(state(A, [8.0]), 1)
        moments.add(state(B, [0.0]), 3)
        assert moments.mean.params.tolist() == MEAN
        assert moments.variance[0].tolist() == VARIANCE
        # buffers: mean 8/4 = 2, variance (36 + 3·4)/4 = 12
        assert moments.mean.buffers.tolist() == [2.0]
        assert moments.variance[1].tolist() == [12.0]
        assert moments.weight == 4

    @pytest.mark.parametrize("scale", [1e-300, 1e-45, 1e15, 1e300])
    def test_only_the_proportions_of_weights_matter(self, state, scale):
        moments = Moments(variance=True)
        moments.add(state(A, [8.0]), 1 * scale)
        moments.add(state(B, [0.0]), 3 * scale)
        torch.testing.assert_close(moments.mean.params, torch.tensor(MEAN))
        torch.testing.assert_close(moments.variance[0], torch.tensor(VARIANCE))

    def test_something_else_than_a_state(self):
        with pytest.raises(StateError, match="`state` must be a ModelState"):
            Moments().add({"weight": torch.zeros(2)}, 1)

    def test_merging_a_tree_is_adding_in_a_row(self, state, rng):
        states = [state(torch.randn(50, generator=rng, dtype=torch.float64), dtype=torch.float64) for _ in range(7)]
        weights = [1, 5, 2, 9, 3, 4, 8]
        straight = Moments(variance=True)
        leaves = []
        for s, n in zip(states, weights, strict=True):
            straight.add(s, n)
            leaves.append(Moments(variance=True))
            leaves[-1].add(s, n)
        left, right = leaves[0], leaves[3]
        left.merge(leaves[1])
        left.merge(leaves[2])
        right.merge(leaves[4])
        leaves[5].merge(leaves[6])
        right.merge(leaves[5])
        left.merge(right)
        left.merge(Moments(variance=True))  # an empty branch adds nothing
        assert left.weight == straight.weight == 32
        torch.testing.assert_close(left.mean.params, straight.mean.params, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(left.variance[0], straight.variance[0], rtol=1e-13, atol=1e-13)

    def test_streaming_is_the_textbook_formula(self, state, rng):
        values = torch.randn(6, 40, generator=rng, dtype=torch.float64)
        n = torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=torch.float64)
        mean = (n[:, None] * values).sum(0) / n.sum()
        variance = (n[:, None] * (values - mean) ** 2).sum(0) / n.sum()
        moments = Moments(variance=True)
        for row, weight in zip(values, n.tolist(), strict=True):
            moments.add(state(row, dtype=torch.float64), weight)
        torch.testing.assert_close(moments.mean.params, mean, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(moments.variance[0], variance, rtol=1e-13, atol=1e-13)

    def test_a_large_offset_does_not_eat_the_variance(self, state, rng):
        """Σw² − (Σw)² in float32 has no correct digit left at an offset of 1e6; the streamed form has three."""
        values = (1e6 + torch.randn(8, 200, generator=rng, dtype=torch.float64)).float()
        exact = values.double().var(0, correction=0)
        moments = Moments(variance=True)
        for row in values:
            moments.add(state(row), 2)
        naive = (values**2).mean(0) - values.mean(0) ** 2
        assert float((naive.double() - exact).abs().max()) > 1
        assert float(((moments.variance[0].double() - exact) / exact).abs().max()) < 0.1
        assert float((moments.mean.params.double() - values.double().mean(0)).abs().max()) <= 0.125  # 2 ulp at 1e6

    def test_equal_states_give_themselves_and_no_variance(self, state, rng):
        values = torch.randn(100, generator=rng) * 1e3
        moments = Moments(variance=True)
        for weight in (3, 7, 0.1, 11):
            moments.add(state(values), weight)
        assert torch.equal(moments.mean.params, values)
        assert not moments.variance[0].any()

    @pytest.mark.parametrize(("variance", "models"), [(False, 1), (True, 2)])
    def test_it_holds_two_models_whatever_it_has_seen(self, state, rng, variance, models):
        def held(value: object) -> int:
            if isinstance(value, torch.Tensor):
                return value.numel()
            if isinstance(value, ModelState):
                return held((value.params, value.buffers, *value.counters.values()))
            return sum(held(v) for v in value) if isinstance(value, tuple | list | dict) else 0

        moments = Moments(variance=variance)
        for _ in range(9):
            moments.add(state(torch.randn(100, generator=rng), torch.rand(10, generator=rng)), 1)
        assert sum(held(v) for v in vars(moments).values()) == models * 110

    def test_neither_states_nor_other_moments_are_changed_or_kept(self, state):
        first, second = state(A), state(B)
        one, two = Moments(variance=True), Moments(variance=True)
        one.add(first, 1)
        two.merge(one)
        two.add(second, 3)
        assert first.params.tolist() == [1, 2, 3, 4]
        assert one.mean.params.tolist() == [1, 2, 3, 4]
        assert not one.variance[0].any()
        assert two.mean.params.tolist() == MEAN

    def test_counters_stay_whole_and_take_the_largest(self):
        moments = Moments()
        for count in (3, 9, 4):
            moments.add(ModelState(torch.zeros(1), torch.zeros(0), {"n": torch.tensor(count)}), 1)
        counter = moments.mean.counters["n"]
        assert counter.dtype == torch.int64
        assert int(counter) == 9

    @pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
    def test_weights_must_be_positive(self, state, weight):
        with pytest.raises(StateError, match="`weight` must be > 0"):
            Moments().add(state(A), weight)

    def test_what_was_not_asked_for_is_an_error(self, state):
        with pytest.raises(StateError, match="no state was added"):
            _ = Moments().mean
        plain = Moments()
        plain.add(state(A), 1)
        with pytest.raises(StateError, match="no variance is tracked"):
            _ = plain.variance
        with pytest.raises(StateError, match="can be merged"):
            plain.merge(Moments(variance=True))

    def test_weighted_mean(self, state):
        assert weighted_mean([(state(A), 1), (state(B), 3)]).params.tolist() == MEAN


def long_states(rng, sizes):
    """Three states of more than a piece, flat and in fragments of these sizes, with their weights."""
    flat = [torch.randn(sum(sizes), generator=rng) for _ in range(3)]
    states = [ModelState(vector, vector[:5].clone(), {}) for vector in flat]
    fragments = [FragmentedState(vector.split(sizes), [vector[:2], vector[2:5]], {}) for vector in flat]
    return states, fragments, [3.0, 5.0, 2.0]


@pytest.mark.parametrize("variance", [False, True])
def test_long_states_in_any_fragments_have_the_bits_of_whole_vectors(rng, variance):
    states, fragments, weights = long_states(rng, [7, PIECE - 8, 3 * PIECE, 1, 33])
    mean, spread, total = torch.zeros(0), torch.zeros(len(states[0].params)), 0.0
    for one, weight in zip(states, weights, strict=True):  # West's update, one operation after the other
        total += weight
        share = weight / total
        if not len(mean):
            mean = one.params.clone()
            continue
        delta = one.params - mean
        mean.add_(delta, alpha=share)
        spread.addcmul_(delta, delta, value=share).mul_(1 - share)
    for given in (states, fragments):
        moments = Moments(variance=variance)
        moments.add_all(zip(given, weights, strict=True))
        assert torch.equal(moments.mean.params, mean)
        assert torch.equal(moments.mean.buffers, mean[:5])
        assert not variance or torch.equal(moments.variance[0], spread)


def test_a_watch_sees_every_piece_of_every_state(rng):
    states, fragments, weights = long_states(rng, [PIECE + 10, 20])
    seen = {}
    weighted_mean(zip(fragments, weights, strict=True), lambda *where: seen.update({where[:3]: where[3].clone()}))
    for number, one in enumerate(states):
        assert torch.equal(torch.cat([seen["params", number, 0], seen["params", number, 1]]), one.params)
        assert torch.equal(seen["buffers", number, 0], one.buffers)
    assert len(seen) == 9
