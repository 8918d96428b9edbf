"""What a run was made with, and what must not change while it is unfinished."""

import hashlib
import platform
import subprocess
from functools import cache
from pathlib import Path

import torch

import fedbe
from fedbe.core import plugins
from fedbe.core.compute import cores, torch_release
from fedbe.core.devices import describe_device
from fedbe.experiment.federation import Federation
from fedbe.experiment.recipe import Recipe

# The version of the arithmetic. Add 1 whenever the same recipe and seed give other numbers, however little: another
# order of operations, another random draw, another default. Unfinished runs of an older version are then refused.
# tests/experiment/test_numerics.py fails if the numbers of its cases change by more than rounding and this does not.
NUMERICS_VERSION = 4
# The same for the authors' program alone (variant or schedule `released`). 2: what docs/variants.md lists under it.
RELEASED_VERSION = 2


def identity(recipe: Recipe, method: str, seed: int, precision: str, federation: Federation) -> dict[str, str]:
    """The identity of a run, which its checkpoints carry: a run may be resumed only while all of it is the same."""
    # Defaults are left out, so that a setting that is added later does not refuse unfinished runs. Another default is
    # another version of the arithmetic.
    settings = recipe.model_dump_json(exclude_defaults=True)
    return {
        "recipe": hashlib.sha256(settings.encode()).hexdigest()[:16],
        "method": method,
        "seed": str(seed),
        "precision": precision,
        "data": federation.digest[:16],
        "numerics": numerics("released" in (recipe.variant, recipe.training.schedule)),
        "model": plugins.source_digest(recipe.model.name) if ":" in recipe.model.name else recipe.model.name,
        "torch": torch_release(torch.__version__),
    }


def numerics(released: bool) -> str:
    """The version of the arithmetic, for runs with or without the forms of the authors' program."""
    return f"{NUMERICS_VERSION}, released {RELEASED_VERSION}" if released else str(NUMERICS_VERSION)


def made_with(device: str) -> dict[str, str]:
    """The versions, the commit, the machine and its device that produce a result, for run.json."""
    return {
        "fedbe": code_version(),
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {cores()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "device": describe_device(device),
    }


@cache
def code_version() -> str:
    """The version of fedbe and a digest of the package's source."""
    digest = hashlib.sha256()
    root = Path(fedbe.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return f"{fedbe.__version__}+{digest.hexdigest()[:12]}"


def commit() -> str:
    """The git commit of the source tree that this package was loaded from, if it is a git checkout."""
    source = Path(fedbe.__file__).parent
    try:
        head = _git(source, "rev-parse", "HEAD")
        return head + (" and uncommitted changes" if _git(source, "status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
