"""Go on with a federation that was stopped."""

from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedbe.flower.arrays import to_record
from fedbe.flower.strategies import CatalogueStrategy, Evaluate


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
    with strategy.journal.held():
        state = strategy.journal.load()
        strategy.restore(state)
        if state is None:
            return strategy.play(grid, initial_arrays, num_rounds, evaluate_fn, **others)
        arrays = to_record(strategy.server.runner.layout.unpack(state.model))
        # With no round left this still evaluates and writes the model: a run may have been stopped just before.
        found = strategy.play(grid, arrays, max(num_rounds - state.round, 0), evaluate_fn, **others)
        found.arrays = found.arrays or arrays
        return found
