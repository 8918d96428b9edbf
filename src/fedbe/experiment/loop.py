"""The only training loop: `execute` starts, resumes and finishes a run. `run_folder` says what a run consists of."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedbe.algorithms.vote import Member
from fedbe.core.devices import describe_device, is_out_of_memory
from fedbe.core.files import locked
from fedbe.data import Task
from fedbe.errors import RunError
from fedbe.experiment import checkpoint, provenance, run_folder, saved_model
from fedbe.experiment.callbacks import Callback, EndStatus
from fedbe.experiment.client_cache import ClientCache
from fedbe.experiment.executors.base import LOST_ADVICE, Executor, Stopped
from fedbe.experiment.federation import prepare
from fedbe.experiment.round import run_round
from fedbe.experiment.run_state import RunState
from fedbe.experiment.simulation import Simulation, make_simulation


def execute(
    folder: Path,
    executor: Executor,
    callback: Callback,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    task: Task | None = None,
    first_round: Path | None = None,
    device: str | None = None,
    shares_cores: bool = False,
) -> bool:
    """Train a run from its last checkpoint, or from the start, until its last round.

    Args:
        folder: The run folder.
        executor: Runs the clients' training and the predictions.
        callback: Its methods are called in each phase and after each round.
        should_stop: Called between clients and rounds; True stops the run.
        task: The data set, if it is already loaded; default: the one that the recipe names.
        first_round: A folder where runs with the same first round share its trained clients. The caller removes it.
        device: Which of the run's devices to use; default: all of them.
        shares_cores: Whether other runs use the cores of this machine at the same time.

    Returns:
        True if the run is finished, False if `should_stop` ended it before.

    Raises:
        RunError: The folder is not a run folder, its checkpoints belong to other settings, data or versions, or the
            memory of the device is full.
        BusyError: Another process trains this run.
    """
    info, recipe = run_folder.read_info(folder), run_folder.read_recipe(folder)
    device = device or info.device
    with locked(folder), _full_memory_as_sentence(device):
        federation = prepare(recipe, info.seed, task)
        sim = make_simulation(
            recipe, info.method, info.seed, info.precision, federation, executor, device, shares_cores=shares_cores
        )
        identity = provenance.identity(recipe, info.method, info.seed, info.precision, federation)
        state = checkpoint.latest(folder, identity) or RunState(0, sim.runner.read())
        run_folder.drop_rounds_after(folder, state.round)
        info = run_folder.mark_identity(folder, info, identity)
        if 0 < state.round < sim.rounds:
            info = run_folder.mark_resumed(folder, info, state.round + 1)
        callback.begin(f"{sim.method.title}, seed {info.seed}", sim.rounds, state.round)
        status: EndStatus = "failed"
        try:
            state = _train(folder, sim, state, identity, callback, should_stop, first_round)
            members = state.members or (Member("model", state.model),)
            vote = sim.method.settings().get("vote", "mean")
            saved_model.save(folder, members, sim.runner.layout, federation, vote)
            run_folder.mark_finished(folder, info)
            status = "finished"
        except Stopped:
            status = "stopped"
            return False
        except KeyboardInterrupt:
            status = "stopped"
            raise
        finally:
            callback.end(status)
    return True


@contextmanager
def _full_memory_as_sentence(device: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(f"the memory of {describe_device(device)} is full; {LOST_ADVICE}: nothing is lost") from error


def _train(
    folder: Path,
    sim: Simulation,
    state: RunState,
    identity: Mapping[str, str],
    callback: Callback,
    should_stop: Callable[[], bool],
    first_round: Path | None,
) -> RunState:
    """Run all rounds that are left; each one ends with its line in rounds.jsonl and its checkpoint."""
    made_with = f"numerics {identity['numerics']}, {identity['model']}, torch {identity['torch']}"
    cache = ClientCache(folder / "trained", sim.federation, sim.runner.plan, made_with)
    shared_cache = replace(cache, folder=first_round or cache.folder)
    while state.round < sim.rounds:
        number = state.round + 1
        progress = partial(callback.phase, number)
        state, record = run_round(sim, state, progress, shared_cache if number == 1 else cache, should_stop)
        run_folder.append_round(folder, record)
        checkpoint.save(folder, state, identity)
        cache.clear()
        callback.round_ended(record)
    cache.clear()
    return state
