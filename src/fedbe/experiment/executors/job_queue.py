"""The jobs of one call of `map`: which wait, which run again after their worker died, whose outcome comes next."""

from collections import deque
from collections.abc import Iterable

from fedbe.experiment.executors.base import Job, Outcome

ATTEMPTS = 3  # a job whose worker dies runs again, up to this many times in all


class JobQueue:
    """The jobs of one call of `map`: not drawn yet, waiting, running, finished."""

    def __init__(self, jobs: Iterable[Job], ahead: int | None) -> None:
        self._source = iter(jobs)
        self._ahead = ahead
        self._drawn = 0
        self._exhausted = False
        self._jobs: dict[int, Job] = {}  # drawn and not finished
        self._waiting: deque[int] = deque()
        self._attempts: dict[int, int] = {}
        self._finished: dict[int, Outcome] = {}
        self._next_outcome = 0

    def draw(self) -> bool:
        """Draw one more job; False if there is none, or if enough are drawn."""
        if self._exhausted or (self._ahead is not None and self._drawn - self._next_outcome >= self._ahead):
            return False
        try:
            job = next(self._source)
        except StopIteration:
            self._exhausted = True
            return False
        self._jobs[self._drawn] = job
        self._attempts[self._drawn] = 0
        self._waiting.append(self._drawn)
        self._drawn += 1
        return True

    def start_next(self) -> tuple[int, Job] | None:
        """The next job that must run, with its number; None if no job waits."""
        if not self._waiting:
            return None
        number = self._waiting.popleft()
        return number, self._jobs[number]

    def job(self, number: int) -> Job:
        """A job that was started."""
        return self._jobs[number]

    def put_back(self, number: int) -> None:
        """Let a job that was started run again."""
        self._waiting.appendleft(number)

    def count_death(self, number: int) -> bool:
        """Note that the job's worker died; True if the job may run again."""
        self._attempts[number] += 1
        return self._attempts[number] < ATTEMPTS

    def finish(self, number: int, outcome: Outcome) -> None:
        """Keep the outcome of a job until its turn comes."""
        self._finished[number] = outcome
        del self._jobs[number]

    def take_outcome(self) -> Outcome | None:
        """The next outcome in the order of the jobs, if its job has finished."""
        outcome = self._finished.pop(self._next_outcome, None)
        if outcome is not None:
            self._next_outcome += 1
        return outcome

    @property
    def is_complete(self) -> bool:
        """Whether every job has finished and its outcome was taken."""
        return self._exhausted and self._next_outcome == self._drawn
