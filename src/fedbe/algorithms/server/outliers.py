"""Which updates are far too large: every tensor of an update is measured once, and compared with the other updates.

A client's change of a tensor t is allowed up to the larger of two bounds:

    absolute   max_change · max(‖w̄_t‖, √size_t)
    relative   max_norm_ratio · usual_t · work_i

w̄ is the global model. For running variances both factors are squared, as the values are. usual_t is the (lower) median
of all clients' changes of t; clients that trained nothing do not count, if most did train. work_i = n_i / median n, at
least 1: who has more data may move further. The weights n_i are those after the cap of `influence`, so a claim widens
the bound only so far. Where honest clients leave a tensor alone, usual_t is 0 and the absolute bound holds, for two
clients as for a thousand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbe.core.normalization import is_running_variance
from fedbe.core.state import Layout, ModelState, Slot
from fedbe.core.updates import Update
from fedbe.errors import StateError

PIECE = 2**16  # elements that are subtracted and measured at once: they stay in the processor's cache
MAX_STEPS = 1e6  # a counter may grow by this in one round, whatever the others do
MAX_STEPS_RATIO = 1e4  # … or by this many times what is usual: steps differ as much as the clients' data do


@dataclass(frozen=True, eq=False)
class Measured:
    """An update and the norms of its changes.

    Attributes:
        update: the update.
        params, buffers: ‖w_t − w̄_t‖ for each tensor t, float64 [tensors].
        extras: for each extra, the norm of each tensor, measured from the server's own (see `ChangeMeter.measure`).
    """

    update: Update
    params: Tensor
    buffers: Tensor
    extras: Mapping[str, Tensor]


class ChangeMeter:
    """Measures updates against the global model, and finds values that are not finite in the same pass.

    Args:
        previous: the global model that the clients started from.
        layout: the names and shapes of the model's tensors.
        memory: what the server made of earlier extras.
    """

    def __init__(self, previous: ModelState, layout: Layout, memory: Mapping[str, Tensor]) -> None:
        self.previous, self.layout, self.memory = previous, layout, memory
        self._params, self._buffers = _Pieces(layout.params), _Pieces(layout.buffers)
        self.params_scale = self._params.scale(previous.params)
        self.buffers_scale = self._buffers.scale(previous.buffers)
        squared = [2.0 if is_running_variance(slot.name) else 1.0 for slot in layout.buffers]
        self.buffers_power = torch.tensor(squared, dtype=torch.float64)

    def measure(self, update: Update) -> Measured:
        """The norms of an update's changes.

        SCAFFOLD's extra is measured as c_i⁺ − c_i + c = (x − y_i)/(K η): the client's change in another unit, also for
        a new client among clients that have settled. So the bounds of the parameters hold for it, in that unit.

        Raises:
            StateError: if the update has NaN or infinite values.
        """
        state, previous = update.state, self.previous
        params = self._params.norms(state.params, previous.params, "its parameters hold")
        buffers = self._buffers.norms(state.buffers, previous.buffers, "its buffers hold")
        extras = {}
        for name, vector in update.extras.items():
            known = -self.memory[name] if name in self.memory else None
            extras[name] = self._params.norms(vector, known, f"its extra '{name}' holds")
        return Measured(update, params, buffers, extras)


class _Pieces:
    """The tensors of a flat vector, cut into pieces that fit a cache."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._count = len(slots)
        self._sizes = torch.tensor([float(s.stop - s.start) for s in slots], dtype=torch.float64)
        cuts = [(i, at, min(at + PIECE, s.stop)) for i, s in enumerate(slots) for at in range(s.start, s.stop, PIECE)]
        self._ranges = [(start, stop) for _, start, stop in cuts]
        self._owner = torch.tensor([i for i, _, _ in cuts], dtype=torch.long)

    def scale(self, vector: Tensor) -> Tensor:
        """max(‖w_t‖, √size_t) of each tensor, float64 [tensors]."""
        return self.norms(vector, None, "it holds").maximum(self._sizes.sqrt())

    def norms(self, vector: Tensor, reference: Tensor | None, what: str) -> Tensor:
        """‖vector_t − reference_t‖ of each tensor t, float64 [tensors]; None is zero. StateError if not finite."""
        norms = self._norms(vector, reference)
        if not bool(torch.isfinite(norms).all()):  # a value is not finite, or its square is beyond float32
            if not bool(torch.isfinite(vector).all()):
                raise StateError(f"{what} NaN or infinite values")
            norms = self._norms(vector.double(), None if reference is None else reference.double())
        return norms

    def _norms(self, vector: Tensor, reference: Tensor | None) -> Tensor:
        total = torch.zeros(self._count, dtype=torch.float64)
        if not self._ranges:
            return total
        scratch = vector.new_empty(min(PIECE, len(vector)))
        pieces = []
        for start, stop in self._ranges:
            change = vector[start:stop]
            if reference is not None:
                change = torch.sub(change, reference[start:stop], out=scratch[: stop - start])
            pieces.append(torch.linalg.vector_norm(change))
        squares = torch.stack(pieces).cpu().double().square()
        return total.index_add_(0, self._owner, squares).sqrt_()


