"""The only training loop: `execute` starts, resumes and finishes a run. `run_folder` says what a run consists of."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from fedbe.algorithms.vote import Member
from fedbe.core.compute import Plan, server_threads
from fedbe.core.files import locked
from fedbe.core.model_runner import ModelRunner
from fedbe.data import Task
from fedbe.errors import RunError
from fedbe.experiment import checkpoint, provenance, run_folder, saved_model
from fedbe.experiment.client_cache import ClientCache
from fedbe.experiment.executors.process_pool import ProcessPool, Stopped
from fedbe.experiment.federation import Federation, initial_weights, prepare
from fedbe.experiment.memory_usage import keep_freed_memory
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.round import Simulation, play_round
from fedbe.experiment.run_folder import Record, RunInfo
from fedbe.experiment.run_state import RunState


class Observer(Protocol):
    """Who watches a run."""

    def begin(self, title: str, rounds: int, done: int) -> None: ...

    def phase(self, round: int, phase: str, done: int, total: int) -> None: ...

    def round_ended(self, record: Record) -> None: ...

    def end(self) -> None: ...


def execute(
    folder: Path,
    pool: ProcessPool,
    observer: Observer,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    task: Task | None = None,
    first_round: Path | None = None,
) -> bool:
    """Train until the last round; True if it was reached, False if `should_stop` said to stop before it.

    Runs that begin alike and are given one folder as `first_round` train the clients of that round once; who gives it
    removes it.
    """
    info, recipe = run_folder.read_info(folder), run_folder.read_recipe(folder)
    with locked(folder):
        federation = prepare(recipe, info.seed, task)
        sim = simulation(recipe, info, federation, pool)
        identity = provenance.identity(recipe, info.method, info.seed, info.precision, federation)
        state = checkpoint.latest(folder, identity) or RunState(0, sim.runner.read())
        run_folder.drop_rounds_after(folder, state.round)
        if 0 < state.round < sim.rounds:
            info = run_folder.mark_resumed(folder, info, state.round + 1)
        made_with = f"numerics {identity['numerics']}, {identity['model']}, torch {identity['torch']}"
        own = ClientCache(folder / "trained", federation, sim.runner.plan, made_with)
        first = replace(own, folder=first_round or own.folder)
        observer.begin(f"{sim.method.title}, seed {info.seed}", sim.rounds, state.round)
        try:
            while state.round < sim.rounds:
                number = state.round + 1
                phase = partial(observer.phase, number)
                state, record = play_round(sim, state, phase, first if number == 1 else own, should_stop)
                run_folder.append_round(folder, record)
                checkpoint.save(folder, state, identity)
                own.clear()
                observer.round_ended(record)
        except Stopped:
            return False
        finally:
            observer.end()
        own.clear()
        members = state.members or (Member("model", state.model),)
        saved_model.save(folder, members, sim.runner.layout, sim.federation)
        run_folder.mark_finished(folder, info)
    return True


def simulation(recipe: Recipe, info: RunInfo, federation: Federation, pool: ProcessPool) -> Simulation:
    method, watched = recipe.method_for(info.method), recipe.evaluation.ensemble
    module = initial_weights(federation.model, info.seed)
    asks = method.needs_unlabeled(module) or (
        watched and recipe.ensemble(method, members=watched).needs_unlabeled(module)
    )
    if asks and federation.server is None:
        raise RunError(f"{method.title} needs images at the server: set data.server or data.unlabeled in the recipe")
    plan = Plan(info.precision)
    pool.configure(federation, plan)
    torch.set_num_threads(server_threads(module))
    keep_freed_memory()
    return Simulation(recipe, method, info.seed, federation, ModelRunner(module, plan), pool)
