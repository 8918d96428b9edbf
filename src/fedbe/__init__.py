"""Federated learning by Bayesian model ensemble (FedBE, ICLR 2021) and its baselines.

This module holds the public names. Each is imported on first use, so `import fedbe` takes milliseconds and does not
import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedbe.algorithms.api import Server
    from fedbe.algorithms.client.rules import ControlVariate, Dynamic, Prox
    from fedbe.algorithms.client.training import LocalSettings, train
    from fedbe.algorithms.methods import Method, get_method
    from fedbe.algorithms.named_servers import (
        FedAvg,
        FedAvgM,
        FedBE,
        FedProx,
        OneEnsemble,
        Scaffold,
        VDistillation,
        server,
    )
    from fedbe.algorithms.server.transforms import ClipNorm
    from fedbe.core.compute import Plan
    from fedbe.core.layout import Layout
    from fedbe.core.metrics import Metrics
    from fedbe.core.model_runner import ModelRunner
    from fedbe.core.moments import Moments
    from fedbe.core.state import ModelState
    from fedbe.core.updates import ClientUpdate
    from fedbe.errors import (
        AggregationError,
        BusyError,
        DataError,
        ExtraError,
        FedBEError,
        ModelError,
        ModelWarning,
        RecipeError,
        RunError,
        RunWarning,
        SettingError,
        StateError,
    )
    from fedbe.experiment.saved_model import load_model
    from fedbe.posterior.dirichlet import Dirichlet
    from fedbe.posterior.gaussian import Gaussian

_NAMES = {
    "fedbe.algorithms.client.rules": ("ControlVariate", "Dynamic", "Prox"),
    "fedbe.algorithms.client.training": ("LocalSettings", "train"),
    "fedbe.algorithms.api": ("Server",),
    "fedbe.algorithms.methods": ("Method", "get_method"),
    "fedbe.algorithms.named_servers": (
        "FedAvg", "FedAvgM", "FedBE", "FedProx", "OneEnsemble", "Scaffold", "VDistillation", "server",
    ),
    "fedbe.algorithms.server.transforms": ("ClipNorm",),
    "fedbe.core.compute": ("Plan",),
    "fedbe.core.model_runner": ("ModelRunner",),
    "fedbe.core.metrics": ("Metrics",),
    "fedbe.core.moments": ("Moments",),
    "fedbe.core.layout": ("Layout",),
    "fedbe.core.state": ("ModelState",),
    "fedbe.core.updates": ("ClientUpdate",),
    "fedbe.errors": (
        "AggregationError", "BusyError", "DataError", "ExtraError", "FedBEError", "ModelError", "ModelWarning",
        "RecipeError", "RunError", "RunWarning", "SettingError", "StateError",
    ),
    "fedbe.experiment.saved_model": ("load_model",),
    "fedbe.posterior.dirichlet": ("Dirichlet",),
    "fedbe.posterior.gaussian": ("Gaussian",),
}  # fmt: skip
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
# Packages that the documentation uses as attributes, such as fedbe.flower.FedBE.
_PACKAGES = ("algorithms", "core", "data", "experiment", "flower", "models", "nvflare", "posterior", "report")

__all__ = [
    "AggregationError",
    "BusyError",
    "ClientUpdate",
    "ClipNorm",
    "ControlVariate",
    "DataError",
    "Dirichlet",
    "Dynamic",
    "ExtraError",
    "FedAvg",
    "FedAvgM",
    "FedBE",
    "FedBEError",
    "FedProx",
    "Gaussian",
    "Layout",
    "LocalSettings",
    "Method",
    "Metrics",
    "ModelError",
    "ModelRunner",
    "ModelState",
    "ModelWarning",
    "Moments",
    "OneEnsemble",
    "Plan",
    "Prox",
    "RecipeError",
    "RunError",
    "RunWarning",
    "Scaffold",
    "Server",
    "SettingError",
    "StateError",
    "VDistillation",
    "get_method",
    "load_model",
    "server",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"fedbe.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'fedbe' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
