"""Workers on a Ray cluster: one actor each. Data and models are put into the object store once, not once a job.

`worker_pool` says what happens when an actor or its node dies. An actor without a place in the cluster gets no job yet.
"""

import os
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from fedbe.core.compute import Plan, cores, torch_release
from fedbe.errors import RunError, SettingError, missing_extra
from fedbe.experiment.executors.base import Job, Lost, Outcome
from fedbe.experiment.executors.memory_usage import ProcessMemoryPeak
from fedbe.experiment.executors.watchdog import START_SECONDS
from fedbe.experiment.executors.worker_pool import JobRunner, Worker, WorkerPool
from fedbe.experiment.federation import Federation
from fedbe.experiment.provenance import code_version

SHARED_BYTES = 2**16  # a tensor of the driver from this size on is an object of its own, which all its users share
POLL_SECONDS = 1.0


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # without it Ray warns in every process
    try:
        import ray
    except ImportError:
        raise missing_extra("the executor ray needs the package ray", "ray") from None
    return ray


class RayPool(WorkerPool["_ActorWorker"]):
    """An executor whose workers are Ray actors; see `Executor`.

    Args:
        workers: The number of actors; None for as many as the CPUs and GPUs of the cluster's nodes allow.
        address: The cluster: "auto" for the one that runs on this machine, or HOST:PORT; None starts Ray here. If this
            process is connected to a cluster already, that one is used.
        num_cpus: The CPUs that Ray reserves for an actor. An actor computes with one thread.
        num_gpus: The GPUs that Ray reserves for an actor; a fraction lets several actors share one. The actor sees no
            other GPU. Without a reservation it sees all GPUs of its node.
        device: Where actors compute, such as "cuda"; default: the plan's device. Each actor looks for it on its own
            node, so this process need not have one.

    Raises:
        ExtraError: Ray is not installed.
        SettingError: `num_cpus` or `num_gpus` is not a number that Ray can reserve.
        RunError: The cluster cannot be reached, or has no place for a worker.
    """

    has_own_devices = True

    def __init__(
        self,
        workers: int | None = None,
        address: str | None = None,
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        device: str | None = None,
    ) -> None:
        _check_reservation("CPUs", num_cpus)
        _check_reservation("GPUs", num_gpus)
        self._ray, self._device = _ray(), device
        self._none_ready_since: float | None = None
        self._connected_here = not self._ray.is_initialized()
        if self._connected_here:
            _connect(self._ray, address)
        self._objects = _SharedTensors(self._ray)
        self._ray.util.register_serializer(Tensor, serializer=self._objects.pack, deserializer=_unpack)
        options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "scheduling_strategy": "SPREAD"}
        self._actor_class = self._ray.remote(_Actor).options(**options)
        try:
            nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            places = _places(nodes, num_cpus, num_gpus)
            super().__init__(places if workers is None else workers)
        except BaseException:
            self._disconnect()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._disconnect()

    def configure(self, federation: Federation, plan: Plan) -> None:
        """Put the federation into the object store and tell the actors."""
        super().configure(self._ray.put(federation), plan)

    def _setup_of(self, i: int) -> tuple[Any, ...]:
        """What an actor needs to find its own device: only its node knows which ones it has."""
        assert self._setup is not None, "`configure` is called first"
        federation, plan = self._setup
        return federation, plan, self._device or plan.device, i

    def memory_peak(self) -> "_ActorMemoryPeak":
        """Start to measure the memory of this process and of the actors."""
        return _ActorMemoryPeak(self._ray, [worker for worker in self._workers if worker.is_ready])

    def _make_worker(self) -> "_ActorWorker":
        return _ActorWorker(self._ray, self._actor_class.remote(str(Path.cwd())))

    def _wait(self, busy: Sequence["_ActorWorker"]) -> Sequence["_ActorWorker"]:
        for worker in busy:
            if worker.job_limit is not None and worker.seconds > worker.job_limit:
                worker.kill()
        starting = [worker.ready for worker in self._workers if not worker.is_ready]
        results = [worker.result for worker in busy]
        finished, _ = self._ray.wait([*results, *starting], num_returns=1, timeout=POLL_SECONDS, fetch_local=False)
        self._replace_died_at_start()
        self._check_any_is_ready()
        return [worker for worker in busy if worker.result in finished]

    def _replace_died_at_start(self) -> None:
        """Replace actors that died before they could start."""
        for i, worker in enumerate(self._workers):
            if worker.died_at_start:
                self._replace(i)

    def _check_any_is_ready(self) -> None:
        """RunError if no actor has been ready for long. Replacing actors does not restart the clock."""
        now = time.monotonic()
        if any(worker.is_ready for worker in self._workers):
            self._none_ready_since = None
        elif self._none_ready_since is None:
            self._none_ready_since = now
        elif now - self._none_ready_since > START_SECONDS:
            raise RunError(
                f"no worker could start on the Ray cluster in {START_SECONDS:.0f} s: `ray status` shows what is free"
            )

    def _disconnect(self) -> None:
        self._ray.util.deregister_serializer(Tensor)
        if self._connected_here:
            self._ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    local = {} if address else {"include_dashboard": False, "num_cpus": cores()}
    try:
        if address and ":" in address and "://" not in address:
            host, port = address.rsplit(":", 1)
            socket.create_connection((host, int(port)), timeout=10).close()  # Ray would try for minutes
        ray.init(address=address, logging_level="CRITICAL", log_to_driver=False, **local)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RunError(f"cannot connect to the Ray cluster '{address or 'on this machine'}': {reason}") from error


