"""Where jobs run: worker processes, a Ray cluster, or this process. `base` says what every executor must offer."""

from typing import TYPE_CHECKING

from fedbe.errors import SettingError, check_option

if TYPE_CHECKING:
    from fedbe.experiment.executors.base import Executor

EXECUTORS = ("processes", "ray")


def make_executor(
    workers: int | None = None,
    kind: str = "processes",
    address: str | None = None,
    *,
    cpus_per_worker: float | None = None,
    gpus_per_worker: float | None = None,
    device: str | None = None,
) -> "Executor":
    """Create an executor with that many workers, or one that runs everything in this process.

    Args:
        workers: The number of workers; default: one for each core, or as many as the Ray cluster has CPUs and GPUs for.
            0 for none, which is useful with a debugger.
        kind: "processes" for worker processes on this machine, or "ray".
        address: The address of the Ray cluster; see `RayPool`.
        cpus_per_worker: The CPUs that Ray reserves for a worker; default: one.
        gpus_per_worker: The GPUs, or the part of one, that Ray reserves for a worker; default: none.
        device: Where the workers of a Ray cluster compute; see `RayPool`.

    Returns:
        A context manager. The results do not depend on which one it is.

    Raises:
        RunError: `workers` is negative, or there is no such cluster.
        SettingError: `kind` is unknown, there is an address or a reservation without Ray, or a wrong reservation.
        ExtraError: Ray is not installed.

    Example:
        >>> with make_executor(0) as executor:
        ...     executor.workers
        1
    """
    # Imported here, so that the command line can start the fork server before torch is imported.
    from fedbe.core.compute import cores
    from fedbe.experiment.executors.process_pool import ProcessPool
    from fedbe.experiment.executors.serial import Serial

    check_option("executor", kind, EXECUTORS)
    if kind == "ray":
        from fedbe.experiment.executors.ray_pool import RayPool

        cpus = 1.0 if cpus_per_worker is None else cpus_per_worker
        return RayPool(workers, address, num_cpus=cpus, num_gpus=gpus_per_worker or 0.0, device=device)
    if address is not None:
        raise SettingError("--address is the address of a Ray cluster: add --executor ray")
    if cpus_per_worker is not None or gpus_per_worker is not None:
        raise SettingError("--cpus-per-worker and --gpus-per-worker are what Ray reserves: add --executor ray")
    return Serial() if workers == 0 else ProcessPool(cores() if workers is None else workers)
