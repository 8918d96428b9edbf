"""Properties of the core that hold for every input, checked on generated ones."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedbe import Layout, ModelState, Moments
from fedbe.core.inputs import batches
from fedbe.core.random import derive

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)
fast = settings(max_examples=50, deadline=None)

values = st.floats(-1e3, 1e3, width=32)
weights = st.floats(1e-3, 1e6)
shapes = st.lists(st.integers(0, 3), max_size=3)
seeds = st.integers(-(2**70), 2**70)


def _tensor(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    numbers = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(dtype)


@st.composite
def state_dicts(draw: st.DrawFn) -> dict[str, Tensor]:
    names = draw(st.lists(st.text(min_size=1), min_size=1, max_size=5, unique=True))
    dtypes = [draw(st.sampled_from(DTYPES[:4])), *(draw(st.sampled_from(DTYPES)) for _ in names[1:])]
    return {
        name: _tensor(draw(shapes), dtype, draw(st.integers(0, 99))) for name, dtype in zip(names, dtypes, strict=True)
    }


@st.composite
def streams(draw: st.DrawFn, min_size: int = 1) -> list[tuple[ModelState, float]]:
    """States with 3 parameters, 2 buffers and a counter, each with a weight."""
    rows = draw(st.lists(st.tuples(*[values] * 5, st.integers(0, 99), weights), min_size=min_size, max_size=6))
    return [
        (
            ModelState(
                torch.tensor(row[:3], dtype=torch.float64),
                torch.tensor(row[3:5], dtype=torch.float64),
                {"n": torch.tensor(row[5])},
            ),
            row[6],
        )
        for row in rows
    ]


def _moments(stream: list[tuple[ModelState, float]]) -> Moments:
    moments = Moments(variance=True)
    for state, weight in stream:
        moments.add(state, weight)
    return moments


def _close(a: Moments, b: Moments) -> None:
    assert a.weight == pytest.approx(b.weight)
    for one, other in zip(_vectors(a), _vectors(b), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-6)  # 1e-12 of the largest square, 1e6
    assert torch.equal(a.mean.counters["n"], b.mean.counters["n"])


def _vectors(moments: Moments) -> tuple[Tensor, ...]:
    return (moments.mean.params, moments.mean.buffers, *moments.variance)


class TestLayout:
    @fast
    @given(state_dicts())
    def test_unpacking_reverses_packing(self, named):
        layout = Layout(named)
        back = layout.unpack(layout.pack(named))
        assert list(back) == list(named)
        for name, tensor in named.items():
            assert back[name].dtype == tensor.dtype
            assert torch.equal(back[name], tensor)
            assert not tensor.numel() or back[name].data_ptr() != tensor.data_ptr()

    @fast
    @given(state_dicts())
    def test_slots_cover_the_vector_without_gaps(self, named):
        layout = Layout(named)
        ends = [0, *(slot.stop for slot in layout.params)]
        assert [slot.start for slot in layout.params] == ends[:-1]
        assert layout.size == ends[-1] == sum(t.numel() for t in named.values() if t.is_floating_point())


class TestMoments:
    @fast
    @given(streams(min_size=2), st.data())
    def test_merged_parts_equal_the_whole_stream(self, stream, data):
        cut = data.draw(st.integers(0, len(stream)))
        merged = _moments(stream[:cut])
        merged.merge(_moments(stream[cut:]))
        _close(merged, _moments(stream))

    @fast
    @given(streams(min_size=2), st.randoms(use_true_random=False))
    def test_the_order_does_not_matter(self, stream, random):
        shuffled = random.sample(stream, len(stream))
        _close(_moments(shuffled), _moments(stream))

    @fast
    @given(streams())
    def test_mean_and_variance_are_the_exact_ones(self, stream):
        moments = _moments(stream)
        total = sum(Fraction(weight) for _, weight in stream)
        for i in range(3):
            terms = [(Fraction(float(state.params[i])), Fraction(weight) / total) for state, weight in stream]
            mean = sum(share * value for value, share in terms)
            variance = sum(share * (value - mean) ** 2 for value, share in terms)
            assert float(moments.mean.params[i]) == pytest.approx(float(mean), rel=1e-12, abs=1e-9)
            assert float(moments.variance[0][i]) == pytest.approx(float(variance), rel=1e-9, abs=1e-6)

    @fast
    @given(streams(), st.lists(weights, min_size=1, max_size=8))
    def test_identical_states_give_exactly_themselves(self, stream, many):
        state = stream[0][0]
        moments = _moments([(state, weight) for weight in many])
        assert torch.equal(moments.mean.params, state.params)
        assert torch.equal(moments.mean.buffers, state.buffers)
        assert not any(part.any() for part in moments.variance)

    @fast
    @given(streams())
    def test_bounds(self, stream):
        moments = _moments(stream)
        states = torch.stack([state.params for state, _ in stream])
        assert all(bool((part >= 0).all()) for part in moments.variance)
        assert bool((moments.mean.params >= states.amin(0) - 1e-9).all())
        assert bool((moments.mean.params <= states.amax(0) + 1e-9).all())
        assert int(moments.mean.counters["n"]) == max(int(state.counters["n"]) for state, _ in stream)

    @fast
    @given(streams(), st.integers(-200, 200))
    def test_only_the_proportions_of_the_weights_matter(self, stream, power):
        scaled = [(state, math.ldexp(weight, power)) for state, weight in stream]
        for one, other in zip(_vectors(_moments(scaled)), _vectors(_moments(stream)), strict=True):
            assert torch.equal(one, other)  # a power of two changes no digit


@fast
@given(st.integers(0, 200), st.integers(1, 250), st.integers(0, 2**31))
def test_batches_contain_every_index_once(count, size, seed):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    parts = list(batches(count, size, order))
    assert torch.cat(parts).tolist() == order.tolist()
    assert all(len(part) <= size + 1 for part in parts)
    assert all(len(part) >= size for part in parts[:-1])
    if size > 1 and count > 1:
        assert all(len(part) > 1 for part in parts)


class TestDerive:
    @fast
    @given(seeds, st.integers(0, 10**6), st.text(max_size=8), st.integers() | st.text(max_size=8))
    def test_it_is_a_function_of_its_arguments(self, seed, round, role, client):
        seeds = {derive(seed, round, role, client) for _ in range(3)}
        assert len(seeds) == 1
        assert 0 <= seeds.pop() < 2**63

    @fast
    @given(*[st.tuples(seeds, st.integers(0, 99), st.sampled_from(["cohort", "train"]), st.integers() | st.text())] * 2)
    def test_other_arguments_give_another_seed(self, first, second):
        assume(first != second)
        assert derive(*first) != derive(*second)
