"""What happens at a client: one local SGD loop, and rules that hook into it."""

from fedbe.clients.rules import ControlVariate, LocalRule, Prox
from fedbe.clients.schedule import step_size
from fedbe.clients.train import LocalSettings, train

__all__ = ["ControlVariate", "LocalRule", "LocalSettings", "Prox", "step_size", "train"]
