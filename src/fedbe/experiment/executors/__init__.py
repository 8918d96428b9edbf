"""Where jobs run: worker processes, or this process. `base` says what every executor must offer."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedbe.experiment.executors.base import Executor


def make_executor(workers: int) -> "Executor":
    """Create an executor with that many worker processes, or one that runs everything in this process.

    Args:
        workers: The number of worker processes; 0 for none, which is useful with a debugger.

    Returns:
        A context manager. The results do not depend on which one it is.

    Raises:
        RunError: `workers` is negative.

    Example:
        >>> with make_executor(0) as executor:
        ...     executor.workers
        1
    """
    # Imported here, so that the command line can start the fork server before torch is imported.
    from fedbe.experiment.executors.process_pool import ProcessPool
    from fedbe.experiment.executors.serial import Serial

    return Serial() if workers == 0 else ProcessPool(workers)
