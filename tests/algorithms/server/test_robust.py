"""Robust means and votes, by hand; and that hostile clients do not move them far."""

import pytest
import torch
from torch import nn

from fedbe import ClientUpdate, Server, get_method
from fedbe.algorithms.server.robust import (
    ROBUST_RULES,
    clip_to_median,
    coordinate_median,
    geometric_median,
    krum_selection,
    robust_mean,
    trimmed_mean,
)
from fedbe.algorithms.vote import consensus_vote, median_vote, trimmed_vote
from fedbe.errors import SettingError

RULES = [rule for rule in ROBUST_RULES if rule != "none"]


@pytest.mark.parametrize("method", ["scaffold", "feddyn", "fedbe+scaffold"])
def test_methods_whose_server_adds_up_what_clients_send_have_no_robust_mean(method):
    with pytest.raises(SettingError, match=r"`robust` must be 'none' for .*, got 'median'"):
        get_method(method, robust="median")


class TestByHand:
    def test_median(self):
        rows = torch.tensor([[1.0, 5.0], [3.0, -9.0], [2.0, 6.0]])
        assert coordinate_median(rows).tolist() == [2.0, 5.0]
        assert coordinate_median(rows[:2]).tolist() == [2.0, -2.0]
        assert coordinate_median(rows[:1]).tolist() == [1.0, 5.0]

    def test_trimmed_mean(self):
        rows = torch.tensor([[0.0], [1.0], [2.0], [6.0], [1000.0]])
        assert trimmed_mean(rows, 1).tolist() == [3.0]  # (1 + 2 + 6) / 3
        assert trimmed_mean(rows, 2).tolist() == [2.0]
        assert trimmed_mean(rows, 9).tolist() == [2.0]  # no more than leaves one

    def test_krum(self):
        # Scores with f = 1: the sums of the two smallest squared distances to others:
        # 0: 1 + 4 = 5; 1: 1 + 1 = 2; 2: 1 + 4 = 5; 10: 4 + 64 = 68; 12: 4 + 100 = 104
        rows = torch.tensor([[0.0], [1.0], [2.0], [10.0], [12.0]])
        assert krum_selection(rows, 1) == [0, 1, 2, 3]
        assert krum_selection(rows, 2) == [0, 1, 2]
        assert krum_selection(rows[:1], 0) == [0]

    def test_geometric_median(self):
        """Of three points on a line it is the middle one; a far point pulls no harder than a near one."""
        for far in (4.0, 4e6):
            rows = torch.tensor([[0.0, 0.0], [1.0, 0.0], [far, 0.0]])
            torch.testing.assert_close(geometric_median(rows), torch.tensor([1.0, 0.0]), atol=1e-3, rtol=0)

    def test_clip_to_median(self, update, state):
        # changes of norm 1, 2 and 100; the median is 2: (1 + 2 + 2) / 3 of the way along each axis
        updates = [update(0, [1.0, 0, 0, 0]), update(1, [0, 2.0, 0, 0]), update(2, [0, 0, 100.0, 0])]
        mean = clip_to_median(updates, state([0.0, 0, 0, 0]))
        torch.testing.assert_close(mean, torch.tensor([1 / 3, 2 / 3, 2 / 3, 0]))

    def test_votes(self):
        good = [torch.tensor([[0.8, 0.2]]), torch.tensor([[0.7, 0.3]]), torch.tensor([[0.6, 0.4]])]
        bad = [torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 1.0]])]
        # the medians of (0, 0, .6, .7, .8) and (.2, .3, .4, 1, 1) are .6 and .4
        torch.testing.assert_close(median_vote([*good, *bad]), torch.tensor([[0.6, 0.4]]))
        # without one on each side: (0 + .6 + .7)/3 and (.3 + .4 + 1)/3, which add up to 1
        torch.testing.assert_close(trimmed_vote([*good, *bad]), torch.tensor([[1.3 / 3, 1.7 / 3]]))
        assert float(consensus_vote([*good, *bad])[0, 0]) > 0.6
        for rule in (median_vote, trimmed_vote, consensus_vote):
            torch.testing.assert_close(rule([good[0]]), good[0])
            torch.testing.assert_close(rule([good[1]] * 3), good[1])


@pytest.mark.parametrize("rule", RULES)
def test_equal_models_are_their_own_mean(rule, update, state):
    updates = [update(i, [1.0, 2, 3, 4], 10**i) for i in range(4)]
    mean = robust_mean(updates, state([0.0, 0, 0, 0]), rule, 0.3)
    torch.testing.assert_close(mean.params, torch.tensor([1.0, 2, 3, 4]))


@pytest.mark.parametrize("rule", RULES)
def test_a_minority_cannot_move_the_mean_far(rule, network, nearby, same):
    module = network("mlp-bn")
    start = module.state_dict()
    honest = nearby(module, 7, spread=0.01)
    hostile = [{k: v + 20 if v.is_floating_point() else v for k, v in start.items()} for _ in range(3)]
    updates = [ClientUpdate(s, 1, i) for i, s in enumerate([*honest, *hostile])]
    robust = Server("fedavg", module, robust=rule).aggregate(start, updates)
    plain = Server("fedavg", module).aggregate(start, updates)
    assert (plain["0.weight"] - start["0.weight"]).abs().max() > 5
    limit = 1.0 if rule == "clip-median" else 0.05
    for name in ("0.weight", "3.bias", "1.running_mean"):
        assert (robust[name] - start[name]).abs().max() < limit
    again = Server("fedavg", module, robust=rule).aggregate(start, updates[::-1])
    assert same(robust, again)  # whatever the order of arrival


def test_the_student_starts_from_the_robust_mean():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    start = model.state_dict()
    updates = [ClientUpdate({k: v + by for k, v in start.items()}, 1, i) for i, by in enumerate([0.1, 0.2, 20.0])]
    tiny = {"distill_epochs": 1, "distill_lr": 1e-9, "distill_lr_min": 1e-10}
    server = Server("fedbe-median", model, unlabeled=torch.randn(12, 4), **tiny)
    state = server.aggregate(start, updates)
    torch.testing.assert_close(state["weight"], start["weight"] + 0.2, atol=1e-4, rtol=0)
    assert server.method.settings()["vote"] == "median"


def test_settings_that_cannot_work():
    with pytest.raises(SettingError, match="unknown robust 'medain': did you mean 'median'"):
        get_method("fedavg", robust="medain")
    with pytest.raises(SettingError, match=r"`hostile_fraction` must be in \[0, 0.5\), got 0.5"):
        get_method("fedavg", hostile_fraction=0.5)
