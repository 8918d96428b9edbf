"""The same recipe and seed give the same numbers as when `NUMERICS_VERSION` was last raised.

goldens.json holds a few numbers of small runs, by version. Vector units and thread counts change the last bits, so
the numbers are compared with a tolerance. Write them again with `python tests/experiment/test_numerics.py`.
"""

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from fedbe.algorithms.methods import METHODS
from fedbe.core.random import generator
from fedbe.core.state import ModelState
from fedbe.experiment import checkpoint, loop, run_folder
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.executors.base import Executor
from fedbe.experiment.executors.serial import Serial
from fedbe.experiment.provenance import NUMERICS_VERSION
from fedbe.experiment.recipe_files import load_recipe
from fedbe.models import MODELS, build

GOLDENS = Path(__file__).with_name("goldens.json")
ADVICE = (
    "the numbers of a run have changed. If that is intended, add 1 to NUMERICS_VERSION in "
    "src/fedbe/experiment/provenance.py and run `python tests/experiment/test_numerics.py`"
)
TOLERANCE = {"batch norm": 1e-3}  # measured between AVX2 and AVX-512: 1.4e-4 there, below 1e-6 elsewhere

SMALL = (
    "variant=paper",
    "training.rounds=2",
    "training.epochs=2",
    "training.one_round_epochs=3",
    "split.clients=4",
    "training.clients_per_round=3",
    "model.hidden=[16]",
    "settings.num_samples=3",
    "settings.distill_epochs=2",
    "settings.distill_lr=0.01",
    "settings.distill_lr_min=0.004",
    "settings.proximal_mu=0.5",
)
IMAGES = (
    "model.name=resnet20",
    "model.hidden=",
    "training.rounds=1",
    "training.epochs=1",
    "training.lr=0.001",  # larger steps amplify the last bits
    "settings.distill_lr=0.001",
    "settings.distill_lr_min=0.0004",
    "data.pad=1",
    "data.flip=true",
)
# name: recipe, method, changes
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {name: ("digits", name, SMALL) for name in METHODS} | {
    "auto": ("digits", "fedbe", (*SMALL, "variant=auto")),
    "auto, students accepted": (
        "digits",
        "fedbe",
        (
            *SMALL,
            "variant=auto",
            "training.rounds=3",
            "settings.gate_margin=0",
            "settings.gate_gain=0",
            "settings.distill_lr=0.1",
            "settings.distill_lr_min=0.1",
        ),  # three rounds: the steps follow the clients' from the third one on
    ),
    "released": ("digits", "fedbe", (*SMALL, "variant=released")),
    "released recipe": (
        "digits",
        "fedavgm",
        (
            *SMALL,
            "variant=released",
            "training.rounds=3",  # the third round is the first with momentum
            "training.schedule=released",
            "training.lr_drop_epochs=1",
            "training.decay_biases=false",
            "data.mean=[0.25]",
            "data.std=[0.5]",
        ),
    ),
    "tuned": ("digits", "fedbe", (*SMALL, "variant=tuned")),
    "dirichlet": ("digits", "fedbe", (*SMALL, "settings.posterior=dirichlet", "evaluation.ensemble=SAC")),
    "batch norm": ("digits", "fedbe", (*SMALL, *IMAGES)),
    "convolutions": (
        "digits",
        "fedbe",
        (*SMALL, "model.name=convnet", "model.hidden=", "model.padding=1", "model.widths=[4, 8, 8]"),
    ),
}
SLOW = ("batch norm", "convolutions")


def numbers(case: str, executor: Executor) -> dict[str, list[float]]:
    """Play a case and describe it by a few numbers: losses of each round, norm and one projection of the weights."""
    recipe, method, changes = CASES[case]
    with TemporaryDirectory() as parent:
        folder = run_folder.create(Path(parent) / "run", load_recipe(recipe, changes), method, 0, "float32")
        loop.execute(folder, executor, Callback())
        state = checkpoint.latest(folder)
        assert state is not None
        records = run_folder.read_rounds(folder)
    models = [state.model, *(member.state for member in state.members)]
    measured = {
        "train_loss": [record["train_loss"] for record in records],
        "test_nll": [record["test"]["nll"] for record in records],
        "ensemble_nll": [record["test_ensemble"]["nll"] for record in records if "test_ensemble" in record],
        "norm": [_vector(model).norm().item() for model in models],
        "projection": [_projection(_vector(model)) for model in models],
        "memory": [vector.double().norm().item() for _, vector in sorted(state.memory.items())],
    }
    return {name: [float(f"{value:.7g}") for value in values] for name, values in measured.items()}


def _vector(model: ModelState) -> torch.Tensor:
    return torch.cat([model.params.double(), model.buffers.double()])


def _projection(vector: torch.Tensor) -> float:
    """A sum with weights in [-1, 1], divided by a norm: other values, or values in another order, change it."""
    weights = torch.sin(torch.arange(1, len(vector) + 1, dtype=torch.float64))
    return float(weights @ vector / weights.norm())


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES])
def test_the_numbers_are_those_of_the_numerics_version(case: str, pool: Executor) -> None:
    goldens = json.loads(GOLDENS.read_text())
    assert str(NUMERICS_VERSION) in goldens, ADVICE
    golden, measured = goldens[str(NUMERICS_VERSION)][case], numbers(case, pool)
    tolerance = TOLERANCE.get(case, 1e-5)
    for name, values in golden.items():
        assert len(measured[name]) == len(values), f"{name} of {case}: {ADVICE}"
        for new, old in zip(measured[name], values, strict=True):
            close = math.isclose(new, old, rel_tol=tolerance)
            assert close, f"{name} of {case} was {old:.7g} and is {new:.7g}: {ADVICE}"


def network_numbers(name: str) -> list[float]:
    """The norm and a projection of a network's initial weights and of its logits for fixed images."""
    shape = (64,) if name == "mlp" else (3, 32, 32)
    module = build(name, 10, shape, generator(0)).eval()
    images = torch.linspace(-1, 1, 4 * math.prod(shape)).reshape(4, *shape)
    with torch.no_grad():
        logits = module(images).double().flatten()
    weights = torch.cat([p.detach().double().flatten() for p in module.parameters()])
    return [float(f"{v:.7g}") for v in (float(weights.norm()), _projection(weights), float(logits.norm()))]


@pytest.mark.parametrize("name", MODELS)
def test_the_networks_are_those_of_the_numerics_version(name: str) -> None:
    golden = json.loads(GOLDENS.read_text())[str(NUMERICS_VERSION)][f"network {name}"]
    assert network_numbers(name) == pytest.approx(golden, rel=1e-3), f"{name}: {ADVICE}"


if __name__ == "__main__":
    with Serial() as executor:
        lines = [f"  {json.dumps(case)}: {json.dumps(numbers(case, executor))}" for case in CASES]
    lines += [f"  {json.dumps(f'network {name}')}: {json.dumps(network_numbers(name))}" for name in MODELS]
    GOLDENS.write_text(f'{{"{NUMERICS_VERSION}": {{\n' + ",\n".join(lines) + "\n}}\n")
