"""Untrusted records: they must fit the model exactly, or a StateError says why not."""

import io
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from torch import nn

from fedbe.core.layout import Layout
from fedbe.errors import StateError
from fedbe.flower import from_record, to_record
from fedbe.flower.arrays import pack_state


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.linear = nn.Linear(3, 2, dtype=dtype)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.again = self.linear  # a tied layer


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_round_trip_keeps_every_tensor(dtype):
    net = Net(dtype)
    back = from_record(to_record(net.state_dict()), Net(dtype))
    assert list(back) == list(net.state_dict())
    for name, tensor in net.state_dict().items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
        back[name].zero_()  # it is writable
    assert bool(net.linear.weight.any())


def test_flowers_own_record_is_read_in_any_memory_order():
    net = nn.Linear(3, 2)
    plain = ArrayRecord(net.state_dict())
    turned = ArrayRecord(net.state_dict())
    turned["weight"] = Array(np.asfortranarray(net.weight.detach().numpy()))
    assert turned["weight"].data != plain["weight"].data
    for record in (plain, turned):
        assert torch.equal(from_record(record, net)["weight"], net.weight)


def test_a_bfloat16_model_travels_as_float32():
    record = to_record({"w": torch.tensor([1.5], dtype=torch.bfloat16)})
    assert record["w"].dtype == "float32"


def npy(header, body=b""):
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


def huge():
    return npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4000000000, 4000000000), }\n", b"\0" * 24)


def array(descr="'<f4'", shape="(2, 3)", more=", }"):
    return npy(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}{more}", b"\0" * 24)


def pickled():
    stream = io.BytesIO()
    np.save(stream, np.array([{}], dtype=object), allow_pickle=True)
    return stream.getvalue()


UNREADABLE = "unreadable header"
WRONG = {
    "huge": (huge(), r"got \[4000000000, 4000000000\]"),
    "short": (array()[:-4], "24 bytes, got 20"),
    "double": (array("'<f8'"), r"got '<f8'"),
    "big-endian": (array("'>f4'"), r"got '>f4'"),
    "divides-by-zero": (
        array("'<M8[s/0]'"),
        r"got '<M8\[s/0\]'",
    ),  # as a dtype it divides by zero in C
    "empty-kind": (array("()"), UNREADABLE),
    "fields": (array("[('a', '<f4')]"), UNREADABLE),
    "negative": (array(shape="(2, -3)"), UNREADABLE),
    "true": (array(shape="(2, True)"), UNREADABLE),
    "list": (array(shape="[2, 3]"), UNREADABLE),
    "hex": (array(shape="(0x" + "f" * 5000 + ",)"), UNREADABLE),
    "digits": (array(shape="(" + "9" * 5000 + ",)"), UNREADABLE),
    "more": (array(more=", 'more': 1}"), UNREADABLE),
    "open": (array(more=""), UNREADABLE),
    "less": (npy("{'descr': '<f4'}"), UNREADABLE),
    "unhashable": (npy("{[]: 1}"), UNREADABLE),
    "no-dict": (npy("[1, 2]"), UNREADABLE),
    "nul": (npy("\0"), UNREADABLE),
    "long": (npy("{" * 60_000), UNREADABLE),
    "deep": (npy("(" * 9_000), UNREADABLE),
    "minus": (npy("-" * 9_000 + "1"), UNREADABLE),
    "code": (npy("__import__('os').getcwd()"), UNREADABLE),
    "cut": (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{", UNREADABLE),
    "cut-length": (b"\x93NUMPY\x01\x00\xff", UNREADABLE),
    "version": (b"\x93NUMPY\x09\x00", UNREADABLE),
    "nothing": (b"", UNREADABLE),
    "pickle": (pickled(), r"got \[1\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_array_is_refused_without_allocating_memory(name):
    data, fragment = WRONG[name]
    net = nn.Linear(3, 2)
    record = to_record(net.state_dict())
    record["weight"] = Array("float32", (2, 3), "numpy.ndarray", data)
    tracemalloc.start()
    with pytest.raises(StateError, match=fragment):
        from_record(record, net)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3_000_000


def test_a_version_2_header_is_read():
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.ones((2, 3), np.float32), version=(2, 0))
    record = to_record(nn.Linear(3, 2).state_dict())
    record["weight"] = Array("float32", (2, 3), "numpy.ndarray", stream.getvalue())
    assert bool((from_record(record, nn.Linear(3, 2))["weight"] == 1).all())


def test_other_forms_and_names_are_refused():
    net = nn.Linear(3, 2)
    record = to_record(net.state_dict())
    for change, fragment in (
        (lambda r: r.pop("bias"), "'bias' is missing"),
        (lambda r: r.update(more=Array(np.zeros(1))), "unknown name 'more'"),
        (lambda r: r.update(bias=Array("float32", (2,), "pickle", b"")), "got 'pickle'"),
    ):
        broken = ArrayRecord(dict(record))
        change(broken)
        with pytest.raises(StateError, match=fragment):
            from_record(broken, net)


@pytest.mark.parametrize("module", ["fedbe.flower", "fedbe.flower.strategies"])
def test_the_import_without_flower_names_the_extra(module):
    code = "import sys; sys.modules['flwr'] = None; sys.path_hooks\nimport importlib.util as u\nreal = u.find_spec\n"
    code += "u.find_spec = lambda n, *a: None if n == 'flwr' else real(n, *a)\n"
    code += f"try:\n import {module}\nexcept ImportError as e:\n print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install -c constraints.txt -e '.[flower]'" in done.stdout


def test_a_received_state_shares_the_bytes_of_its_message_until_it_is_packed():
    net = nn.Linear(3, 2)
    record = to_record(net.state_dict())
    state, expected = pack_state(record, Layout(net), "it"), Layout(net).pack(net.state_dict())
    weight = np.frombuffer(record["weight"].data, np.float32, offset=len(record["weight"].data) - 24)
    assert state.fragments("params")[0].data_ptr() == weight.ctypes.data
    assert torch.equal(state.params, expected.params)
    assert [vector.data_ptr() for vector in state.fragments("params")] == [state.params.data_ptr()]  # bytes can go
