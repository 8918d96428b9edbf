"""state_dict and load_state_dict of a server: enough to resume every method, and checked."""

import pytest
import torch
from torch import nn

import fedbe
from fedbe import ClientUpdate, server
from fedbe.algorithms.methods import METHODS
from fedbe.algorithms.pace import PACE_MEMORY
from fedbe.errors import SettingError, StateError

QUICK = {"num_samples": 2, "distill_epochs": 1, "distill_batch_size": 8}
INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(3))


def _make(name):
    quick = {k: v for k, v in QUICK.items() if k in METHODS[name].settings()}
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    return server(name, model, unlabeled=INPUTS, seed=5, **quick), model.state_dict()


def _updates(state, number):
    extras = {key: {k: v * 0 + 0.1 * number for k, v in state.items()} for key in ("control", "gradient")}
    return [ClientUpdate({k: v + 0.1 * (i + number) for k, v in state.items()}, 4, i, extras) for i in range(3)]


@pytest.mark.parametrize("name", METHODS)
def test_a_server_goes_on_where_another_stopped(name):
    straight, start = _make(name)
    first = straight.aggregate(start, _updates(start, 1))
    again, _ = _make(name)
    again.load_state_dict(straight.state_dict())
    expected = straight.aggregate(first, _updates(first, 2))
    got = again.aggregate(first, _updates(first, 2))
    assert all(torch.equal(expected[k], got[k]) for k in expected)
    assert again.round == 2
    assert torch.equal(straight.predict_proba(expected, INPUTS), again.predict_proba(got, INPUTS))


