"""Which updates are far too large: every tensor of an update is measured once, and compared with the other updates.

A client's change of a tensor t is allowed up to the larger of two bounds:

    absolute   max_change · max(‖w̄_t‖, √size_t)
    relative   max_norm_ratio · usual_t · work_i

w̄ is the global model. For running variances both factors are squared, as the values are. usual_t is the (lower) median
of all clients' changes of t; clients that trained nothing do not count, if most did train. work_i = n_i / median n, at
least 1: who has more data may move further. The weights n_i are those after the cap of `influence`, so a claim widens
the bound only so far. Where honest clients leave a tensor alone, usual_t is 0 and the absolute bound holds, for two
clients as for a thousand. One client alone has nobody to be compared with: its usual_t is 0, too.

Buffers have the scale of the data (the statistics of BatchNorm), which only clients know. So where usual_t of a buffer
is 0, the absolute bound takes its place: otherwise one hostile client of two that leaves the statistics as they are
would get the honest one set aside.

A buffer that more than half of the clients that trained left as it is, to the last bit, is not for training: nobody may
change it. The absolute bound alone would let it grow, round by round. At a tie nobody can know who is right, and both
stay. Statistics of BatchNorm change in every client that trains, with one batch as with a thousand. Parameters have no
such rule: an expert or a head of its own may be trained by few.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

from fedbe.core.compute import one_thread
from fedbe.core.layout import Layout, Slot
from fedbe.core.moments import weighted_mean
from fedbe.core.normalization import is_running_variance
from fedbe.core.state import PIECE, ModelState, pieces
from fedbe.core.updates import Update
from fedbe.errors import StateError

MAX_STEPS = 1e6  # a counter may grow by this in one round, whatever the others do
MAX_STEPS_RATIO = 1e4  # … or by this many times what is usual: steps differ as much as the clients' data do
NOTHING = torch.zeros((), dtype=torch.float64)
MAX_RATE = 1e6  # of an extra to the client's change, 1/(K η): one step with a learning rate of 10⁻⁶


@dataclass(frozen=True, eq=False)
class Measured:
    """An update and the norms of its changes.

    Attributes:
        update: the update.
        params, buffers: ‖w_t − w̄_t‖ for each tensor t, float64 [tensors].
        extras: for each extra, the norm of each tensor, measured from the server's own (see `ChangeMeter`).
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
        self._params, self._buffers = _Tensors(layout.params), _Tensors(layout.buffers)
        self.params_scale = self._params.scale(previous.fragments("params"))
        self.buffers_scale = self._buffers.scale(previous.fragments("buffers"))
        squared = [2.0 if is_running_variance(slot.name) else 1.0 for slot in layout.buffers]
        self.buffers_power = torch.tensor(squared, dtype=torch.float64)

    def measure(
        self, updates: Sequence[Update], weights: Sequence[float]
    ) -> tuple[list[Measured | StateError], ModelState | None]:
        """The norms of the updates' changes and, from the same pass over the data, the weighted mean of all updates.

        Args:
            updates: the updates.
            weights: of the mean.

        Returns:
            For each update its norms, or an error if it has NaN or infinite values. The mean; None without updates.
        """
        tensors = {"params": self._params, "buffers": self._buffers}
        with one_thread():
            last = {part: list(pieces(self.previous.fragments(part))) for part in tensors}
        norms_by_part: list[dict[str, list[Tensor]]] = [{part: [] for part in tensors} for _ in updates]

        def watch(part: str, number: int, position: int, piece: Tensor) -> None:
            norms_by_part[number][part] += tensors[part].norms_in_piece(position, piece - last[part][position])

        states = [update.state for update in updates]
        mean = weighted_mean(zip(states, weights, strict=True), watch) if states else None
        return [self._measured(*pair) for pair in zip(updates, norms_by_part, strict=True)], mean

    def _measured(self, update: Update, norms: Mapping[str, list[Tensor]]) -> Measured | StateError:
        """The norms of an update, whose parts were measured piece by piece.

        SCAFFOLD's extra is measured as c_i⁺ − c_i + c = (x − y_i)/(K η): the client's change in another unit, also for
        a new client among clients that have settled. So the bounds of the parameters hold for it, in that unit.
        """
        ours, theirs = update.state.fragments, self.previous.fragments
        try:
            params = self._params.norms(ours("params"), theirs("params"), "its parameters hold", norms["params"])
            buffers = self._buffers.norms(ours("buffers"), theirs("buffers"), "its buffers hold", norms["buffers"])
            extras = {}
            for name, vector in update.extras.items():
                known = [-self.memory[name]] if name in self.memory else None
                extras[name] = self._params.norms([vector], known, f"its extra '{name}' holds")
        except StateError as error:
            return error
        return Measured(update, params, buffers, extras)


