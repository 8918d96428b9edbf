"""The entries of a model's `state_dict`: which are parameters, frozen or tied, and which cannot be combined."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedbe.errors import FedBEError, ModelError, StateError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
UNSUPPORTED_INTEGERS = (torch.uint16, torch.uint32, torch.uint64)


def list_entries(source: nn.Module | Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All entries of a state by name, and the parameters among them, tied ones once."""
    if isinstance(source, nn.Module):
        entries, params = source.state_dict(keep_vars=True), dict(source.named_parameters())
        _check_supported(entries, params, "`model`", ModelError)
        return entries, params  # type: ignore[return-value]
    if not isinstance(source, Mapping):
        raise StateError(f"the state must be a mapping of names to tensors, got {type(source).__name__}")
    floats = {n: t for n, t in source.items() if isinstance(t, Tensor) and t.is_floating_point()}
    _check_supported(source, floats, "the state", StateError)
    return dict(source), floats


def frozen_parameters(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters without gradients, if others have one. A plain `state_dict` has no parameters."""
    params = {n: t for n, t in entries.items() if isinstance(t, nn.Parameter)}
    if not any(p.requires_grad for p in params.values()):
        return {}
    return {n: p.detach() for n, p in params.items() if not p.requires_grad}


def tied_names(entries: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> dict[str, str]:
    """The name of the tied tensor that each further name stands for.

    named_parameters() lists a tied weight once. state_dict() lists it under each of its names, and also the buffers of
    a layer that is used twice.
    """
    canonical: dict[int, str] = {}
    for name, tensor in (*params.items(), *entries.items()):
        canonical.setdefault(id(tensor), name)
    return {name: canonical[id(t)] for name, t in entries.items() if canonical[id(t)] != name}


def _check_supported(
    entries: Mapping[str, object], params: Mapping[str, Tensor], what: str, error: type[FedBEError]
) -> None:
    for name, entry in entries.items():
        if (problem := _problem(name, entry)) is not None:
            raise error(f"{what} has {problem}")
    if not params:
        raise error(f"{what} has no parameters, so there is nothing to combine")
    devices = sorted({str(t.device) for t in entries.values() if isinstance(t, Tensor)})
    if len(devices) > 1:
        raise error(f"{what} must be on one device, got {', '.join(devices)}")
    if devices == ["meta"]:
        raise error(f"{what} is on the meta device and has no numbers: create it on a real device")


def _problem(name: str, entry: object) -> str | None:
    """Why an entry of a state cannot be averaged, if it cannot."""
    if not isinstance(entry, Tensor):
        return f"an entry that is not a tensor: '{name}'"
    if is_lazy(entry):
        return f"the uninitialised lazy '{name}': run one batch through it first"
    if entry.is_complex():
        return f"the complex '{name}'; only real parameters can be averaged"
    if name.rsplit(".", 1)[-1] == "_extra_state":
        return f"an extra state, '{name}', which cannot be averaged: move it into buffers"
    return _dtype_problem(name, entry)


def _dtype_problem(name: str, tensor: Tensor) -> str | None:
    if tensor.is_floating_point() and tensor.dtype not in FLOATS:
        supported = ", ".join(str(d).removeprefix("torch.") for d in FLOATS)
        return f"'{name}' in {tensor.dtype}; supported are {supported}"
    if tensor.dtype in UNSUPPORTED_INTEGERS:
        return f"'{name}' in {tensor.dtype}, in which torch cannot compute: use int64"
    if isinstance(tensor, nn.Parameter) and not tensor.is_floating_point():
        return f"the integer parameter '{name}': make it a buffer"
    return None
