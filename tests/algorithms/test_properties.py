"""Properties that must hold for all inputs: of the guard, of sharpening and of the vote."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedbe.algorithms.distillation import sharpen
from fedbe.algorithms.server.guard import admit
from fedbe.algorithms.server.limits import Limits
from fedbe.algorithms.vote import mean_vote
from fedbe.core.layout import Layout
from fedbe.core.updates import ClientUpdate
from fedbe.errors import AggregationError

QUICK = settings(max_examples=60, deadline=None)
LAYOUT = Layout(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
START = LAYOUT.pack(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict())
PROBABILITIES = st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=6)

# What a client may send in place of a tensor, a number of examples or an id.
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5),
    st.lists(st.integers(), max_size=3), st.just(torch.zeros(2)), st.just(torch.tensor(math.nan)),
)  # fmt: skip


def _probabilities(values):
    row = torch.tensor([values], dtype=torch.float64)
    return row / row.sum()


@QUICK
@given(PROBABILITIES, st.floats(0.1, 20.0))
def test_sharpening_keeps_a_distribution_and_the_order_of_classes(values, exponent):
    before = _probabilities(values)
    after = sharpen(before, exponent)
    assert math.isclose(float(after.sum()), 1.0, rel_tol=1e-9)
    assert bool(torch.isfinite(after).all())
    for i in range(len(values)):
        for j in range(len(values)):
            if before[0, i] > before[0, j]:
                assert after[0, i] >= after[0, j]
    if exponent >= 1:
        assert float(after.max()) >= float(before.max()) - 1e-9


@QUICK
@given(PROBABILITIES)
def test_exponent_one_changes_nothing(values):
    torch.testing.assert_close(sharpen(_probabilities(values), 1.0), _probabilities(values))


@QUICK
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8), st.randoms())
def test_the_mean_vote_lies_between_its_members_and_does_not_depend_on_their_order(rows, shuffle):
    members = [torch.tensor([row], dtype=torch.float64) for row in rows]
    mean = mean_vote(members)
    stacked = torch.stack(members)
    assert bool((mean >= stacked.amin(0) - 1e-12).all())
    assert bool((mean <= stacked.amax(0) + 1e-12).all())
    shuffle.shuffle(members)
    torch.testing.assert_close(mean_vote(members), mean)


def _honest(moves):
    named = LAYOUT.unpack(START)
    return [
        ClientUpdate({k: v + m if v.is_floating_point() else v + 3 for k, v in named.items()}, 10 + i, i)
        for i, m in enumerate(moves)
    ]


@QUICK
@given(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=6), st.randoms())
def test_clients_within_a_factor_of_100_are_admitted_in_the_order_of_their_ids(moves, shuffle):
    updates = _honest(moves)
    shuffle.shuffle(updates)
    admission = admit(updates, START, LAYOUT, Limits(), (), {})
    assert [u.client_id for u in admission.admitted] == list(range(len(moves)))
    assert not admission.set_aside


@QUICK
@given(st.sampled_from([*LAYOUT.keys]), ANYTHING, ANYTHING, ANYTHING)
def test_whatever_one_client_sends_the_others_are_used(key, value, num_examples, client_id):
    state = LAYOUT.unpack(START) | {key: value}
    broken = ClientUpdate(state, num_examples, client_id)
    admission = admit([*_honest([0.1, 0.2, 0.3]), broken], START, LAYOUT, Limits(), (), {})
    missing = {0, 1, 2} - {u.client_id for u in admission.admitted}
    assert all(m == client_id for m in missing)  # two updates under one id: both are set aside
    for aside in admission.set_aside:
        assert aside.reason.isprintable()


@QUICK
@given(st.lists(ANYTHING, max_size=3))
def test_updates_that_are_not_updates_end_in_one_sentence(replies):
    with pytest.raises(AggregationError, match="usable client updates"):
        admit(replies, START, LAYOUT, Limits(), (), {})
