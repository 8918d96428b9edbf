"""What every method guarantees, whatever it computes."""

import copy

import pytest
import torch

import fedbe
from fedbe.algorithms import methods
from fedbe.algorithms.pace import PACE_MEMORY

QUICK = {"distill_epochs": 2, "distill_batch_size": 8, "num_samples": 3}
NETWORKS = ("mlp-bn", "conv-gn", "dropout-bn")
RANDOM = {n for n, m in methods.METHODS.items() if "distill_until" in m.settings()}  # they shuffle batches, at least
AVERAGES = ("fedavg", "fedavg-median", "fedavgm", "fedprox", "scaffold", "1-ensemble")  # of one client: that client

pytestmark = [pytest.mark.parametrize("method", methods.METHODS), pytest.mark.parametrize("name", NETWORKS)]


@pytest.fixture
def make(network, inputs_for, name, method):
    """make(seed=…): a new server for this method and network."""

    def build(**options):
        known = methods.METHODS[method].settings()
        quick = {k: v for k, v in QUICK.items() if k in known}
        return fedbe.server(method, network(name), unlabeled=inputs_for(name), total_clients=5, **(quick | options))

    return build


def test_names_dtypes_shapes_and_finite_numbers(make, network, replies, name):
    module = network(name)
    given = module.state_dict()
    state = make().aggregate(given, replies(module))
    assert list(state) == list(given)
    for key, tensor in given.items():
        assert (state[key].dtype, state[key].shape) == (tensor.dtype, tensor.shape)
        assert bool(torch.isfinite(state[key]).all())
        assert not state[key].requires_grad
    assert any(not torch.equal(state[k], given[k]) for k in given)
    network(name).load_state_dict(state)
    assert all(float(v.min()) >= 0 for k, v in state.items() if k.endswith("running_var"))


def test_no_argument_is_changed(network, inputs_for, replies, name, method):
    module = network(name).train()
    given, updates, inputs = module.state_dict(), replies(module), inputs_for(name)
    before = copy.deepcopy((given, [(u.state, u.num_examples, u.extras) for u in updates], inputs))
    torch.manual_seed(5)
    rng = torch.get_rng_state()
    quick = {k: v for k, v in QUICK.items() if k in methods.METHODS[method].settings()}
    server = fedbe.server(method, module, unlabeled=inputs, **quick)
    state = server.aggregate(given, updates)
    after = (given, [(u.state, u.num_examples, u.extras) for u in updates], inputs)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    torch.testing.assert_close(dict(module.state_dict()), dict(before[0]), rtol=0, atol=0)
    assert module.training
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), rng)
    # The result shares no memory with the arguments, so the caller may change it in place.
    for tensor in state.values():
        tensor.zero_()
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_the_result_is_a_function_of_the_seed(make, network, replies, same, name, method):
    module = network(name)
    options = {"gate": "off"} if "gate" in methods.METHODS[method].settings() else {}  # so that every student stays
    torch.manual_seed(1)
    one = make(seed=3, **options).aggregate(module.state_dict(), replies(module))
    torch.manual_seed(2)
    two = make(seed=3, **options).aggregate(module.state_dict(), replies(module))
    other = make(seed=4, **options).aggregate(module.state_dict(), replies(module))
    later = make(seed=3, **options)
    later.round = 6
    assert same(one, two)
    assert same(one, other) == (method not in RANDOM)
    assert same(one, later.aggregate(module.state_dict(), replies(module))) == (method not in RANDOM)


@pytest.mark.parametrize("ids", [(0, 1, 2), ("b", "a", 3), (None, None, None), (4, None, "x")], ids=str)
def test_the_order_of_replies_changes_nothing(make, network, replies, same, name, ids):
    module = network(name)
    updates = replies(module, ids=ids)
    servers = [make() for _ in range(2)]
    states = [
        server.aggregate(module.state_dict(), [updates[i] for i in order])
        for server, order in zip(servers, ((0, 1, 2), (2, 0, 1)), strict=True)
    ]
    assert same(*states)
    assert same(*(dict(server.memory) for server in servers))


def test_memory_is_returned_and_never_changed(make, network, replies, name):
    module = network(name)
    server = make()
    state = server.aggregate(module.state_dict(), replies(module))
    first = server.memory
    copy_of_first = {k: v.clone() for k, v in first.items()}
    server.aggregate(state, replies(module))
    assert all(torch.equal(first[k], copy_of_first[k]) for k in copy_of_first)
    if copy_of_first:
        assert server.memory is not first
        changed = any(not torch.equal(server.memory[k], copy_of_first[k]) for k in copy_of_first)
        # Two rounds may give the gate and the pace the same numbers.
        may_stay = all(k.startswith("gate") or k == PACE_MEMORY for k in copy_of_first)
        assert changed or may_stay or server.memory.keys() != copy_of_first.keys()


def test_memory_and_round_are_enough_to_resume(make, network, replies, same, name):
    module = network(name)
    straight = make()
    state = straight.aggregate(module.state_dict(), replies(module))
    saved_round = straight.round
    saved_memory = {k: v.clone() for k, v in straight.memory.items()}
    expected = straight.aggregate(state, replies(module))
    resumed = make()
    resumed.round, resumed.memory = saved_round, saved_memory
    assert same(resumed.aggregate(state, replies(module)), expected)
    assert resumed.round == 2


def test_the_average_of_one_client_is_that_client(make, network, replies, same, name, method):
    module = network(name)
    (only,) = replies(module, ids=(0,))
    if method not in RANDOM:
        state = make().aggregate(module.state_dict(), [only])
        assert same(state, dict(only.state)) == (method in AVERAGES or (method == "fedavg-bn" and name == "conv-gn"))
        return
    plain = {"sharpening": 1.0}
    state = make(members="A", **plain).aggregate(module.state_dict(), [only])
    assert same(state, make(members="C", **plain).aggregate(module.state_dict(), [only]))
    # Without statistics, learning its own predictions changes nothing (appendix). Adam makes steps of rounding errors.
    if name == "conv-gn" and method != "feddf":
        for key in state:
            torch.testing.assert_close(state[key], only.state[key], rtol=0, atol=1e-5)


def test_info_describes_the_round(make, network, replies, name, method):
    module = network(name)
    labels = torch.arange(24) % 3
    server = make(labels=labels)
    server.aggregate(module.state_dict(), replies(module))
    info = server.info
    assert (info.round, info.clients, info.set_aside) == (1, (0, 1, 2), ())
    assert {"guard", "mean"} <= set(info.step.seconds)
    assert all(s >= 0 for s in info.step.seconds.values())
    if method in RANDOM:
        members = server.method.settings()["members"]
        assert len(info.step.members) == 3 * ("S" in members) + 3 * ("C" in members) + ("A" in members)
        assert all(0 <= m.metrics.accuracy <= 1 for m in info.step.members)
        assert 0 <= info.step.ensemble.accuracy <= 1
        assert 0 <= info.step.student.accuracy <= 1
        assert (info.step.average is not None) == ("A" in members)
