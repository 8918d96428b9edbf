"""Federated learning by Bayesian model ensemble (FedBE, ICLR 2021) and its baselines.

The public names, and nothing else. They are loaded on first use, so that `import fedbe` costs milliseconds
and not the seconds that torch takes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedbe.algorithms.client.rules import ControlVariate, Prox
    from fedbe.algorithms.client.training import LocalSettings, train
    from fedbe.algorithms.server.api import (
        FedAvg,
        FedAvgM,
        FedBE,
        FedProx,
        OneEnsemble,
        Scaffold,
        Server,
        VDistillation,
        server,
    )
    from fedbe.core.compute import Plan
    from fedbe.core.moments import Moments
    from fedbe.core.state import Layout, ModelState
    from fedbe.core.updates import ClientUpdate
    from fedbe.errors import FedBEError
    from fedbe.experiment.saved_model import load_model
    from fedbe.posterior import Dirichlet, Gaussian

_HOMES = {
    "fedbe.algorithms.client.rules": ("ControlVariate", "Prox"),
    "fedbe.algorithms.client.training": ("LocalSettings", "train"),
    "fedbe.errors": ("FedBEError",),
    "fedbe.posterior": ("Dirichlet", "Gaussian"),
    "fedbe.algorithms.server.api": (
        "FedAvg", "FedAvgM", "FedBE", "FedProx", "OneEnsemble", "Scaffold", "Server", "VDistillation", "server",
    ),
    "fedbe.experiment.saved_model": ("load_model",),
    "fedbe.core.compute": ("Plan",),
    "fedbe.core.moments": ("Moments",),
    "fedbe.core.state": ("Layout", "ModelState"),
    "fedbe.core.updates": ("ClientUpdate",),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_PACKAGES = (
    "data",
    "experiment",
    "flower",
    "models",
    "posterior",
    "report",
)  # so that `import fedbe` is enough for fedbe.flower.FedBE

__all__ = [
    "ClientUpdate",
    "ControlVariate",
    "Dirichlet",
    "FedAvg",
    "FedAvgM",
    "FedBE",
    "FedBEError",
    "FedProx",
    "Gaussian",
    "Layout",
    "LocalSettings",
    "ModelState",
    "Moments",
    "OneEnsemble",
    "Plan",
    "Prox",
    "Scaffold",
    "Server",
    "VDistillation",
    "load_model",
    "server",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"fedbe.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'fedbe' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
