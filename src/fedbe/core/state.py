"""Model states as flat vectors: the one form in which the server computes.

Means, variances, momentum and samples are single operations on these vectors. `layout` says which tensor lies where.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedbe.core.compute import one_thread

PIECE = 2**17  # elements that are computed at once: they stay in the processor's cache


@dataclass(frozen=True, eq=False)
class ModelState:
    """All numbers of one model, in flat vectors.

    Args:
        params: All parameters [P], in the working dtype of the layout.
        buffers: All floating-point buffers [B], in the same dtype.
        counters: The integer and boolean buffers by name (`num_batches_tracked`). They are never averaged.

    Example:
        >>> import fedbe, torch
        >>> layout = fedbe.Layout(torch.nn.Linear(2, 1))
        >>> state = layout.pack({"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])})
        >>> state.params, state.buffers, state.counters
        (tensor([1., 2., 3.]), tensor([]), {})
    """

    params: Tensor
    buffers: Tensor
    counters: Mapping[str, Tensor]

    def fragments(self, part: str) -> list[Tensor]:
        """The vectors that make up `params` or `buffers`, one after the other. They must not be changed."""
        return [getattr(self, part)]

    def clone(self) -> "ModelState":
        """A copy in new memory."""
        counters = {name: counter.clone() for name, counter in self.counters.items()}
        return ModelState(torch.cat(self.fragments("params")), torch.cat(self.fragments("buffers")), counters)

    def finite(self) -> bool:
        """Whether no parameter and no buffer is NaN or infinite."""
        return all(all_finite(vector) for part in ("params", "buffers") for vector in self.fragments(part))

    def digest(self, *extras: Tensor) -> str:
        """SHA-256 of all numbers, and of `extras`. It orders updates without a client id independently of arrival."""
        counters = (self.counters[name] for name in sorted(self.counters))
        content = hashlib.sha256()
        for tensor in (self.params, self.buffers, *counters, *extras):
            content.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return content.hexdigest()


class FragmentedState(ModelState):
    """A state that is left where a message brought it: one vector for each tensor.

    A mean and the guard's norms need only pieces of it. The flat vectors are made when something asks for them; the
    fragments are then freed.

    Args:
        params, buffers: Consecutive vectors in the working dtype. They may share memory that must not be changed.
        counters: As in `ModelState`.

    Example:
        >>> import fedbe, torch
        >>> named = {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])}
        >>> fedbe.Layout(torch.nn.Linear(2, 1)).gather(named).params
        tensor([1., 2., 3.])
    """

    _fragments: dict[str, list[Tensor]]

    def __init__(
        self, params: Tensor | Sequence[Tensor], buffers: Tensor | Sequence[Tensor], counters: Mapping[str, Tensor]
    ) -> None:
        given = {"params": params, "buffers": buffers}  # tensors where `dataclasses.replace` makes a changed state
        fragments = {part: [v] if isinstance(v, Tensor) else list(v) for part, v in given.items()}
        object.__setattr__(self, "_fragments", fragments)
        object.__setattr__(self, "counters", counters)

    def fragments(self, part: str) -> list[Tensor]:
        """The vectors that make up `params` or `buffers`, one after the other. They must not be changed."""
        return self._fragments[part]

    @cached_property
    def params(self) -> Tensor:
        """All parameters [P]."""
        return self._join("params")

    @cached_property
    def buffers(self) -> Tensor:
        """All floating-point buffers [B]."""
        return self._join("buffers")

    def _join(self, part: str) -> Tensor:
        vector = torch.cat(self._fragments[part])
        self._fragments[part] = [vector]
        return vector


def pieces(fragments: Iterable[Tensor]) -> Iterator[Tensor]:
    """A vector that lies in consecutive fragments, in pieces of PIECE elements; a piece of one fragment is a view.

    The cuts do not depend on the fragments, so element-wise results have the same bits for any of them.
    """
    parts: list[Tensor] = []
    missing = PIECE
    for fragment in fragments:
        while len(fragment):
            parts.append(fragment[:missing])
            fragment = fragment[missing:]
            missing -= len(parts[-1])
            if not missing:
                yield _joined(parts)
                parts, missing = [], PIECE
    if parts:
        yield _joined(parts)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def all_finite(vector: Tensor) -> bool:
    """Whether no value is NaN or infinite. A finite sum proves it, many times faster than a look at each value.

    Example:
        >>> all_finite(torch.tensor([3e38, 3e38])), all_finite(torch.tensor([1.0, float("nan")]))
        (True, False)
    """
    with one_thread():
        return bool(torch.isfinite(vector.sum())) or bool(torch.isfinite(vector).all())
