"""Go on with a federation that was stopped."""

from collections.abc import Callable
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedbe.flower.arrays import to_record
from fedbe.flower.strategies import CatalogueStrategy

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


def resume(
    strategy: CatalogueStrategy,
    grid: Grid,
    initial_arrays: ArrayRecord,
    num_rounds: int = 3,
    *,
    evaluate_fn: Evaluate | None = None,
    **others: Any,
) -> Result:
    """`strategy.start(…)` that begins after the last round in the strategy's folder; from the start if there is none.

    Takes what `strategy.start` takes. `num_rounds` counts all rounds, those already played included; model, server
    memory, clients' memories and seeds are those of an uninterrupted run. The result has this call's rounds. Where
    settings depend on `num_rounds` (`distill_until` below 1, as in the variant tuned) another number is refused.
    """
    strategy.server.rounds = num_rounds
    state = strategy.journal.load()
    done = 0 if state is None else state.round
    if state is not None:
        strategy.restore(state)
        initial_arrays = to_record(strategy.server.bench.layout.unpack(state.model))
    if done >= num_rounds:
        return Result(arrays=initial_arrays)

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord | None:
        return evaluate_fn(round + done, arrays) if evaluate_fn else None

    found = strategy.play(
        grid, initial_arrays, num_rounds - done, evaluate_fn=evaluate if evaluate_fn else None, **others
    )
    for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        setattr(found, name, {number + done: record for number, record in getattr(found, name).items()})
    return found
