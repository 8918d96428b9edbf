"""One round of a federation: local training, server step, measurements. RunState in, RunState out."""

import time
from collections.abc import Callable, Mapping

from torch import Tensor

from fedbe.algorithms.server.context import Context, StepInfo
from fedbe.algorithms.server.guard import SetAside
from fedbe.algorithms.server.step import DraftHook, StepResult, server_step
from fedbe.core.model_runner import ModelRunner
from fedbe.core.random import generator
from fedbe.core.updates import ClientId, ClientUpdate, Update
from fedbe.errors import AggregationError
from fedbe.experiment.client_cache import ClientCache
from fedbe.experiment.cohort_training import CohortTraining, Progress, TrainedCohort
from fedbe.experiment.evaluation import DraftEvaluation, is_measured, measure
from fedbe.experiment.records import clients_record
from fedbe.experiment.run_folder import Record
from fedbe.experiment.run_state import RunState
from fedbe.experiment.simulation import Simulation


def run_round(
    sim: Simulation,
    state: RunState,
    progress: Progress,
    cache: ClientCache | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[RunState, Record]:
    """Run the round after `state`.

    Args:
        sim: The simulation.
        state: The state before the round.
        progress: Called with (phase, done, total).
        cache: Holds clients of this round that were trained earlier, and receives the others as they finish.
        should_stop: Called between clients; True stops the round.

    Returns:
        The state after the round, and its line for rounds.jsonl.

    Raises:
        Stopped: `should_stop` returned True during local training. Clients that have finished are in `cache`.
        AggregationError: No client finished, or the server step failed.
    """
    number = state.round + 1
    begin, peak = time.perf_counter(), sim.executor.memory_peak()
    cohort = CohortTraining(sim, state, cache, progress, should_stop).run()
    if not cohort.trained:
        first = cohort.failed[0]
        raise AggregationError(f"no client finished round {number}; client {first.client_id}: {first.reason}")
    begin -= cohort.cached_seconds  # the time of a round includes what a resumed run had done before
    seconds = {"train": time.perf_counter() - begin}
    memory = {} if cohort.cached_seconds else {"train": peak.mb()}

    peak = sim.executor.memory_peak()
    evaluation = DraftEvaluation(sim) if is_measured(sim, number) else None
    result = run_server_step(sim, state, cohort, progress, evaluation)
    after = _next_state(state, cohort, result)
    seconds |= result.info.seconds
    memory["server"] = peak.mb()

    tests: Record = {}
    if evaluation is not None:
        progress("evaluate", 0, 1)
        test_begin, peak = time.perf_counter(), sim.executor.memory_peak()
        try:
            tests["test"] = measure(sim, after.model, after.members).as_dict()
        except AggregationError as error:  # the new model's predictions are not finite
            result = _stopped_round(sim, state, error)
            after = _next_state(state, cohort, result)
            tests["test"] = measure(sim, after.model, after.members).as_dict()
        tests |= evaluation.record
        seconds["test"] = time.perf_counter() - test_begin + evaluation.seconds
        memory["test"] = peak.mb()
    seconds["round"] = time.perf_counter() - begin
    return after, _record(sim, number, cohort, result) | {"seconds": seconds} | tests | {"memory_mb": memory}


def run_server_step(
    sim: Simulation, state: RunState, cohort: TrainedCohort, progress: Progress, on_draft: DraftHook | None
) -> StepResult:
    """The server step of the round after `state`, with the method of the simulation."""
    attacker, predictor, sizes = sim.attacker, sim.predictor("server"), sim.federation.clients.sizes
    sent = [Update(client, t.state, float(sizes[client]), t.extras) for client, t in cohort.trained.items()]
    updates = [ClientUpdate(u.state, u.num_examples, u.client_id, u.extras) for u in sent]
    if attacker is not None:
        draw = generator(sim.seed, state.round + 1, "attack")
        updates = attacker.updates(sent, state.model, sim.method.settings(), draw)
        predictor = attacker.predictor(predictor)
    context = Context(
        runner=sim.runner,
        seed=sim.seed,
        round=state.round + 1,
        rounds=sim.rounds,
        inputs=sim.federation.server,
        labels=sim.federation.server_labels,
        total_clients=len(sim.federation.clients),
        predictor=predictor,
        progress=progress,
    )
    try:
        return server_step(
            sim.method.stages,
            state.model,
            updates,
            state.memory,
            context,
            transforms=sim.method.transforms,
            limits=sim.limits(),
            extras=sim.method.extras,
            on_draft=on_draft,
        )
    except AggregationError as error:
        return _stopped_round(sim, state, error)


def _stopped_round(sim: Simulation, state: RunState, error: AggregationError) -> StepResult:
    """Attackers have stopped the round: the server keeps its model, and the next round follows.

    Without attackers the error is raised.
    """
    if sim.attacker is None:
        raise error
    return StepResult(state.model, state.memory, StepInfo(), (), (SetAside(None, str(error)),))


def _next_state(state: RunState, cohort: TrainedCohort, result: StepResult) -> RunState:
    """Clients whose update was set aside keep their old memory."""
    memories: dict[ClientId, Mapping[str, Tensor]] = {
        client: trained.memory
        for client, trained in cohort.trained.items()
        if trained.memory and client in result.clients
    }
    return RunState(state.round + 1, result.state, result.memory, {**state.clients, **memories}, result.members)


def _record(sim: Simulation, number: int, cohort: TrainedCohort, result: StepResult) -> Record:
    trained, failed = cohort.trained, cohort.failed
    model, layout = model_bytes(sim.runner), sim.runner.layout
    vector = layout.size * layout.dtype.itemsize
    broadcast = sum(name in stage.memory_sizes(layout) for stage in sim.method.stages for name in sim.method.extras)
    return {
        "round": number,
        "lr": sim.lr(number),
        **clients_record(result.clients, (*failed, *result.set_aside), result.capped),
        "train_loss": train_loss(sim, cohort, result),
        "server": result.info.as_record(),
        "bytes": {
            "down": (len(trained) + len(failed)) * (model + broadcast * vector),
            "up": len(trained) * (model + len(sim.method.extras) * vector),
        },
    }


def train_loss(sim: Simulation, cohort: TrainedCohort, result: StepResult) -> float | None:
    """The mean loss of the clients in the result, weighted by examples. Clients of zero epochs have none."""
    trained = {client: t for client, t in cohort.trained.items() if t.steps and client in result.clients}
    losses = [(t.loss, len(sim.federation.clients[client])) for client, t in trained.items()]
    total = sum(examples for _, examples in losses)
    return sum(loss * examples for loss, examples in losses) / total if total else None


def model_bytes(runner: ModelRunner) -> int:
    """The size of one model on a network: every tensor once, in its own dtype."""
    layout = runner.layout
    total = sum((s.stop - s.start) * s.dtype.itemsize for s in (*layout.params, *layout.buffers))
    total += sum(shape.numel() * dtype.itemsize for shape, dtype in layout.counters.values())
    return int(total)
