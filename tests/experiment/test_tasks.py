"""The simulator on other inputs than images: token ids with a mask, one class for each pixel; and frozen parameters."""

import sys
from pathlib import Path

import pytest
import torch

import fedbe
from fedbe import ModelWarning, data
from fedbe.core.compute import Plan
from fedbe.core.layout import Layout
from fedbe.experiment import federation, run_folder, saved_model
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.executors.serial import Serial
from fedbe.experiment.jobs import prepare_jobs
from fedbe.experiment.recipe_files import load_recipe
from fedbe.experiment.run_jobs import NewRun, RunJob, spread_runs

MODULE = """
import numpy as np
import torch
from torch import nn


def texts():
    \"\"\"Two words of 2 … 11 and padding; the class is the first word modulo 3.\"\"\"
    draw = np.random.default_rng(0)
    ids = draw.integers(2, 12, (240, 4))
    mask = np.repeat([[1, 1, 0, 0]], 240, axis=0)
    return {"ids": ids, "mask": mask}, ids[:, 0] % 3


def token_ids():
    inputs, labels = texts()
    return inputs["ids"], labels


def pairs():
    inputs, labels = texts()
    return tuple(inputs.values()), labels


class Bag(nn.Module):
    def __init__(self, classes, frozen):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, classes)
        self.embed.requires_grad_(not frozen)

    def forward(self, ids, mask=None):
        words = self.embed(ids)
        words = words if mask is None else words * mask[..., None]
        return {"logits": self.head(words[:, :2].sum(1)), "hidden": words}


class Scores(Bag):
    def forward(self, ids, mask=None):
        whole = super().forward(ids, mask)
        return {"hidden": whole["hidden"], "scores": whole["logits"]}


def scores(classes, shape):
    return Scores(classes, frozen=False)


def bag(classes, shape, frozen=False):
    assert shape in ({"ids": (4,), "mask": (4,)}, ((4,), (4,)), (4,)), shape
    return Bag(classes, frozen)


def masks():
    \"\"\"Images whose bright pixels are class 1.\"\"\"
    images = np.random.default_rng(0).integers(0, 256, (60, 6, 6), dtype=np.uint8)
    return images, (images > 127).astype(np.int64)


def other_images():
    images, labels = masks()
    return 255 - images, labels[:, 0, 0]


def pixels(classes, shape):
    return nn.Conv2d(shape[0], classes, 3, padding=1)


def softmax(classes, shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes), nn.Softmax(1))


def regression(classes, shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A small recipe with a source, a model and further changes."""
    (tmp_path / "tasks_for_tests.py").write_text(MODULE.replace('\\"', '"'))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tasks_for_tests", raising=False)
    (tmp_path / "small.toml").write_text(
        'data = {server = 40}\nsplit = {kind = "iid", clients = 3}\n'
        "training = {rounds = 2, epochs = 3, batch_size = 10, lr = 0.1}\n"
        "settings = {num_samples = 2, distill_epochs = 2}\n"
    )

    def make(source, model, *changes):
        names = [f"data.source=tasks_for_tests:{source}", f"model.name=tasks_for_tests:{model}"]
        return load_recipe(tmp_path / "small.toml", [*names, *changes])

    return make


@pytest.mark.parametrize("source", ["texts", "pairs", "token_ids"])
def test_text(recipe, play, source):
    """Token ids stay integers: in training, in the vote, in the evaluation and in the saved model."""
    folder = play(source, "fedbe", recipe=recipe(source, "bag"), workers=Serial())
    records = run_folder.read_rounds(folder)
    assert records[-1]["test"]["accuracy"] > 0.5  # three classes
    test = data.load_task(run_folder.read_recipe(folder).data.source).test
    again = saved_model.load_trained_model(folder).metrics(test.inputs, test.labels)
    assert again.accuracy == records[-1]["test"]["accuracy"]


def test_the_vote_of_a_saved_text_model(recipe, play):
    folder = play("votes", "1-ensemble", recipe=recipe("texts", "bag", "training.one_round_epochs=2"), workers=Serial())
    test = data.load_task(run_folder.read_recipe(folder).data.source).test
    again = saved_model.load_trained_model(folder).metrics(test.inputs, test.labels)
    assert again.accuracy == run_folder.read_rounds(folder)[-1]["test"]["accuracy"]


@pytest.mark.parametrize("method", ["fedbe", "1-ensemble"])
def test_the_recipe_names_the_output_that_has_the_logits(recipe, play, method):
    named = recipe("texts", "scores", "model.output=scores", "training.one_round_epochs=2")
    folder = play("scores", method, recipe=named, workers=Serial())
    test = data.load_task(named.data.source).test
    again = saved_model.load_trained_model(folder).metrics(test.inputs, test.labels)
    assert again.accuracy == run_folder.read_rounds(folder)[-1]["test"]["accuracy"]
    with pytest.raises(fedbe.ModelError, match="name the logits with `output`"):
        play("unnamed", method, recipe=recipe("texts", "scores"), workers=Serial())


