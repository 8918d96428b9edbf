"""Figure 1b of the paper: models sampled between three clients, each at its γ, coloured by its accuracy.

A run does not keep its clients' models. They are trained again from the checkpoint before the last round, by the
simulator's own round; the loss of that training must be the recorded one, else nothing is shown.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from fedbe import seeds
from fedbe.diagnostics import quality
from fedbe.ensemble import predict
from fedbe.errors import FedBEError
from fedbe.posterior import Dirichlet
from fedbe.recipes.schema import Evaluation
from fedbe.report.clients import load_task
from fedbe.report.spec import Chart, Dot, Panel, Table
from fedbe.report.trials import Study, Trial
from fedbe.servers.context import Draft, Round
from fedbe.servers.stages import Mean
from fedbe.simulation import checkpoint
from fedbe.simulation.federation import initial_weights, prepare
from fedbe.simulation.jobs import Job
from fedbe.simulation.round import RunState, Simulation, play_round
from fedbe.simulation.workers import Done, Outcome, Pool
from fedbe.states import ModelState
from fedbe.updates import Update
from fedbe.workbench import Plan, Workbench

SAMPLES = 300
CORNERS = ((0.0, 0.0), (1.0, 0.0), (0.5, math.sqrt(3) / 2))


class Here:
    """A pool of no processes: jobs run in this one."""

    pids: tuple[int, ...] = ()

    def __init__(self, simulation: Callable[[], Simulation]) -> None:
        self._simulation = simulation

    def map(self, jobs: Iterable[Job], **_: object) -> Iterator[Outcome]:
        sim = self._simulation()
        return (Done(job.run(sim.federation, sim.bench)) for job in jobs)


class Caught:
    """A stage that keeps the clients' models of a round."""

    def __init__(self) -> None:
        self.updates: tuple[Update, ...] = ()

    def __call__(self, draft: Draft, round: Round) -> Draft:
        self.updates = tuple(round.updates)
        return draft


def applies(study: Study) -> bool:
    """Three clients on the Swiss roll."""
    return study.recipe.data.source == "swissroll" and study.recipe.split.clients == 3


def triangle(study: Study) -> Chart | str:
    """The triangle of the study's first finished run; or why there is none."""
    trial = next((t for t in study.trials if t.finished), None)
    if trial is None:
        return "The triangle of sampled models is not shown: no run has ended."
    try:
        sim, updates = _last_clients(trial)
    except FedBEError as error:
        return f"The triangle of sampled models is not shown: {error}."
    if isinstance(updates, str):
        return f"The triangle of sampled models is not shown: {updates}."
    with _one_thread():
        return _chart(trial, sim, updates)


def _last_clients(trial: Trial) -> tuple[Simulation, tuple[Update, ...] | str]:
    """Play the last round again up to the clients' models, or say why that cannot be."""
    sim = _simulation(trial)
    before = _state_before(trial, sim)
    if before is None:
        return sim, f"{trial.folder} has no checkpoint of the round before the last"
    caught = Caught()
    quick = sim.recipe.model_copy(update={"evaluation": Evaluation()})
    again = replace(sim, recipe=quick, method=replace(sim.method, stages=(Mean(), caught)))
    with _one_thread():
        _, record = play_round(again, before, lambda *_: None)
    told = trial.records[-1]["train_loss"]
    if not math.isclose(record["train_loss"], told, rel_tol=1e-6):
        return sim, "its last round, trained again, has another loss; the code or the machine has changed since"
    if len(caught.updates) != 3:
        return sim, f"{len(caught.updates)} clients took part in the last round, not three"
    return sim, caught.updates


def _simulation(trial: Trial) -> Simulation:
    federation = prepare(trial.recipe, trial.info.seed, load_task(trial.recipe.data.source))
    bench = Workbench(initial_weights(federation.model, trial.info.seed), Plan(trial.info.precision))
    here = cast(Pool, Here(lambda: sim))
    sim = Simulation(trial.recipe, trial.recipe.method_for(trial.info.method), trial.info.seed, federation, bench, here)
    return sim


def _state_before(trial: Trial, sim: Simulation) -> RunState | None:
    last = len(trial.records)
    if last == 1:
        return RunState(0, sim.bench.read())
    # `latest` gives the newest checkpoint only, and it is the one before that we need
    return checkpoint.read(trial.folder / f"checkpoint-{last - 1:06d}.safetensors")


def _chart(trial: Trial, sim: Simulation, updates: tuple[Update, ...]) -> Chart:
    alpha = sim.recipe.settings.get("alpha", 1.0)
    fitted = Dirichlet.fit(updates, alpha=alpha)
    draw = seeds.numpy_generator(seeds.generator(trial.info.seed, len(trial.records), "triangle"))
    gammas = draw.dirichlet(fitted.alpha, SAMPLES)
    sampled = [_accuracy(sim, fitted.mix(gamma)) for gamma in gammas]
    corners = [_accuracy(sim, u.state) for u in updates]
    centre = _accuracy(sim, fitted.mix(np.full(3, 1 / 3)))
    low, high = min(sampled + corners + [centre]), max(sampled + corners + [centre])
    dots = [_dot(g, a, low, high, "", _gamma(g)) for g, a in zip(gammas, sampled, strict=True)]
    for i, (update, found) in enumerate(zip(updates, corners, strict=True)):
        dots.append(_dot(np.eye(3)[i], found, low, high, "corner", f"client {update.client}"))
    dots.append(_dot(np.full(3, 1 / 3), centre, low, high, "centre", "FedAvg"))
    beat = sum(a > centre for a in sampled)
    rows = [(d.label, f"{a:.1f}") for d, a in zip(dots, [*sampled, *corners, centre], strict=True)]
    return Chart(
        "triangle",
        "triangle",
        f"{beat} of {SAMPLES} sampled models beat FedAvg's average of {centre:.1f} %",
        f"Models between the three clients of the last round (n = 1 run: {trial.title}, seed {trial.info.seed}, round "
        f"{len(trial.records)}), sampled from a Dirichlet with α = {alpha}: position is the mixture γ, corners are the "
        "clients' own models, the centre is FedAvg's average, colour is test accuracy (paper, Figure 1b).",
        (Panel(dots=tuple(dots), scale=(low, high)),),
        Table(("Model", "Test accuracy, %"), tuple(reversed(rows))),
        unit="%",
    )


def _dot(gamma: np.ndarray, accuracy: float, low: float, high: float, role: str, label: str) -> Dot:
    x, y = (float(sum(g * c[axis] for g, c in zip(gamma, CORNERS, strict=True))) for axis in (0, 1))
    share = (accuracy - low) / (high - low) if high > low else 1.0
    return Dot(x, y, f"{label}: {accuracy:.1f} %", colour=share, role=role)


def _gamma(gamma: np.ndarray) -> str:
    return f"γ = ({', '.join(f'{g:.2f}' for g in gamma)})"


def _accuracy(sim: Simulation, state: ModelState) -> float:
    found = predict(sim.bench, state, sim.federation.test)
    return 100 * quality(found, sim.federation.test_labels).accuracy


@contextmanager
def _one_thread() -> Iterator[None]:
    """As the workers of a run have it: the number of threads changes the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
