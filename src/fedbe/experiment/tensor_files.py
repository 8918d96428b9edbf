"""Models and vectors as named tensors in one safetensors file with a JSON header and a checksum of all content."""

import hashlib
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

# What `read_tensors`, and reading its results, raise for a missing or damaged file.
UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, safetensors.SafetensorError
)  # fmt: skip
CHECKSUM = "sha256"


def write_tensors(path: Path, header: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file, whole or not at all. Without a header (None) it holds tensors and a checksum."""
    # safetensors refuses tensors that share memory, as a member and the model may.
    separate = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    digest = content_digest(header, separate)
    # One entry of metadata: safetensors writes several in any order, and equal runs must write equal bytes.
    metadata = {CHECKSUM: digest} if header is None else {"fedbe": json.dumps({**header, CHECKSUM: digest})}
    write_atomic(path, safetensors.torch.save(separate, metadata))


def read_tensors(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the header and the tensors of a file, and compare them with the checksum.

    Raises:
        UNREADABLE: The file is missing or damaged.
    """
    with safetensors.safe_open(path, framework="pt") as file:
        header = dict(json.loads(file.metadata()["fedbe"]))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if CHECKSUM not in header:
        raise ValueError("it has no checksum")
    if header.pop(CHECKSUM) != content_digest(header, tensors):
        raise ValueError("its content does not match its checksum")
    return header, tensors


def content_digest(header: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the header and over name, type, shape and bytes of every tensor."""
    content = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        content.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        content.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()


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
