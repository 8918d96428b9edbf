"""The student's step sizes follow those of the clients, which the server need not know.

Late in a run clients take small steps, and the average is nearly right. A student that still takes the large steps of
the first rounds learns the same vote, but forgets more of what the clients have learned from labels, so the next vote
is worse. It should take steps in proportion to theirs.

The server sees how far clients move. SGD's points spread with a variance in proportion to the step size, so

    step size in this round = step size of the settings · (m / m_max)²

where m is the median over the clients of ‖w_i − w‖, and m_max the largest m since the second round. The first round
does not count: its clients start from random weights, and move 15 to 30 % further than ever after.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedbe.core.compute import one_thread
from fedbe.core.state import ModelState, pieces
from fedbe.core.updates import Update

PACE_MEMORY = "largest_client_move"
SMALLEST = 1e-6  # a step size must be above 0, also if no client moved


def median_move(updates: Iterable[Update], previous: ModelState) -> Tensor:
    """The median over the clients of ‖w_i − w‖, parameters only: a scalar, which few hostile clients hardly move.

    Args:
        updates: the clients' models w_i.
        previous: the global model w that they started from.

    Example:
        >>> states = [ModelState(torch.tensor([x, 0.0]), torch.empty(0), {}) for x in (0.0, 3.0, 4.0, 100.0)]
        >>> median_move([Update(str(i), state, 1.0, {}) for i, state in enumerate(states[1:])], states[0])
        tensor(4., dtype=torch.float64)
    """
    with one_thread():  # the number of threads must not change the last bit
        return torch.stack([_distance(update.state, previous) for update in updates]).median().cpu()


def _distance(state: ModelState, previous: ModelState) -> Tensor:
    pairs = zip(pieces(state.fragments("params")), pieces(previous.fragments("params")), strict=True)
    return torch.stack([(piece - last).double().square().sum() for piece, last in pairs]).sum().sqrt()


def follow(memory: Mapping[str, Tensor], move: Tensor) -> tuple[float, dict[str, Tensor]]:
    """What this round's step sizes are multiplied by, (m / m_max)², and the server's memory with the new m_max.

    Example:
        >>> _, memory = follow({}, torch.tensor(9.0))  # the first round takes full steps, and does not count
        >>> factor, memory = follow(memory, torch.tensor(4.0))
        >>> factor, follow(memory, torch.tensor(2.0))[0]
        (1.0, 0.25)
    """
    if PACE_MEMORY not in memory:
        return 1.0, {**memory, PACE_MEMORY: torch.zeros(1)}
    largest = torch.stack([move.float(), *memory[PACE_MEMORY]]).max()
    factor = max(float(move.float() / largest) ** 2, SMALLEST) if largest > 0 else 1.0
    return factor, {**memory, PACE_MEMORY: largest.reshape(1)}
