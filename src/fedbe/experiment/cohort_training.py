"""The local training of one round: jobs for the cohort, progress, and a cache of the clients that have finished."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedbe.algorithms.client.training import Trained
from fedbe.algorithms.server.guard import SetAside
from fedbe.errors import RunError
from fedbe.experiment.client_cache import ClientCache
from fedbe.experiment.executors.base import LOST_ADVICE, Failed, Lost, Outcome, Stopped
from fedbe.experiment.jobs import TrainJob
from fedbe.experiment.run_state import RunState
from fedbe.experiment.simulation import Simulation

Progress = Callable[[str, int, int], None]  # phase, done, total

# Finished clients are written to the cache when the round has trained this long and the writing takes no more than this
# share of the time; and when the run is stopped.
CACHE_AFTER_SECONDS = 5.0
CACHE_SHARE = 0.02

# If the models of a cohort need more memory than this, each is read from its file in the cache, page by page as it is
# used: the memory of a round does not grow with its cohort.
IN_MEMORY_MB = 1024


@dataclass(frozen=True, eq=False)
class TrainedCohort:
    """The result of a round's local training.

    Args:
        trained: The clients that finished, ascending.
        failed: The clients that failed, ascending, with reasons.
        cached_seconds: About how long the cached clients took to train, over all workers.
    """

    trained: dict[int, Trained]
    failed: list[SetAside]
    cached_seconds: float


class CohortTraining:
    """Trains the cohort of the round after `state`, the longest job first.

    Args:
        sim: The simulation.
        state: The state before the round.
        cache: Where finished clients are looked up and saved; None for no cache.
        progress: Called with ("clients", finished, total).
        should_stop: Called between clients; True stops the training.
    """

    def __init__(
        self,
        sim: Simulation,
        state: RunState,
        cache: ClientCache | None,
        progress: Progress,
        should_stop: Callable[[], bool],
    ) -> None:
        self._sim, self._cache = sim, cache
        self._progress, self._should_stop = progress, should_stop
        self._jobs = train_jobs(sim, state)
        self._trained: dict[int, Trained] = {}
        self._failed: dict[int, str] = {}
        self._unsaved: list[tuple[TrainJob, Trained, float]] = []
        self._save_seconds = 0.0
        vectors = 1 + len(sim.method.extras)
        cohort_mb = len(self._jobs) * vectors * state.model.params.nbytes / 2**20
        self._stays_on_disk = cohort_mb > IN_MEMORY_MB

    def run(self) -> TrainedCohort:
        """Train all clients that the cache does not have.

        Raises:
            Stopped: `should_stop` returned True. Clients that have finished are in the cache.
        """
        if self._should_stop():
            raise Stopped
        cached_seconds = self._load_cached()
        self._show_progress()
        self._train([job for job in self._jobs if job.client not in self._trained])
        clients = sorted(job.client for job in self._jobs)
        return TrainedCohort(
            {client: self._trained[client] for client in clients if client in self._trained},
            [SetAside(client, self._failed[client]) for client in clients if client in self._failed],
            cached_seconds / max(1, min(len(clients), self._sim.executor.workers)),
        )

    def _load_cached(self) -> float:
        """Take what the cache has; returns how many seconds it took to train."""
        total = 0.0
        for job in self._jobs:
            cached = None if self._cache is None else self._cache.load(job)
            if cached is not None:
                self._trained[job.client], seconds = cached
                total += seconds
        return total

    def _train(self, jobs: Sequence[TrainJob]) -> None:
        begin = time.perf_counter()

        def done(number: int, outcome: Outcome) -> None:
            self._note(jobs[number], outcome)
            elapsed = time.perf_counter() - begin
            if self._stays_on_disk:
                self._save()
            elif elapsed > CACHE_AFTER_SECONDS:
                self._save(CACHE_SHARE * elapsed)
            self._show_progress()

        try:
            for _ in self._sim.executor.map(jobs, done=done, should_stop=self._should_stop):
                pass
            if self._should_stop():
                raise Stopped
        except (Stopped, RunError):
            self._save()
            raise

    def _note(self, job: TrainJob, outcome: Outcome) -> None:
        if isinstance(outcome, Lost) and not self._sim.recipe.limits.drop_lost_clients:
            raise RunError(
                f"client {job.client} could not be trained: {outcome.reason}; {LOST_ADVICE}. "
                "To continue without such clients: --set limits.drop_lost_clients=true in a new run"
            )
        if isinstance(outcome, Failed):
            self._failed[job.client] = outcome.reason
        else:
            self._trained[job.client] = outcome.value
            self._unsaved.append((job, outcome.value, outcome.seconds))

    def _save(self, allowed: float = math.inf) -> None:
        """Write finished clients, until this round has spent the allowed seconds on writing."""
        while self._cache is not None and self._unsaved and self._save_seconds <= allowed:
            begin = time.perf_counter()
            job, trained, seconds = self._unsaved.pop()
            self._cache.save(job, trained, seconds)
            if self._stays_on_disk and (saved := self._cache.load(job)):
                self._trained[job.client] = saved[0]
            self._save_seconds += time.perf_counter() - begin

    def _show_progress(self) -> None:
        self._progress("clients", len(self._trained) + len(self._failed), len(self._jobs))


def train_jobs(sim: Simulation, state: RunState) -> list[TrainJob]:
    """One job for each client of the next round's cohort, the longest first."""
    number = state.round + 1
    attacker = sim.attacker
    jobs = [
        TrainJob(
            client=client,
            round=number,
            seed=sim.seed,
            state=state.model,
            settings=sim.local_settings(number, client),
            num_examples=len(sim.federation.clients[client]),
            rules=sim.method.rules,
            broadcast={name: vector for name, vector in state.memory.items() if name in sim.method.extras},
            memory=state.clients.get(client, {}),
            flip_labels=attacker is not None and attacker.flips_labels(client),
        )
        for client in sim.cohort(number)
    ]
    return sorted(jobs, key=lambda job: (-job.size, job.client))