def test_kept_members_are_part_of_it():
    ensemble, start = _make("1-ensemble")
    state = ensemble.aggregate(start, _updates(start, 1))
    again, _ = _make("1-ensemble")
    again.load_state_dict(ensemble.state_dict())
    assert [m.name for m in again.members] == ["client 0", "client 1", "client 2"]
    assert torch.equal(ensemble.predict_proba(state, INPUTS), again.predict_proba(state, INPUTS))


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"method": "fedavg"}, "method 'fedavg'"),
        ({"round": -1}, "`round` must be"),
        ({"round": True}, "`round` must be"),
        ({"memory": 3}, "`memory` must be a mapping"),
        ({"memory": {"momentum": torch.ones(3)}}, r"shape \[15\]"),
        ({"memory": {"momentum": torch.full((15,), torch.nan)}}, "NaN"),
        ({"memory": {"momentum": "x"}}, "must be a tensor"),
        ({"memory": {"control": torch.ones(15)}}, "nothing called 'control'"),
        ({"members": [1]}, "`members` must be a list"),
        ({"members": [{"name": "a", "state": {"weight": torch.ones(3, 4)}}]}, "lacks 'bias'"),
        (
            {"members": [{"name": "a", "state": {"weight": torch.ones(3, 4), "bias": torch.full((3,), torch.inf)}}]},
            "NaN",
        ),
        ({"more": 1}, "must have the keys"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(change, fragment):
    momentum, start = _make("fedavgm")
    momentum.aggregate(start, _updates(start, 1))
    before = momentum.state_dict()
    with pytest.raises(StateError, match=fragment):
        momentum.load_state_dict(before | change)
    with pytest.raises(StateError, match="must have the keys"):
        momentum.load_state_dict(None)
    after = momentum.state_dict()
    assert after["round"] == before["round"]
    assert torch.equal(after["memory"]["momentum"], before["memory"]["momentum"])


def _model(value=1.0):
    return {"name": "a", "state": {"weight": torch.full((3, 4), value), "bias": torch.zeros(3)}}


@pytest.mark.parametrize(
    ("name", "change", "fragment"),
    [
        ("past-averages", {"memory": {"past 0 params": torch.ones(15)}}, "lacks 'past 0 buffers' after round 1"),
        ("past-averages", {"round": 2}, "lacks 'past 1 params' after round 2"),
        ("past-averages", {"round": 0}, "must not have 'past 0 params' after round 0"),
        ("fedavg", {"members": [_model()]}, "FedAvg does not keep members, and the state of round 1 has 1"),
        ("1-ensemble", {"members": []}, "1-Ensemble keeps members, and the state of round 1 has 0"),
        ("fedavgm", {"round": 7, "memory": {}}, "lacks 'momentum' after round 7"),
        ("fedadam", {"memory": {"first moment": torch.ones(15)}}, "lacks 'second moment'"),
        ("fedbe", {"memory": {PACE_MEMORY: torch.ones(1), "gate_rest": torch.zeros(1)}}, "lacks 'gate_"),
        ("fedbe", {"memory": {}}, f"lacks '{PACE_MEMORY}'"),
    ],
)
def test_a_state_that_no_server_of_this_method_has_is_refused(name, change, fragment):
    made, start = _make(name)
    made.aggregate(start, _updates(start, 1))
    again, _ = _make(name)
    with pytest.raises(StateError, match=fragment):
        again.load_state_dict(made.state_dict() | change)
    again.load_state_dict(made.state_dict())


@pytest.mark.parametrize("value", [-1.0, 0.5])
def test_a_gate_counts_in_whole_numbers(value):
    made, start = _make("fedbe")
    made.aggregate(start, _updates(start, 1))
    saved = made.state_dict()
    with pytest.raises(StateError, match="whole numbers >= 0 for gate_"):
        made.load_state_dict(saved | {"memory": saved["memory"] | {"gate_refusals": torch.tensor([value])}})


def test_a_gate_that_has_not_judged_yet_has_no_memory():
    made, _ = _make("fedbe")
    made.load_state_dict({**made.state_dict(), "round": 3, "memory": {PACE_MEMORY: torch.ones(1)}})


def test_a_state_is_a_copy():
    momentum, start = _make("fedavgm")
    momentum.aggregate(start, _updates(start, 1))
    momentum.state_dict()["memory"]["momentum"].zero_()
    assert float(momentum.memory["momentum"].abs().sum()) > 0


def test_every_class_by_name():
    classes = {"fedavg": fedbe.FedAvg, "1-ensemble": fedbe.OneEnsemble, "fedbe": fedbe.FedBE}
    for name, cls in classes.items():
        made, _ = _make(name)
        assert isinstance(made, cls)
    assert type(_make("fedbe+fedavgm")[0]) is fedbe.Server


def test_what_it_prints():
    made, start = _make("fedbe")
    assert repr(made) == "FedBE(parameters=15, unlabeled=16, seed=5, round=0)"
    broken = ClientUpdate({k: v * torch.nan for k, v in start.items()}, 4, 9)
    made.aggregate(start, [*_updates(start, 1), broken])
    text = str(made.info)
    assert text.splitlines()[0].split() == ["round", "1"]
    assert "3 (0, 1, 2)" in text
    assert "client 9: " in text
    assert "4 (average, client 0, client 1, client 2)" in text
    assert "distill" in text
    assert repr(_make("fedbe+fedavgm")[0]).startswith("Server('fedbe+fedavgm', ")


def test_two_clients_whose_ids_look_alike_stay_two_members():
    ensemble, start = _make("1-ensemble")
    ensemble.aggregate(start, [ClientUpdate(start, 1, 1), ClientUpdate({k: v + 1 for k, v in start.items()}, 1, "1")])
    again, _ = _make("1-ensemble")
    again.load_state_dict(ensemble.state_dict())
    assert len(again.members) == 2


@pytest.mark.parametrize("make", [lambda m: fedbe.FedAvg(m, method="fedbe"), lambda m: server(["fedavg"], m)])
def test_wrong_methods_get_one_sentence(make):
    with pytest.raises(SettingError, match="method"):
        make(nn.Linear(1, 2))


def test_ids_cannot_control_a_terminal():
    plain, start = _make("fedavg")
    plain.aggregate(start, [ClientUpdate(start, 1, "\x1b[2Jx")])
    assert "\x1b" not in str(plain.info)
