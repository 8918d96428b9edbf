"""One round of a federation: cohort, local training, server step, measurements. RunState in, RunState out."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedbe.algorithms.client.lr_schedule import step_size
from fedbe.algorithms.client.training import LocalSettings, Trained
from fedbe.algorithms.ensemble import EnsembleSettings
from fedbe.algorithms.methods import Method
from fedbe.algorithms.server.context import Context, Draft, Round, StepInfo
from fedbe.algorithms.server.guard import SetAside
from fedbe.algorithms.server.step import StepResult, server_step
from fedbe.algorithms.vote import Member, Predictor, get_vote_rule, vote
from fedbe.core.metrics import Metrics, compute_metrics
from fedbe.core.model_runner import ModelRunner
from fedbe.core.random import generator
from fedbe.core.state import ModelState
from fedbe.core.updates import ClientId, ClientUpdate
from fedbe.errors import AggregationError, RunError
from fedbe.experiment.client_cache import WORTH_SECONDS, ClientCache
from fedbe.experiment.executors.process_pool import Done, Failed, ProcessPool, Stopped
from fedbe.experiment.federation import Federation
from fedbe.experiment.jobs import PredictJob, TrainJob, Where, test_jobs
from fedbe.experiment.memory_usage import Peak
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.run_folder import Record
from fedbe.experiment.run_state import RunState

Progress = Callable[[str, int, int], None]  # phase, done, total


@dataclass(frozen=True, eq=False)
class Simulation:
    """One federation with one method and one seed, and the means to run it."""

    recipe: Recipe
    method: Method
    seed: int
    federation: Federation
    runner: ModelRunner
    pool: ProcessPool

    @property
    def rounds(self) -> int:
        return self.recipe.rounds(self.method)

    def cohort(self, round: int) -> list[int]:
        """The clients of a round: a function of (seed, round)."""
        total = len(self.federation.clients)
        asked = self.recipe.training.clients_per_round or total
        chosen = torch.randperm(total, generator=generator(self.seed, round, "cohort"))[:asked]
        return sorted(chosen.tolist())

    def epochs(self, client: int) -> int:
        """E of one client: the recipe's, or its own, drawn once."""
        if self.method.one_round:
            return self.recipe.training.one_round_epochs
        epochs = self.recipe.training.epochs
        if isinstance(epochs, int):
            return epochs
        low, high = epochs
        return int(torch.randint(low, high + 1, (1,), generator=generator(self.seed, 0, "epochs", client)).item())

    def local_settings(self, round: int, client: int) -> LocalSettings:
        t = self.recipe.training
        lr = step_size(t.lr, round, self.rounds, t.schedule)
        return LocalSettings(self.epochs(client), t.batch_size, lr, t.lr_decay, t.momentum, t.weight_decay)

    def ensemble(self, **changes: Any) -> EnsembleSettings:
        """The ensemble of this method and recipe, with some settings changed."""
        return self.recipe.ensemble(self.method, **changes)

    def predictor(self, where: Where) -> Predictor:
        """Members' probabilities, asked of the workers; no more models in flight than workers need."""

        def run(members: Iterable[Member]) -> Iterator[Tensor]:
            jobs = (PredictJob(m.state, where) for m in members)
            for outcome in self.pool.map(jobs, ahead=len(self.pool.pids) + 1):
                yield _value(outcome)

        return run

    def measure(self, state: ModelState, members: tuple[Member, ...] = ()) -> Metrics:
        """Metrics on the test images: of the model, or of the members' vote where the method keeps them."""
        labels = self.federation.test_labels
        if members:
            combined = vote(members, self.predictor("test"), rule=self.method.vote_rule)
            return compute_metrics(combined.probabilities, labels)
        parts = [_value(o) for o in self.pool.map(test_jobs(state, len(labels)))]
        return compute_metrics(torch.cat(parts), labels)


def _value(outcome: Done | Failed) -> Tensor:
    if isinstance(outcome, Failed):
        raise RunError(f"a model could not be evaluated: {outcome.reason}")
    value: Tensor = outcome.value
    return value


