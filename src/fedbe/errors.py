"""All errors that this package raises on purpose.

A message is one sentence: what was expected, what was received, what to do. The command line prints it and exits with
code 1 (2 for wrong usage). All classes derive from `FedBEError`.
"""

import difflib
from collections.abc import Collection, Iterable


class FedBEError(Exception):
    """The base class of all errors of this package: one `except` is enough around a call.

    Each class below also derives from the built-in error that fits, so code that knows nothing of fedbe catches it too.

    Example:
        >>> import fedbe
        >>> try:
        ...     fedbe.get_method("fedbe", distill_epochs=0)
        ... except fedbe.FedBEError as error:
        ...     print(error)
        `distill_epochs` must be >= 1, got 0
    """


class SettingError(FedBEError, ValueError):
    """A parameter or setting has an unknown name or an invalid value. The message names it, and what is valid.

    Example:
        >>> import fedbe
        >>> fedbe.get_method("fedbee")
        Traceback (most recent call last):
        fedbe.errors.SettingError: unknown method 'fedbee': did you mean 'fedbe'?
    """


class StateError(FedBEError, ValueError):
    """A model state does not fit the model: its keys, shapes or dtypes differ.

    A client's state that does not fit raises nothing: it is set aside with a reason, and the round continues. This
    error is for states that the caller is responsible for, such as the global state or a saved one.

    Example:
        >>> import fedbe, torch
        >>> server = fedbe.FedAvg(torch.nn.Linear(2, 1))
        >>> try:
        ...     server.aggregate({"weight": torch.zeros(1, 2)}, [])
        ... except fedbe.StateError as error:
        ...     print("bias" in str(error))
        True
    """


class ModelError(FedBEError, TypeError):
    """A module cannot be used, for example because it has no parameters or its output is not [N, classes, …].

    Example:
        >>> import fedbe, torch
        >>> try:
        ...     fedbe.FedAvg(torch.nn.ReLU())
        ... except fedbe.ModelError as error:
        ...     print("parameters" in str(error))
        True
    """


class RunWarning(UserWarning):
    """Something in a run folder is damaged, and the run continues without it.

    For example the newest checkpoint: the one before it is used, and the rounds after it are trained again.
    """


class ModelWarning(UserWarning):
    """A module works, but probably not as intended.

    For example, it ends in a softmax: losses and votes expect logits and apply a softmax themselves.

    Example:
        >>> import fedbe, torch, warnings
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(1))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = fedbe.FedBE(model, unlabeled=torch.randn(10, 4))
        >>> [w.category.__name__ for w in caught]
        ['ModelWarning']
    """


class AggregationError(FedBEError, RuntimeError):
    """A round has no valid result. The global model, and the server's memory, are as they were before the call.

    Example:
        >>> import fedbe, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> try:
        ...     fedbe.FedAvg(model).aggregate(model.state_dict(), [])
        ... except fedbe.AggregationError as error:
        ...     print("unchanged" in str(error))
        True
    """


class DataError(FedBEError, ValueError):
    """A data set is missing or damaged, or does not fit its use. The message says how to download it, if it can be.

    Example:
        >>> import fedbe.data
        >>> try:
        ...     fedbe.data.load_task("no/such/folder")
        ... except fedbe.DataError as error:
        ...     print("no/such/folder" in str(error))
        True
    """


class RecipeError(FedBEError, ValueError):
    """A recipe has unknown or invalid settings, or its file is not valid TOML.

    Example:
        >>> from fedbe.experiment.recipe_files import load_recipe
        >>> load_recipe("digits", ["training.roundz=3"])
        Traceback (most recent call last):
        fedbe.errors.RecipeError: recipe digits: unknown setting 'training.roundz': did you mean 'rounds'?
    """


class RunError(FedBEError, RuntimeError):
    """A run cannot be started, resumed or read. Nothing in its folder has been changed.

    For example, the folder belongs to another recipe, or it was made by a version with other arithmetic.

    Example:
        >>> import fedbe
        >>> try:
        ...     fedbe.load_model("no/such/run")
        ... except fedbe.RunError as error:
        ...     print("model.safetensors" in str(error))
        True
    """


class BusyError(RunError):
    """Another process is training the run. Wait for it, or stop it, and try again: a run has one writer at a time."""


class ExtraError(FedBEError, ImportError):
    """An optional dependency is not installed. The message has the `pip install` command for it.

    It is an ImportError, too, so `try: import fedbe.nvflare` and `except ImportError` is enough to do without.
    """


def install_command(extra: str) -> str:
    """The command that installs an extra in a checkout of fedbe, which is not on a package index yet.

    Example:
        >>> install_command("flower")
        "pip install -c constraints.txt -e '.[flower]'"
    """
    return f"pip install -c constraints.txt -e '.[{extra}]'"


def missing_extra(problem: str, extra: str) -> ExtraError:
    """The error for a problem that installing an extra solves."""
    return ExtraError(f"{problem}; in the checkout of fedbe run: {install_command(extra)}")


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
    """Raise a SettingError that suggests the nearest option, unless `name` is one of `options`.

    Example:
        >>> check_option("vote", "medain", ["mean", "median"])
        Traceback (most recent call last):
        fedbe.errors.SettingError: unknown vote 'medain': did you mean 'median'?
    """
    if name not in options:
        raise SettingError(f"unknown {what} '{name}': {nearest(name, options)}")


def check_settings(owner: str, names: Iterable[str], allowed: Collection[str]) -> None:
    """Raise a SettingError for the first of `names` that is not a setting of `owner`.

    Example:
        >>> check_settings("fedavg", ["beta"], [])
        Traceback (most recent call last):
        fedbe.errors.SettingError: fedavg has no setting 'beta': it has none
    """
    for name in names:
        if name not in allowed:
            hint = nearest(name, allowed) if allowed else "it has none"
            raise SettingError(f"{owner} has no setting '{name}': {hint}")
