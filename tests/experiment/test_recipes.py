"""Recipes: what is shipped, what is refused and in which words."""

from pathlib import Path

import pytest

from fedbe.errors import RecipeError
from fedbe.experiment.recipe_files import available_recipes, dump_recipe, load_recipe, override_recipe


@pytest.mark.parametrize("name", available_recipes())
def test_every_shipped_recipe_is_valid_and_says_what_it_is(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.summary


def test_a_change_reaches_its_place() -> None:
    recipe = load_recipe(
        "digits", ["training.rounds=7", "method=fedavg", "settings.num_samples=4", "model.hidden=[8, 8]"]
    )
    assert (recipe.training.rounds, recipe.method, recipe.settings["num_samples"]) == (7, "fedavg", 4)
    assert recipe.model.settings() == {"hidden": [8, 8]}
    assert load_recipe("digits").training.rounds != 7


def test_another_split_leaves_the_settings_of_the_old_one_behind() -> None:
    assert load_recipe("cifar10-step", ["split.kind=dirichlet"]).split.settings() == {}
    asked = load_recipe("cifar10-step", ["split.alpha=0.3", "split.kind=dirichlet"]).split
    assert (asked.clients, asked.settings()) == (10, {"alpha": 0.3})
    assert load_recipe("cifar10-step", ["split.kind=step"]).split == load_recipe("cifar10-step").split


def test_nothing_after_the_sign_unsets() -> None:
    split = load_recipe("cifar10-step", ["split.minor_images=", "split.major_share=0.8"]).split
    assert split.settings() == {"major_classes": 2, "major_share": 0.8}


def test_a_range_of_epochs_is_a_pair() -> None:
    assert load_recipe("digits", ["training.epochs=[1, 20]"]).training.epochs == (1, 20)


def test_one_method_can_have_its_own_setting() -> None:
    recipe = load_recipe("digits", ["settings.num_samples=4", "method_settings.fedbe.num_samples=6"])
    assert recipe.method_for("fedbe").settings()["num_samples"] == 6
    assert recipe.method_for("fedbe-sgd").settings()["num_samples"] == 4


def test_the_released_variant_changes_the_method() -> None:
    assert load_recipe("digits", ["variant=released"]).method_for("fedbe").settings()["loss"] == "kl_over_classes"


def test_what_is_dumped_is_the_same_recipe() -> None:
    recipe = load_recipe("digits", ["training.epochs=[1, 20]"])
    assert override_recipe(recipe, []) == recipe
    assert "unlabeled" not in dump_recipe(recipe)["data"]


def test_settings_that_only_a_measured_ensemble_uses_are_looked_at_too() -> None:
    with pytest.raises(RecipeError, match="`num_samples` must be a whole number, got 'x'"):
        load_recipe("cifar10-step", ["method=fedavg", "evaluation.ensemble=S", "settings.num_samples=x"])


def test_a_split_that_is_no_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "odd.toml").write_text("split = 5\n")
    with pytest.raises(RecipeError, match=r"cannot set 'split\.kind': 'split' is a value, not a table"):
        load_recipe(tmp_path / "odd.toml", ["split.kind=iid"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("training.round=3", "unknown setting 'training.round': did you mean 'rounds'?"),
        ("metod=fedavg", "unknown setting 'metod': did you mean 'method'?"),
        ("method=fedbee", "unknown method 'fedbee': did you mean 'fedbe'?"),
        ("settings.num_sample=3", "no method has a setting 'num_sample': did you mean 'num_samples'?"),
        ("method_settings.fedavg.proximal_mu=1", "FedAvg has no setting 'proximal_mu': it has none"),
        ("settings.members=SAX", "`members` must be one or more of"),
        ("training.rounds=0", "'training.rounds': input should be greater than or equal to 1, got 0"),
        ("training.rounds=many", "'training.rounds': input should be a valid integer"),
        ("training.epochs=[5, 1]", "epochs must be [low, high], got [5, 1]"),
        ("training.schedule=papr", "unknown schedule 'papr': did you mean 'paper'?"),
        ("training.clients_per_round=11", "clients_per_round is 11, but there are only 10 clients"),
        ("data.unlabeled_size=301", "unlabeled_size is 301, but the server has only 300 images"),
        ("split.kind=stepp", "'split.kind': input should be 'iid', 'step', 'dirichlet' or 'column', got 'stepp'"),
        ("evaluation.ensemble=XY", "`members` must be one or more of"),
        ("evaluation.ensemble=SS", "each once, like 'SAC'; got 'SS'"),
        ("settings.distill_lr={a=1}", "`distill_lr` must be a number"),
        ("rounds", "a change must look like training.rounds=20, got 'rounds'"),
        ("name.first=x", "cannot set 'name.first': 'name' is a value, not a table"),
        ("variant=mine", "unknown variant 'mine'"),
    ],
)
def test_what_cannot_work_gets_one_sentence(change: str, sentence: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("digits", [change])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_measured_beside_a_method_is_checked_too() -> None:
    with pytest.raises(RecipeError, match="unknown posterior 'gausian': did you mean 'gaussian'"):
        load_recipe("digits", ["method=fedavg", "evaluation.ensemble=SAC", "settings.posterior=gausian"])


def test_a_recipe_that_is_not_there_or_not_toml(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no recipe 'digit': did you mean 'digits'"):
        load_recipe("digit")
    broken = tmp_path / "broken.toml"
    broken.write_text("[data")
    with pytest.raises(RecipeError, match="is not valid TOML"):
        load_recipe(broken)
