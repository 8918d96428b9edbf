"""Flower's wrappers for differential privacy: where their promise does not hold, they are refused."""

import sys
from types import FrameType

from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)

from fedbe.algorithms.methods import Method
from fedbe.errors import SettingError

WRAPPERS = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)


def check_wrapper(method: Method) -> None:
    """SettingError if a privacy wrapper of Flower calls a strategy whose result is not the plain mean.

    The wrappers add noise to what the strategy returns. The noise is calibrated for the mean of clipped updates. It
    does not cover momentum, a distilled model, or anything else that a method makes of the updates.
    """
    wrapper = _calling_wrapper()
    if wrapper is not None and not method.releases_mean:
        raise SettingError(
            f"{wrapper} cannot wrap {method.title}: its noise is calibrated for the mean of clipped updates, and this "
            "method returns something else, so the result would not be private; use flwr.clientapp.mod.LocalDpMod at "
            "the clients, or wrap fedbe.flower.FedAvg"
        )


def _calling_wrapper() -> str | None:
    """The name of the wrapper on the call stack. A strategy cannot see who wraps it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, WRAPPERS):
            return type(caller).__name__
        frame = frame.f_back
    return None
