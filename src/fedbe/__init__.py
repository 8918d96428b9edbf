"""Federated learning by Bayesian model ensemble (FedBE, ICLR 2021) and its baselines.

The public names, and nothing else. They are loaded on first use, so that `import fedbe` costs milliseconds
and not the seconds that torch takes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedbe.clients.rules import ControlVariate, Prox
    from fedbe.errors import FedBEError
    from fedbe.posterior import Dirichlet, Gaussian
    from fedbe.servers.door import (
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
    from fedbe.simulation.use import load
    from fedbe.states import Layout, ModelState, Moments
    from fedbe.updates import ClientUpdate
    from fedbe.workbench import Plan

_HOMES = {
    "fedbe.clients.rules": ("ControlVariate", "Prox"),
    "fedbe.errors": ("FedBEError",),
    "fedbe.posterior": ("Dirichlet", "Gaussian"),
    "fedbe.servers.door": (
        "FedAvg", "FedAvgM", "FedBE", "FedProx", "OneEnsemble", "Scaffold", "Server", "VDistillation", "server",
    ),
    "fedbe.simulation.use": ("load",),
    "fedbe.states": ("Layout", "ModelState", "Moments"),
    "fedbe.updates": ("ClientUpdate",),
    "fedbe.workbench": ("Plan",),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_PACKAGES = (
    "clients",
    "data",
    "flower",
    "report",
    "simulation",
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
    "ModelState",
    "Moments",
    "OneEnsemble",
    "Plan",
    "Prox",
    "Scaffold",
    "Server",
    "VDistillation",
    "load",
    "server",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"fedbe.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'fedbe' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
