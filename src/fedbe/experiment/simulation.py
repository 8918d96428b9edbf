"""A simulated federation: data, method, seed, model and executor of a run, and what follows from them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedbe.algorithms.client.lr_schedule import step_size
from fedbe.algorithms.client.training import LocalSettings
from fedbe.algorithms.ensemble import EnsembleSettings
from fedbe.algorithms.methods import Method
from fedbe.algorithms.server.limits import Limits
from fedbe.algorithms.vote import Member, Predictor
from fedbe.core.compute import Plan, cores, has_convolutions
from fedbe.core.devices import ask_for_same_bits, is_here
from fedbe.core.gradients import learns_in_parts
from fedbe.core.model_runner import ModelRunner, try_model
from fedbe.core.random import generator
from fedbe.errors import RunError
from fedbe.experiment.attacks import Attacker
from fedbe.experiment.executors.base import LOST_ADVICE, Executor, Failed, Lost, Outcome
from fedbe.experiment.executors.memory_usage import keep_freed_memory
from fedbe.experiment.federation import Federation
from fedbe.experiment.jobs import DataPart, PredictJob
from fedbe.experiment.recipe import Recipe


@dataclass(frozen=True, eq=False)
class Simulation:
    """One federation with one method and one seed, and the means to run it.

    Args:
        recipe: The settings of the experiment.
        method: The method, with the recipe's settings.
        seed: All randomness of the run follows from it.
        federation: The data of the server and of all clients.
        runner: The model of this process, for the server step.
        executor: Runs the clients' training and the predictions.
    """

    recipe: Recipe
    method: Method
    seed: int
    federation: Federation
    runner: ModelRunner
    executor: Executor

    @property
    def rounds(self) -> int:
        """The number of rounds of the whole run."""
        return self.recipe.rounds(self.method)

    @property
    def attacker(self) -> Attacker | None:
        """The hostile clients; None if there are none."""
        return None if self.recipe.attack is None else self.recipe.attack.attacker()

    def cohort(self, round: int) -> list[int]:
        """The clients of a round, ascending: a function of (seed, round)."""
        total = len(self.federation.clients)
        size = self.recipe.training.clients_per_round or total
        drawn = torch.randperm(total, generator=generator(self.seed, round, "cohort"))[:size]
        return sorted(drawn.tolist())

    def epochs(self, round: int, client: int) -> int:
        """The local epochs of one client: the recipe's number, or one that is drawn for the client (and the round)."""
        if self.method.one_round:
            return self.recipe.training.one_round_epochs
        epochs = self.recipe.training.epochs
        if isinstance(epochs, int):
            return epochs
        low, high = epochs
        draw = generator(self.seed, round if self.recipe.training.redraw_epochs else 0, "epochs", client)
        return int(torch.randint(low, high + 1, (1,), generator=draw).item())

    def lr(self, round: int) -> float:
        """The clients' learning rate in a round."""
        training = self.recipe.training
        return step_size(training.lr, round, self.rounds, training.schedule)

    def local_settings(self, round: int, client: int) -> LocalSettings:
        """The settings of one client's SGD in a round."""
        t = self.recipe.training
        return LocalSettings(
            epochs=self.epochs(round, client),
            batch_size=t.batch_size,
            lr=self.lr(round),
            lr_decay=t.lr_decay,
            lr_drop_epochs=t.lr_drop_epochs,
            momentum=t.momentum,
            weight_decay=t.weight_decay,
            decay_biases=t.decay_biases,
        )

    def limits(self) -> Limits:
        """The limits of the guard. By default the server declares the sizes of the split, which it knows."""
        settings = self.recipe.limits.model_dump(exclude={"drop_lost_clients"})
        if settings["client_weights"] == "declared":
            settings["client_weights"] = dict(enumerate(self.federation.clients.sizes))
        return Limits(**settings)

    def ensemble(self, **changes: Any) -> EnsembleSettings:
        """The ensemble of this method and recipe, with some settings changed."""
        return self.recipe.ensemble(self.method, **changes)

    def predictor(self, part: DataPart) -> Predictor:
        """A function from members to their probabilities on the server's or the test data.

        The executor computes them, and no more models than it needs are in memory at once.
        """

        def predict(members: Iterable[Member]) -> Iterator[Tensor]:
            jobs = (PredictJob(member.state, part) for member in members)
            return map(probabilities, self.executor.map(jobs, ahead=self.executor.workers + 1))

        return predict


