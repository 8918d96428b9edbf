"""The client side: one local SGD loop, and rules that hook into it."""

from fedbe.algorithms.client.lr_schedule import step_size
from fedbe.algorithms.client.rules import ControlVariate, Dynamic, LocalRule, Prox
from fedbe.algorithms.client.training import LocalSettings, train

__all__ = ["ControlVariate", "Dynamic", "LocalRule", "LocalSettings", "Prox", "step_size", "train"]
