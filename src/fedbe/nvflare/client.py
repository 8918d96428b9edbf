"""The client side: local training by the rules of the method that the server runs.

flare.init()
while flare.is_running():
    flare.send(fedbe.nvflare.fit(flare.receive(), Net(), inputs, labels, LocalSettings(epochs=5)))
"""

import json
import math
from typing import Any

from nvflare import client as flare
from nvflare.app_common.abstract.fl_model import FLModel, MetaKey, ParamsType
from torch import Tensor, nn

from fedbe.algorithms.client.training import LocalSettings, train
from fedbe.algorithms.methods import get_method
from fedbe.core.compute import Plan
from fedbe.core.inputs import Augmentation, as_inputs
from fedbe.core.model_runner import ModelRunner
from fedbe.core.random import generator
from fedbe.core.updates import ClientId
from fedbe.errors import SettingError
from fedbe.nvflare.messages import META, to_arrays, to_state


def fit(
    received: FLModel,
    model: nn.Module,
    inputs: Any,
    labels: Tensor,
    settings: LocalSettings | None = None,
    *,
    client_id: ClientId | None = None,
    augment: Augmentation | None = None,
    plan: Plan | None = None,
    output: str | int | None = None,
) -> FLModel:
    """Train by local SGD from the global model, with the rules of the server's method (FedProx, SCAFFOLD …).

    The result is a function of (seed, round, client id) and the data.

    Args:
        received: what `flare.receive()` returned.
        model: the architecture. It is copied, and its weights do not matter.
        inputs: the client's inputs, in any form that `unlabeled` of `fedbe.Server` has.
        labels: class indices [N].
        settings: epochs, batch size, learning rate and so on. Default: `LocalSettings()`.
        client_id: what the random numbers of this client depend on. Default: the name of the site.
        augment: (batch, generator) -> batch. Default: none.
        plan: precision and memory layout. Default: float32.
        output: which part of the model's output are the logits, as in `fedbe.Server`.

    Returns:
        The reply for `flare.send`.

    Raises:
        SettingError: the message is not from a `MethodController`.
        StateError: the global model does not fit `model`.
    """
    asked = (received.meta or {}).get(META)
    if not asked:
        raise SettingError("the server's message has no instructions: run fedbe.nvflare.MethodController at the server")
    runner = ModelRunner(model, plan, output)
    layout = runner.layout
    method = get_method(asked["method"], **json.loads(asked["rules"]))
    client = flare.get_site_name() if client_id is None else client_id
    result = train(
        runner,
        layout.pack(to_state(received.params, layout, "the global model"), "the global model"),
        as_inputs(inputs, augment, "inputs"),
        labels,
        settings or LocalSettings(),
        generator(int(asked["seed"]), asked["round"], "train", client),
        rules=method.rules,
        broadcast=to_state(asked["broadcast"], layout, "the broadcast") if asked["broadcast"] else {},
        memory=to_state(asked["memory"], layout, "the memory") if asked["memory"] else {},
    )
    state = layout.unpack(result.state)
    in_tensors = all(isinstance(value, Tensor) for value in received.params.values())
    reply = {"method": method.name, "num_examples": len(labels), "extras": to_arrays(result.extras)}
    return FLModel(
        params_type=ParamsType.FULL,
        params=state if in_tensors else to_arrays(state),
        metrics={"train_loss": result.loss} if math.isfinite(result.loss) else {},
        meta={MetaKey.NUM_STEPS_CURRENT_ROUND: result.steps, META: reply},
    )
