"""The time of a study on this machine and device: its work in training images, divided by a measured speed."""

import json
import os
import time
from collections.abc import Iterable
from functools import cache

import torch
from torch.nn import functional

from fedbe.core.compute import Plan, cores, one_thread
from fedbe.core.devices import CPU, ask_for_same_bits
from fedbe.core.model_runner import ModelRunner
from fedbe.core.optim import SGD
from fedbe.core.random import generator
from fedbe.experiment.federation import ModelSpec
from fedbe.experiment.recipe import Recipe
from fedbe.models import MODELS
from fedbe.reproduce.study import Scale, Study
from fedbe.reproduce.study_runner import StudyRun

# Source -> training images, test images, shape, classes. An estimate must not load data.
SIZES = {
    "digits": (1438, 359, (1, 8, 8), 10),
    "swissroll": (1200, 600, (2,), 3),
    "cifar10": (50_000, 10_000, (3, 32, 32), 10),
    "cifar10-16px": (50_000, 10_000, (3, 16, 16), 10),
    "cifar100": (50_000, 10_000, (3, 32, 32), 100),
    "tiny-imagenet": (100_000, 10_000, (3, 64, 64), 200),
}
RERUNNING = ("triangle", "confidence")  # analyses that run the last round again
BUSY_SHARE = 0.3  # of the cores: above it, measured speeds are clearly too low
FORWARD_SHARE = 0.3  # the cost of a forward pass, as a share of a training step


def seconds_by_column(study: Study, scale: Scale, device: str = "cpu") -> dict[str, float]:
    """The time of one seed of all cells, on all cores or on the device, by the value of the columns.

    Work that cells share counts once, in the first cell: a run with several views, and the training of a first round.
    """
    runs: dict[str, tuple[str, Recipe]] = {}
    for cell in study.cells(scale):
        recipe = study.recipe_for(cell, scale)
        runs.setdefault(recipe.model_dump_json(), (cell[-1], recipe))
    by_column: dict[str, float] = {}
    first_rounds: set[str] = set()
    for column, recipe in runs.values():
        first_round = _first_round_settings(recipe)
        total = run_seconds(recipe, device, first_round_trained=first_round in first_rounds)
        if study.analysis in RERUNNING:
            total += run_seconds(recipe, device) / recipe.training.rounds
        by_column[column] = by_column.get(column, 0.0) + total
        first_rounds.add(first_round)
    return by_column


def seconds_left(runs: Iterable[StudyRun], device: str = "cpu") -> float:
    """The time of the rounds that are left of some runs. Cells that share a folder share its run."""
    by_folder = {run.folder: run for run in runs}
    return sum(
        run_seconds(run.recipe, device) * run.rounds_left / run.recipe.rounds(run.recipe.method_for())
        for run in by_folder.values()
    )


def _first_round_settings(recipe: Recipe) -> str:
    """All settings that change the training of the first round."""
    method, parts = recipe.method_for(), (recipe.data, recipe.split, recipe.model, recipe.training)
    return f"{method.one_round} {method.rules} {[part.model_dump_json() for part in parts]}"


def run_seconds(recipe: Recipe, device: str = "cpu", *, first_round_trained: bool = False) -> float:
    """The time of one run: local training, the vote, the distillation, evaluation on test data.

    `first_round_trained`: another run has trained the clients of the first round already.
    """
    images, tests, shape, classes = SIZES[recipe.data.source]
    method, training = recipe.method_for(), recipe.training
    cohort = training.clients_per_round or recipe.split.clients
    local_images = (images - recipe.data.server) * cohort / recipe.split.clients * _local_epochs(recipe)
    round_images = local_images + _server_images(recipe, cohort) + _evaluation_images(recipe, tests, cohort)
    total_images = recipe.rounds(method) * round_images - first_round_trained * local_images
    settings = json.dumps(recipe.model.settings())
    return total_images / images_per_second(recipe.model.name, shape, classes, settings, training.batch_size, device)


def _local_epochs(recipe: Recipe) -> float:
    """The epochs of a client in one round; the mean if they vary."""
    training = recipe.training
    if recipe.method_for().one_round:
        return training.one_round_epochs
    return training.epochs if isinstance(training.epochs, int) else sum(training.epochs) / 2


def _server_images(recipe: Recipe, cohort: int) -> float:
    """The training images that cost as much as the server's step of one round."""
    unlabeled = recipe.data.unlabeled_size or recipe.data.server
    settings = recipe.method_for().settings()
    if "distill_epochs" not in settings:
        return 0.0
    voters = _count_voters(settings["members"], settings["num_samples"], cohort, settings["num_past"])
    return float(settings["distill_until"] * unlabeled * (settings["distill_epochs"] + voters * FORWARD_SHARE))


def _evaluation_images(recipe: Recipe, tests: int, cohort: int) -> float:
    """The training images that cost as much as the evaluation of one round."""
    evaluation = recipe.evaluation
    samples = recipe.method_for().settings().get("num_samples", 10)
    models = 1 + _count_voters(evaluation.ensemble, samples, cohort) + cohort * evaluation.clients
    return tests * models * FORWARD_SHARE / evaluation.every


def _count_voters(members: str, samples: int, clients: int, past: int = 0) -> int:
    """
    >>> _count_voters("SAC", 10, 3), _count_voters("", 10, 3)
    (14, 0)
    """
    return ("S" in members) * samples + ("A" in members) + ("C" in members) * clients + ("P" in members) * past


@cache
def images_per_second(
    name: str, shape: tuple[int, ...], classes: int, settings: str, batch_size: int, device: str = "cpu"
) -> float:
    """The training speed of a model, measured for a few steps: one thread times the cores, or one process on a device.

    Several processes may get more out of a device; that is not known before.
    `shape` is the shape of one input. `settings` are the model's settings as JSON.
    """
    model_settings = json.loads(settings) if name in MODELS else {}
    with one_thread():
        runner = ModelRunner(ModelSpec(name, classes, shape, model_settings).build(generator(0)), Plan(device=device))
        ask_for_same_bits(runner.device)  # before cuBLAS starts: a study in this process follows
        runner.module.train()
        optimizer = SGD(runner, 0.9, 0.0)
        inputs = torch.randn(batch_size, *shape).to(runner.device)
        labels = (torch.arange(batch_size) % classes).to(runner.device)
        steps, begin = 0, 0.0
        while steps < 3 or time.perf_counter() - begin < 0.3:
            optimizer.zero_grad()
            loss = functional.cross_entropy(runner.logits(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step(0.01)
            if runner.device != CPU:
                loss.item()  # waits for the device
            begin = begin or time.perf_counter()  # the first step is a warm-up
            steps += 1
        processes = cores() if runner.device == CPU else 1
        return processes * batch_size * (steps - 1) / (time.perf_counter() - begin)


def busy_cores() -> float | None:
    """How many cores other programs keep busy, by the system's load of the last minute; None if hardly any."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load if load > BUSY_SHARE * cores() else None
