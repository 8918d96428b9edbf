"""No client decides alone: the number of examples that it reports counts only so much."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedbe import ClientUpdate, FedAvg, FedBE
from fedbe.algorithms.server.influence import cap_weights, share_limit
from fedbe.algorithms.server.limits import Limits


@pytest.mark.parametrize(
    ("weights", "share", "expected"),
    [
        ([1e15, *[1] * 9], 0.25, [3, *[1] * 9]),  # 3 of 12
        ([1e15, 1e15, *[1] * 8], 0.25, [4, 4, *[1] * 8]),  # 4 of 16 each: 0.25 · 8 / (1 − 0.5)
        ([1e15, 5, *[1] * 8], 0.25, [4, 4, *[1] * 8]),  # then 5 is too much, too
        ([3, 1], 0.25, [3, 1]),
        ([1e15, 1], 0.25, [3, 1]),  # two clients: three quarters
        ([3000, 3, 3, 3, 3, 3, 3], 0.25, [9, 3, 3, 3, 3, 3, 3]),  # seven: a third
        ([1e15, *[1] * 9], 1.0, [1e15, *[1] * 9]),  # no limit
        ([7], 0.25, [7]),
        ([10, 20, 40], 0.25, [10, 20, 40]),
    ],
)
def test_by_hand(weights, share, expected):
    assert cap_weights(weights, share) == pytest.approx(expected)


def test_a_client_counts_at_most_so_many_times_the_median():
    assert cap_weights([1e15, 5, 2, 2, 1], 1.0, 20) == [40, 5, 2, 2, 1]
    assert cap_weights([1e15] * 4 + [100.0] * 96, 0.25, 20) == [2000.0] * 4 + [100.0] * 96  # 45 % together
    assert cap_weights([1e15] * 5 + [100.0] * 5, 1.0, 20) == [2000.0] * 5 + [100.0] * 5  # the lower median
    assert cap_weights([1e15, 100.0], 0.25, 20) == [300.0, 100.0]
    assert cap_weights([30.0, 3.0, 60.0], 1.0, 20) == [30.0, 3.0, 60.0]


def test_honest_sizes_from_3_to_3000_hardly_change():
    sizes = [3 * 1000 ** (i / 199) for i in range(200)]
    capped = cap_weights(sizes, 0.25, Limits().max_size_ratio)
    assert sum(new != old for new, old in zip(capped, sizes, strict=True)) == 14
    assert sum(capped) / sum(sizes) == pytest.approx(0.92, abs=0.01)


@given(
    st.lists(st.floats(1e-3, 1e15), min_size=1, max_size=30),
    st.floats(0.05, 1),
)
def test_no_share_is_above_the_limit(weights, max_share):
    capped = cap_weights(weights, max_share)
    limit = share_limit(len(weights), max_share)
    assert max(capped) <= limit * sum(capped) * (1 + 1e-6)
    assert all(new <= old for new, old in zip(capped, weights, strict=True))
    if max(weights) <= limit * sum(weights):
        assert capped == weights


def _replies(examples):
    return [ClientUpdate({"weight": torch.full((2, 1), float(i))}, n, i) for i, n in enumerate(examples)]


@pytest.fixture
def model():
    return nn.Linear(1, 2, bias=False)


class TestServer:
    def test_one_claim_does_not_take_the_model_over(self, model):
        server = FedAvg(model)
        state = server.aggregate(model.state_dict(), _replies([5] * 9 + [1e15]))
        assert state["weight"].flatten().tolist() == pytest.approx([(36 + 3 * 9) / 12] * 2)  # Σ 0…8 = 36
        (capped,) = server.info.capped
        assert "client 9 reports 100 %" in str(capped)
        assert "counts as 25 %" in str(capped)
        assert "capped        client 9 reports" in str(server.info)

    def test_four_claims_do_not_take_a_large_cohort_over(self, model):
        server = FedAvg(model)
        state = server.aggregate(model.state_dict(), _replies([1e15] * 4 + [100] * 96))
        honest, hostile = sum(range(4, 100)) * 100, sum(range(4)) * 2000
        assert state["weight"][0].item() == pytest.approx((honest + hostile) / (96 * 100 + 4 * 2000))
        assert [c.client_id for c in server.info.capped] == [0, 1, 2, 3]
        assert "client 0 reports 25 % of all examples and counts as 11.4 %" in str(server.info)
        believing = FedAvg(model, max_size_ratio=1e15)
        assert believing.aggregate(model.state_dict(), _replies([1e15] * 4 + [100] * 96))["weight"][0].item() < 1.6

    def test_honest_weights_stay(self, model):
        server = FedAvg(model)
        server.aggregate(model.state_dict(), _replies([5] * 9 + [15]))
        assert server.info.capped == ()

    def test_reports_can_be_ignored(self, model):
        server = FedAvg(model, client_weights="equal")
        state = server.aggregate(model.state_dict(), _replies([1, 1e15, float("nan")]))
        assert state["weight"][0].item() == pytest.approx(1.0)
        assert server.info.capped == server.info.set_aside == ()

    def test_the_server_can_declare_them(self, model):
        server = FedAvg(model, client_weights={0: 1, 1: 999})
        state = server.aggregate(model.state_dict(), _replies([1e15, 1, 1]))
        assert state["weight"][0].item() == pytest.approx(0.999)
        (aside,) = server.info.set_aside
        assert aside.client_id == 2
        assert "declared no number of examples" in aside.reason

    def test_the_posterior_uses_the_capped_weights(self, model):
        inputs = torch.randn(8, 1)
        given = _replies([5] * 9 + [1e15])
        servers = [FedBE(model, unlabeled=inputs, distill_epochs=1, max_share=share) for share in (0.25, 1.0)]
        states = [server.aggregate(model.state_dict(), given) for server in servers]
        assert not torch.equal(states[0]["weight"], states[1]["weight"])
