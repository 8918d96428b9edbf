"""Recipes: shipped ones, changes, old names of settings, and what is refused."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbe.errors import RecipeError
from fedbe.experiment.federation import prepare
from fedbe.experiment.provenance import NUMERICS_VERSION, identity
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import available_recipes, dump_recipe, load_recipe, override_recipe


@pytest.mark.parametrize("name", available_recipes())
def test_every_shipped_recipe_is_valid_and_has_a_summary(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.summary


def test_changes_set_the_named_settings() -> None:
    recipe = load_recipe(
        "digits", ["training.rounds=7", "method=fedavg", "settings.num_samples=4", "model.hidden=[8, 8]"]
    )
    assert (recipe.training.rounds, recipe.method, recipe.settings["num_samples"]) == (7, "fedavg", 4)
    assert recipe.model.settings() == {"hidden": [8, 8]}
    assert load_recipe("digits").training.rounds != 7


def test_a_new_split_kind_drops_the_settings_of_the_old_one() -> None:
    assert load_recipe("cifar10-step", ["split.kind=dirichlet"]).split.settings() == {}
    asked = load_recipe("cifar10-step", ["split.alpha=0.3", "split.kind=dirichlet"]).split
    assert (asked.clients, asked.settings()) == (10, {"alpha": 0.3})
    assert load_recipe("cifar10-step", ["split.kind=step"]).split == load_recipe("cifar10-step").split


def test_an_empty_value_unsets() -> None:
    split = load_recipe("cifar10-step", ["split.minor_images=", "split.major_share=0.8"]).split
    assert split.settings() == {"major_classes": 2, "major_share": 0.8}


@pytest.mark.parametrize("table", ["settings", "method_settings.fedbe"])
def test_old_names_of_settings_are_read(tmp_path: Path, table: str) -> None:
    old = tmp_path / "old.toml"
    old.write_text(f"[training]\nbatch = 7\n[{table}]\nsamples = 3\nserver_lr = 0.02\nserver_lr_min = 0.01\n")
    recipe = load_recipe(old)
    settings = recipe.method_for("fedbe").settings()
    assert recipe.training.batch_size == 7
    assert (settings["num_samples"], settings["distill_lr"], settings["distill_lr_min"]) == (3, 0.02, 0.01)
    assert "samples" not in str(dump_recipe(recipe)).replace("num_samples", "")


def test_old_names_work_as_changes_and_win_over_the_recipe() -> None:
    changes = ["training.batch=7", "settings.samples=3", "method_settings.fedbe+fedprox.mu=0.5"]
    recipe = load_recipe("digits", changes)
    assert (recipe.training.batch_size, recipe.settings["num_samples"]) == (7, 3)
    assert recipe.method_settings["fedbe+fedprox"] == {"proximal_mu": 0.5}
    assert load_recipe("digits", ["settings.num_samples=4", "settings.samples="]).settings.get("num_samples") is None


@pytest.mark.parametrize("table", ["settings", "method_settings.fedbe"])
def test_the_old_and_the_new_name_together_are_refused(tmp_path: Path, table: str) -> None:
    both = tmp_path / "both.toml"
    both.write_text(f"[{table}]\nnum_samples = 3\nsamples = 4\n")
    with pytest.raises(RecipeError, match=rf"'{table}\.samples' is the old name of '{table}\.num_samples'"):
        load_recipe(both)


def test_a_model_s_own_setting_is_not_renamed() -> None:
    recipe = load_recipe("digits", ["model.name=mine:make", "model.samples=3", "model.hidden="])
    assert recipe.model.settings() == {"samples": 3}


def test_a_range_of_epochs_is_a_pair() -> None:
    assert load_recipe("digits", ["training.epochs=[1, 20]"]).training.epochs == (1, 20)


def test_one_method_can_have_its_own_setting() -> None:
    recipe = load_recipe("digits", ["settings.num_samples=4", "method_settings.fedbe.num_samples=6"])
    assert recipe.method_for("fedbe").settings()["num_samples"] == 6
    assert recipe.method_for("fedbe-sgd").settings()["num_samples"] == 4


def test_the_released_variant_changes_the_method() -> None:
    assert load_recipe("digits", ["variant=released"]).method_for("fedbe").settings()["loss"] == "kl_over_classes"


def test_a_dumped_recipe_is_the_same_recipe() -> None:
    recipe = load_recipe("digits", ["training.epochs=[1, 20]"])
    assert override_recipe(recipe, []) == recipe
    assert "unlabeled" not in dump_recipe(recipe)["data"]


@pytest.mark.parametrize("name", ["../../x", "a/b", "..", "", "a\\b", "\x1b[2J", "a\nb"])
def test_a_recipe_cannot_name_a_folder_elsewhere(tmp_path: Path, name: str) -> None:
    path = tmp_path / "evil.toml"
    path.write_bytes(tomli_w.dumps({"name": name}).encode())
    with pytest.raises(RecipeError, match="becomes the name of a folder"):
        load_recipe(path)


def test_default_limits_do_not_change_the_identity_of_a_recipe() -> None:
    assert "limits" not in dump_recipe(load_recipe("digits"))
    changed = load_recipe("digits", ["limits.max_share=0.1", "limits.client_weights=reported"])
    assert override_recipe(changed, []).limits == changed.limits
    assert changed.limits.max_share == 0.1
    with pytest.raises(RecipeError, match=r"unknown setting 'limits.max_shar': did you mean 'max_share'"):
        load_recipe("digits", ["limits.max_shar=0.1"])


SMALL = st.integers(1, 50)
POSITIVE = st.floats(1e-6, 1e3)
EPOCHS = st.integers(0, 30) | st.tuples(st.integers(0, 10), st.integers(10, 30))
RECIPES = st.builds(
    Recipe,
    name=st.text(min_size=1).filter(
        lambda name: name.strip(". ") and not set(name) & set("/\\") and name.isprintable()
    ),
    summary=st.text(),
    method=st.sampled_from(["fedavg", "fedbe", "1-ensemble", "fedbe+scaffold"]),
    variant=st.sampled_from(["paper", "released", "tuned"]),
    data=st.fixed_dictionaries(
        {"server": st.integers(50, 300)}, optional={"unlabeled_size": SMALL, "flip": st.booleans()}
    ),
    split=st.fixed_dictionaries({"kind": st.sampled_from(["iid", "step", "dirichlet"]), "clients": SMALL})
    | st.fixed_dictionaries({"kind": st.just("dirichlet"), "alpha": POSITIVE}),
    model=st.fixed_dictionaries({"name": st.just("mlp")}, optional={"hidden": st.lists(SMALL)}),
    training=st.fixed_dictionaries(
        {}, optional={"rounds": SMALL, "epochs": EPOCHS, "lr": POSITIVE, "schedule": st.just("constant")}
    ),
    evaluation=st.fixed_dictionaries({}, optional={"every": SMALL, "ensemble": st.sampled_from(["", "SAC", "A"])}),
    settings=st.fixed_dictionaries({}, optional={"num_samples": SMALL, "swa_start_steps": SMALL}),
    method_settings=st.fixed_dictionaries(
        {}, optional={"fedprox": st.fixed_dictionaries({"proximal_mu": POSITIVE}), "fedbe": st.just({})}
    ),
)


@settings(max_examples=50, deadline=None)
@given(RECIPES)
def test_any_recipe_survives_a_file(recipe: Recipe) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.toml"
        path.write_bytes(tomli_w.dumps(dump_recipe(recipe)).encode())
        assert load_recipe(path) == recipe


def test_settings_of_a_measured_ensemble_are_checked() -> None:
    with pytest.raises(RecipeError, match="`num_samples` must be a whole number"):
        load_recipe("cifar10-step", ["method=fedavg", "evaluation.ensemble=S", "settings.num_samples=x"])


def test_a_split_that_is_not_a_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.toml").write_text("split = 5\n")
    with pytest.raises(RecipeError, match="'split' is a value"):
        load_recipe(tmp_path / "odd.toml", ["split.kind=iid"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("training.round=3", "unknown setting 'training.round'"),
        ("metod=fedavg", "did you mean 'method'?"),
        ("method=fedbee", "unknown method 'fedbee'"),
        ("settings.num_sample=3", "did you mean 'num_samples'?"),
        ("method_settings.fedavg.proximal_mu=1", "FedAvg has no setting 'proximal_mu'"),
        ("settings.members=SAX", "`members` must be one or more of"),
        ("training.rounds=0", "'training.rounds': input should be greater"),
        ("training.rounds=many", "'training.rounds': input should be a valid integer"),
        ("training.epochs=[5, 1]", "epochs must be [low, high]"),
        ("training.schedule=papr", "unknown schedule 'papr'"),
        ("training.clients_per_round=11", "only 10 clients"),
        ("data.unlabeled_size=301", "only 300 inputs"),
        ("split.kind=stepp", "'split.kind': input should be 'iid'"),
        ("evaluation.ensemble=XY", "`members` must be one or more of"),
        ("evaluation.ensemble=SS", "each once"),
        ("settings.distill_lr={a=1}", "`distill_lr` must be a number"),
        ("rounds", "a change must look like"),
        ("name.first=x", "cannot set 'name.first'"),
        ("variant=mine", "unknown variant 'mine'"),
    ],
)
def test_a_wrong_change_is_refused_in_one_sentence(change: str, sentence: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("digits", [change])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_posterior_of_a_measured_ensemble_is_checked() -> None:
    with pytest.raises(RecipeError, match="unknown posterior 'gausian'"):
        load_recipe("digits", ["method=fedavg", "evaluation.ensemble=SAC", "settings.posterior=gausian"])


def test_a_missing_or_damaged_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no recipe 'digit'"):
        load_recipe("digit")
    broken = tmp_path / "broken.toml"
    broken.write_text("[data")
    with pytest.raises(RecipeError, match="is not valid TOML"):
        load_recipe(broken)


@pytest.mark.parametrize("split", ["step", "dirichlet"])
def test_the_released_recipes_are_the_authors_program(split: str) -> None:
    """The numbers of hongyouc/FedBE: run.sh, utils/options.py, utils/tools.py, models/Update.py and main.py."""
    recipe, paper = load_recipe(f"cifar10-{split}-released"), load_recipe(f"cifar10-{split}")
    assert (recipe.split, recipe.model) == (paper.split, paper.model)
    assert (recipe.data.pad, recipe.data.flip) == (4, True)
    assert (recipe.data.mean, recipe.data.std) == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    training = recipe.training
    assert (training.epochs, training.batch_size, training.weight_decay, training.decay_biases) == (20, 40, 1e-3, False)
    assert (training.schedule, training.lr, training.lr_drop_epochs) == ("released", 0.01, 30)
    settings = recipe.method_for("fedbe").settings()
    expected = {
        "posterior": "gaussian-released", "statistics": "sampled", "augment": False, "distill_weight_decay": 1e-5,
        "distill_decay_norms": True, "distill_lr": 1e-3, "distill_lr_min": 1e-3, "swa_start_steps": 500,
        "swa_cycle_steps": 25, "distill_epochs": 20, "distill_batch_size": 128, "loss": "kl_over_classes",
        "sharpening": 2.0, "num_samples": 10, "members": "SAC",
    }  # fmt: skip
    assert {name: settings[name] for name in expected} == expected
    assert recipe.method_for("fedavgm").settings()["momentum_form"] == "released"


def test_given_statistics_normalise_the_data() -> None:
    recipe = load_recipe("digits", ["data.mean=[0.25]", "data.std=[0.5]"])
    loader = prepare(recipe, 0).train
    assert (loader.mean.tolist(), loader.std.tolist()) == ([0.25], [0.5])
    with pytest.raises(RecipeError, match=r"`std` .*each of 1 channels, got 3"):
        prepare(load_recipe("digits", ["data.std=[1.0, 1.0, 1.0]"]), 0)


def test_only_unfinished_runs_of_the_released_program_are_refused() -> None:
    """Its arithmetic was corrected; the version of all others stayed."""

    def numerics(*changes: str) -> str:
        recipe = load_recipe("digits", changes)
        return identity(recipe, "fedbe", 0, "float32", prepare(recipe, 0))["numerics"]

    assert numerics() == numerics("variant=tuned") == str(NUMERICS_VERSION)
    assert numerics("variant=released") == numerics("training.schedule=released") == f"{NUMERICS_VERSION}, released 2"


def test_validation_images_are_training_images_and_the_test_images_stay_unused() -> None:
    plain, chosen = load_recipe("digits"), load_recipe("digits", ["data.validation=100"])
    before, federation = prepare(plain, 0), prepare(chosen, 0)
    assert len(federation.test) == 100
    used = sum(map(len, federation.clients)) + len(federation.server or ())
    assert used == sum(map(len, before.clients)) + len(before.server or ()) - 100
    assert federation.test_labels.bincount().min() >= 9  # stratified
    assert prepare(chosen, 1).test_labels.equal(federation.test_labels)  # the same for every seed
    with pytest.raises(RecipeError, match="validation"):
        prepare(load_recipe("digits", ["data.validation=2000"]), 0)


def test_the_identity_leaves_out_settings_at_their_default() -> None:
    federation = prepare(load_recipe("digits"), 0)

    def recipe_part(*changes: str) -> str:
        return identity(load_recipe("digits", changes), "fedbe", 0, "float32", federation)["recipe"]

    assert recipe_part("data.validation=0", "evaluation.every=1") == recipe_part()
    assert recipe_part("data.validation=1") != recipe_part()


def test_tables_in_very_many_tables_are_one_sentence(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(".".join(["a"] * 3000) + " = 1")
    with pytest.raises(RecipeError, match="its tables are nested too deeply"):
        load_recipe(path)


def test_a_number_of_very_many_digits_is_one_sentence(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(f"seed = {'9' * 5000}")
    with pytest.raises(RecipeError, match=r"mine\.toml is not valid TOML: Exceeds the limit"):
        load_recipe(path)
    with pytest.raises(RecipeError):
        load_recipe("digits", [f"training.rounds={'9' * 5000}"])
