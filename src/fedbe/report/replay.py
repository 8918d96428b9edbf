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

from fedbe.ensemble import Member
from fedbe.errors import RunError
from fedbe.recipes.schema import Evaluation
from fedbe.report.clients import load_task
from fedbe.report.trials import Trial
from fedbe.servers.context import Draft, Round
from fedbe.servers.stages import Mean
from fedbe.simulation import checkpoint
from fedbe.simulation.federation import initial_weights, prepare
from fedbe.simulation.jobs import Job
from fedbe.simulation.round import RunState, Simulation, play_round
from fedbe.simulation.workers import Done, Outcome, Pool
from fedbe.workbench import Plan, Workbench


@dataclass(frozen=True, eq=False)
class Replayed:
    """The last round of `trial` as it stood before the server's own stages: the clients' models and their average."""

    trial: Trial
    sim: Simulation
    draft: Draft
    round: Round

    def clients(self) -> list[Member]:
        return [Member(f"client {u.client}", u.state) for u in self.round.updates]


def last_round(trial: Trial, pool: Pool | None = None) -> Replayed:
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
            outcome = Done(job.run(sim.federation, sim.bench))
            done(number, outcome)
            yield outcome


class _Caught:
    """A stage that changes nothing and keeps what it was given."""

    seen: tuple[Draft, Round]

    def __call__(self, draft: Draft, round: Round) -> Draft:
        self.seen = (draft, round)
        return draft


def _simulation(trial: Trial, pool: Pool | None) -> Simulation:
    recipe, seed, plan = trial.recipe, trial.info.seed, Plan(trial.info.precision)
    federation = prepare(recipe, seed, load_task(recipe.data.source))
    bench = Workbench(initial_weights(federation.model, seed), plan)
    if pool is not None:
        pool.configure(federation, plan)
    workers = pool or cast(Pool, _Here(lambda: sim))
    sim = Simulation(recipe, recipe.method_for(trial.info.method), seed, federation, bench, workers)
    return sim


def _state_before(trial: Trial, sim: Simulation) -> RunState:
    last = len(trial.records)
    if last == 1:
        return RunState(0, sim.bench.read())
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
