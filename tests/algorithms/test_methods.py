from dataclasses import replace

import pytest
from torch import nn

from fedbe.algorithms import methods
from fedbe.algorithms.client.rules import ControlVariate, Dynamic, Prox
from fedbe.algorithms.methods import get_method
from fedbe.algorithms.server.corrections import Adaptive, DynamicUpdate, Recalibrate
from fedbe.algorithms.server.distill_stage import Distill
from fedbe.algorithms.server.stages import ControlUpdate, KeepMembers, Mean, Momentum
from fedbe.errors import SettingError

# The rows of the paper, written down again: rules, stages, who votes, how the student is trained.
ROWS = {
    "fedavg": ((), (Mean,), None),
    "fedavgm": ((), (Mean, Momentum), None),
    "fedavg-median": ((), (Mean,), None),
    "fedbe-median": ((), (Mean, Distill), ("AC", "swa")),
    "fedprox": ((Prox,), (Mean,), None),
    "scaffold": ((ControlVariate,), (Mean, ControlUpdate), None),
    "v-distillation": ((), (Mean, Distill), ("C", "sgd")),
    "1-ensemble": ((), (Mean, KeepMembers), None),
    "fedbe": ((), (Mean, Distill), ("SAC", "swa")),
    "fedbe-sgd": ((), (Mean, Distill), ("SAC", "sgd")),
    "fedbe+fedprox": ((Prox,), (Mean, Distill), ("SAC", "swa")),
    "fedbe+fedavgm": ((), (Mean, Momentum, Distill), ("SAC", "swa")),
    "fedbe+scaffold": ((ControlVariate,), (Mean, ControlUpdate, Distill), ("SAC", "swa")),
    "fedavg-bn": ((), (Mean, Recalibrate), None),
    "fedadam": ((), (Mean, Adaptive), None),
    "fedyogi": ((), (Mean, Adaptive), None),
    "past-averages": ((), (Mean, Distill), ("AP", "sgd")),
    "feddf": ((), (Mean, Distill), ("C", "adam")),
    "feddyn": ((Dynamic,), (Mean, DynamicUpdate), None),
}
EXTRAS = {ControlVariate: "control", Dynamic: "gradient"}


@pytest.mark.parametrize("name", ROWS)
def test_rows(name):
    rules, stages, distillation = ROWS[name]
    method = get_method(name, "paper")
    assert tuple(type(r) for r in method.rules) == rules
    assert tuple(type(s) for s in method.stages) == stages
    assert method.needs_unlabeled(nn.Linear(1, 1)) == (distillation is not None)
    assert method.extras == tuple(EXTRAS[rule] for rule in rules if rule in EXTRAS)
    assert method.one_round == (name == "1-ensemble")
    if distillation:
        members, optimizer = distillation
        stage = method.stages[-1]
        assert (stage.ensemble.members, stage.distillation.optimizer) == (members, optimizer)


def test_no_row_is_forgotten():
    assert set(ROWS) == set(methods.METHODS)
    assert len({m.title for m in methods.METHODS.values()}) == len(ROWS)


def test_the_variant_paper_has_the_paper_s_settings():
    settings = get_method("fedbe", "paper").settings()
    expected = {
        "num_samples": 10, "posterior": "gaussian", "scale": 1.0, "sharpening": 2.0, "distill_epochs": 20,
        "distill_batch_size": 128, "distill_lr": 1e-3, "distill_lr_min": 4e-4,
        "swa_cycle_steps": 25, "swa_start_steps": 250,
        "distill_momentum": 0.9, "distill_until": 1.0, "loss": "cross_entropy", "targets": "ensemble",
        "augment": True, "members": "SAC",
    }  # fmt: skip
    assert {k: settings[k] for k in expected} == expected


@pytest.mark.parametrize("name", ROWS)
def test_the_released_variant_sets_what_a_method_has(name):
    plain, released = get_method(name, "paper").settings(), get_method(name, "released").settings()
    changed = {k: released[k] for k in plain if plain[k] != released[k]}
    released_settings = methods.variant_settings(methods.METHODS[name], "released")
    assert changed == {k: v for k, v in released_settings.items() if k in plain and v != plain[k]}


@pytest.mark.parametrize("name", ["feddf", "past-averages"])
@pytest.mark.parametrize("variant", methods.VARIANTS)
def test_methods_of_others_have_no_variants(name, variant):
    assert get_method(name, variant) == methods.METHODS[name]


def test_a_row_takes_the_variants_that_it_names_whatever_its_name_is(monkeypatch):
    monkeypatch.setitem(methods.METHODS, "my-fedbe", replace(methods.METHODS["fedbe"], name="my-fedbe"))
    assert get_method("my-fedbe", "auto").settings() == get_method("fedbe", "auto").settings()
    assert get_method("my-fedbe", "auto").settings() != methods.METHODS["fedbe"].settings()


def test_a_variant_does_not_touch_what_makes_a_method_itself():
    tuned = methods.VARIANTS["tuned"]
    assert {k: get_method("fedbe", "tuned").settings()[k] for k in tuned} == tuned
    assert get_method("v-distillation", "tuned").settings()["members"] == "C"
    assert get_method("1-ensemble", "tuned") == get_method("1-ensemble")
    assert get_method("fedavg", "tuned") == get_method("fedavg")


