"""FedBE in a real federation: strategies and clients for Flower (flwr ≥ 1.41, the message API).

    strategy = fedbe.flower.FedBE(model=Net, unlabeled=images, fraction_train=0.5)

The rest of the package never imports Flower; this part needs the extra `fedbe[flower]`.
"""

from fedbe.flower import _ready  # noqa: F401  # first: it says what is missing, and stops Flower's telemetry
from fedbe.flower.arrays import from_record, to_record
from fedbe.flower.client import Job, Reply, client_app
from fedbe.flower.resuming import resume
from fedbe.flower.strategies import (
    CatalogueStrategy,
    FedAvg,
    FedAvgM,
    FedBE,
    FedProx,
    OneEnsemble,
    Scaffold,
    VDistillation,
    strategy,
)

__all__ = [
    "CatalogueStrategy",
    "FedAvg",
    "FedAvgM",
    "FedBE",
    "FedProx",
    "Job",
    "OneEnsemble",
    "Reply",
    "Scaffold",
    "VDistillation",
    "client_app",
    "from_record",
    "resume",
    "strategy",
    "to_record",
]
