"""FedBE in a real federation: strategies and clients for Flower (flwr ≥ 1.41, the message API).

    strategy = fedbe.flower.FedBE(model=Net, unlabeled=images, fraction_train=0.5)

The rest of the package never imports Flower. This part needs the extra `fedbe[flower]`.
"""

from fedbe.flower import _bootstrap  # noqa: F401  # first: it checks for Flower and turns its telemetry off
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
