"""The public strategies: one class for each server class of `fedbe`, any method by name, and resuming a run."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import nn

from fedbe.algorithms.methods import METHODS
from fedbe.algorithms.named_servers import SERVER_CLASSES
from fedbe.flower.arrays import frozen_arrays, to_record, with_frozen
from fedbe.flower.base_strategy import EvaluateFn, MethodStrategy


def _strategy_class(class_name: str, method: str) -> type[MethodStrategy]:
    """The strategy class of a method. Its arguments are those of `MethodStrategy`."""
    doc = f"{METHODS[method].title} as a Flower strategy: {METHODS[method].summary}. Arguments: see `MethodStrategy`."
    return type(class_name, (MethodStrategy,), {"method_name": method, "__doc__": doc, "__module__": __name__})


STRATEGY_CLASSES = {method: _strategy_class(cls.__name__, method) for method, cls in SERVER_CLASSES.items()}
globals().update({cls.__name__: cls for cls in STRATEGY_CLASSES.values()})

if TYPE_CHECKING:  # type checkers, editors and mkdocs do not see generated classes; a test compares this with the table

    class FedAvg(MethodStrategy):
        """FedAvg as a Flower strategy. Arguments: see `MethodStrategy`."""

    class FedAvgM(MethodStrategy):
        """FedAvgM as a Flower strategy. Arguments: see `MethodStrategy`."""

    class FedBE(MethodStrategy):
        """FedBE as a Flower strategy. Arguments: see `MethodStrategy`."""

    class FedProx(MethodStrategy):
        """FedProx as a Flower strategy. Arguments: see `MethodStrategy`."""

    class OneEnsemble(MethodStrategy):
        """1-Ensemble as a Flower strategy. Arguments: see `MethodStrategy`."""

    class Scaffold(MethodStrategy):
        """SCAFFOLD as a Flower strategy. Arguments: see `MethodStrategy`."""

    class VDistillation(MethodStrategy):
        """v-Distillation as a Flower strategy. Arguments: see `MethodStrategy`."""


def strategy(name: str, model: nn.Module | Callable[[], nn.Module], **arguments: Any) -> MethodStrategy:
    """Make a strategy for any method.

    Args:
        name: a name in `fedbe methods`, such as "fedbe" or "fedbe+scaffold".
        model: the architecture: a module, or a class or function that makes one.
        arguments: the arguments of `MethodStrategy`.

    Returns:
        An instance of the class of that method, such as `fedbe.flower.FedBE`, if there is one.

    Raises:
        SettingError: the method or an argument is unknown, missing or out of range.

    Example:
        >>> import torch
        >>> type(strategy("fedavg", nn.Linear(3, 2))).__name__
        'FedAvg'
        >>> strategy("fedbe+fedavgm", nn.Linear(3, 2), unlabeled=torch.zeros(4, 3)).method.title
        'FedBE + FedAvgM'
    """
    cls = STRATEGY_CLASSES.get(name) or type(MethodStrategy.__name__, (MethodStrategy,), {"method_name": name})
    return cls(model, **arguments)


def resume(
    strategy: MethodStrategy,
    grid: Grid,
    initial_arrays: ArrayRecord,
    num_rounds: int = 3,
    *,
    evaluate_fn: EvaluateFn | None = None,
    **options: Any,
) -> Result:
    """Continue after the last checkpoint in the strategy's folder, or start if there is none.

    The model, the server's memory, the clients' memories and the seeds are those of an uninterrupted run, so the
    final model is the same to the last bit.

    Args:
        strategy: a strategy with a `folder`.
        grid: Flower's grid.
        initial_arrays: the first global model; if there is a checkpoint, only its frozen parameters are used.
        num_rounds: the number of rounds of the whole run, including finished ones. Where settings depend on it
            (`distill_until` below 1, as in the variant "tuned"), it must not change.
        evaluate_fn: (round, global model) -> metrics. Default: none.
        options: the other arguments of `strategy.start`.

    Returns:
        Flower's Result; its metrics are those of the rounds of this call.

    Raises:
        RunError: the strategy has no folder, or the folder belongs to a run with other settings.
        AggregationError: a round had fewer usable replies than `min_clients`.
    """
    strategy.server.rounds = num_rounds
    with strategy.recorder.locked():
        state = strategy.recorder.load()
        strategy.restore(state)
        if state is None:
            return strategy.run_rounds(grid, initial_arrays, num_rounds, evaluate_fn, **options)
        layout = strategy.server.runner.layout
        trained = to_record(layout.unpack(state.model))
        arrays = with_frozen(trained, frozen_arrays(initial_arrays, layout), layout)
        # With no round left this still evaluates and writes the model: the run may have been stopped just before.
        result = strategy.run_rounds(grid, arrays, max(num_rounds - state.round, 0), evaluate_fn, **options)
        result.arrays = result.arrays or arrays
        return result
