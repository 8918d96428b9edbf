"""How the variant auto was chosen: on the proxy, by validation images, never by test images.

    python -m benchmarks.choose_auto trunk FOLDER SEED ROUNDS [KEY=VALUE …]   run rounds and keep every model
    python -m benchmarks.choose_auto teachers FOLDER SEED ROUND …             accuracy of votes, by rule and members
    python -m benchmarks.choose_auto students FOLDER SEED ROUND SETTINGS …    one distillation for each set of settings

A set of SETTINGS is a list like members=AC,vote=softened,sharpening=3,distill_lr=0.03. docs/default.md has the results.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedbe.algorithms.balance import balance_by_members, expected_mix
from fedbe.algorithms.distillation import distill, sharpen
from fedbe.algorithms.ensemble import sample_models
from fedbe.algorithms.methods import get_method
from fedbe.algorithms.server.context import Draft, Round
from fedbe.algorithms.server.distill_stage import Distill
from fedbe.algorithms.vote import get_vote_rule, predict
from fedbe.core.metrics import Metrics, compute_metrics
from fedbe.core.model_runner import ModelRunner
from fedbe.core.random import generator
from fedbe.core.state import ModelState
from fedbe.core.updates import Update
from fedbe.data import Loader
from fedbe.experiment.cohort_training import CohortTraining
from fedbe.experiment.evaluation import measure
from fedbe.experiment.executors.serial import Serial
from fedbe.experiment.federation import Federation, initial_weights, prepare
from fedbe.experiment.recipe_files import load_recipe
from fedbe.experiment.round import run_server_step
from fedbe.experiment.run_state import RunState
from fedbe.experiment.simulation import make_simulation
from fedbe.posterior.base import PosteriorSettings
from fedbe.posterior.gaussian import Gaussian

RECIPE = "cifar10-proxy"
EXAMPLES = "examples of client "
CHANGES = "changes.json"  # in the folder of a trunk: what differs from the recipe
RULES = ("mean", "softened", "logits")
MEMBERS = ("A", "C", "AC", "SAC")


def trunk(folder: Path, seed: int, rounds: int, changes: list[str]) -> None:
    """Run the first rounds of the proxy; keep average, model and clients of each."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CHANGES).write_text(json.dumps(changes))
    recipe = load_recipe(RECIPE, changes)
    with Serial() as executor:
        sim = make_simulation(recipe, recipe.method, seed, "float32", prepare(recipe, seed), executor)
        torch.set_num_threads(1)
        state = RunState(0, sim.runner.read())
        for number in range(1, rounds + 1):
            seen: list[tuple[Draft, Round]] = []
            cohort = CohortTraining(sim, state, None, lambda *_: None, lambda: False).run()
            result = run_server_step(sim, state, cohort, lambda *_: None, lambda d, r, s=seen: s.append((d, r)))  # type: ignore[misc]
            average, updates = seen[0][0].state, seen[0][1].updates
            tensors = {"average": average.params, "model": result.state.params.clone()}  # one tensor if refused
            tensors |= {f"client {u.client_id}": u.state.params for u in updates}
            tensors |= {f"{EXAMPLES}{u.client_id}": torch.tensor([u.num_examples]) for u in updates}
            save_file(tensors, folder / f"round-{number:02d}.safetensors")
            state = RunState(number, result.state, result.memory)
            scores = {"average": measure(sim, average).accuracy, "model": measure(sim, result.state).accuracy}
            gate = {} if result.info.gate is None else {f"gate {k}": v for k, v in vars(result.info.gate).items()}
            print(json.dumps({"round": number, **scores, **gate}), flush=True)


