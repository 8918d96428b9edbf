"""How the arithmetic is done on this machine: device, precision, memory layout, threads.

Nothing here decides what is computed. `devices` knows which devices there are.
"""

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from fedbe.core.devices import has_bfloat16_units, parse_devices, resolve_device
from fedbe.errors import SettingError, check_option

PRECISIONS = ("float32", "bfloat16")
CPU_FLAGS = Path("/proc/cpuinfo")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # the quota of this container (cgroup v2)
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last one is ARM's


@dataclass(frozen=True)
class Plan:
    """How forward and backward passes are computed.

    Args:
        precision: "float32", or "bfloat16": passes run under autocast, and weights stay in float32.
        channels_last: The memory layout of images and convolutions. The values are the same; on a CPU it is about a
            quarter faster. A model that does not take it (`x.view(…)` after a convolution) runs without it.
        batch_size: The number of inputs in one forward pass when nothing is trained.
        device: Where passes are computed: "auto" (an accelerator if torch sees one), "cpu", "cuda", "cuda:1", "mps"; or
            several, "cuda:0,1", which worker processes take in turn and a single process takes the first of. States of
            models stay where the caller's module is. Default: the device of the caller's module.

    Raises:
        SettingError: The precision is unknown, `batch_size` is below 1, or the device is not there.

    Example:
        >>> Plan(batch_size=100, device="cpu")
        Plan(precision='float32', channels_last=True, batch_size=100, device='cpu')
    """

    precision: str = "float32"
    channels_last: bool = True
    batch_size: int = 250
    device: str | None = None

    def __post_init__(self) -> None:
        check_option("precision", self.precision, PRECISIONS)
        if self.batch_size < 1:
            raise SettingError(f"`batch_size` must be >= 1, got {self.batch_size}")
        if self.device is not None:
            object.__setattr__(self, "device", resolve_device(self.device))

    def compute_device(self, default: torch.device) -> torch.device:
        """The device of one process: the first of the plan's, or `default` if the plan names none."""
        return default if self.device is None else parse_devices(self.device)[0]

    def for_worker(self, number: int) -> "Plan":
        """The plan of one of several worker processes: they take the plan's devices in turn.

        Example:
            >>> Plan(device="cpu").for_worker(3).device
            'cpu'
        """
        if self.device is None:
            return self
        devices = parse_devices(self.device)
        return replace(self, device=str(devices[number % len(devices)]))

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """A context in which torch computes in this plan's precision on `device`."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bfloat16")


def resolve_precision(precision: str, device: str = "cpu") -> str:
    """The precision that "auto" means on a device of this machine; any other known precision as it is.

    Example:
        >>> resolve_precision("float32")
        'float32'
    """
    check_option("precision", precision, ("auto", *PRECISIONS))
    if precision == "auto":
        has_units = has_bfloat16() if device == "cpu" else has_bfloat16_units(device)
        return "bfloat16" if has_units else "float32"
    return precision


def has_bfloat16() -> bool:
    """Does the processor compute bfloat16 in hardware? Without it, bfloat16 is emulated and slower than float32."""
    return bool(BFLOAT16_FLAGS & cpu_flags())


def cpu_flags() -> set[str]:
    """The processor's features, as Linux lists them; empty elsewhere."""
    try:
        text = CPU_FLAGS.read_text()
    except OSError:
        return set()
    lines = (line for line in text.splitlines() if line.lower().startswith(("flags", "features")))
    return set(next(lines, "").split())


def cores() -> int:
    """The number of cores that this process may use: `taskset` or a container's quota can lower it."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        # "150000 100000" is one and a half cores; "max 100000" is unlimited.
        quota, period = CPU_QUOTA.read_text().split()
        return available if quota == "max" else min(available, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return available


def torch_release(version: str) -> str:
    """A version of torch without the build: another wheel of it, for another device, may continue a run.

    Example:
        >>> torch_release("2.13.0+cpu")
        '2.13.0'
    """
    return version.partition("+")[0]


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread.

    Worker processes do, because the number of threads changes the last bits. Short passes over memory do, too: threads
    that wait for the next one cost more than they gain.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def server_threads(module: nn.Module) -> int:
    """The number of threads for the server's training: all cores for convolutions, one for small layers.

    It depends on the model and the cores, not on the number of workers: threads change the last bits of the result.
    """
    return cores() if has_convolutions(module) else 1


def has_convolutions(module: nn.Module) -> bool:
    """Whether one pass is enough work for several threads."""
    return any(isinstance(layer, nn.Conv2d) for layer in module.modules())