def test_whole_runs_and_worker_processes_use_the_named_output(recipe):
    """`prepare_jobs` is what a worker process has, `spread_runs` tries the model before workers get whole runs."""
    named = recipe("texts", "scores", "model.output=scores")
    made, runner = prepare_jobs(federation.prepare(named, 0), Plan())
    assert runner.logits(made.test.batch(torch.arange(2))).shape == (2, 3)
    job = RunJob(Path("never"), NewRun(named, "fedavg", 0, "float32"))
    assert spread_runs("runs", [job], Serial())


@pytest.mark.slow
def test_frozen_parameters_never_travel(recipe, play, identical):
    """Worker processes build the same frozen weights, messages do not hold them, the model file does."""
    frozen, whole = (recipe("texts", "bag", f"model.frozen={value}") for value in ("true", "false"))
    one = play("serial", "fedbe", recipe=frozen, workers=Serial())
    with ProcessPool(1) as workers:
        two = play("pool", "fedbe", recipe=frozen, workers=workers)
    assert identical(one, two)
    other = play("whole", "fedbe", recipe=whole, workers=Serial())
    up = [run_folder.read_rounds(folder)[-1]["bytes"]["up"] for folder in (one, other)]
    assert (up[0], up[1]) == (3 * 4 * 27, 3 * 4 * (27 + 96))  # clients · bytes · parameters
    model = fedbe.load_model(one)
    assert set(model.state_dict()) == {"embed.weight", "head.weight", "head.bias"}
    assert Layout(model).size == 27


def test_one_class_for_each_pixel(recipe, play):
    folder = play("pixels", "fedbe", recipe=recipe("masks", "pixels", "data.server=10"), workers=Serial())
    records = run_folder.read_rounds(folder)
    assert records[-1]["test"]["accuracy"] > 0.9
    model = saved_model.load_trained_model(folder)
    assert model.predict_proba(torch.zeros(2, 6, 6, 1, dtype=torch.uint8)).shape == (2, 2, 6, 6)


def test_validation_and_unlabeled_data_of_a_segmentation_task(recipe):
    """Both functions return arrays, and they are not the same data."""
    changes = ("data.server=10", "data.validation=12", "data.unlabeled=tasks_for_tests:other_images")
    made = federation.prepare(recipe("masks", "pixels", *changes), 0)
    assert len(made.test) == 12
    assert len(made.server) == 60
    with pytest.raises(fedbe.SettingError, match="own test images"):
        federation.prepare(recipe("masks", "pixels", "data.unlabeled=tasks_for_tests:masks", *changes[:2]), 0)


@pytest.mark.parametrize(
    ("source", "model", "changes", "message"),
    [
        ("texts", "bag", ["model.name=mlp"], "'mlp' takes one tensor, this data has several"),
        ("texts", "bag", ["data.flip=true"], "data.flip are for images"),
        ("masks", "pixels", ["data.pad=1"], "would move the images, but not their labels"),
        ("texts", "bag", ["data.unlabeled=digits"], "data.unlabeled is for images"),
        ("masks", "pixels", ["split.kind=step"], "needs one class for each example"),
        ("masks", "bag", [], "failed with AssertionError"),
        ("texts", "pixels", [], "failed with KeyError"),
    ],
)
def test_what_does_not_fit_is_refused(recipe, play, source, model, changes, message):
    with pytest.raises(fedbe.FedBEError, match=message):
        play("no", "fedavg", recipe=recipe(source, model, *changes), workers=Serial())


def test_integers_are_numbers_for_our_own_networks(recipe, play):
    folder = play("mlp", "fedavg", recipe=recipe("token_ids", "bag", "model.name=mlp"), workers=Serial())
    test = data.load_task(run_folder.read_recipe(folder).data.source).test
    assert saved_model.load_trained_model(folder).predict_proba(test.inputs).shape == (len(test), 3)


def test_other_tasks(recipe, play):
    digits = recipe("texts", "softmax", "data.source=digits", "training.epochs=1")
    with pytest.warns(ModelWarning, match="remove the model's last softmax"):
        play("softmax", "fedavg", recipe=digits, workers=Serial())
    with pytest.raises(fedbe.ModelError, match="single-label classification"):
        play("one", "fedavg", recipe=recipe("texts", "regression", "data.source=digits"), workers=Serial())


def test_the_module_of_a_run_is_named_in_its_folder(recipe, play):
    folder = play("named", "fedavg", recipe=recipe("texts", "bag", "training.rounds=1"), workers=Serial())
    assert isinstance(folder, Path)
    assert saved_model.load_trained_model(folder).spec.shape == {"ids": (4,), "mask": (4,)}
