"""All errors that this package raises on purpose.

A message is one sentence: what was expected, what was received, what to do. The command line prints it and exits with
code 1 (2 for wrong usage). All classes derive from `FedBEError`.
"""

import difflib
from collections.abc import Collection, Iterable


class FedBEError(Exception):
    """The base class of all errors of this package."""


class SettingError(FedBEError, ValueError):
    """A parameter or setting has an invalid value."""


class StateError(FedBEError, ValueError):
    """A model state does not fit the model: its keys, shapes or dtypes differ."""


class ModelError(FedBEError, TypeError):
    """A module is not supported."""


class RunWarning(UserWarning):
    """Something in a run folder is damaged, and the run continues without it."""


class ModelWarning(UserWarning):
    """A module works, but probably not as intended."""


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


def check_option(what: str, name: str, options: Collection[str]) -> None:
    """Raise a SettingError that suggests the nearest option, unless `name` is one of `options`."""
    if name not in options:
        raise SettingError(f"unknown {what} '{name}': {nearest(name, options)}")


def check_settings(owner: str, names: Iterable[str], allowed: Collection[str]) -> None:
    """Raise a SettingError for the first of `names` that is not a setting of `owner`."""
    for name in names:
        if name not in allowed:
            hint = nearest(name, allowed) if allowed else "it has none"
            raise SettingError(f"{owner} has no setting '{name}': {hint}")