def probabilities(outcome: Outcome) -> Tensor:
    """The result of a `PredictJob`; RunError if it failed."""
    if isinstance(outcome, Failed):
        advice = f"; {LOST_ADVICE}" if isinstance(outcome, Lost) else ""
        raise RunError(f"a model could not be evaluated: {outcome.reason}{advice}")
    value: Tensor = outcome.value
    return value


def own_plan(precision: str, device: str, executor: Executor) -> Plan:
    """The plan of this process. With workers that have devices of their own it computes on the CPU if it has none."""
    return Plan(precision, device="cpu" if executor.has_own_devices and not is_here(device) else device)


def make_simulation(
    recipe: Recipe,
    method_name: str,
    seed: int,
    precision: str,
    federation: Federation,
    executor: Executor,
    device: str = "cpu",
    *,
    shares_cores: bool = False,
) -> Simulation:
    """Build a simulation, and prepare the executor and this process for it.

    Models are trained and run on the device, and all data is copied there once. Between rounds, and on their way to and
    from the clients, models are in the host's memory: a large cohort need not fit on the device. If the executor's
    workers have devices of their own and this process has none of that kind, the server step is computed on the CPU.
    With `shares_cores` other runs use this machine's cores, too: one thread computes, unless the bits depend on it.

    Raises:
        RunError: The method, or the ensemble that is measured, needs server data and the recipe has none.
        SettingError, ModelError: The device is not there, the model cannot run on the data, or returns no logits.
    """
    method = recipe.method_for(method_name)
    module = federation.build_model()
    if needs_unlabeled(recipe, method, module) and federation.server is None:
        raise RunError(
            f"{method.title} needs unlabeled inputs at the server: set data.server or data.unlabeled in the recipe"
        )
    plan = own_plan(precision, device, executor)
    placed = executor.configure(federation, plan)
    keep_freed_memory()
    runner = ModelRunner(module, plan, federation.model.output)
    ask_for_same_bits(runner.device)
    method.check_classes(try_model(runner, federation.test, "the data"))
    # The server's data is all that this process itself reads many times.
    federation = replace(federation, server=federation.server_on(runner.device) if placed is None else placed.server)
    torch.set_num_threads(cores() if needs_all_cores(recipe, method, runner, federation) else 1)
    runner.threads = 1 if shares_cores else cores()
    return Simulation(recipe, method, seed, federation, runner, executor)


def needs_unlabeled(recipe: Recipe, method: Method, module: nn.Module) -> bool:
    """Whether the method, or the ensemble that is measured, needs inputs at the server."""
    measured = recipe.evaluation.ensemble
    needed = bool(measured) and recipe.ensemble(method, members=measured).needs_unlabeled(module)
    return needed or method.needs_unlabeled(module)


def needs_all_cores(recipe: Recipe, method: Method, runner: ModelRunner, federation: Federation) -> bool:
    """Whether torch uses a thread for each core in the server's step. Then the last bits depend on their number.

    Convolutions in whole batches are worth it. One thread computes what is short, and around a distillation in parts,
    which has threads of its own.
    """
    if not has_convolutions(runner.module) or not needs_unlabeled(recipe, method, runner.module):
        return False
    learns_vote = method.settings().get("targets") == "ensemble"
    return not (learns_vote and federation.server is not None and learns_in_parts(runner, federation.server))
