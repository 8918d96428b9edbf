"""Every error that a user can meet.

One sentence each: what was expected, what came, what to do. The command line prints it as it is and exits with
code 1 (2 for wrong use); in Python all of them derive from `FedBEError`.
"""

import difflib
from collections.abc import Iterable


class FedBEError(Exception):
    """The base of all errors that this package raises on purpose."""


class SettingError(FedBEError, ValueError):
    """A parameter or setting has a value that cannot work."""


class StateError(FedBEError, ValueError):
    """A model state does not fit the model: other keys, shapes or dtypes."""


class ModelError(FedBEError, TypeError):
    """A module that this package cannot work with."""


class AggregationError(FedBEError, RuntimeError):
    """Too few usable client updates: the global model stays as it was."""


class DataError(FedBEError, ValueError):
    """A data set that is missing, damaged or does not fit what was asked of it."""


class RecipeError(FedBEError, ValueError):
    """A recipe with unknown or impossible settings."""


class RunError(FedBEError, RuntimeError):
    """A run that cannot start, go on or be read."""


class BusyError(RunError):
    """A run that another process is training."""


class ExtraError(FedBEError, ImportError):
    """A part of this package whose optional dependency is not installed."""


def nearest(name: str, options: Iterable[str]) -> str:
    """A hint for a mistyped name: the closest of `options`, or all of them.

    >>> nearest("fedavgg", ["fedavg", "fedbe"])
    "did you mean 'fedavg'?"
    >>> nearest("zzz", ["fedavg", "fedbe"])
    'choose one of: fedavg, fedbe'
    """
    options = list(options)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else "choose one of: " + ", ".join(options)
