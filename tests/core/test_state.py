from dataclasses import replace

import pytest
import torch
from torch import nn

from fedbe import Layout, ModelState
from fedbe.errors import ModelError, StateError

A, B = [[1.0, 2.0], [3.0, 4.0]], [[5.0, 2.0], [7.0, 0.0]]


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
        assert same(layout.with_frozen(back), named)
        assert named.keys() - back.keys() == {"scale"}
        assert layout.size == sum(p.numel() for p in module.parameters() if p.requires_grad) == 9 + 3 + 3 + 3 + 3
        assert layout.aliases["second.weight"] == "first.weight"
        assert layout.aliases["again.running_var"] == "norm.running_var"

    def test_frozen_parameters_are_not_part_of_it(self):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        module[0].requires_grad_(False)
        layout = Layout(module)
        assert (layout.size, list(layout.frozen), list(layout.keys)) == (
            3,
            ["0.weight", "0.bias"],
            ["1.weight", "1.bias"],
        )
        whole = module.state_dict()
        part = {name: tensor for name, tensor in whole.items() if name.startswith("1.")}
        assert torch.equal(layout.pack(whole).params, layout.pack(part).params)
        with pytest.raises(StateError, match=r"frozen '0.bias' differs from `model`'s"):
            layout.pack({**whole, "0.bias": whole["0.bias"] + 1})
        with pytest.raises(StateError, match="unknown '2"):
            layout.pack({**whole, "2.bias": whole["0.bias"]})

    def test_all_parameters_frozen_count_as_none(self):
        layout = Layout(nn.Linear(2, 1).requires_grad_(False))
        assert (layout.size, layout.frozen) == (3, {})

    def test_one_tensor_under_two_names_of_a_state_dict_is_not_tied(self):
        shared = torch.zeros(2)
        layout = Layout({"a": shared, "b": shared})
        state = layout.pack({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])})
        assert state.params.tolist() == [1, 2, 3, 4]
        assert layout.unpack(state)["b"].tolist() == [3, 4]

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
            (lambda s: s.update(weight=torch.zeros(3, 2)), r"'weight' .*\[2, 3\], got \[3, 2\]"),
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
        assert layout.packed(state) is state
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


def test_a_gathered_state_shares_memory_until_its_vectors_are_asked_for():
    net = nn.Linear(3, 2)
    layout, named = Layout(net), net.state_dict()
    gathered, packed = layout.gather(named), layout.pack(named)
    assert [vector.data_ptr() for vector in gathered.fragments("params")] == [t.data_ptr() for t in named.values()]
    assert gathered.finite()
    changed = replace(gathered, params=packed.params + 1)  # as transforms do
    assert torch.equal(changed.params, packed.params + 1)
    assert torch.equal(gathered.params, packed.params)
    gathered.params.zero_()
    assert torch.equal(layout.pack(named).params, packed.params)  # the vectors are copies
    assert gathered.digest() == layout.pack({name: torch.zeros_like(t) for name, t in named.items()}).digest()
    with pytest.raises(StateError, match="lacks 'bias'"):
        layout.gather({"weight": net.weight})
