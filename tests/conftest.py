"""Shared fixtures: small states, small networks, clients near a global model, hand-written runs."""

import importlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbe import ClientUpdate, ModelState
from fedbe.core.updates import Update
from fedbe.experiment import comparison as comparisons
from fedbe.experiment import run_folder
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import load_recipe

State = dict[str, Tensor]
EXTRAS = ("control", "gradient")  # of SCAFFOLD and of FedDyn


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tensors in tests are small, and xdist uses the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.fixture
def state() -> Callable[..., ModelState]:
    """state([[a, b], [c, d]], buffers=[…]): a packed state with these numbers."""

    def make(params: object, buffers: object = (), dtype: torch.dtype = torch.float32) -> ModelState:
        return ModelState(
            torch.as_tensor(params, dtype=dtype).reshape(-1), torch.as_tensor(buffers, dtype=dtype).reshape(-1), {}
        )

    return make


@pytest.fixture
def update(state: Callable[..., ModelState]) -> Callable[..., Update]:
    """update(client, params, examples): an update that the guard has admitted."""

    def make(client: int | str, params: object, examples: float = 1.0, **extras: Tensor) -> Update:
        return Update(client, state(params), float(examples), extras)

    return make


def _mlp_bn() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def _mlp_plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def _conv_gn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 9, 3)
    )


def _dense() -> nn.Module:
    """Logits [N, classes, H, W], as for segmentation."""
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1))


