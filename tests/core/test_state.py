import pytest
import torch
from torch import nn

from fedbe import Layout, ModelState, Moments
from fedbe.core.moments import weighted_mean
from fedbe.errors import ModelError, StateError

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


class Tied(nn.Module):
    """Everything that is odd at once: tied weights, a frozen one, a shared BatchNorm, counters, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.again = self.norm
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int32))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("scratch", torch.zeros(7), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.second(self.norm(self.first(x)))) * self.scale


class TestLayout:
    def test_pack_and_unpack_give_back_names_order_dtypes_and_bits(self, same):
        module = Tied()
        layout = Layout(module)
        named = {k: v.clone() for k, v in module.state_dict().items()}
        back = layout.unpack(layout.pack(named))
        assert same(back, named)
        assert layout.size == sum(p.numel() for p in module.parameters()) == 9 + 3 + 3 + 3 + 3 + 1
        assert layout.aliases["second.weight"] == "first.weight"
        assert layout.aliases["again.running_var"] == "norm.running_var"

    def test_pack_copies(self):
        module = nn.Linear(2, 1)
        state = Layout(module).pack(module.state_dict())
        state.params.zero_()
        assert module.weight.any()

    @pytest.mark.parametrize(
        ("dtype", "working"),
        [
            (torch.float16, torch.float32),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float32),
            (torch.float64, torch.float64),
        ],
    )
    def test_half_precision_works_in_float32_and_comes_back_in_half(self, dtype, working):
        module = nn.Linear(3, 2).to(dtype)
        layout = Layout(module)
        state = layout.pack(module.state_dict())
        assert state.params.dtype == working
        assert layout.unpack(state)["weight"].dtype == dtype
        assert torch.equal(layout.unpack(state)["weight"], module.weight)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda s: s.pop("weight"), "lacks 'weight'"),
            (lambda s: s.update(extra=torch.zeros(1)), "has unknown 'extra'"),
            (lambda s: s.update(weight=torch.zeros(3, 2)), r"'weight' must have shape \[2, 3\], got \[3, 2\]"),
            (
                lambda s: s.update(weight=torch.zeros(2, 3).double()),
                "'weight' must be torch.float32, got torch.float64",
            ),
            (lambda s: s.update(weight=[1.0]), "'weight' must be a tensor, got list"),
            (lambda s: s.update(weight=torch.zeros(2, 3).to_sparse()), "'weight' must be a dense tensor"),
            (lambda s: s.update(weight=torch.zeros(2, 3, device="meta")), "'weight' must be a dense tensor with data"),
        ],
    )
    def test_what_does_not_fit_is_named(self, change, message):
        module = nn.Linear(3, 2)
        named = dict(module.state_dict())
        change(named)
        with pytest.raises(StateError, match=message):
            Layout(module).pack(named)

    def test_many_missing_keys_are_counted(self):
        layout = Layout(nn.Sequential(*(nn.Linear(1, 1) for _ in range(4))))
        with pytest.raises(StateError, match=r"'1.weight' and 5 more"):
            layout.pack({})

    @pytest.mark.parametrize("value", [None, 3, [torch.zeros(1)]])
    def test_a_state_must_be_a_mapping(self, value):
        with pytest.raises(StateError, match="must be a mapping"):
            Layout(nn.Linear(1, 1)).pack(value)

    @pytest.mark.parametrize(
        "bad", [torch.ones(3, 3), torch.zeros(3, 3, device="meta"), torch.zeros(3, 3).to_sparse(), torch.zeros(2), "x"]
    )
    def test_tied_tensors_must_agree(self, bad):
        module = Tied()
        named = dict(module.state_dict())
        named["second.weight"] = bad
        with pytest.raises(StateError, match=r"'second\.weight'"):
            Layout(module).pack(named)

    def test_tied_nan_is_left_for_the_guard_to_name(self):
        module = Tied()
        named = dict(module.state_dict())
        named["first.weight"] = named["second.weight"] = torch.full((3, 3), torch.nan)
        assert Layout(module).pack(named).params.isnan().any()

    def test_vectors_of_parameters(self):
        layout = Layout(nn.Linear(2, 1))
        vector = layout.pack_params({"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])}, "it")
        assert vector.tolist() == [1, 2, 3]
        assert torch.equal(layout.pack_params(vector, "it"), vector)
        assert layout.unpack_params(vector)["weight"].tolist() == [[1, 2]]

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (torch.zeros(4), r"it must have shape \[3\], got \[4\]"),
            (torch.zeros(3, device="meta"), "it must be a dense tensor with data"),
            (torch.zeros(3, dtype=torch.complex64), "floating-point"),
            (torch.zeros(3, dtype=torch.int64), "floating-point"),
            ({"weight": torch.zeros(1, 2)}, "it lacks 'bias'"),
            ({"weight": torch.zeros(2), "bias": torch.zeros(1)}, r"'weight' must have shape \[1, 2\]"),
            ({"weight": torch.zeros(1, 2).to_sparse(), "bias": torch.zeros(1)}, "'weight' must be a dense tensor"),
            ({"weight": 1, "bias": torch.zeros(1)}, "'weight' must be a tensor"),
            (None, "it must be a tensor or a mapping"),
            ([1.0], "it must be a tensor or a mapping"),
        ],
    )
    def test_vectors_that_do_not_fit(self, given, message):
        with pytest.raises(StateError, match=message):
            Layout(nn.Linear(2, 1)).pack_params(given, "it")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"params": torch.zeros(2)}, "'params' must have shape"),
            ({"params": torch.zeros(8, dtype=torch.float64)}, "'params' must be torch.float32"),
            ({"params": torch.zeros(8, device="meta")}, "'params' must be a dense tensor"),
            ({"buffers": torch.zeros(3)}, "'buffers' must have shape"),
            ({"counters": {}}, r"has the counters \[\], expected \['1.num_batches_tracked'\]"),
            ({"counters": {"1.num_batches_tracked": torch.zeros(())}}, "must be torch.int64"),
        ],
    )
    def test_a_packed_state_is_checked_too(self, change, message):
        module = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
        layout = Layout(module)
        state = layout.pack(module.state_dict())
        layout.check(state)
        with pytest.raises(StateError, match=message):
            layout.check(ModelState(**({k: getattr(state, k) for k in ("params", "buffers", "counters")} | change)))


def _complex() -> nn.Module:
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return module


def _integer() -> nn.Module:
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    return module


def _float8() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("b", torch.zeros(2).to(torch.float8_e5m2))
    return module


class _WithExtraState(nn.Linear):
    def get_extra_state(self) -> str:
        return "something"


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.ReLU(), "no parameters"),
        (lambda: nn.Linear(2, 2, device="meta"), "meta device"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), "one device, got cpu, meta"),
        (lambda: nn.LazyLinear(2), "uninitialised lazy 'weight'"),
        (_complex, "complex 'w'"),
        (_integer, "integer parameter 'w'"),
        (_float8, "float8_e5m2; supported are float16, bfloat16, float32, float64"),
        (lambda: _WithExtraState(2, 2), "not a tensor: '_extra_state'"),
    ],
)
def test_modules_that_cannot_be_combined(make, message):
    with pytest.raises(ModelError, match=message):
        Layout(make())


def test_digest_sees_every_number(state):
    one = state(A, [1.0])
    assert one.digest() == state(A, [1.0]).digest()
    others = [
        state(B, [1.0]).digest(),
        state(A, [2.0]).digest(),
        one.digest(torch.zeros(1)),
        one.digest(torch.ones(1)),
        ModelState(one.params, one.buffers, {"n": torch.tensor(1)}).digest(),
        ModelState(one.params, one.buffers, {"n": torch.tensor(2)}).digest(),
    ]
    assert len({one.digest(), *others}) == 7
