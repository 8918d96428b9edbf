"""The last round of a finished run, played again for its clients' models, which a run does not keep.

It starts from the checkpoint before that round and is the simulator's own round; the loss of the training must be the
recorded one, else it is refused: nothing else may be passed off as the run's.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch

from fedbe.algorithms.ensemble import Member
from fedbe.algorithms.server.context import Draft, Round
from fedbe.algorithms.server.stages import Mean
from fedbe.analysis.runs import Trial
from fedbe.core.compute import Plan
from fedbe.core.model_runner import ModelRunner
from fedbe.errors import RunError
from fedbe.experiment import checkpoint
from fedbe.experiment.executors.process_pool import Done, Outcome, ProcessPool
from fedbe.experiment.federation import initial_weights, prepare
from fedbe.experiment.jobs import Job
from fedbe.experiment.recipe import Evaluation
from fedbe.experiment.round import RunState, Simulation, play_round
from fedbe.report.clients import load_task


@dataclass(frozen=True, eq=False)
class Replayed:
    """The last round of `trial` as it stood before the server's own stages: the clients' models and their average."""

    trial: Trial
    sim: Simulation
    draft: Draft
    round: Round

    def clients(self) -> list[Member]:
        return [Member(f"client {u.client_id}", u.state) for u in self.round.updates]


def last_round(trial: Trial, pool: ProcessPool | None = None) -> Replayed:
    """Play it by the workers of a pool, or in this process."""
    sim = _simulation(trial, pool)
    caught = _Caught()
    quick = sim.recipe.model_copy(update={"evaluation": Evaluation()})
    again = replace(sim, recipe=quick, method=replace(sim.method, stages=(Mean(), caught)))
    with one_thread():
        _, record = play_round(again, _state_before(trial, sim), lambda *_: None)
    if not math.isclose(record["train_loss"] or 0, trial.records[-1]["train_loss"] or 0, rel_tol=1e-6):
        raise RunError("its last round, trained again, has another loss; the code or the machine has changed since")
    return Replayed(trial, sim, *caught.seen)


class _Here:
    """A pool of no processes: jobs run in this one."""

    pids: tuple[int, ...] = ()

    def __init__(self, simulation: Callable[[], Simulation]) -> None:
        self._simulation = simulation

    def map(
        self, jobs: Iterable[Job], done: Callable[[int, Outcome], None] = lambda *_: None, **_: object
    ) -> Iterator[Outcome]:
        sim = self._simulation()
        for number, job in enumerate(jobs):
            outcome = Done(job.run(sim.federation, sim.runner))
            done(number, outcome)
            yield outcome


class _Caught:
    """A stage that changes nothing and keeps what it was given."""

    seen: tuple[Draft, Round]

    def __call__(self, draft: Draft, round: Round) -> Draft:
        self.seen = (draft, round)
        return draft


def _simulation(trial: Trial, pool: ProcessPool | None) -> Simulation:
    recipe, seed, plan = trial.recipe, trial.info.seed, Plan(trial.info.precision)
    federation = prepare(recipe, seed, load_task(recipe.data.source))
    runner = ModelRunner(initial_weights(federation.model, seed), plan)
    if pool is not None:
        pool.configure(federation, plan)
    workers = pool or cast(ProcessPool, _Here(lambda: sim))
    sim = Simulation(recipe, recipe.method_for(trial.info.method), seed, federation, runner, workers)
    return sim


def _state_before(trial: Trial, sim: Simulation) -> RunState:
    last = len(trial.records)
    if last == 1:
        return RunState(0, sim.runner.read())
    # `latest` gives the newest checkpoint only, and it is the one before that we need
    before = checkpoint.read(trial.folder / f"checkpoint-{last - 1:06d}.safetensors")
    if before is None:
        raise RunError(f"{trial.folder} has no checkpoint of the round before the last")
    return before


@contextmanager
def one_thread() -> Iterator[None]:
    """As the workers of a run have it: the number of threads changes the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
