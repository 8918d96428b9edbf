"""Whatever a client sends, the round goes on with the others, as if it had not been there."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import fedbe
from fedbe import ClientUpdate, FedAvg, FedAvgM, ModelState, Scaffold
from fedbe.algorithms.server.guard import admit
from fedbe.algorithms.server.limits import Limits
from fedbe.core.moments import weighted_mean
from fedbe.errors import AggregationError, SettingError, StateError


@pytest.fixture
def module(network):
    return network("mlp-bn")


def _with(update: ClientUpdate, **changes: object) -> ClientUpdate:
    parts = {k: getattr(update, k) for k in ("state", "num_examples", "client_id", "extras", "metrics")}
    return ClientUpdate(**(parts | changes))


def _state(update: ClientUpdate, **tensors: object) -> ClientUpdate:
    return _with(update, state={**update.state, **tensors})


def _put(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


W, VAR, STEPS = "0.weight", "1.running_var", "1.num_batches_tracked"


class Odd(torch.Tensor):
    """A subclass that raises whatever one does with it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("odd")


BROKEN = {
    "missing-key": (lambda u: _with(u, state={k: v for k, v in u.state.items() if k != W}), "lacks '0.weight'"),
    "extra-key": (lambda u: _state(u, more=torch.zeros(1)), "has unknown 'more'"),
    "odd-key": (lambda u: _with(u, state={**u.state, 3: torch.zeros(1)}), "has unknown '3'"),
    "shape": (lambda u: _state(u, **{W: torch.zeros(4, 8)}), "must have shape [8, 4], got [4, 8]"),
    "dtype": (lambda u: _state(u, **{W: u.state[W].double()}), "must be torch.float32, got torch.float64"),
    "float-counter": (lambda u: _state(u, **{STEPS: torch.tensor(1.0)}), "must be torch.int64"),
    "nan": (lambda u: _state(u, **{W: _put(u.state[W], torch.nan)}), "its parameters hold NaN"),
    "inf": (lambda u: _state(u, **{W: _put(u.state[W], -torch.inf)}), "its parameters hold NaN or infinite"),
    "nan-buffer": (lambda u: _state(u, **{VAR: _put(u.state[VAR], torch.nan)}), "its buffers hold NaN"),
    "inf-buffer": (lambda u: _state(u, **{VAR: _put(u.state[VAR], torch.inf)}), "its buffers hold NaN"),
    "negative-variance": (lambda u: _state(u, **{VAR: _put(u.state[VAR], -0.1)}), "'1.running_var' has values below"),
    "no-tensor": (lambda u: _state(u, **{W: [1.0]}), "'0.weight' must be a tensor, got list"),
    "none": (lambda u: _state(u, **{W: None}), "'0.weight' must be a tensor, got NoneType"),
    "sparse": (lambda u: _state(u, **{W: u.state[W].to_sparse()}), "dense tensor"),
    "meta": (lambda u: _state(u, **{W: u.state[W].to("meta")}), "dense tensor with data"),
    "no-mapping": (lambda u: _with(u, state=list(u.state.values())), "must be a mapping of names"),
    "no-state": (lambda u: _with(u, state=None), "must be a mapping of names"),
    "packed-short": (
        lambda u: _with(u, state=ModelState(torch.zeros(3), torch.zeros(16), {})),
        "'params' must have shape",
    ),
    "packed-nothing": (lambda u: _with(u, state=ModelState(None, None, {})), "'params' must be a tensor"),
    "zero-examples": (lambda u: _with(u, num_examples=0), "`num_examples` must be a number > 0, got 0"),
    "negative-examples": (lambda u: _with(u, num_examples=-3), "got -3"),
    "nan-examples": (lambda u: _with(u, num_examples=float("nan")), "got nan"),
    "inf-examples": (lambda u: _with(u, num_examples=float("inf")), "at most 1e+15"),
    "huge-examples": (lambda u: _with(u, num_examples=10**400), "at most 1e+15"),
    "half-inf-examples": (lambda u: _with(u, num_examples=np.float16("inf")), "at most 1e+15"),
    "long-id": (lambda u: _with(u, client_id="x" * 101), "`client_id` must have at most 100 characters, got 101"),
    "subclass": (lambda u: _state(u, **{W: u.state[W].as_subclass(Odd)}), "must be a plain tensor, got Odd"),
    "bool-examples": (lambda u: _with(u, num_examples=True), "got True"),
    "text-examples": (lambda u: _with(u, num_examples="12"), "got '12'"),
    "no-examples": (lambda u: _with(u, num_examples=None), "got None"),
    "tensor-examples": (lambda u: _with(u, num_examples=torch.tensor(3)), "got tensor(3)"),
    "list-id": (lambda u: _with(u, client_id=[1]), "`client_id` must be"),
    "bool-id": (lambda u: _with(u, client_id=True), "`client_id` must be"),
    "float-id": (lambda u: _with(u, client_id=1.5), "`client_id` must be"),
    "no-update": (lambda u: u.state, "an update must be a ClientUpdate, got dict"),
    "nothing": (lambda _: None, "an update must be a ClientUpdate, got NoneType"),
    "wild": (lambda u: _state(u, **{W: _put(u.state[W], 1e6)}), "is usual, the limit is"),
    "wild-beyond-float": (lambda u: _state(u, **{W: _put(u.state[W], 3e38)}), "is usual, the limit is"),
    "wild-buffer": (lambda u: _state(u, **{VAR: _put(u.state[VAR], 1e6)}), "its '1.running_var' changed by"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_update_is_set_aside_with_a_reason(case, module, replies, same):
    breaks, reason = BROKEN[case]
    good = replies(module, ids=(0, 1, 2, 3))
    bad = breaks(good[1])
    rest = [good[0], good[2], good[3]]
    start = module.state_dict()
    server, clean = FedAvgM(module), FedAvgM(module)
    got = server.aggregate(start, [good[0], bad, good[2], good[3]])
    assert same(got, clean.aggregate(start, rest))
    assert server.info.clients == (0, 2, 3)
    (aside,) = server.info.set_aside
    assert reason in aside.reason
    expected = getattr(bad, "client_id", None)
    valid = type(expected) is int or (type(expected) is str and len(expected) <= 100)
    assert aside.client_id == (expected if valid else None)


@pytest.mark.parametrize(
    ("extras", "reason"),
    [
        ({}, "lacks the extra 'control'"),
        (None, "its extras must be a mapping, got NoneType"),
        ({"control": None}, "must be a tensor or a mapping"),
        ({"control": torch.zeros(5)}, r"must have shape [83], got [5]"),
        ({"control": torch.full((83,), torch.nan)}, "'control' holds NaN"),
        ({"control": torch.full((83,), torch.inf)}, "'control' holds NaN or infinite"),
        ({"control": torch.zeros(83, device="meta")}, "dense tensor with data"),
        ({"control": torch.zeros(83).to_sparse()}, "dense tensor with data"),
        ({"control": torch.zeros(83, dtype=torch.complex64)}, "floating-point"),
        ({"control": {"0.weight": torch.zeros(8, 4)}}, "lacks '0.bias'"),
        ({"control": {"0.weight": torch.zeros(1)}}, "lacks '0.bias'"),
    ],
)
def test_broken_extras_are_set_aside(extras, reason, module, replies, same):
    good = replies(module)
    start = module.state_dict()
    server, clean = Scaffold(module, total_clients=9), Scaffold(module, total_clients=9)
    got = server.aggregate(start, [good[0], _with(good[1], extras=extras), good[2]])
    assert same(got, clean.aggregate(start, [good[0], good[2]]))
    assert torch.equal(server.memory["control"], clean.memory["control"])
    assert reason in server.info.set_aside[0].reason


def test_methods_without_extras_do_not_look_at_them(module, replies):
    server = FedAvg(module)
    server.aggregate(module.state_dict(), [_with(u, extras=None) for u in replies(module)])
    assert not server.info.set_aside


def test_the_guard_hands_on_the_mean_of_its_one_pass_over_the_updates(module, replies):
    layout = fedbe.Layout(module)

    def admitted(updates):
        return admit(updates, layout.pack(module.state_dict()), layout, Limits(), (), {})

    good = replies(module)
    for order in (good, good[::-1]):
        result = admitted(order)
        expected = weighted_mean([(u.state, u.num_examples) for u in result.admitted])
        assert torch.equal(result.mean.params, expected.params)
        assert torch.equal(result.mean.buffers, expected.buffers)
    for more in (good[1], _with(_state(good[1], **{W: _put(good[1].state[W], torch.nan)}), client_id=9)):
        assert admitted([*good, more]).mean is None  # it counts once, or not at all


class TestDoubles:
    def test_the_same_update_twice_counts_once(self, module, replies, same):
        good = replies(module)
        server = FedAvg(module)
        got = server.aggregate(module.state_dict(), [*good, good[1]])
        assert same(got, FedAvg(module).aggregate(module.state_dict(), good))
        (aside,) = server.info.set_aside
        assert aside.client_id == 1
        assert "it counts once" in aside.reason

    @pytest.mark.parametrize(
        "change",
        [
            lambda u: _state(u, **{W: _put(u.state[W], 0.5)}),
            lambda u: _state(u, **{STEPS: torch.tensor(77)}),
            lambda u: _with(u, num_examples=21),
            lambda u: _with(u, extras={"control": torch.ones(83)}),
        ],
        ids=["weights", "counter", "examples", "extras"],
    )
    @pytest.mark.parametrize("first", [True, False])
    def test_two_that_differ_are_both_set_aside_whichever_came_first(self, module, replies, same, change, first):
        good = replies(module)
        twin = change(good[1])
        pair = [twin, good[1]] if first else [good[1], twin]
        server = Scaffold(module, total_clients=3)
        got = server.aggregate(module.state_dict(), [good[0], *pair, good[2]])
        clean = Scaffold(module, total_clients=3).aggregate(module.state_dict(), [good[0], good[2]])
        assert same(got, clean)
        assert [s.reason for s in server.info.set_aside] == ["2 different updates were received under this id"] * 2

    def test_ids_of_another_kind_are_other_clients(self, module, replies):
        server = FedAvg(module)
        server.aggregate(module.state_dict(), replies(module, ids=("1", 1, "a")))
        assert server.info.clients == (1, "1", "a")

    def test_without_ids_equal_updates_all_count(self, module, replies):
        one, two, _ = replies(module, ids=(None, None, None))
        server = FedAvg(module)
        got = server.aggregate(module.state_dict(), [one, one, two])
        weights = (10 * one.state[W] * 2 + 20 * two.state[W]) / 40
        torch.testing.assert_close(got[W], weights)
        assert server.info.clients == ("anonymous 1", "anonymous 2", "anonymous 3")


def test_numbers_of_numpy_are_numbers(module, replies, same):
    good = replies(module)
    other = [_with(u, num_examples=np.int64(u.num_examples), client_id=np.int32(u.client_id)) for u in good]
    server = FedAvg(module)
    assert same(server.aggregate(module.state_dict(), other), FedAvg(module).aggregate(module.state_dict(), good))
    assert server.info.clients == (0, 1, 2)
    assert not server.info.set_aside


def test_a_packed_state_is_as_good_as_a_named_one(module, replies, same):
    server = FedAvg(module)
    good = replies(module)
    packed = [_with(u, state=server.runner.layout.pack(u.state)) for u in good]
    assert same(server.aggregate(module.state_dict(), packed), server.aggregate(module.state_dict(), good))


class Positions(nn.Module):
    """Asks an embedding for the positions that lie in a buffer, and counts its steps in another."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.register_buffer("positions", torch.arange(4))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        return x @ self.embedding(self.positions)


class TestIntegers:
    @pytest.fixture
    def module(self):
        torch.manual_seed(0)
        return Positions()

    def _sent(self, module, client, steps=5, **tensors):
        trained = {"embedding.weight": module.embedding.weight.detach() + 0.1 * (client + 1)}
        return ClientUpdate({**module.state_dict(), **trained, "steps": torch.tensor(steps), **tensors}, 1, client)

    @pytest.mark.parametrize("others", [(0,), (0, 2), (0, 2, 3)])
    @pytest.mark.parametrize("method", ["fedavg", "fedbe"])
    def test_nobody_may_rebuild_the_model(self, module, same, others, method):
        """Such positions would end the server that asks the model, or every client that it is sent to."""
        good = [self._sent(module, client) for client in others]
        bad = self._sent(module, 1, positions=torch.full((4,), 10**12))
        settings = {"unlabeled": torch.randn(6, 4), "distill_epochs": 1} if method == "fedbe" else {}
        server, clean = (fedbe.server(method, module, **settings) for _ in range(2))
        got = server.aggregate(module.state_dict(), [bad, *good])
        assert same(got, clean.aggregate(module.state_dict(), good))
        (aside,) = server.info.set_aside
        assert aside.client_id == 1
        assert "changed the integers in 'positions'" in aside.reason

    def test_who_takes_a_name_that_we_give_takes_nobody_along(self, module):
        """Those without an id are called anonymous 1, 2 …"""
        good = [ClientUpdate(self._sent(module, client).state, 1) for client in (0, 2)]
        bad = self._sent(module, 1, positions=torch.full((4,), 10**12))
        server = FedAvg(module)
        server.aggregate(module.state_dict(), [*good, _with(bad, client_id="anonymous 1")])
        assert server.info.clients == ("anonymous 1", "anonymous 2")
        assert len(server.info.set_aside) == 1

    def test_a_counter_may_grow_and_those_who_did_not_train_keep_it(self, module):
        idle = [ClientUpdate(module.state_dict(), 1, client) for client in (5, 6, 7)]
        server = FedAvg(module)
        state = server.aggregate(module.state_dict(), [self._sent(module, 0, 5), self._sent(module, 1, 800), *idle])
        assert not server.info.set_aside
        assert state["steps"] == 800

    def test_a_counter_cannot_grow_without_measure(self, module):
        server = FedAvg(module)
        given = [self._sent(module, 0), self._sent(module, 1), self._sent(module, 2, 2**63 - 1)]
        assert server.aggregate(module.state_dict(), given)["steps"] == 5
        (aside,) = server.info.set_aside
        assert aside.client_id == 2
        assert "'steps' grew by 9.22e+18; 5 is usual" in aside.reason

    @pytest.mark.parametrize("ratio", [2.0, 1e200])
    @pytest.mark.parametrize(
        ("before", "steps"),
        [
            (100, (100, 100, 99)),  # counted from 0 in each round
            (0, (0, 0, 3)),  # of rare events
            (0, (5, 5, 400)),  # one client has much data
            (10**6, (10**6 + 7, 10**6 + 7, 10)),  # one starts counting at zero
        ],
    )
    def test_honest_counters_differ(self, module, before, steps, ratio):
        start = {**module.state_dict(), "steps": torch.tensor(before)}
        server = FedAvg(module, max_norm_ratio=ratio)
        server.aggregate(start, [self._sent(module, client, n) for client, n in enumerate(steps)])
        assert not server.info.set_aside

    def test_clients_may_freeze_batch_norm(self, network, nearby):
        """Its counter then moves with a minority."""
        bn = network("mlp-bn")
        states = nearby(bn, 3)  # the counter grows by 0, 1 and 2
        states[1][STEPS] = states[0][STEPS]
        server = FedAvg(bn)
        server.aggregate(bn.state_dict(), [ClientUpdate(s, 1, client_id=i) for i, s in enumerate(states)])
        assert not server.info.set_aside


class Frozen(nn.Module):
    """Has a buffer and a counter that training leaves alone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("offset", torch.zeros(4))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        return self.linear(x - self.offset)


def _frozen_update(module, client, **broken):
    trained = {"linear.weight": module.linear.weight.detach() + 0.1 * (client + 1)}
    return ClientUpdate({**module.state_dict(), **trained, **broken}, 1, client)


class TestWild:
    @pytest.mark.parametrize("name", [W, VAR])
    def test_of_two_clients_the_one_beyond_all_measure_is_wild(self, module, replies, name):
        one, two, _ = replies(module)
        server = FedAvg(module)
        server.aggregate(module.state_dict(), [one, _state(two, **{name: _put(two.state[name], 1e6)})])
        assert [s.client_id for s in server.info.set_aside] == [1]

    def test_the_limits_are_settings(self, module, replies):
        given = replies(module)
        given[2] = _state(given[2], **{W: _put(given[2].state[W], 20.0)})  # others move by 0.6; ‖w‖ ≤ √32 = 5.7
        wide, narrow = FedAvg(module), FedAvg(module, max_norm_ratio=5.0, max_change=1.0)
        wide.aggregate(module.state_dict(), given)
        narrow.aggregate(module.state_dict(), given)
        assert not wide.info.set_aside
        assert [s.client_id for s in narrow.info.set_aside] == [2]

    @pytest.mark.parametrize("count", [2, 3, 10])
    def test_what_the_others_leave_alone_is_not_the_attacker_s_to_set(self, same, count):
        """The median of changes that are not zero would be the attacker's own."""
        torch.manual_seed(0)
        module = Frozen()
        good = [_frozen_update(module, client) for client in range(1, count)]
        for broken in ({"offset": torch.full((4,), 1e30)}, {"steps": torch.tensor(2**62)}):
            server, clean = FedAvg(module), FedAvg(module)
            got = server.aggregate(module.state_dict(), [_frozen_update(module, 0, **broken), *good])
            assert same(got, clean.aggregate(module.state_dict(), good))
            assert [s.client_id for s in server.info.set_aside] == [0]

    def test_the_client_with_nearly_all_data_is_not_wild(self, module):
        """Six clients with 3 examples take one step; one with 3,000 examples takes 1,500 and moves 180 times as far."""
        start = module.state_dict()

        def moved(by):
            return {k: v + by if v.is_floating_point() else v for k, v in start.items()}

        given = [ClientUpdate(moved(0.002), 3, client_id=i) for i in range(6)]
        server = FedAvg(module)
        server.aggregate(start, [*given, ClientUpdate(moved(0.36), 3000, client_id=6)])
        assert not server.info.set_aside
        assert [c.client_id for c in server.info.capped] == [6]

    @pytest.mark.parametrize("by", [0.01, 3.0])
    def test_clients_that_did_not_move_make_nobody_wild(self, module, by):
        """Slow clients that trained nothing are honest, and so is the one that did."""
        still = module.state_dict()
        moved = {k: v + by if k == W else v for k, v in still.items()}
        server = FedAvg(module)
        server.aggregate(still, [ClientUpdate(s, 1, client_id=i) for i, s in enumerate([still, still, still, moved])])
        assert not server.info.set_aside

    @pytest.mark.parametrize("usual", [0.5, 1e-9])
    def test_an_extra_beyond_all_others_is_wild(self, module, replies, same, usual):
        good = [_with(u, extras={"control": torch.full((83,), usual)}) for u in replies(module, ids=(0, 1, 2, 3))]
        bad = _with(good[1], extras={"control": _put(good[1].extras["control"], 1e30)})
        server, clean = Scaffold(module, total_clients=4), Scaffold(module, total_clients=4)
        got = server.aggregate(module.state_dict(), [good[0], bad, good[2], good[3]])
        assert same(got, clean.aggregate(module.state_dict(), [good[0], good[2], good[3]]))
        assert torch.equal(server.memory["control"], clean.memory["control"])
        (aside,) = server.info.set_aside
        assert aside.client_id == 1
        assert aside.reason.startswith("its extra 'control', '0.weight', has norm 1e+30; ")

    @pytest.mark.parametrize("sizes", [(0.0, 0.0, 0.0), (0.0, 0.0, 0.3), (1e-12, 1e-9, 2e-12)])
    def test_extras_that_are_zero_or_tiny_make_nobody_wild(self, module, replies, sizes):
        """In the first round, or where a client took no step."""
        given = zip(replies(module), sizes, strict=True)
        server = Scaffold(module, total_clients=3)
        server.aggregate(module.state_dict(), [_with(u, extras={"control": torch.full((83,), s)}) for u, s in given])
        assert not server.info.set_aside

    def test_a_new_client_among_those_that_have_settled_is_not_wild(self, module):
        """It has no control variate yet and sends all of it; the others send what little changed."""
        state = module.state_dict()
        moved = {k: v + 1e-6 if k == W else v for k, v in state.items()}
        given = [
            ClientUpdate(moved, 1, i, {"control": torch.full((83,), size)}) for i, size in enumerate([1e-4] * 3 + [0.1])
        ]
        server = Scaffold(module, total_clients=4)
        server.aggregate(state, given)
        assert not server.info.set_aside

    def test_a_control_variate_is_measured_from_the_server_s(self, module):
        """c_i⁺ − c_i + c is the client's own way: where that is short, −c is usual and 160 times c is not."""
        state = module.state_dict()
        moved = {k: v + 1e-3 if k == W else v for k, v in state.items()}
        server = Scaffold(module, total_clients=4)

        def send(*controls):
            given = [ClientUpdate(moved, 1, i, {"control": torch.full((83,), c)}) for i, c in enumerate(controls)]
            server.aggregate(state, given)
            return [s.client_id for s in server.info.set_aside]

        assert send(0.5, 0.5, 0.5, 0.5) == []
        assert float(server.memory["control"][0]) == 0.5
        assert send(-0.499, -0.501, -0.499, 80.0) == [3]

    def test_a_clash_with_the_names_we_give_takes_nobody_else_along(self, module, replies):
        good = replies(module, ids=("anonymous 1", "b", "c", None))
        bad = _state(good[3], **{W: _put(good[3].state[W], 1e6)})
        server = FedAvg(module)
        server.aggregate(module.state_dict(), [*good[:3], bad])
        assert server.info.clients == ("anonymous 1", "b", "c")


class TestAlone:
    """One client cannot be compared with others, and its own changes are no yardstick."""

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [({W: 1e30}, "its '0.weight' changed"), ({VAR: 1e30}, "'1.running_var' changed"), ({STEPS: 2**40}, "grew by")],
    )
    @pytest.mark.parametrize("others", [False, True], ids=["one-reply", "the-other-is-nan"])
    def test_the_absolute_bounds_hold(self, module, replies, changes, reason, others):
        good = replies(module)[0]
        bad = _state(good, **{name: torch.full_like(good.state[name], value) for name, value in changes.items()})
        nan = _with(_state(good, **{W: _put(good.state[W], torch.nan)}), client_id=1)
        with pytest.raises(AggregationError, match=reason):
            FedAvg(module).aggregate(module.state_dict(), [bad, nan] if others else [bad])

    @pytest.mark.parametrize(("control", "usable"), [(100.0, True), (1e30, False)])
    def test_an_extra_is_not_its_own_yardstick(self, module, replies, control, usable):
        server = Scaffold(module, total_clients=1)
        given = [_with(replies(module)[0], extras={"control": torch.full((83,), control)})]
        if usable:
            server.aggregate(module.state_dict(), given)
        else:
            with pytest.raises(AggregationError, match="its extra 'control'"):
                server.aggregate(module.state_dict(), given)


class TestTooFew:
    def test_nothing_changes_and_the_reasons_are_told(self, module, replies):
        server = FedAvgM(module, min_clients=2)
        start = module.state_dict()
        state = server.aggregate(start, replies(module))
        memory, info = server.memory, server.info
        kept = {k: v.clone() for k, v in memory.items()}
        before = {k: v.clone() for k, v in state.items()}
        bad = [_with(u, num_examples=0) for u in replies(module)]
        with pytest.raises(AggregationError, match=r"1 usable .*client 1: `num_examples`"):
            server.aggregate(state, [replies(module)[0], *bad[1:]])
        assert (server.round, server.memory, server.info) == (1, memory, info)
        assert all(torch.equal(memory[k], kept[k]) for k in kept)
        assert all(torch.equal(state[k], before[k]) for k in before)

    def test_many_reasons_are_cut_short(self, module, replies):
        bad = [_with(u, num_examples=0) for u in replies(module, ids=range(6))]
        with pytest.raises(AggregationError, match="; and 3 more"):
            FedAvg(module).aggregate(module.state_dict(), bad)

    def test_no_updates_at_all(self, module):
        with pytest.raises(AggregationError, match="0 usable client updates"):
            FedAvg(module).aggregate(module.state_dict(), [])


def test_finite_clients_with_a_result_that_is_not(module):
    """3e38 and −3e38 are floats; their difference is none."""
    far = [{k: v * 0 + sign * 3e38 if k == W else v for k, v in module.state_dict().items()} for sign in (1, -1)]
    server = FedAvg(module)
    with pytest.raises(AggregationError, match="combined model has NaN or infinite"):
        server.aggregate(module.state_dict(), [ClientUpdate(s, 1, client_id=i) for i, s in enumerate(far)])
    assert server.round == 0


def test_a_global_state_that_is_not_finite_is_refused(module, replies):
    """With it no length can be compared, and FedAvgM would remember NaN for good."""
    broken = {k: _put(v, torch.nan) if k == W else v for k, v in module.state_dict().items()}
    server = FedAvgM(module)
    with pytest.raises(AggregationError, match="global model that was given"):
        server.aggregate(broken, replies(module))
    server.aggregate(module.state_dict(), replies(module))
    assert (server.round, bool(torch.isfinite(server.memory["momentum"]).all())) == (1, True)


def test_what_the_server_remembers_stays_finite(module, replies):
    """Two clients cannot say who is wild; their control variates add up."""
    given = [_with(u, extras={"control": torch.full((83,), 3e38)}) for u in replies(module, ids=(0, 1))]
    server = Scaffold(module, total_clients=2)
    server.aggregate(module.state_dict(), given)
    before = server.memory["control"].clone()
    with pytest.raises(AggregationError, match="new 'control' has NaN"):
        server.aggregate(module.state_dict(), given)
    assert torch.equal(server.memory["control"], before)


def test_reasons_cannot_move_a_terminal_s_cursor(module, replies):
    """The name of a tensor is a stranger's word, too."""
    given = replies(module)
    given[0] = _state(given[0], **{"\x1b[2Jhello": torch.zeros(1)})
    server = FedAvg(module)
    server.aggregate(module.state_dict(), given)
    (aside,) = server.info.set_aside
    assert "'?[2Jhello'" in aside.reason
    assert aside.reason.isprintable()


def test_reasons_have_a_sensible_length(module, replies):
    given = replies(module)
    given[0] = _state(given[0], **{"x" * 100_000: torch.zeros(1)})
    server = FedAvg(module)
    server.aggregate(module.state_dict(), given)
    (aside,) = server.info.set_aside
    assert len(aside.reason) == 300


def test_the_global_state_must_fit():
    module = nn.Linear(2, 2)
    with pytest.raises(StateError, match=r"`global_state` .*lacks 'weight'"):
        FedAvg(module).aggregate({"bias": torch.zeros(2)}, [ClientUpdate(module.state_dict(), 1)])


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"min_clients": 0}, "`min_clients` must be"),
        ({"min_clients": "2"}, "`min_clients` must be"),
        ({"max_norm_ratio": 1.0}, "`max_norm_ratio` .*> 1, got 1.0"),
        ({"max_norm_ratio": None}, "`max_norm_ratio` .*> 1, got None"),
        ({"max_change": 0.0}, "`max_change` .*> 0, got 0.0"),
        ({"max_share": 0.0}, r"`max_share` .*\(0, 1\], got 0.0"),
        ({"max_share": 2}, r"`max_share` .*\(0, 1\], got 2"),
        ({"max_size_ratio": 0.5}, "`max_size_ratio` .*>= 1, got 0.5"),
        ({"max_size_ratio": float("nan")}, "`max_size_ratio` .*>= 1, got nan"),
        ({"client_weights": "none"}, "`client_weights` must be 'reported', 'equal' or"),
        ({"client_weights": {0: -1}}, "`client_weights` of client 0: .*> 0"),
    ],
)
def test_limits(limits, message):
    with pytest.raises(SettingError, match=message):
        Limits(**limits)