def find_outliers(
    measured: Sequence[Measured], weights: Sequence[float], meter: ChangeMeter, max_norm_ratio: float, max_change: float
) -> dict[int, str]:
    """A reason for each position whose update changes a tensor by more than both bounds allow.

    Args:
        measured: the measured updates.
        weights: n_i of each update, after the cap.
        meter: what they were measured with.
        max_norm_ratio: of the relative bound.
        max_change: of the absolute bound.
    """
    sizes = torch.tensor(weights, dtype=torch.float64)
    work = (sizes / sizes.median()).clamp_(min=1.0).unsqueeze(1)
    params = torch.stack([m.params for m in measured])
    moved = params.square().sum(1).sqrt()
    trained = moved > 0
    yardstick = trained if 2 * int(trained.sum()) > len(measured) else torch.ones_like(trained)
    reasons: dict[int, str] = {}

    def compare(names: Sequence[str], norms: Tensor, ratio: Tensor | float, floor: Tensor, verb: str) -> None:
        if not names:
            return
        usual = norms[yardstick].median(0).values
        allowed = (ratio * usual * work).maximum(floor)
        for i in torch.nonzero((norms > allowed).any(1)).flatten().tolist():
            t = int((norms[i] / allowed[i]).argmax())
            reasons.setdefault(
                i, f"its {names[t]} {verb} {norms[i, t]:.3g}; {usual[t]:.3g} is usual, the limit is {allowed[i, t]:.3g}"
            )

    layout, floor = meter.layout, max_change * meter.params_scale
    compare(_quoted(layout.params), params, max_norm_ratio, floor, "changed by")
    ratio, buffers_floor = max_norm_ratio**meter.buffers_power, max_change**meter.buffers_power * meter.buffers_scale
    compare(_quoted(layout.buffers), torch.stack([m.buffers for m in measured]), ratio, buffers_floor, "changed by")
    growth, steps = _growth(measured, meter.previous), torch.tensor(MAX_STEPS, dtype=torch.float64)
    compare([f"'{n}'" for n in layout.counters], growth, max(max_norm_ratio, MAX_STEPS_RATIO), steps, "grew by")
    for name in measured[0].update.extras:
        norms = torch.stack([m.extras[name] for m in measured])
        rates = (norms.square().sum(1).sqrt() / moved)[yardstick & trained]
        unit = max(1.0, float(rates.median())) if len(rates) else 1.0
        names = [f"extra '{name}', {tensor}," for tensor in _quoted(layout.params)]
        compare(names, norms, max_norm_ratio, floor * unit, "has norm")
    return reasons


def _quoted(slots: Sequence[Slot]) -> list[str]:
    return [f"'{slot.name}'" for slot in slots]


def _growth(measured: Sequence[Measured], previous: ModelState) -> Tensor:
    """By how much each client's counters grew, float64 [clients, counters]."""

    def grown(counters: Mapping[str, Tensor]) -> list[float]:
        return [
            float((counters[name].cpu().double() - before.cpu().double()).clamp(min=0).norm())
            for name, before in previous.counters.items()
        ]

    return torch.tensor([grown(m.update.state.counters) for m in measured], dtype=torch.float64)


def structure_changes(updates: Sequence[Update], previous: ModelState) -> dict[int, str]:
    """A reason for each position whose update changed the model's structure.

    An array of integers is structure if at least half of the clients that trained left it alone, such as the position
    ids of an embedding. A wrong one would break every later use of the model. A single integer is a counter.
    """
    reasons: dict[int, str] = {}
    arrays = {name: last for name, last in previous.counters.items() if last.ndim}
    if not arrays:
        return reasons
    trained = {i for i, u in enumerate(updates) if not torch.equal(u.state.params, previous.params)}
    trained = trained or set(range(len(updates)))
    for name, last in arrays.items():
        changed = [i for i, u in enumerate(updates) if not torch.equal(u.state.counters[name], last)]
        if 2 * len(trained.intersection(changed)) <= len(trained):
            reasons |= dict.fromkeys(changed, f"it changed the integers in '{name}', which are not for training")
    return reasons