def _versions() -> dict[str, str]:
    return {"fedbe": code_version(), "torch": torch_release(torch.__version__)}


def _check_versions(there: Mapping[str, str]) -> None:
    """RunError if a node has other versions than this process: a run would mix two kinds of numbers."""
    for name, here in _versions().items():
        if there[name] != here:
            raise RunError(
                f"a node of the Ray cluster has {name} {there[name]}, and this machine has {here}: "
                "install the same version on all of them"
            )


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1].strip()


def _check_reservation(what: str, amount: float) -> None:
    if not (amount >= 0 and (amount <= 1 or amount == int(amount))):
        raise SettingError(f"the {what} of a worker must be from 0 to 1, or a whole number, got {amount:g}")


def _places(nodes: Sequence[Mapping[str, float]], num_cpus: float, num_gpus: float) -> int:
    """How many actors fit on the nodes of a cluster, each on one node; RunError if none does.

    >>> _places([{"CPU": 8.0, "GPU": 2.0}, {"CPU": 3.0}], 1, 0.4), _places([{"CPU": 3.0}, {"CPU": 2.0}], 2, 0)
    (4, 2)
    """
    wanted = [(name, each) for name, each in (("CPU", num_cpus), ("GPU", num_gpus)) if each]
    places = sum(min((_fits(name, node.get(name, 0.0), each) for name, each in wanted), default=1) for node in nodes)
    if places < 1:
        cpus, gpus = (sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU"))
        advice = ": use --device cpu, or nodes with GPUs" if num_gpus and not gpus else f" on {len(nodes)} nodes"
        raise RunError(
            f"a worker needs {num_cpus:g} CPUs and {num_gpus:g} GPUs, but the Ray cluster has {cpus:g} CPUs and "
            f"{gpus:g} GPUs{advice}"
        )
    return places


def _fits(name: str, total: float, each: float) -> int:
    """How many workers one node has CPUs or GPUs for. Less than a GPU is a part of one GPU, never of two."""
    if name == "GPU" and each < 1:
        return int(total) * int(1 / each + 1e-9)
    return int(total / each + 1e-9)


class _ActorWorker(Worker):
    """One actor, as the driver sees it."""

    def __init__(self, ray: Any, actor: Any) -> None:
        super().__init__()
        self._ray, self.actor = ray, actor
        self.ready = actor.check.remote()
        self.result: Any = None
        self._configured: Any = None  # the end of `set_up`: a job waits for it, and fails with it
        self._is_ready = self.died_at_start = False

    @property
    def is_ready(self) -> bool:
        if not self._is_ready and not self.died_at_start and self._ray.wait([self.ready], timeout=0)[0]:
            try:
                _check_versions(self._ray.get(self.ready))
                self._is_ready = True
            except self._ray.exceptions.RayTaskError as error:
                raise RunError(f"a node of the Ray cluster cannot run fedbe: {error.cause}") from error
            except self._ray.exceptions.RayError as error:
                if getattr(error, "actor_init_failed", False):  # it would fail again
                    raise RunError(f"a node of the Ray cluster cannot run fedbe: {_last_line(error)}") from error
                self.died_at_start = True
        return self._is_ready

    def set_up(self, setup: tuple[Any, ...]) -> bool:
        self._configured = self.actor.set_up.remote(*setup)
        return True

    def start(self, job: Job) -> bool:
        self.result = self.actor.run.remote(job, self._configured)
        return True

    def receive(self) -> Outcome | None:
        try:
            outcome: Outcome = self._ray.get(self.result)
        except self._ray.exceptions.RayTaskError as error:  # the data or the job cannot be read there
            return Lost(f"on the Ray cluster, {type(error.cause).__name__}: {error.cause}")
        except self._ray.exceptions.RayError:  # the actor, its node or the object is lost
            return None
        finally:
            self.result = None
        return outcome

    def kill(self) -> None:
        self._ray.kill(self.actor)

    def close(self) -> str:
        self.kill()
        return "on a Ray cluster"


class _Actor:
    """A worker process of the cluster: one reused model, one thread."""

    def __init__(self, directory: str) -> None:
        import ray

        ray.util.register_serializer(Tensor, serializer=_pack_inline, deserializer=_unpack)
        if Path(directory).is_dir():  # where the driver finds the user's own modules
            os.chdir(directory)
        self._runner = JobRunner()

    def check(self) -> dict[str, str]:
        """The versions that decide a job's result, as soon as the actor has started."""
        return _versions()

    def set_up(self, federation: Federation, plan: Plan, device: str | None, number: int) -> None:
        """Set the data and the arithmetic of the jobs that follow, on a device of this node."""
        self._runner.set_up(federation, plan, device, number)

    def run(self, job: Job, configured: None) -> Outcome:  # noqa: ARG002 (Ray waits for it, and fails if it failed)
        """Run a job."""
        return self._runner.run(job)

    def start_peak(self) -> None:
        """Start to measure this process's memory."""
        self._peak = ProcessMemoryPeak()

    def peak_mb(self) -> float:
        """The largest memory since `start_peak`."""
        return self._peak.mb()


class _ActorMemoryPeak:
    """The largest memory of this process and of actors since this object was created, summed, in MB."""

    def __init__(self, ray: Any, workers: Sequence[_ActorWorker]) -> None:
        self._ray, self._workers, self._own = ray, workers, ProcessMemoryPeak()
        for worker in workers:
            worker.actor.start_peak.remote()

    def mb(self) -> float:
        """The sum of the peaks, in MB; actors that have died do not count."""
        total = self._own.mb()
        for answer in [worker.actor.peak_mb.remote() for worker in self._workers]:
            try:
                total += self._ray.get(answer, timeout=60)
            except self._ray.exceptions.RayError:
                continue
        return round(total, 1)


class _SharedTensors:
    """Puts each large tensor of the driver into the object store once, for as long as it lives and does not change.

    The jobs of a round hold the same global model, so it is put once for all of them. On a node all actors read the
    same memory.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._objects: dict[int, tuple[ReferenceType[Tensor], int, Any]] = {}

    def pack(self, tensor: Tensor) -> Any:
        """What travels instead of the tensor: an array, or the reference of an object."""
        if tensor.nbytes < SHARED_BYTES:
            return _pack_inline(tensor)
        if tensor.is_inference():  # such a tensor does not count its changes
            return self._ray.put(_pack_inline(tensor))
        kept = self._objects.get(id(tensor))
        if kept is None or kept[0]() is not tensor or kept[1] != tensor._version:
            self._objects = {key: value for key, value in self._objects.items() if value[0]() is not None}
            kept = self._objects[id(tensor)] = (ref(tensor), tensor._version, self._ray.put(_pack_inline(tensor)))
        return kept[2]


def _pack_inline(tensor: Tensor) -> "np.ndarray[Any, Any]":
    array: np.ndarray[Any, Any] = tensor.detach().numpy()
    return array


def _unpack(packed: Any) -> Tensor:
    """The tensor of an array, which is copied, or of an object, whose memory is only read."""
    if isinstance(packed, np.ndarray):
        return torch.tensor(packed)  # not from_numpy: Ray's empty arrays have strides that torch cannot view
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the memory is not writable; nobody writes
        return torch.from_numpy(ray.get(packed))