class Scaled(nn.Module):
    """A network with its normalisation as buffers, which nobody trains."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        return self.linear(x - self.mean)


class TestConstantBuffers:
    @staticmethod
    def replies(module, count, hostile, trained=True):
        step = 0.01 if trained else 0.0
        updates = []
        for i in range(count):
            state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
            state["linear.weight"] += step * (i + 1)
            if i in hostile:
                state["mean"] += 29.0  # below the absolute bound, and again in every round
            updates.append(ClientUpdate(state, 100, i))
        return updates

    @pytest.mark.parametrize("count", [3, 10])
    def test_who_changes_what_nobody_trains_is_set_aside(self, count):
        module = Scaled()
        server = FedAvg(module)
        state = server.aggregate(module.state_dict(), self.replies(module, count, {0}))
        assert torch.equal(state["mean"], module.mean)
        (aside,) = server.info.set_aside
        assert (aside.client_id, aside.reason) == (0, "it changed 'mean', which the others left as it is")

    @pytest.mark.parametrize("hostile", [1, 2])
    @pytest.mark.parametrize("scale", [1.0, 300.0], ids=["scaled", "raw"])
    def test_at_a_tie_no_honest_client_is_set_aside(self, network, hostile, scale):
        """Hostile clients that leave the statistics of BatchNorm alone must not decide that nobody trains them."""
        module = network("mlp-bn")
        start, honest, bad = module.state_dict(), copy.deepcopy(module), copy.deepcopy(module)
        with torch.no_grad():
            for _ in range(20):
                honest(scale * torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
            for client, step in ((honest, 0.01), (bad, -1.0)):
                for weight in client.parameters():
                    weight += step
        states = [honest.state_dict()] * hostile + [{**start, **dict(bad.named_parameters())}] * hostile
        server = FedAvg(module)
        server.aggregate(start, [ClientUpdate(state, 100, i) for i, state in enumerate(states)])
        assert server.info.set_aside == ()

    def test_clients_that_train_nothing_are_no_judges(self):
        """Statistics of BatchNorm change where a client trains; here only one of four does."""
        module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        states = [module.state_dict() for _ in range(4)]
        states[0] = {name: tensor + 1 for name, tensor in states[0].items()}
        server = FedAvg(module)
        server.aggregate(module.state_dict(), [ClientUpdate(state, 100, i) for i, state in enumerate(states)])
        assert server.info.set_aside == ()

    @pytest.mark.parametrize("batches", [(1, 50), (1, 1, 40), (1, 2, 3, 300)])
    def test_statistics_that_everybody_trains_stay(self, batches):
        module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        draw, updates = torch.Generator().manual_seed(0), []
        for i, count in enumerate(batches):
            client = copy.deepcopy(module)
            with torch.no_grad():
                for _ in range(count):
                    client(torch.randn(8, 4, generator=draw))
                client[0].weight += 0.01 * count
            updates.append(ClientUpdate(client.state_dict(), 8 * count, i))
        server = FedAvg(module)
        server.aggregate(module.state_dict(), updates)
        assert server.info.set_aside == ()
