"""The server side: guard, transforms and stages, run in this order by `server_step`."""

from fedbe.algorithms.server.corrections import Adaptive, DynamicUpdate, Recalibrate
from fedbe.algorithms.server.distill_stage import Distill
from fedbe.algorithms.server.stages import ControlUpdate, KeepMembers, Mean, Momentum, Stage
from fedbe.algorithms.server.step import StepResult, server_step

__all__ = [
    "Adaptive",
    "ControlUpdate",
    "Distill",
    "DynamicUpdate",
    "KeepMembers",
    "Mean",
    "Momentum",
    "Recalibrate",
    "Stage",
    "StepResult",
    "server_step",
]
