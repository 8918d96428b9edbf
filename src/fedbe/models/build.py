"""The registry of networks, `MODELS`, and `build`."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fedbe.core.random import global_rng
from fedbe.errors import SettingError, check_option, check_settings
from fedbe.models.convnet import ConvNet
from fedbe.models.mlp import MLP
from fedbe.models.mobilenet import MobileNetV2
from fedbe.models.resnet import ResNet

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": MLP,
    "convnet": ConvNet,
    **{f"resnet{depth}": partial(ResNet, depth) for depth in (20, 32, 44, 56)},
    "mobilenetv2": MobileNetV2,
}


def build(name: str, classes: int, shape: tuple[int, ...], generator: torch.Generator, **settings: Any) -> nn.Module:
    """Build a network. Its weights are drawn from `generator` and from nothing else.

    Weights are Xavier-uniform and biases zero, as in the authors' code. Normalisation starts as the identity.

    Args:
        name: a key of `MODELS`.
        classes: number of outputs, at least 2.
        shape: shape of one input, (C, H, W), or (D,) for vectors.
        generator: the source of the weights.
        settings: settings of that network, for example `norm="group"` or `hidden=(64,)`.

    Raises:
        SettingError: if the name or a setting is unknown, or a value does not fit.

    Example:
        >>> network = build("mlp", 10, (64,), torch.Generator().manual_seed(0), hidden=(32,))
        >>> network(torch.zeros(5, 64)).shape
        torch.Size([5, 10])
    """
    check_option("model", name, MODELS)
    if classes < 2:
        raise SettingError(f"`classes` must be >= 2, got {classes}")
    parameters = inspect.signature(MODELS[name]).parameters
    check_settings(f"model '{name}'", settings, [p for p in parameters if p not in ("classes", "shape")])
    with global_rng(generator):
        try:
            module = MODELS[name](classes=classes, shape=shape, **settings)
        except (TypeError, RuntimeError) as error:  # the second one: larger than any memory
            given = ", ".join(f"{key} = {value!r}" for key, value in settings.items())[:200]
            problem = str(error).splitlines()[0][:200]  # torch writes its stack below the first line
            raise SettingError(f"model '{name}' cannot be made with {given}: {problem}") from error
        module.apply(_initialise)
    return module


def _initialise(layer: nn.Module) -> None:
    if isinstance(layer, nn.Conv2d | nn.Linear):
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
