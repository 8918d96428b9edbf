"""Runs whose numbers were written by hand, so that every number of a report can be worked out."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedbe.recipes import Recipe, load
from fedbe.simulation import compare, run

Make = Callable[..., Path]
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]


def quality(accuracy: float, confidence: float = 0.5, ece: float = 0.25) -> dict[str, float]:
    return {"accuracy": accuracy, "nll": 1.0, "confidence": confidence, "ece": ece}


def record(number: int, accuracy: float, **more: Any) -> dict[str, Any]:
    """A line of rounds.jsonl as FedAvg writes it, when an ensemble is measured too."""
    return {
        "round": number,
        "lr": 0.1,
        "clients": [0, 1],
        "set_aside": [],
        "train_loss": 1.0,
        "server": {},
        "bytes": {"down": 3000, "up": 2000},
        "seconds": {"train": 0.5, "guard": 0.01, "mean": 0.03, "test": 0.2, "round": 0.75},
        "memory_mb": {"train": 100.0 + number, "server": 50.0, "test": 70.0},
        "test": quality(accuracy),
        "test_ensemble": quality(accuracy + 0.05),
        **more,
    }


def distilled(number: int, accuracy: float) -> dict[str, Any]:
    """The same as FedBE writes it."""
    seconds = {"train": 0.5, "guard": 0.01, "mean": 0.03, "fit": 0.06, "ensemble": 0.1, "distill": 0.3, "evaluate": 0.9}
    more = {"seconds": {**seconds, "test": 0.2, "round": 2.1}, "test_average": quality(accuracy - 0.02)}
    return record(number, accuracy, **more)


@pytest.fixture
def recipe() -> Recipe:
    return load("digits", ("training.rounds=3", "split.clients=4"))


@pytest.fixture
def make_run(tmp_path: Path, recipe: Recipe) -> Make:
    """make_run("name", "fedavg", [0.5, 0.6, 0.7], seed=1): a run with these accuracies, finished if it has all."""

    def make(name: str, method: str, accuracies: Sequence[float], seed: int = 0, recipe: Recipe = recipe) -> Path:
        folder = run.create(tmp_path / name, recipe, method, seed, "float32")
        return fill(folder, accuracies)

    return make


def fill(folder: Path, accuracies: Sequence[float]) -> Path:
    info, rounds = run.read_info(folder), run.read_recipe(folder).training.rounds
    line = distilled if "fedbe" in info.method else record
    records = [line(i, a) for i, a in enumerate(accuracies, start=1)]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if len(accuracies) == rounds:
        info = replace(info, finished="2026-01-01T00:00:00+0000", final=records[-1]["test"])
        (folder / "run.json").write_text(json.dumps(vars(info)))
    return folder


@pytest.fixture
def comparison(tmp_path: Path, recipe: Recipe) -> Path:
    """FedAvg ends at 60 and 62 %, FedBE at 70 and 74 %: differences of 10 and 12 points."""
    folder = compare.create(tmp_path / "both", recipe, ["fedavg", "fedbe"], [0, 1], "float32")
    for name, accuracies in {
        "fedavg-seed0": (0.4, 0.5, 0.6),
        "fedavg-seed1": (0.42, 0.52, 0.62),
        "fedbe-seed0": (0.5, 0.6, 0.7),
        "fedbe-seed1": (0.54, 0.64, 0.74),
    }.items():
        fill(folder / name, accuracies)
    return folder


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A real Chromium; without one the tests are skipped, but not in CI."""
    found = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if found is None:
        reason = "no Chromium on this machine: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}; CI must not skip these tests")
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield running
        running.close()