def test_the_default_variant_is_auto_and_leaves_the_baselines_as_in_the_paper():
    auto = methods.VARIANTS["auto"]
    assert {k: get_method("fedbe").settings()[k] for k in auto} == auto
    assert get_method("fedbe").needs_rounds is False
    baselines = [name for name in ROWS if not name.startswith("fedbe")]
    assert [name for name in baselines if get_method(name) != get_method(name, "paper")] == []


def test_single_settings_win_over_the_variant():
    method = get_method("fedbe", "released", posterior="dirichlet", alpha={0: 1.0, 1: 2.0})
    assert method.settings()["posterior"] == "dirichlet"
    assert method.settings()["loss"] == "kl_over_classes"
    assert get_method("fedbe").settings()["posterior"] == "gaussian"


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (("fedbee",), {}, "unknown method 'fedbee': did you mean 'fedbe'"),
        (("zzz",), {}, "choose one of: fedavg, fedavgm"),
        (("fedbe", "relased"), {}, "did you mean 'released'"),
        (("fedbe",), {"sampels": 3}, "did you mean 'num_samples'"),
        (("fedprox",), {"nu": 1.0}, "choose one of: proximal_mu, prox_form"),
        (("fedavg",), {"proximal_mu": 1.0}, "no setting 'proximal_mu'"),
        (("fedbe",), {"num_samples": "10"}, "`num_samples` must be a whole number, got '10'"),
        (("fedbe",), {"num_samples": 2.5}, "`num_samples` must be a whole number, got 2.5"),
        (("fedbe",), {"num_samples": True}, "`num_samples` must be a whole number, got True"),
        (("fedbe", "paper"), {"num_samples": 0}, "`num_samples` must be"),
        (("fedbe",), {"scale": "1"}, "`scale` must be a number"),
        (("fedbe",), {"augment": 1}, "`augment` must be true or false"),
        (("fedbe",), {"posterior": 3}, "`posterior` must be a word"),
        (("fedbe",), {"posterior": "gauss"}, "unknown posterior 'gauss'"),
        (("fedbe",), {"statistics": "average"}, "did you mean 'averaged'"),
        (("fedbe",), {"members": "SACX"}, "`members` must be one or more of"),
        (("fedbe",), {"members": "P"}, "`members` must not be 'P' alone"),
        (("1-ensemble",), {"members": "AP"}, "`members` must not include P"),
        (("fedbe",), {"members": "AP", "num_past": 0}, "`num_past` must be >= 1 .*got 0"),
        (("fedbe",), {"alpha": 0.0}, "`alpha` must be a number > 0"),
        (("fedbe",), {"alpha": 1e308}, r"`alpha` .* at most 1e\+15, got 1e\+308"),
        (("fedbe",), {"alpha": {0: "x"}}, r"`alpha` .*> 0 .*got 'x'"),
        (("fedbe",), {"alpha": {0: -1.0}}, r"`alpha` .*> 0 .*got -1"),
        (("fedbe",), {"scale": -1.0}, "`scale` must be >= 0"),
        (("fedbe",), {"scale": float("inf")}, "`scale` must be a finite number, got inf"),
        (("fedbe",), {"distill_lr": {"a": 1}}, "`distill_lr` must be a number"),
        (("fedbe",), {"distill_momentum": 1.5}, r"`distill_momentum` must be in \[0, 1\), got 1.5"),
        (("fedbe",), {"distill_until": 1.5}, "`distill_until` .*0 to 1, got 1.5"),
        (("fedbe",), {"sharpening": 0.0}, "`sharpening` must be > 0"),
        (("fedbe",), {"targets": "label"}, "did you mean 'labels'"),
        (("fedbe",), {"distill_epochs": 0}, "`distill_epochs` must be >= 1"),
        (("fedavgm",), {"beta": 1.0}, r"`beta` must be in \[0, 1\)"),
        (("fedavgm",), {"momentum_form": "damp"}, "did you mean 'damped'"),
        (("fedavg",), {"mean_weights": "uniforn"}, "did you mean 'uniform'"),
        (("fedadam",), {"adaptive_form": "yoga"}, "did you mean 'yogi'"),
        (("fedadam",), {"eta": 0.0}, "`eta` must be > 0, got 0.0"),
        (("fedadam",), {"tau": -1.0}, "`tau` must be > 0, got -1.0"),
        (("fedadam",), {"beta1": 1.0}, r"`beta1` must be in \[0, 1\), got 1.0"),
        (("fedyogi",), {"beta2": 1.0}, r"`beta2` must be in \[0, 1\), got 1.0"),
        (("feddyn",), {"dyn_alpha": 0.0}, "`dyn_alpha` must be > 0, got 0.0"),
    ],
)
def test_settings_that_cannot_work(arguments, settings, message):
    with pytest.raises(SettingError, match=message):
        get_method(*arguments, **settings)


def test_whole_numbers_are_numbers():
    assert get_method("fedbe", scale=2, sharpening=1).settings()["scale"] == 2


def test_without_samples_the_number_of_samples_does_not_matter():
    assert get_method("fedbe", members="AC", num_samples=0).settings()["num_samples"] == 0