class _View(nn.Module):
    """`x.view(…)` after a convolution, as in many tutorials: runs in plain torch, but not in channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(6 * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norm(self.conv(x))), 2)
        logits: Tensor = self.head(self.drop(x.view(-1, 6 * 9)))
        return logits


def _dropout_bn() -> nn.Module:
    """Dropout before BatchNorm: a mask that is drawn out of order changes the running statistics."""
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


_NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp-bn": (_mlp_bn, (4,)),
    "mlp": (_mlp_plain, (4,)),
    "conv-gn": (_conv_gn, (3, 8, 8)),
    "dense": (_dense, (3, 6, 6)),
    "dropout-bn": (_dropout_bn, (4,)),
    "view": (_View, (3, 8, 8)),
}


@pytest.fixture
def network() -> Callable[[str], nn.Module]:
    """network("mlp-bn"): one of the small networks, always with the same weights."""

    def make(name: str) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(3)
            return _NETWORKS[name][0]()

    return make


@pytest.fixture
def inputs_for() -> Callable[..., Tensor]:
    """inputs_for("mlp-bn", 24): random inputs for that network."""

    def make(name: str, count: int = 24, seed: int = 11) -> Tensor:
        return torch.randn(count, *_NETWORKS[name][1], generator=torch.Generator().manual_seed(seed))

    return make


@pytest.fixture
def nearby() -> Callable[..., list[State]]:
    """nearby(module, 3): different valid states near that of a module; counters grow."""

    def make(module: nn.Module, count: int = 3, spread: float = 0.1, seed: int = 5) -> list[State]:
        draw = torch.Generator().manual_seed(seed)
        states: list[State] = []
        for i in range(count):
            moved: State = {}
            for name, tensor in module.state_dict().items():
                if not tensor.is_floating_point():
                    moved[name] = tensor + i
                    continue
                noise = torch.randn(tensor.shape, generator=draw) * spread
                moved[name] = tensor + noise.to(tensor.dtype)
                if "running_var" in name:
                    moved[name].clamp_(min=1e-2)
            states.append(moved)
        return states

    return make


@pytest.fixture
def replies(nearby: Callable[..., list[State]]) -> Callable[..., list[ClientUpdate]]:
    """replies(module): three clients with 10, 20 and 40 examples and what SCAFFOLD's and FedDyn's clients send."""

    def make(module: nn.Module, ids: Sequence[int | str | None] = (0, 1, 2)) -> list[ClientUpdate]:
        size = sum(p.numel() for p in module.parameters())
        draw = torch.Generator().manual_seed(17)
        return [
            ClientUpdate(s, 10 * 2**i, client_id=c, extras=dict.fromkeys(EXTRAS, torch.randn(size, generator=draw)))
            for i, (s, c) in enumerate(zip(nearby(module, len(ids)), ids, strict=True))
        ]

    return make


@pytest.fixture
def same() -> Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], bool]:
    """Whether two named states are equal bit for bit."""

    def compare(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
        return list(a) == list(b) and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)

    return compare


# Runs with numbers written by hand, so that every number of a report can be worked out.
Make = Callable[..., Path]
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]


def quality(accuracy: float, confidence: float = 0.5, ece: float = 0.25) -> dict[str, float]:
    return {"accuracy": accuracy, "nll": 1.0, "confidence": confidence, "ece": ece}


def record(number: int, accuracy: float, **more: Any) -> dict[str, Any]:
    """A line of rounds.jsonl of FedAvg, with the ensemble measured too."""
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
    """A line of rounds.jsonl of FedBE."""
    seconds = {"train": 0.5, "guard": 0.01, "mean": 0.03, "fit": 0.06, "ensemble": 0.1, "distill": 0.3, "evaluate": 0.9}
    more = {"seconds": {**seconds, "test": 0.2, "round": 2.1}, "test_average": quality(accuracy - 0.02)}
    return record(number, accuracy, **more)


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("digits", ("variant=paper", "training.rounds=3", "split.clients=4"))


@pytest.fixture
def make_run(tmp_path: Path, recipe: Recipe) -> Make:
    """make_run("name", "fedavg", [0.5, 0.6, 0.7], seed=1): a run with these accuracies, finished if complete."""

    def make(name: str, method: str, accuracies: Sequence[float], seed: int = 0, recipe: Recipe = recipe) -> Path:
        folder = run_folder.create(tmp_path / name, recipe, method, seed, "float32")
        return fill(folder, accuracies)

    return make


def fill(folder: Path, accuracies: Sequence[float]) -> Path:
    info, rounds = run_folder.read_info(folder), run_folder.read_recipe(folder).training.rounds
    line = distilled if "fedbe" in info.method else record
    records = [line(i, a) for i, a in enumerate(accuracies, start=1)]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if len(accuracies) == rounds:
        info = replace(info, finished="2026-01-01T00:00:00+0000", final=records[-1]["test"])
        (folder / "run.json").write_text(json.dumps(vars(info)))
    return folder


@pytest.fixture
def warns_always() -> Iterator[None]:
    """Torch gives its warnings each time, not once in a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.fixture
def comparison(tmp_path: Path, recipe: Recipe) -> Path:
    """FedAvg ends at 60 and 62 %, FedBE at 70 and 74 %: differences of 10 and 12 points."""
    folder = comparisons.create(tmp_path / "both", recipe, ["fedavg", "fedbe"], [0, 1], "float32")
    for name, accuracies in {
        "fedavg-seed0": (0.4, 0.5, 0.6),
        "fedavg-seed1": (0.42, 0.52, 0.62),
        "fedbe-seed0": (0.5, 0.6, 0.7),
        "fedbe-seed1": (0.54, 0.64, 0.74),
    }.items():
        fill(folder / name, accuracies)
    return folder


@pytest.fixture
def library() -> Callable[[str], Any]:
    """library("datasets"): an optional library of the extra `dev`. Without it the test is skipped, except in CI."""

    def load(name: str) -> Any:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            reason = f"{name} is not installed: pip install -c constraints.txt -e '.[dev]'"
            if os.environ.get("CI"):
                pytest.fail(f"{reason}; CI must not skip these tests")
            pytest.skip(reason)
        return importlib.import_module(name)

    return load


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A real Chromium. Without one, tests are skipped, except in CI."""
    executable = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if executable is None:
        reason = "Chromium is not installed: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}; CI must not skip these tests")
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield chromium
        chromium.close()
