"""A checkpoint is a RunState in one safetensors file. It is written atomically, and the last two are kept.

The header of the file has the round and the identity of the run as JSON, and a checksum of all content. If a file is
damaged, it is named and the one before it is used. A file that belongs to another recipe, other data or another version
of the arithmetic is refused.
"""

import json
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from fedbe.algorithms.vote import Member
from fedbe.core.compute import torch_release
from fedbe.core.updates import ClientId
from fedbe.errors import RunError, RunWarning
from fedbe.experiment.run_state import RunState
from fedbe.experiment.tensor_files import UNREADABLE, model_of, part, read_tensors, tensors_of, write_tensors

KEPT = 2
Identity = Mapping[str, str]  # what must not change between checkpoint and resume: recipe, numerics, data, torch …


def save(folder: Path, state: RunState, identity: Identity) -> Path:
    """Write the checkpoint of a round, then remove all but the last two."""
    tensors = tensors_of("model", state.model)
    tensors |= {f"memory/{name}": t for name, t in state.memory.items()}
    tensors |= {
        f"clients/{json.dumps(c)}/{name}": t for c, memory in state.clients.items() for name, t in memory.items()
    }
    for i, member in enumerate(state.members):
        tensors |= tensors_of(f"members/{i}", member.state)
    header = {
        "round": state.round,
        "identity": dict(identity),
        "members": [m.name for m in state.members],
    }
    path = path_of(folder, state.round)
    write_tensors(path, header, tensors)
    for old in paths(folder)[KEPT:]:
        with suppress(OSError):  # a file too many does no harm
            old.unlink()
    return path


def path_of(folder: Path, round: int) -> Path:
    """The checkpoint that is written after a round."""
    return folder / f"checkpoint-{round:06d}.safetensors"


def paths(folder: Path) -> list[Path]:
    """The checkpoints of a run, the newest first."""
    named = {path: path.stem.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*.safetensors")}
    numbered = {path: int(number) for path, number in named.items() if number.isdecimal()}
    return sorted(numbered, key=numbered.__getitem__, reverse=True)


def latest(folder: Path, identity: Identity | None = None) -> RunState | None:
    """The newest checkpoint that is not damaged. A RunWarning names those that are.

    Args:
        folder: The run folder.
        identity: The identity of the run; None to accept any checkpoint.

    Returns:
        The state; None if the run has no checkpoint yet.

    Raises:
        RunError: No checkpoint can be read, or the newest one has another identity.
    """
    existing = paths(folder)
    for path in existing:
        try:
            state = read(path, identity)
            if state.round != int(path.stem.removeprefix("checkpoint-")):
                raise ValueError(f"it is of round {state.round}")
            return state
        except UNREADABLE as error:
            warnings.warn(f"{path} is damaged and not used: {error}", RunWarning, stacklevel=2)
    if existing:
        raise RunError(f"none of the {len(existing)} checkpoints in {folder} can be read: start a new run")
    return None


def read(path: Path, identity: Identity | None = None) -> RunState:
    """The state in one file. `UNREADABLE` if the file is damaged, RunError if it has another identity."""
    header, tensors = read_tensors(path)
    if identity is not None:
        saved = dict(header["identity"])
        saved["torch"] = torch_release(str(saved.get("torch", "unknown")))  # checkpoints from before name the build
        _check(saved, identity, path)
    return _state_of(header, tensors)


def _check(saved: Identity, current: Identity, path: Path) -> None:
    for name, value in current.items():
        if saved.get(name) != value:
            raise RunError(
                f"{path.parent} cannot be resumed: its {name} was {saved.get(name, 'unknown')} and is now {value}; "
                "the result would mix two different runs. Start a new run instead"
            )


def _state_of(header: Mapping, tensors: Mapping[str, Tensor]) -> RunState:  # type: ignore[type-arg]
    clients: dict[ClientId, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("clients/"):
            client, what = name.removeprefix("clients/").rsplit("/", 1)
            clients.setdefault(json.loads(client), {})[what] = tensor
    members = tuple(Member(name, model_of(f"members/{i}", tensors)) for i, name in enumerate(header["members"]))
    return RunState(
        round=int(header["round"]),
        model=model_of("model", tensors),
        memory=part("memory/", tensors),
        clients=clients,
        members=members,
    )
