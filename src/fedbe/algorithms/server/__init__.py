"""The server side: guard, transforms and stages, run in this order by `server_step`."""

from fedbe.algorithms.server.stages import ControlUpdate, Distill, KeepMembers, Mean, Momentum, Stage
from fedbe.algorithms.server.step import StepResult, server_step

__all__ = [
    "ControlUpdate",
    "Distill",
    "KeepMembers",
    "Mean",
    "Momentum",
    "Stage",
    "StepResult",
    "server_step",
]
