"""What server and clients tell each other in addition to parameters: one entry "fedbe" in the meta of an FLModel.

server to client  method, rules (their settings), seed, round from 1, broadcast and memory (vectors by name)
client to server  method (whose rules were applied), num_examples, extras (vectors by name)
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from nvflare.app_common.abstract.fl_model import FLModel, MetaKey
from torch import Tensor

from fedbe.algorithms.methods import Method
from fedbe.core.layout import Layout, check_tensor
from fedbe.core.updates import ClientUpdate
from fedbe.errors import StateError

META = "fedbe"


def instructions(method: Method, seed: int, round: int) -> dict[str, Any]:
    """The entry of the server's meta, without vectors."""
    rules = {f.name: getattr(rule, f.name) for rule in method.rules for f in fields(rule)}  # type: ignore[arg-type]
    return {"method": method.name, "rules": json.dumps(rules), "seed": str(seed), "round": round}


def to_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors as NumPy arrays, which NVFlare sends without pickle; bfloat16, which NumPy does not have, as float32."""
    plain = {n: t.detach().cpu() for n, t in tensors.items()}
    return {n: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for n, t in plain.items()}


def to_state(values: object, layout: Layout, what: str) -> dict[str, Tensor]:
    """Received parameters (NumPy arrays or tensors) as tensors in the dtypes of the layout.

    Raises:
        StateError: the values are not a mapping, or one of them is not an array of numbers.
    """
    if not isinstance(values, Mapping) or not values:
        raise StateError(f"{what} must be a mapping of names to arrays, got {type(values).__name__}")
    half = {slot.name for slot in (*layout.params, *layout.buffers) if slot.dtype == torch.bfloat16}
    state = {}
    for name, value in values.items():
        try:
            tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        except (TypeError, ValueError) as error:
            raise StateError(f"{what}: '{str(name)[:80]}' is not an array of numbers") from error
        state[str(name)] = tensor.to(torch.bfloat16) if name in half else tensor
    return state


def read_update(
    result: FLModel, client: str, method: Method, layout: Layout, previous: Mapping[str, Tensor]
) -> ClientUpdate:
    """A client's reply. Its weight is `num_examples` of `fit`, else NVFlare's number of steps, else 1.

    Raises:
        StateError: the reply cannot be read, or the client did not apply the rules of the method.
    """
    meta = _mapping(result.meta)
    ours = _mapping(meta.get(META))
    applied = ours.get("method")
    if method.rules and not (isinstance(applied, str) and applied == method.name):
        raise StateError(f"it did not apply the rules of {method.title}: use fedbe.nvflare.fit")
    if len(_mapping(result.params)) > len(layout.all_keys):  # before any of them is looked at
        raise StateError(f"its state must have at most {len(layout.all_keys)} arrays, got {len(result.params)}")
    state = to_state(result.params, layout, "its state")
    if result.params_type == "DIFF":
        state = {n: _changed(previous[n], change, n) if n in previous else change for n, change in state.items()}
    weight = ours.get("num_examples", meta.get(MetaKey.NUM_STEPS_CURRENT_ROUND, 1))
    extras = _mapping(ours.get("extras"))
    sent = [name for name in method.extras if name in extras]  # others are not looked at
    vectors = {name: to_state({name: extras[name]}, layout, "its extra")[name] for name in sent}
    return ClientUpdate(state, weight, client, vectors)


def _changed(last: Tensor, change: Tensor, name: str) -> Tensor:
    """last + change; a sum of other shapes would be broadcast, to any size."""
    return last + check_tensor(change, name, last.shape, last.dtype, "its change").to(last.device)


def _mapping(value: object) -> Mapping[Any, Any]:
    """The value if it is a mapping, else an empty one: replies can hold anything."""
    return value if isinstance(value, Mapping) else {}
