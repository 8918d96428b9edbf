"""Property tests of the array reader: any bytes give the expected tensor or a StateError."""

import io

import numpy as np
import pytest
import torch
from flwr.app import Array
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from fedbe.errors import StateError
from fedbe.flower import from_record, to_record

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


class OneBuffer(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("tensor", tensor)


def read(data, tensor):
    """Read `data` as the array of a model whose buffer is like `tensor`."""
    model = OneBuffer(tensor)
    record = to_record(model.state_dict())
    record["tensor"] = Array("float32", tuple(tensor.shape), "numpy.ndarray", data)
    return from_record(record, model)["tensor"]


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@settings(max_examples=80, deadline=None)
@given(SHAPES, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 2**32))
def test_any_tensor_survives_the_round_trip(shape, dtype, fortran_order, seed):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    tensor = (values * 3).to(dtype)
    array = to_record({"tensor": tensor})["tensor"].numpy()
    received = read(npy(np.asfortranarray(array) if fortran_order and array.ndim else array), torch.zeros_like(tensor))
    assert (received.dtype, received.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(received, tensor)


VALID = npy(np.arange(6, dtype=np.float32).reshape(2, 3))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(VALID) - 1), st.binary(max_size=12), st.integers(0, 12))
@example(0, b"", 0)
def test_damaged_bytes_are_read_or_refused(position, inserted, removed):
    damaged = VALID[:position] + inserted + VALID[position + removed :]
    try:
        received = read(damaged, torch.zeros(2, 3))
    except StateError:
        return
    assert (received.shape, received.dtype) == ((2, 3), torch.float32)
    assert damaged[-24:] in (received.numpy().tobytes("C"), received.numpy().tobytes("F"))


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data):
    for content in (data, VALID[:10] + data):
        with pytest.raises(StateError):
            read(content, torch.zeros(2, 3))
