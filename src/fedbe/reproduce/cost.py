"""How long a study would take on this machine: work in images, divided by a speed that is measured here and now."""

import json
import time
from functools import cache

import torch
from torch.nn import functional

from fedbe.algorithms.server.stages import Distill
from fedbe.core.compute import cores
from fedbe.core.model_runner import ModelRunner
from fedbe.core.optim import SGD
from fedbe.core.random import generator
from fedbe.experiment.federation import ModelSpec
from fedbe.experiment.recipe import Recipe
from fedbe.models import MODELS
from fedbe.reproduce.study import Scale, Study

# What a recipe's source has: training and test images, shape, classes. Only for the estimate; nothing is loaded.
SIZES = {
    "digits": (1438, 359, (1, 8, 8), 10),
    "swissroll": (1200, 600, (2,), 3),
    "cifar10": (50_000, 10_000, (3, 32, 32), 10),
    "cifar100": (50_000, 10_000, (3, 32, 32), 100),
    "tiny-imagenet": (100_000, 10_000, (3, 64, 64), 200),
}
REPLAYING = ("triangle", "confidence")  # analyses that play a run's last round again
FORWARD_SHARE = 0.3  # a forward pass costs about this much of a training step


def seconds(study: Study, scale: Scale) -> float:
    """The whole study at a scale, all runs and seeds, on all cores."""
    return study.limits(scale).seeds * sum(seconds_by_column(study, scale).values())


def seconds_by_column(study: Study, scale: Scale) -> dict[str, float]:
    """One seed, by the value of the columns; a run that several cells look at counts once, in the first of them, and so
    does the first round's training, which runs that begin alike share."""
    runs: dict[str, tuple[str, Recipe]] = {}
    for cell in study.cells(scale):
        recipe = study.recipe_for(cell, scale)
        runs.setdefault(recipe.model_dump_json(), (cell[-1], recipe))
    found: dict[str, float] = {}
    begun: set[str] = set()
    for column, recipe in runs.values():
        replay = run_seconds(recipe) / recipe.training.rounds if study.analysis in REPLAYING else 0.0
        known = (beginning := _beginning(recipe)) in begun
        found[column] = found.get(column, 0.0) + run_seconds(recipe, begun=known) + replay
        begun.add(beginning)
    return found


def _beginning(recipe: Recipe) -> str:
    """What the training of the first round depends on."""
    method, parts = recipe.method_for(), (recipe.data, recipe.split, recipe.model, recipe.training)
    return f"{method.one_round} {method.rules} {[part.model_dump_json() for part in parts]}"


def run_seconds(recipe: Recipe, *, begun: bool = False) -> float:
    """One run: local training (but for the first round's, if that is done), the vote, the distillation, measuring on
    test data."""
    images, tests, shape, classes = SIZES[recipe.data.source]
    method, training = recipe.method_for(), recipe.training
    epochs = training.epochs if isinstance(training.epochs, int) else sum(training.epochs) / 2
    rounds, epochs = recipe.rounds(method), training.one_round_epochs if method.one_round else epochs
    cohort = training.clients_per_round or recipe.split.clients
    training_work = (images - recipe.data.server) * cohort / recipe.split.clients * epochs
    work = training_work
    server = recipe.data.unlabeled_size or recipe.data.server
    samples = 10
    for stage in method.stages:
        if isinstance(stage, Distill):
            samples = stage.num_samples
            voters = _voters(stage.members, samples, cohort)
            work += stage.distill_until * server * (stage.distill_epochs + voters * FORWARD_SHARE)
    asked = 1 + _voters(recipe.evaluation.ensemble, samples, cohort) + cohort * recipe.evaluation.clients
    work += tests * asked * FORWARD_SHARE / recipe.evaluation.every
    settings = json.dumps(recipe.model.settings())
    return (rounds * work - begun * training_work) / _speed(
        recipe.model.name, shape, classes, settings, training.batch_size
    )


def _voters(members: str, samples: int, clients: int) -> int:
    """
    >>> _voters("SAC", 10, 3), _voters("", 10, 3)
    (14, 0)
    """
    return ("S" in members) * samples + ("A" in members) + ("C" in members) * clients


@cache
def _speed(name: str, shape: tuple[int, ...], classes: int, settings: str, batch: int) -> float:
    """Training images a second on all cores: a few steps on one thread, times the cores."""
    wanted = json.loads(settings) if name in MODELS else {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runner = ModelRunner(ModelSpec(name, classes, shape, wanted).build(generator(0)))
        runner.module.train()
        optimizer = SGD(runner, 0.9, 0.0)
        inputs, labels = torch.randn(batch, *shape), torch.arange(batch) % classes
        steps, begin = 0, 0.0
        while steps < 3 or time.perf_counter() - begin < 0.3:
            optimizer.zero_grad()
            functional.cross_entropy(runner.logits(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step(0.01)
            begin = begin or time.perf_counter()  # the first step warms up
            steps += 1
        return cores() * batch * (steps - 1) / (time.perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
