"""Single-threaded worker processes: one reused model each, data in shared memory, jobs over a pipe.

`worker_pool` says what happens when a process dies, and `mailbox` how the tensors of jobs and results travel.
"""

import errno
import multiprocessing
import os
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from fedbe.core.compute import Plan
from fedbe.errors import FedBEError, RunError
from fedbe.experiment.executors.base import Job, Outcome
from fedbe.experiment.executors.forkserver import start_method, warm_up
from fedbe.experiment.executors.mailbox import MailboxPair
from fedbe.experiment.executors.memory_usage import ProcessMemoryPeak
from fedbe.experiment.executors.watchdog import HANG_SECONDS, Watchdog, start_beating
from fedbe.experiment.executors.worker_pool import JobRunner, Worker, WorkerPool
from fedbe.experiment.federation import Federation

FREE_FILES, FREE_FILES_PER_WORKER = 24, 8  # files that this process must be able to open


class _Worker(Worker):
    """One worker process."""

    def __init__(self) -> None:
        super().__init__()
        context = multiprocessing.get_context(start_method())
        self.pipe, worker_pipe = context.Pipe()
        self.beat = context.RawValue("Q", 0)
        self._mailboxes = MailboxPair.create()
        arguments = (worker_pipe, self.beat, self._mailboxes)
        self.process: BaseProcess = context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        self.process.start()
        worker_pipe.close()
        self._mailboxes.close_handle()

    def kill(self) -> None:
        """End the process at once; the pool then finds it dead."""
        self.process.kill()

    def set_up(self, setup: tuple[Any, ...]) -> bool:
        with _system_limits():
            return self._send("setup", setup)

    def start(self, job: Job) -> bool:
        return self._send("job", self._mailboxes.jobs.put(job))

    def _send(self, kind: str, value: Any) -> bool:
        """Send a message; False if the process has died."""
        try:
            self.pipe.send((kind, value))
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> Any:
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            return None

    def read(self, answer: Any) -> Outcome:
        outcome: Outcome = self._mailboxes.results.take(answer, copy=True)
        return outcome

    def close(self) -> str:
        self.pipe.close()
        self.process.join(timeout=2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return f"exit code {self.process.exitcode}"


class ProcessPool(WorkerPool[_Worker]):
    """An executor with a fixed number of worker processes; see `Executor`.

    Args:
        workers: The number of processes, at least 1.
        hang_seconds: A process that shows no sign of life for this long is replaced, like one that died.

    Raises:
        RunError: `workers` is below 1, or the system does not allow so many processes or open files.
    """

    def __init__(self, workers: int, hang_seconds: float = HANG_SECONDS) -> None:
        with _system_limits():
            check_free_files(workers)
            warm_up()
        super().__init__(workers)
        self._watchdog = Watchdog(lambda: self._workers, hang_seconds)

    def __exit__(self, *_: object) -> None:
        self._watchdog.close()
        super().__exit__()

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [w.process.pid for w in self._workers if w.process.pid is not None]

    def memory_peak(self) -> ProcessMemoryPeak:
        """Start to measure the memory of this process and of the workers."""
        return ProcessMemoryPeak(self.pids)

    def configure(self, federation: Federation, plan: Plan) -> None:
        """Set the data and the arithmetic of the jobs that follow, for all workers and for replacements."""
        with _system_limits():
            super().configure(federation.share_(), plan)

    def _make_worker(self) -> _Worker:
        with _system_limits():
            return _Worker()

    def _wait(self, busy: Sequence[_Worker]) -> Sequence[_Worker]:
        ready = set(wait([worker.pipe for worker in busy]) if busy else ())  # without pipes it would wait forever
        return [worker for worker in busy if worker.pipe in ready]


def check_free_files(workers: int) -> None:
    """OSError if this process may open far fewer files than the workers need: a thread of multiprocessing, which
    passes them on, would print its errors over ours."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = limit - len(os.listdir("/dev/fd"))  # noqa: PTH208 (names of open files, not paths)
    if limit != resource.RLIM_INFINITY and free < FREE_FILES + FREE_FILES_PER_WORKER * workers:
        raise OSError(errno.EMFILE, f"only {max(free, 0)} more files can be opened")


@contextmanager
def _system_limits() -> Iterator[None]:
    """Turn what the system refuses (processes, open files, shared memory) into one sentence."""
    try:
        yield
    except (OSError, EOFError, RuntimeError) as error:
        if isinstance(error, FedBEError):
            raise
        raise RunError(
            f"worker processes cannot be started ({error}): use fewer (--workers), or raise the system's limits "
            "(`ulimit -n` for open files)"
        ) from error


def _serve(pipe: Connection, beat: Any, mailboxes: MailboxPair) -> None:
    """The main function of a worker process: run one job after the other until the pipe closes."""
    # Ctrl-C goes to every process of the terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start_beating(beat)
    runner = JobRunner()
    while True:
        try:
            kind, value = pipe.recv()
        except (EOFError, OSError):
            return
        if kind == "setup":
            runner.set_up(*value)
            continue
        try:
            pipe.send(mailboxes.results.put(runner.run(mailboxes.jobs.take(value, copy=False))))
        except OSError:  # the pool was closed meanwhile
            return