class _Tensors:
    """The tensors of a flat vector, cut where its pieces end. Vectors are given as fragments."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._sizes = torch.tensor([float(s.stop - s.start) for s in slots], dtype=torch.float64)
        starts, end = [s.start for s in slots], slots[-1].stop if slots else 0
        cuts = list(pairwise(sorted({*starts, *range(0, end, PIECE), end})))
        self._owner = torch.tensor([bisect_right(starts, start) - 1 for start, _ in cuts], dtype=torch.long)
        by_piece = groupby(cuts, key=lambda cut: cut[0] // PIECE)
        self._lengths = [[stop - start for start, stop in group] for _, group in by_piece]

    def scale(self, vector: list[Tensor]) -> Tensor:
        """max(‖w_t‖, √size_t) of each tensor, float64 [tensors]."""
        return self.norms(vector, None, "it holds").maximum(self._sizes.sqrt())

    def norms(
        self, vector: list[Tensor], reference: list[Tensor] | None, what: str, piece_norms: list[Tensor] | None = None
    ) -> Tensor:
        """‖vector_t − reference_t‖ of each tensor t, float64 [tensors]; None is zero. StateError if not finite.

        `piece_norms` has the results of `norms_in_piece` for all pieces, if they are known.
        """
        norms = self._joined(self._in_pieces(vector, reference) if piece_norms is None else piece_norms)
        if not bool(torch.isfinite(norms).all()):  # a value is not finite, or its square is beyond float32
            if not all(bool(torch.isfinite(fragment).all()) for fragment in vector):
                raise StateError(f"{what} NaN or infinite values")
            double = None if reference is None else [fragment.double() for fragment in reference]
            norms = self._joined(self._in_pieces([fragment.double() for fragment in vector], double))
        return norms

    def norms_in_piece(self, position: int, piece: Tensor) -> list[Tensor]:
        """The norm of each tensor's part in a piece."""
        return [torch.linalg.vector_norm(part) for part in torch.split(piece, self._lengths[position])]

    def _in_pieces(self, vector: list[Tensor], reference: list[Tensor] | None) -> list[Tensor]:
        with one_thread():
            values = pieces(vector)
            changes = values if reference is None else map(torch.sub, values, pieces(reference))
            return [norm for position, change in enumerate(changes) for norm in self.norms_in_piece(position, change)]

    def _joined(self, norms: list[Tensor]) -> Tensor:
        total = torch.zeros_like(self._sizes)
        if not norms:
            return total
        return total.index_add_(0, self._owner, torch.stack(norms).cpu().double().square()).sqrt_()


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

    def compare(
        names: Sequence[str], norms: Tensor, ratio: Tensor | float, floor: Tensor, verb: str, unknown: Tensor = NOTHING
    ) -> None:
        if not names:
            return
        usual = norms[yardstick].median(0).values if len(measured) > 1 else torch.zeros_like(norms[0])
        usual = usual.where(usual > 0, unknown)
        allowed = (ratio * usual * work).maximum(floor)
        for i in torch.nonzero((norms > allowed).any(1)).flatten().tolist():
            t = int((norms[i] / allowed[i]).argmax())
            reasons.setdefault(
                i, f"its {names[t]} {verb} {norms[i, t]:.3g}; {usual[t]:.3g} is usual, the limit is {allowed[i, t]:.3g}"
            )

    layout, floor = meter.layout, max_change * meter.params_scale
    compare(_quoted(layout.params), params, max_norm_ratio, floor, "changed by")
    buffers, ratio = torch.stack([m.buffers for m in measured]), max_norm_ratio**meter.buffers_power
    buffers_floor = max_change**meter.buffers_power * meter.buffers_scale
    compare(_quoted(layout.buffers), buffers, ratio, buffers_floor, "changed by", buffers_floor)
    for i, t in _changed_constants(buffers, trained):
        reasons.setdefault(i, f"it changed '{layout.buffers[t].name}', which the others left as it is")
    growth, steps = _growth(measured, meter.previous), torch.tensor(MAX_STEPS, dtype=torch.float64)
    compare([f"'{n}'" for n in layout.counters], growth, max(max_norm_ratio, MAX_STEPS_RATIO), steps, "grew by")
    for name in measured[0].update.extras:
        norms = torch.stack([m.extras[name] for m in measured])
        rates = (norms.square().sum(1).sqrt() / moved)[yardstick & trained]
        unit = min(max(1.0, float(rates.median())), MAX_RATE) if len(rates) else 1.0
        names = [f"extra '{name}', {tensor}," for tensor in _quoted(layout.params)]
        compare(names, norms, max_norm_ratio, floor * unit, "has norm")
    return reasons


def _changed_constants(norms: Tensor, trained: Tensor) -> list[tuple[int, int]]:
    """Pairs of a client and a buffer that it changed, where more than half of those that trained did not."""
    changed = norms > 0
    judges = changed[trained] if bool(trained.any()) else changed
    constant = 2 * judges.sum(0) < len(judges)
    return [(int(i), int(t)) for i, t in torch.nonzero(changed & constant)]


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
