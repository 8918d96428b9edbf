"""Memory that two processes share, through which the tensors of a job or of its result travel.

Through a pipe a tensor is copied four times, in small pieces. Here it is written once and read in place. A tensor that
was part of the last value too is not written again: all jobs of a round have the same global model. A mailbox holds one
job, because a worker has one, or two results: the next job can start before the last result was read.
"""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from multiprocessing.reduction import DupFd
from typing import Any, Self
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

CAPACITY = 2**30  # bytes of addresses for one mailbox; memory is used only for what is written
SMALL = 2**14  # bytes; smaller tensors travel with the message
ALIGNMENT = 64
_Written = dict[int, tuple[ReferenceType[Tensor], int]]  # by offset: a tensor and its version


@dataclass(frozen=True)
class SharedArray:
    """Where a tensor is in the mailbox."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


class Mailbox:
    """One end of a mailbox. The other one is its copy in another process, to which it can be handed at its start.

    Args:
        memory: Shared bytes; None if all tensors must travel with the message.
        values: How many values it holds: the last ones that were put.
    """

    def __init__(self, memory: "np.ndarray[Any, Any] | None", values: int = 1) -> None:
        self._memory, self._values, self._puts = memory, values, 0
        self._written: _Written = {}

    def put(self, value: Any) -> Any:
        """Write the tensors of a value over those of an earlier one; returns the message that travels instead."""
        size = 0 if self._memory is None else len(self._memory) // self._values // ALIGNMENT * ALIGNMENT
        end = size * (self._puts % self._values)
        limit = end + size
        written: _Written = {}

        def packed(tensor: Tensor) -> Any:
            nonlocal end
            array = tensor.detach().numpy()
            if array.nbytes < SMALL or end + array.nbytes > limit:
                return array
            slot = SharedArray(end, array.shape, array.dtype.str)
            if not self._has(tensor, end):
                np.copyto(self._read(slot), array)
            if not tensor.is_inference():  # such a tensor does not count its changes
                written[end] = (ref(tensor), tensor._version)
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
            return slot

        message = _converted(value, Tensor, packed)
        self._puts, self._written = self._puts + 1, written
        return message

    def _has(self, tensor: Tensor, offset: int) -> bool:
        """Whether the last value had this tensor at this offset, with the same numbers."""
        last = self._written.get(offset)
        return last is not None and last[0]() is tensor and last[1] == tensor._version

    def take(self, message: Any, *, copy: bool) -> Any:
        """The value of a message.

        Args:
            message: What `put` returned on the other end.
            copy: False if nobody uses the tensors when their memory is written again.
        """

        def unpacked(part: "SharedArray | np.ndarray[Any, Any]") -> Tensor:
            if isinstance(part, np.ndarray):
                return torch.from_numpy(part)
            array = self._read(part)
            return torch.from_numpy(array.copy() if copy else array)

        return _converted(message, SharedArray | np.ndarray, unpacked)

    def _read(self, slot: SharedArray) -> "np.ndarray[Any, Any]":
        assert self._memory is not None, "only a mailbox with memory has slots"
        return np.ndarray(slot.shape, slot.dtype, self._memory.data, slot.offset)


class MailboxPair:
    """The mailboxes of a worker, for jobs and for results, in one piece of shared memory.

    It can be an argument of a new process.

    Args:
        handle: A file in memory; None if tensors must travel with the messages.
    """

    def __init__(self, handle: int | None) -> None:
        self._handle = handle
        if handle is None:
            self.jobs, self.results = Mailbox(None), Mailbox(None)
            return
        memory = np.frombuffer(mmap.mmap(handle, 2 * CAPACITY), dtype=np.uint8)
        self.jobs, self.results = Mailbox(memory[:CAPACITY]), Mailbox(memory[CAPACITY:], values=2)

    @classmethod
    def create(cls) -> Self:
        """A pair with new memory, on Linux; elsewhere one without."""
        if not hasattr(os, "memfd_create"):
            return cls(None)
        handle = os.memfd_create("fedbe")
        os.ftruncate(handle, 2 * CAPACITY)
        return cls(handle)

    def __reduce__(self) -> tuple[Callable[..., "MailboxPair"], tuple[Any]]:
        return _open_pair, (None if self._handle is None else DupFd(self._handle),)

    def close_handle(self) -> None:
        """Close the file that the other process has got. The memory stays."""
        if self._handle is not None:
            os.close(self._handle)


def _open_pair(handle: Any) -> MailboxPair:
    pair = MailboxPair(None if handle is None else handle.detach())
    pair.close_handle()
    return pair


def _converted(value: Any, kinds: Any, convert: Callable[[Any], Any]) -> Any:
    """The same dataclasses and dicts with every part of these kinds converted."""
    if isinstance(value, kinds):
        return convert(value)
    if isinstance(value, dict):
        return {k: _converted(v, kinds, convert) for k, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        before = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        after = {name: _converted(part, kinds, convert) for name, part in before.items()}
        return replace(value, **{name: part for name, part in after.items() if part is not before[name]})
    return value
