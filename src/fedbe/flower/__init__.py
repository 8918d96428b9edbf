"""FedBE in a real federation: strategies and clients for Flower (flwr ≥ 1.41, the message API).

    strategy = fedbe.flower.FedBE(model=Net, unlabeled=images, fraction_train=0.5)

The rest of the package never imports Flower. This part needs the extra `flower`. Each name is imported on first
use, so that `fedbe flower down` imports neither torch nor Flower.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedbe.flower import _bootstrap  # noqa: F401  # first: it checks for Flower and turns its telemetry off

if TYPE_CHECKING:
    from fedbe.flower.arrays import from_record, to_record
    from fedbe.flower.base_strategy import MethodStrategy
    from fedbe.flower.client import TrainReply, TrainRequest, client_app
    from fedbe.flower.strategies import (
        FedAvg,
        FedAvgM,
        FedBE,
        FedProx,
        OneEnsemble,
        Scaffold,
        VDistillation,
        resume,
        strategy,
    )

_NAMES = {
    "arrays": ("from_record", "to_record"),
    "base_strategy": ("MethodStrategy",),
    "client": ("TrainReply", "TrainRequest", "client_app"),
    "strategies": (
        "FedAvg", "FedAvgM", "FedBE", "FedProx", "OneEnsemble", "Scaffold", "VDistillation", "resume", "strategy",
    ),
}  # fmt: skip
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "FedAvg",
    "FedAvgM",
    "FedBE",
    "FedProx",
    "MethodStrategy",
    "OneEnsemble",
    "Scaffold",
    "TrainReply",
    "TrainRequest",
    "VDistillation",
    "client_app",
    "from_record",
    "resume",
    "strategy",
    "to_record",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'fedbe.flower' has no attribute '{name}'")
    return getattr(import_module(f"fedbe.flower.{_MODULES[name]}"), name)
