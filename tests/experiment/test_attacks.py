"""Hostile clients: what they send, by hand; and what becomes of a run."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedbe.algorithms.vote import Member
from fedbe.core.state import ModelState
from fedbe.core.updates import Update
from fedbe.errors import RecipeError
from fedbe.experiment import run_folder
from fedbe.experiment.attacks import (
    ATTACKS,
    MODEL_ATTACKS,
    Attacker,
    View,
    class_prior,
    hidden_class_prior,
    hidden_loss_max,
    loss_max,
)
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import dump_recipe, load_recipe, override_recipe

ONE_OF_THREE = ([2.0, 0.0], [1.0, 3.0], [3.0, 5.0])  # changes; the first client is hostile: μ = [2, 4], σ = [√2, √2]


@pytest.fixture
def sent(update: Callable[..., Update], state: Callable[..., ModelState]) -> Callable[..., list[list[float]]]:
    """sent(kind, strength): what the server receives as changes of the model [1, 1]."""

    def send(kind: str, strength: float | None = None, settings: Mapping[str, object] = {}) -> list[list[float]]:
        honest = [update(i, torch.tensor(change) + 1) for i, change in enumerate(ONE_OF_THREE)]
        attacker = Attacker(kind, 1, strength)
        received = attacker.updates(honest, state([1.0, 1.0]), settings, torch.Generator().manual_seed(0))
        assert [u.client_id for u in received] == [0, 1, 2]
        assert all(isinstance(u.state, ModelState) for u in received)
        return [(u.state.params - 1).tolist() for u in received]

    return send


ROOT = 2**0.5
BY_HAND = {
    "sign-flip": [-20.0, 0.0],
    "scaled": [100.0, 0.0],
    "inner-product": [-3.0, -6.0],
    "little": [2 - 1.5 * ROOT, 4 - 1.5 * ROOT],
    "mimic": [1.0, 3.0],
    "infinity": [torch.inf, torch.inf],
    "label-flip": [2.0, 0.0],  # is in the training
    "loss-max": [2.0, 0.0],  # is in the predictions
    "class-prior": [2.0, 0.0],
    "hidden-loss-max": [2.0, 0.0],
    "hidden-class-prior": [2.0, 0.0],
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_what_is_sent(kind: str, sent: Callable[..., list[list[float]]]) -> None:
    received = sent(kind)
    assert received[0] == pytest.approx(BY_HAND[kind], abs=1e-5)
    assert received[1:] == [list(change) for change in ONE_OF_THREE[1:]]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [(0 * 1 + 1 * 3 + 3 * 6) / 10, (3 * 3 + 5 * 6) / 10]),  # 1, 3 and 6 examples
        ({"mean_weights": "uniform"}, [4 / 3, 8 / 3]),
        ({"robust": "median"}, [1.0, 3.0]),
    ],
)
def test_attackers_know_how_the_server_combines(
    settings: Mapping[str, object],
    expected: list[float],
    update: Callable[..., Update],
    state: Callable[..., ModelState],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`View.combine` of an attack that sends no change at all: the server's mean of it and of the honest changes."""
    combined = []

    def attack(view: View) -> Tensor:
        combined.append(view.combine(0 * view.trained[0]))
        return view.trained

    monkeypatch.setitem(MODEL_ATTACKS, "mimic", (attack, 1.0))
    changes = zip(ONE_OF_THREE, (1, 3, 6), strict=True)
    sent = [update(i, torch.tensor(change) + 1, n) for i, (change, n) in enumerate(changes)]
    Attacker("mimic", 1).updates(sent, state([1.0, 1.0]), settings, torch.Generator())
    assert combined[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_against_a_mean_the_largest_factor_is_the_best(sent: Callable[..., list[list[float]]]) -> None:
    (received, *_) = sent("little-optimal")  # ± 10 σ are equally far
    assert [abs(received[0] - 2), abs(received[1] - 4)] == pytest.approx([10 * ROOT, 10 * ROOT], abs=1e-5)


def test_the_search_knows_the_rule_of_the_server(sent: Callable[..., list[list[float]]]) -> None:
    """A median of three ignores −10 σ and +10 σ alike: within reach are only the honest values on each side."""
    (received, *_) = sent("little-optimal", settings={"robust": "median", "hostile_fraction": 0.3})
    # μ ± z σ with σ = √2 passes both honest clients (μ ± 1) from z = 1 on: the first such change is kept.
    assert received == pytest.approx([2 - ROOT, 4 - ROOT], abs=1e-5)


def test_random_models_and_claims(update: Callable[..., Update], state: Callable[..., ModelState]) -> None:
    honest = [update(i, torch.zeros(10_000), 7) for i in range(3)]
    attacker = Attacker("gaussian", 2, strength=3.0, claim=1e6)
    received = attacker.updates(honest, state(torch.zeros(10_000)), {}, torch.Generator().manual_seed(0))
    noise = [u.state.params for u in received if isinstance(u.state, ModelState)]
    assert [float(n.std()) for n in noise] == pytest.approx([3.0, 3.0, 0.0], abs=0.1)
    assert not torch.equal(noise[0], noise[1])
    assert [u.num_examples for u in received] == [1e6, 1e6, 7.0]


class TestPredictions:
    HONEST = torch.tensor([[0.8, 0.2, 0.0], [0.3, 0.6, 0.1], [0.15, 0.05, 0.8]])

    def test_targets(self) -> None:
        assert loss_max(self.HONEST[None], 0.4).argmax(1).tolist() == [2, 2, 1]
        # Correlations of the columns: (0, 1) −0.16, (0, 2) −0.76, (1, 2) −0.63 …
        assert class_prior(self.HONEST[None], 0.4).argmax(1).tolist() == [2, 2, 0]
        # … also where each pixel has a class, [J, classes, H, W]
        pixels = self.HONEST[None, :, :, None, None].expand(1, 3, 3, 2, 2)
        assert class_prior(pixels, 0.4).argmax(1)[:, 0, 1].tolist() == [2, 2, 0]

    def test_hidden_ones_copy_the_worst_honest_prediction(self) -> None:
        """Two members agree; the third is far from their mean, and unlike it in the first and the last input."""
        other = torch.tensor([[0.2, 0.3, 0.5], [0.3, 0.6, 0.1], [0.7, 0.2, 0.1]])
        honest = torch.stack([self.HONEST, other, self.HONEST])
        expected = torch.stack([other[0], self.HONEST[1], other[2]])
        for attack in (hidden_loss_max, hidden_class_prior):
            assert torch.equal(attack(honest, 0.4), expected)
            pixels = honest[..., None, None].expand(3, 3, 3, 2, 2)
            assert torch.equal(attack(pixels, 0.4)[:, :, 1, 0], expected)

    @pytest.mark.parametrize("kind", ["loss-max", "class-prior"])
    def test_only_hostile_clients_lie(self, kind: str, state: Callable[..., ModelState]) -> None:
        members = [Member(name, state([0.0])) for name in ("sample 1", "average", "client 0", "client 1", "client 10")]
        answers = list(Attacker(kind, 1).predictor(lambda given: iter([self.HONEST] * len(list(given))))(members))
        wanted = {"loss-max": [2, 2, 1], "class-prior": [2, 2, 0]}[kind]
        assert answers[2].argmax(1).tolist() == wanted
        assert answers[2].max(1).values.tolist() == [1.0, 1.0, 1.0]
        assert all(torch.equal(answers[i], self.HONEST) for i in (0, 1, 3, 4))

    def test_others_leave_predictions_alone(self) -> None:
        def predictor(members: object) -> object:
            return members

        assert Attacker("sign-flip", 1).predictor(predictor) is predictor  # type: ignore[arg-type]


@pytest.fixture
def attacked(small: Recipe, play: Callable[..., Path]) -> Callable[..., Path]:
    def run(name: str, method: str, kind: str, *changes: str) -> Path:
        settings = [f"attack.kind={kind}", "attack.clients=1", "training.clients_per_round=4", *changes]
        return play(name, method, recipe=override_recipe(small, settings))

    return run


@pytest.mark.slow
class TestRuns:
    def test_infinite_values_are_set_aside(self, attacked: Callable[..., Path]) -> None:
        records = run_folder.read_rounds(attacked("run", "fedbe", "infinity"))
        assert [r["clients"] for r in records] == [[1, 2, 3]] * 3
        assert "NaN or infinite" in records[0]["set_aside"][0]["reason"]

    def test_labels_are_flipped_for_hostile_clients_only(self, attacked: Callable[..., Path]) -> None:
        folder = attacked(
            "run", "fedavg", "label-flip", "split.kind=iid", "training.epochs=10", "evaluation.clients=true"
        )
        clients = run_folder.read_rounds(folder)[0]["test_clients"]
        assert clients["client 0"]["accuracy"] < 0.2
        assert min(clients[f"client {i}"]["accuracy"] for i in (1, 2, 3)) > 0.5

    def test_a_round_that_is_stopped_keeps_the_model(self, attacked: Callable[..., Path]) -> None:
        """Nobody can be admitted, if four of four are needed and one sends what the guard sets aside."""
        folder = attacked("run", "fedavg", "infinity", "limits.min_clients=4")
        records = run_folder.read_rounds(folder)
        assert [r["clients"] for r in records] == [[], [], []]
        assert "3 usable client updates, at least 4 needed" in records[0]["set_aside"][0]["reason"]
        assert records[0]["test"] == records[2]["test"]

    def test_a_model_that_predicts_nan_is_not_kept(self, attacked: Callable[..., Path]) -> None:
        """Finite weights of 1e25 overflow in the forward pass. A guard without limits admits them."""
        limits = ("limits.max_change=1e30", "limits.max_norm_ratio=1e30")
        folder = attacked("run", "fedavg", "sign-flip", "attack.strength=1e25", *limits)
        records = run_folder.read_rounds(folder)
        assert "predictions are NaN or infinite" in records[0]["set_aside"][0]["reason"]
        assert [r["clients"] for r in records] == [[], [], []]
        assert records[0]["test"] == records[2]["test"]

    def test_a_claim_counts_only_where_reports_do(self, attacked: Callable[..., Path]) -> None:
        claim = "attack.claim=1e15"
        accuracies = [
            run_folder.read_info(
                attacked(f"run{i}", "fedavg", "label-flip", "split.kind=iid", "training.epochs=10", *more)
            ).final
            for i, more in enumerate(
                [
                    (),
                    (claim,),
                    (claim, "limits.client_weights=reported", "limits.max_share=1", "limits.max_size_ratio=1e15"),
                    (claim, "limits.client_weights=reported"),
                ]
            )
        ]
        plain, ignored, believed, capped = (a["accuracy"] for a in accuracies if a is not None)
        assert plain == ignored
        assert believed < 0.2
        assert capped > believed + 0.3


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("attack.kind=sign-flop", "unknown attack 'sign-flop': did you mean 'sign-flip'"),
        ("attack.clients=10", "attack.clients is 10, .*below 10"),
        ("attack.strength=0", "'attack.strength'"),
        ("attack.power=3", "unknown setting 'attack.power'"),
    ],
)
def test_settings_that_cannot_work(change: str, sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        load_recipe("digits", ["attack.kind=mimic", "attack.clients=2", change])


def test_a_recipe_without_an_attack_is_as_it_was() -> None:
    assert "attack" not in dump_recipe(load_recipe("digits"))
    recipe = load_recipe("digits", ["attack.kind=mimic", "attack.clients=2"])
    assert dump_recipe(recipe)["attack"] == {"kind": "mimic", "clients": 2}


def test_every_attack_has_a_test() -> None:
    assert set(ATTACKS) == {*BY_HAND, "gaussian", "little-optimal"}
