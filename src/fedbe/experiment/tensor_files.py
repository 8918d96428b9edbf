"""Models and vectors as named tensors in one safetensors file with a JSON header."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedbe.core.files import write_atomic
from fedbe.core.state import ModelState

# What `read_tensors` raises for a missing or damaged file.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError)


def write_tensors(path: Path, header: object, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file, whole or not at all. Without a header (None) it holds only the tensors."""
    # safetensors refuses tensors that share memory, as a member and the model may.
    separate = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    metadata = None if header is None else {"fedbe": json.dumps(header)}
    write_atomic(path, safetensors.torch.save(separate, metadata))


def read_tensors(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """Read the header and the tensors of a file; raises `UNREADABLE` if that is not possible."""
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["fedbe"])
        return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def tensors_of(prefix: str, state: ModelState) -> dict[str, Tensor]:
    """A model state as tensors by name; `model_of` is the inverse."""
    counters = {f"{prefix}/counters/{name}": t for name, t in state.counters.items()}
    return {f"{prefix}/params": state.params, f"{prefix}/buffers": state.buffers, **counters}


def model_of(prefix: str, tensors: Mapping[str, Tensor]) -> ModelState:
    """The model state that was stored under a prefix."""
    counters = part(f"{prefix}/counters/", tensors)
    return ModelState(tensors[f"{prefix}/params"], tensors[f"{prefix}/buffers"], counters)


def part(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names start with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