def play_round(
    sim: Simulation,
    state: RunState,
    progress: Progress,
    kept: ClientCache | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[RunState, Record]:
    """The next state, and the line for rounds.jsonl.

    Clients whose training `kept` has are not trained again, and it is given the others' as they finish. `should_stop`
    raises Stopped when the clients that are being trained are done: nothing but what `kept` was not given is lost.
    """
    number = state.round + 1
    begin, peak = time.perf_counter(), Peak(sim.pool.pids)
    trained, failed, before = _train(sim, state, number, progress, kept, should_stop)
    begin -= before  # seconds say what a round takes, also where a part of it was done before
    memory = {} if before else {"train": peak.mb()}
    training_seconds = time.perf_counter() - begin
    if not trained:
        raise AggregationError(f"no client finished round {number}; client {failed[0].client_id}: {failed[0].reason}")
    measured = number % sim.recipe.evaluation.every == 0 or number == sim.rounds
    evaluation = DraftEvaluation(sim) if measured else None
    peak = Peak(sim.pool.pids)
    result = server_step(
        sim.method.stages,
        state.model,
        [_update(sim, client, t) for client, t in trained.items()],
        state.memory,
        Context(
            runner=sim.runner,
            seed=sim.seed,
            round=number,
            rounds=sim.rounds,
            inputs=sim.federation.server,
            labels=sim.federation.server_labels,
            total_clients=len(sim.federation.clients),
            predictor=sim.predictor("server"),
            progress=progress,
        ),
        transforms=sim.method.transforms,
        extras=sim.method.extras,
        on_draft=evaluation,
    )
    memory["server"] = peak.mb()
    used = {client for client in result.clients if isinstance(client, int)}
    memories: dict[ClientId, Mapping[str, Tensor]] = {c: t.memory for c, t in trained.items() if t.memory and c in used}
    after = RunState(number, result.state, result.memory, {**state.clients, **memories}, result.members)
    record = _record(sim, number, trained, failed, result)
    record["seconds"] = {"train": training_seconds, **record["seconds"]}
    if evaluation is not None:
        progress("evaluate", 0, 1)
        with_time, peak = time.perf_counter(), Peak(sim.pool.pids)
        record["test"] = sim.measure(after.model, after.members).as_dict()
        record |= evaluation.record
        record["seconds"]["test"] = time.perf_counter() - with_time + evaluation.seconds
        memory["test"] = peak.mb()
    record["seconds"]["round"] = time.perf_counter() - begin
    record["memory_mb"] = memory
    return after, record


def _train(
    sim: Simulation,
    state: RunState,
    number: int,
    progress: Progress,
    kept: ClientCache | None,
    should_stop: Callable[[], bool],
) -> tuple[dict[int, Trained], list[SetAside], float]:
    """Everybody's local training, longest first: by client, in the order of their numbers; those who failed; and how
    many seconds of it were (about) spent before, on what `kept` has."""
    cohort = sim.cohort(number)
    jobs = [
        TrainJob(
            client=client,
            round=number,
            seed=sim.seed,
            state=state.model,
            settings=sim.local_settings(number, client),
            num_examples=len(sim.federation.clients[client]),
            rules=sim.method.rules,
            broadcast={k: v for k, v in state.memory.items() if k in sim.method.extras},
            memory=state.clients.get(client, {}),
        )
        for client in cohort
    ]
    jobs.sort(key=lambda job: (-job.size, job.client))
    if should_stop():
        raise Stopped
    found = {job.client: old for job in jobs if kept is not None and (old := kept.find(job)) is not None}
    trained = {client: old for client, (old, _) in found.items()}
    todo = [job for job in jobs if job.client not in found]
    failed: dict[int, str] = {}
    progress("clients", len(found), len(jobs))
    begin = time.perf_counter()
    to_keep: list[tuple[TrainJob, Trained, float]] = []

    def done(which: int, outcome: Done | Failed) -> None:
        job = todo[which]
        if isinstance(outcome, Failed):
            failed[job.client] = outcome.reason
        else:
            trained[job.client] = outcome.value
            to_keep.append((job, outcome.value, outcome.seconds))
        if time.perf_counter() - begin > WORTH_SECONDS:
            keep()
        progress("clients", len(trained) + len(failed), len(jobs))

    def keep() -> None:
        while kept is not None and to_keep:
            kept.keep(*to_keep.pop())

    try:
        for _ in sim.pool.map(todo, done=done, should_stop=should_stop):
            pass
        if should_stop():
            raise Stopped
    except Stopped:
        keep()
        raise
    before = sum(seconds for _, seconds in found.values()) / max(1, min(len(jobs), len(sim.pool.pids)))
    aside = [SetAside(c, failed[c]) for c in cohort if c in failed]
    return {c: trained[c] for c in cohort if c in trained}, aside, before


def _update(sim: Simulation, client: int, trained: Trained) -> ClientUpdate:
    examples = len(sim.federation.clients[client])
    return ClientUpdate(trained.state, examples, client, trained.extras)


class DraftEvaluation:
    """A hook of the server step: measures the average, its ensemble and the clients on the test data.

    Where the method lets the same ensemble vote, its samples are drawn once and used for both.
    """

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.record: Record = {}
        self.seconds = 0.0

    def __call__(self, draft: Draft, round: Round) -> None:
        begin = time.perf_counter()
        evaluation = self._sim.recipe.evaluation
        if self._sim.method.replaces_model:
            self.record["test_average"] = self._sim.measure(draft.state).as_dict()
        if evaluation.ensemble:
            self.record["test_ensemble"] = self._measure_ensemble(draft, round, evaluation.ensemble)
        if evaluation.clients:
            self.record["test_clients"] = self._measure_clients(round)
        self.seconds = time.perf_counter() - begin

    def _measure_ensemble(self, draft: Draft, round: Round, members: str) -> Record:
        settings = self._sim.ensemble(members=members)
        # This vote is not part of the method's step, so its time must not count there; samples that both use do count.
        measured = replace(round, info=StepInfo())
        shared = self._sim.method.settings().get("members", "")
        (round if "S" in shared and self._sim.ensemble().samples_like(settings) else measured).keep_samples(settings)
        voters = measured.members(settings, draft.state)
        result = vote(
            voters, self._sim.predictor("test"), self._sim.federation.test_labels, rule=get_vote_rule(settings.vote)
        )
        assert result.metrics is not None
        return result.metrics.as_dict() | {"disagreement": result.disagreement}

    def _measure_clients(self, round: Round) -> Record:
        clients = [Member(f"client {u.client_id}", u.state) for u in round.updates]
        reports = vote(clients, self._sim.predictor("test"), self._sim.federation.test_labels).members
        return {r.name: r.metrics.as_dict() for r in reports if r.metrics is not None}


def _record(
    sim: Simulation, number: int, trained: Mapping[int, Trained], failed: list[SetAside], result: StepResult
) -> Record:
    info = result.info
    state_bytes = model_bytes(sim.runner)
    vectors = len(sim.method.extras) * sim.runner.layout.size * sim.runner.layout.dtype.itemsize
    # Clients of zero epochs have no loss, and that of a client who was set aside may be no number.
    used = [c for c, t in trained.items() if t.steps and c in result.clients]
    losses = {c: (trained[c].loss, len(sim.federation.clients[c])) for c in used}
    total = sum(examples for _, examples in losses.values())
    server: Record = {
        name: q.as_dict() for name in ("average", "ensemble", "student") if (q := getattr(info, name)) is not None
    }
    if info.disagreement is not None:
        server["disagreement"] = info.disagreement
    if info.left_out:
        server["left_out"] = list(info.left_out)
    if info.members:
        server["members"] = {m.name: m.metrics.accuracy if m.metrics else None for m in info.members}
    return {
        "round": number,
        "lr": step_size(sim.recipe.training.lr, number, sim.rounds, sim.recipe.training.schedule),
        "clients": list(result.clients),
        "set_aside": [{"client": s.client_id, "reason": s.reason} for s in (*failed, *result.set_aside)],
        "train_loss": sum(loss * examples for loss, examples in losses.values()) / total if total else None,
        "server": server,
        "bytes": {
            "down": (len(trained) + len(failed)) * (state_bytes + vectors),
            "up": len(trained) * (state_bytes + vectors),
        },
        "seconds": dict(info.seconds),
    }


def model_bytes(runner: ModelRunner) -> int:
    """What a real network would move for one model: every tensor once, in its own dtype."""
    layout = runner.layout
    total = sum((s.stop - s.start) * s.dtype.itemsize for s in (*layout.params, *layout.buffers))
    total += sum(shape.numel() * dtype.itemsize for shape, dtype in layout.counters.values())
    return int(total)
