"""Properties of the readers: any bytes give data or a `DataError`, never another exception."""

import io
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedbe.data import Task, load_task
from fedbe.data.readers.idx import parse
from fedbe.data.readers.plain_pickle import read_plain
from fedbe.errors import DataError

IDX = struct.pack(">HBBIII", 0, 8, 3, 2, 3, 4) + bytes(range(24))


def npy(values):
    memory = io.BytesIO()
    np.save(memory, values)
    return memory.getvalue()


def npz(members):
    """An .npz from the raw content of its .npy members, with correct checksums."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return memory.getvalue()


MEMBERS = {
    "inputs": npy(np.arange(40.0).reshape(10, 4)),
    "labels": npy(np.arange(10) % 3),
    "classes": npy(np.array(["a", "b", "c"])),
    "clients": npy(np.arange(10) // 2),
}
NPZ = npz(MEMBERS)


def damaged(content):
    """`content` with some bytes replaced, cut at the end, or extended."""

    def change(edits, length, tail):
        changed = bytearray(content)
        for position, value in edits:
            changed[position % len(changed)] = value
        return bytes(changed[:length]) + tail

    edits = st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=8)
    return st.builds(change, edits, st.one_of(st.none(), st.integers(0, len(content))), st.binary(max_size=8))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "mine.npz"


def is_task_or_data_error(path, content):
    path.write_bytes(content)
    try:
        return isinstance(load_task(path), Task)
    except DataError:
        return True


@pytest.mark.filterwarnings("ignore")  # numpy warns about some damaged headers
@settings(max_examples=60, deadline=None)
@given(content=st.one_of(damaged(NPZ), st.binary(max_size=200)))
def test_any_npz_file_is_a_task_or_a_data_error(path, content):
    assert is_task_or_data_error(path, content)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=100, deadline=None)
@given(member=st.sampled_from(sorted(MEMBERS)), data=st.data())
def test_an_npz_with_any_member_is_a_task_or_a_data_error(path, member, data):
    content = data.draw(st.one_of(damaged(MEMBERS[member]), st.binary(max_size=20)))
    assert is_task_or_data_error(path, npz(MEMBERS | {member: content}))


ANY_ARRAY = arrays.arrays(
    st.one_of(
        arrays.integer_dtypes(endianness="?"),
        arrays.unsigned_integer_dtypes(endianness="?"),
        arrays.floating_dtypes(endianness="?"),
        arrays.boolean_dtypes(),
        arrays.unicode_string_dtypes(endianness="?"),
        arrays.complex_number_dtypes(),
        arrays.datetime64_dtypes(),
    ),
    arrays.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=6),
)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=80, deadline=None)
@given(
    contents=st.fixed_dictionaries(
        {"inputs": ANY_ARRAY, "labels": st.one_of(ANY_ARRAY, arrays.arrays(np.int64, st.integers(5, 6)))},
        optional=dict.fromkeys(("test_inputs", "test_labels", "classes", "clients"), ANY_ARRAY),
    )
)
@example(contents={"inputs": np.zeros((5, 2)), "labels": np.array([0, 1, 2, 3, 10**15])})
@example(contents={"inputs": np.zeros((5, 2), ">f8"), "labels": np.arange(5)})
@example(contents={"inputs": np.zeros((5, 2), np.longdouble), "labels": np.arange(5)})
@example(contents={"inputs": np.zeros((5, 2)), "labels": np.arange(5), "classes": np.array("five")})
def test_any_arrays_are_a_task_or_a_data_error(path, contents):
    assert is_task_or_data_error(path, npz({name: npy(values) for name, values in contents.items()}))


def test_the_undamaged_file_is_read(path):
    path.write_bytes(NPZ)
    task = load_task(path)
    assert (len(task.train), len(task.test), task.train.inputs.shape[1]) == (8, 2, 4)


@settings(max_examples=100, deadline=None)
@given(st.one_of(damaged(IDX), st.binary(max_size=60)), st.integers(1, 4))
@example(struct.pack(">HBBIII", 0, 8, 3, 0, 2**32 - 1, 2**32 - 1), 3)
def test_any_idx_file_is_an_array_or_a_data_error(content, dimensions):
    try:
        values = parse(content, dimensions, "file")
    except DataError:
        return
    assert values.tobytes() == content[4 + 4 * dimensions :]


def is_plain(value):
    if isinstance(value, dict):
        return all(is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str | int | np.ndarray)


PICKLE = (
    b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03(K\x06K\x09eU\x04datacnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\n"
    b"ndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09(K\x01K\x02K\x02\x86cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b"
    b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x04abcdtbu."
)
OPERATIONS = st.sampled_from(
    [b"(", b"}", b"]", b")", b"\x85", b"\x86", b"\x87", b"t", b"q\x00", b"h\x00", b"\x94", b"a", b"e", b"s", b"u", b"R",
     b"b", b"N", b"\x88", b"K\x01", b"U\x01x", b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"U\x02u1", b"."]
)  # fmt: skip


PROGRAMS = st.lists(OPERATIONS, max_size=30).map(lambda operations: b"".join(operations) + b".")


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        damaged(PICKLE), st.binary(max_size=60), st.lists(OPERATIONS, max_size=30).map(lambda p: b"".join(p) + b".")
    )
)
@example(b"(.")
@example(PICKLE)
def test_any_pickle_is_plain_or_a_data_error(content):
    try:
        value = read_plain(content, "batch")
    except DataError:
        return
    assert is_plain(value)
