"""The only source of randomness: a generator is a function of (seed, round, role, client).

Nothing depends on what was drawn before, so a resumed run, another number of workers or another order of replies
meets the same numbers, and a checkpoint needs no RNG state.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fedbe.errors import SettingError


def derive(seed: int, round: int = 0, role: str = "", client: int | str = "") -> int:
    """A 63-bit seed from SHA-256 of the four names; other names, other numbers.

    >>> derive(0, 1, "cohort") == derive(0, 1, "cohort")
    True
    >>> derive(0, 1, "cohort") == derive(0, 2, "cohort")
    False
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise SettingError(f"`seed` must be a whole number, got {seed!r}")
    # The type of the client id is part of the name: client 3 and client "3" are two clients.
    text = f"{seed}/{round}/{role}/{client!r}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, round: int = 0, role: str = "", client: int | str = "") -> torch.Generator:
    """A torch generator on the CPU for one purpose.

    >>> a = torch.rand(2, generator=generator(0, 3, "distill"))
    >>> b = torch.rand(2, generator=generator(0, 3, "distill"))
    >>> bool((a == b).all())
    True
    """
    return torch.Generator().manual_seed(derive(seed, round, role, client))


def numpy_generator(source: torch.Generator) -> np.random.Generator:
    """A NumPy generator that takes its seed from the next draw of a torch generator."""
    seed = torch.randint(0, 2**62, (1,), generator=source)
    return np.random.default_rng(int(seed.item()))


@contextmanager
def global_rng(source: torch.Generator) -> Iterator[None]:
    """Within: torch's global RNG (which dropout draws from) follows `source`; after: it is as it was before."""
    seed = int(torch.randint(0, 2**62, (1,), generator=source).item())
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
