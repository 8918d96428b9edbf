"""Run the last round of a finished run again, for its clients' models, which a run does not keep.

The rerun starts from the checkpoint before that round and uses the simulator's training and server step. Its training
loss must equal the recorded one. Otherwise it is refused, because the models would not be the run's.
"""

import math
from dataclasses import dataclass, replace

from fedbe.algorithms.server.context import Draft, Round
from fedbe.algorithms.server.stages import Mean
from fedbe.algorithms.vote import Member
from fedbe.analysis.data import load_task
from fedbe.analysis.runs import Run
from fedbe.core.compute import one_thread
from fedbe.core.model_runner import ModelRunner
from fedbe.errors import RunError
from fedbe.experiment import checkpoint
from fedbe.experiment.cohort_training import CohortTraining
from fedbe.experiment.executors.base import Executor
from fedbe.experiment.executors.serial import Serial
from fedbe.experiment.federation import prepare
from fedbe.experiment.round import run_server_step, train_loss
from fedbe.experiment.run_state import RunState
from fedbe.experiment.simulation import Simulation, own_plan
from fedbe.experiment.tensor_files import UNREADABLE


@dataclass(frozen=True, eq=False)
class Rerun:
    """The last round of `run` before the stages of its method: the clients' models and their average (the draft)."""

    run: Run
    sim: Simulation
    draft: Draft
    round: Round

    def clients(self) -> list[Member]:
        """The clients' models."""
        return [Member(f"client {u.client_id}", u.state) for u in self.round.updates]


def rerun_last_round(run: Run, executor: Executor | None = None) -> Rerun:
    """Train the clients of the last round again.

    Args:
        run: A finished run.
        executor: Trains the clients; default: this process does.

    Raises:
        RunError: The checkpoint before the last round is missing, or the training loss is not the recorded one.
    """
    sim = _simulation(run, executor or Serial())
    state = _state_before(run, sim)
    seen: list[tuple[Draft, Round]] = []
    only_mean = replace(sim, method=replace(sim.method, stages=(Mean(),)))
    with one_thread():
        cohort = CohortTraining(sim, state, None, lambda *_: None, lambda: False).run()
        if cohort.failed:
            raise RunError(f"client {cohort.failed[0].client_id} of its last round failed: {cohort.failed[0].reason}")
        result = run_server_step(only_mean, state, cohort, lambda *_: None, lambda *step: seen.append(step))
    if not math.isclose(train_loss(sim, cohort, result) or 0, run.records[-1]["train_loss"] or 0, rel_tol=1e-6):
        raise RunError("its last round, trained again, has another loss; the code or the machine has changed since")
    return Rerun(run, sim, *seen[0])


def _simulation(run: Run, executor: Executor) -> Simulation:
    recipe, seed, plan = run.recipe, run.info.seed, own_plan(run.info.precision, run.info.device, executor)
    federation = prepare(recipe, seed, load_task(recipe.data.source))
    runner = ModelRunner(federation.build_model(), plan, federation.model.output)
    executor.configure(federation, plan)
    return Simulation(recipe, recipe.method_for(run.info.method), seed, federation, runner, executor)


def _state_before(run: Run, sim: Simulation) -> RunState:
    last = len(run.records)
    if last == 1:
        return RunState(0, sim.runner.read())
    # `latest` gives the newest checkpoint only, and we need the one before it.
    path = checkpoint.path_of(run.folder, last - 1)
    try:
        return checkpoint.read(path)
    except UNREADABLE as error:
        raise RunError(f"the checkpoint of the round before the last, {path}, cannot be read: {error}") from error