class Lab:
    """The models of one round of a trunk, and the data to judge them on."""

    def __init__(self, folder: Path, seed: int, number: int) -> None:
        recipe = load_recipe(RECIPE, json.loads((folder / CHANGES).read_text()))
        self.federation: Federation = prepare(recipe, seed)
        self.runner = ModelRunner(initial_weights(self.federation.model, seed))
        self.seed, self.number = seed, number
        tensors = load_file(folder / f"round-{number:02d}.safetensors")
        self.average = _state(tensors.pop("average"))
        tensors.pop("model")
        sizes = {name: float(tensors.pop(name)) for name in list(tensors) if name.startswith(EXAMPLES)}
        self.updates = [
            Update(name, _state(vector), sizes[f"examples of {name}"], {}) for name, vector in sorted(tensors.items())
        ]

    def predictions(self, members: str, inputs: Loader) -> list[Tensor]:
        """Probabilities of the members, samples first."""
        settings = PosteriorSettings()
        layout = self.runner.layout
        models: list[ModelState] = []
        if "S" in members:
            ensemble = get_method("fedbe", "paper").stages[-1]
            assert isinstance(ensemble, Distill)
            posterior = Gaussian.fit_round(self.updates, previous=self.average, layout=layout, settings=settings)
            source = generator(self.seed, self.number, "posterior")
            models += sample_models(ensemble.ensemble, posterior, self.runner, None, source)
        models += [self.average] if "A" in members else []
        models += [u.state for u in self.updates] if "C" in members else []
        return [predict(self.runner, model, inputs) for model in models]

    def validate(self, model: ModelState) -> Metrics:
        """Metrics on the validation images."""
        return compute_metrics(predict(self.runner, model, self.federation.test), self.federation.test_labels)


def _state(params: Tensor) -> ModelState:
    return ModelState(params, torch.empty(0), {})


def teachers(folder: Path, seed: int, numbers: list[int]) -> None:
    """Accuracy of each vote on the validation images, which neither clients nor server have seen."""
    for number in numbers:
        lab = Lab(folder, seed, number)
        for members in MEMBERS:
            predictions = lab.predictions(members, lab.federation.test)
            votes = {rule: get_vote_rule(rule)(predictions) for rule in RULES}
            mixes = torch.stack([expected_mix(p) for p in predictions])
            if len(predictions) > 1:
                votes["softened, balanced"] = balance_by_members(votes["softened"], mixes)
            labels = lab.federation.test_labels
            scores = (f"{rule} {100 * compute_metrics(v, labels).accuracy:.1f}" for rule, v in votes.items())
            print(f"round {number:2} {members:4}", *scores)


def students(folder: Path, seed: int, number: int, specs: list[str]) -> None:
    """Distil once for each set of settings, from the same average."""
    lab = Lab(folder, seed, number)
    server = lab.federation.server
    assert server is not None
    print(f"round {number}: average", _line(lab.validate(lab.average)), flush=True)
    for spec in specs:
        changes = ["variant=paper", *(f"settings.{setting}" for setting in spec.split(","))]
        stage = load_recipe(RECIPE, changes).method_for().stages[-1]
        assert isinstance(stage, Distill)
        predictions = lab.predictions(stage.ensemble.members, server)
        combined = get_vote_rule(stage.ensemble.vote)(predictions)
        if stage.ensemble.balance:
            combined = balance_by_members(combined, torch.stack([expected_mix(p) for p in predictions]))
        targets = sharpen(combined, stage.distillation.sharpening)
        source = generator(seed, number, "distill")
        student = distill(lab.runner, lab.average, server, targets, stage.distillation, source)
        print(spec, _line(lab.validate(student)), flush=True)


def _line(metrics: Metrics) -> str:
    return f"{100 * metrics.accuracy:.2f} %, nll {metrics.nll:.3f}, confidence {100 * metrics.confidence:.1f} %"


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["trunk", folder, seed, rounds, *changes]:
            trunk(Path(folder), int(seed), int(rounds), changes)
        case ["teachers", folder, seed, *numbers] if numbers:
            teachers(Path(folder), int(seed), [int(n) for n in numbers])
        case ["students", folder, seed, number, *specs] if specs:
            students(Path(folder), int(seed), int(number), specs)
        case _:
            sys.exit(__doc__)
