"""Models by name."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedbe.core.random import global_rng
from fedbe.errors import SettingError, nearest
from fedbe.models.convnet import ConvNet
from fedbe.models.mlp import MLP
from fedbe.models.mobilenet import MobileNetV2
from fedbe.models.resnet import ResNet


def _resnet(depth: int) -> Callable[..., nn.Module]:
    def make(classes: int, shape: tuple[int, ...], norm: str = "batch") -> nn.Module:
        return ResNet(depth, classes, shape, norm)

    return make


MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": MLP,
    "convnet": ConvNet,
    "resnet20": _resnet(20),
    "resnet32": _resnet(32),
    "resnet44": _resnet(44),
    "resnet56": _resnet(56),
    "mobilenetv2": MobileNetV2,
}


def build(name: str, classes: int, shape: tuple[int, ...], generator: torch.Generator, **settings: Any) -> nn.Module:
    """The network `name` for inputs of `shape` ((3, 32, 32), or (D,) for vectors), weights drawn from the generator.

    Weights are Xavier-uniform, biases zero, as in the authors' runs; normalisation starts as the identity.
    """
    if name not in MODELS:
        raise SettingError(f"unknown model '{name}': {nearest(name, MODELS)}")
    if classes < 2:
        raise SettingError(f"`classes` must be >= 2, got {classes}")
    known = [p for p in inspect.signature(MODELS[name]).parameters if p not in ("classes", "shape")]
    for setting in settings:
        if setting not in known:
            hint = nearest(setting, known) if known else "it has none"
            raise SettingError(f"model '{name}' has no setting '{setting}': {hint}")
    with global_rng(generator):
        try:
            module = MODELS[name](classes=classes, shape=shape, **settings)
        except TypeError as error:
            given = ", ".join(f"{k} = {v!r}" for k, v in settings.items())
            raise SettingError(f"model '{name}' cannot be made with {given}: {error}") from error
        module.apply(_initialise)
    return module


def _initialise(layer: nn.Module) -> None:
    if isinstance(layer, nn.Conv2d | nn.Linear):
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
