"""All errors that this package raises on purpose.

A message is one sentence: what was expected, what was received, what to do. The command line prints it and exits with
code 1 (2 for wrong usage). All classes derive from `FedBEError`.
"""

import difflib
from collections.abc import Iterable


class FedBEError(Exception):
    """The base class of all errors of this package."""


class SettingError(FedBEError, ValueError):
    """A parameter or setting has an invalid value."""


class StateError(FedBEError, ValueError):
    """A model state does not fit the model: its keys, shapes or dtypes differ."""


class ModelError(FedBEError, TypeError):
    """A module is not supported."""


class AggregationError(FedBEError, RuntimeError):
    """A round has no valid result, for example too few usable updates. The global model is unchanged."""


class DataError(FedBEError, ValueError):
    """A data set is missing or damaged, or does not fit its use."""


class RecipeError(FedBEError, ValueError):
    """A recipe has unknown or invalid settings."""


class RunError(FedBEError, RuntimeError):
    """A run cannot be started, resumed or read."""


class BusyError(RunError):
    """Another process is training the run."""


class ExtraError(FedBEError, ImportError):
    """An optional dependency is not installed."""


def nearest(name: str, options: Iterable[str]) -> str:
    """A hint for a mistyped name: the closest of `options`, or all of them.

    Example:
        >>> nearest("fedavgg", ["fedavg", "fedbe"])
        "did you mean 'fedavg'?"
        >>> nearest("zzz", ["fedavg", "fedbe"])
        'choose one of: fedavg, fedbe'
    """
    options = list(options)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else "choose one of: " + ", ".join(options)
