"""The only source of randomness: a generator is a function of (seed, round, role, client).

No draw depends on earlier draws. So a resumed run, another number of workers and another order of replies give the same
numbers, and a checkpoint does not need the state of a generator.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from fedbe.core.devices import CPU
from fedbe.errors import SettingError


def derive(seed: int, round: int = 0, role: str = "", client: int | str = "") -> int:
    """A 63-bit seed: SHA-256 of the four arguments.

    Args:
        seed: The seed of the run.
        round: The number of the round.
        role: The purpose, such as "cohort" or "distill".
        client: The client id. Its type counts: client 3 and client "3" are two clients.

    Example:
        >>> derive(0, 1, "cohort") == derive(0, 1, "cohort")
        True
        >>> derive(0, 1, "cohort") == derive(0, 2, "cohort")
        False
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise SettingError(f"`seed` must be a whole number, got {seed!r}")
    text = f"{seed}/{round}/{role}/{client!r}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, round: int = 0, role: str = "", client: int | str = "") -> torch.Generator:
    """A torch generator on the CPU for one purpose, with a seed that is a hash of the four arguments (see `derive`).

    Args:
        seed: The seed of the run.
        round: The number of the round.
        role: The purpose, such as "cohort" or "distill".
        client: The client id. Its type counts: client 3 and client "3" are two clients.

    Example:
        >>> a = torch.rand(2, generator=generator(0, 3, "distill"))
        >>> b = torch.rand(2, generator=generator(0, 3, "distill"))
        >>> torch.equal(a, b)
        True
    """
    return torch.Generator().manual_seed(derive(seed, round, role, client))


def numpy_generator(source: torch.Generator) -> np.random.Generator:
    """A NumPy generator whose seed is the next draw of a torch generator."""
    seed = torch.randint(0, 2**62, (1,), generator=source)
    return np.random.default_rng(int(seed.item()))


@contextmanager
def global_rng(source: torch.Generator, device: torch.device = CPU) -> Iterator[None]:
    """Seed torch's global generators, which dropout uses, from `source`; restore their states afterwards.

    Args:
        source: One draw from it gives the seed.
        device: The generator of this device is seeded, next to the CPU's.
    """
    seed = int(torch.randint(0, 2**62, (1,), generator=source, device=source.device).item())
    with preserved_rng(device):
        torch.default_generator.manual_seed(seed)
        if device != CPU:
            module = torch.get_device_module(device)
            with nullcontext() if device.type == "mps" else module.device(device):
                module.manual_seed(seed)  # of the current device
        yield


@contextmanager
def preserved_rng(device: torch.device = CPU) -> Iterator[None]:
    """Restore the states of torch's global generators, of the CPU and of a device, at the end."""
    before = torch.get_rng_state()
    module = torch.get_device_module(device)
    where = () if device.type == "mps" else (device,)  # there is one MPS device, and its functions take none
    device_before = None if device == CPU else module.get_rng_state(*where)
    try:
        yield
    finally:
        torch.set_rng_state(before)
        if device_before is not None:
            module.set_rng_state(device_before, *where)
