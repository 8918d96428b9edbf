"""The test files are built operation by operation, without Python's pickle module."""

import struct
import tracemalloc

import numpy as np
import pytest

from fedbe.data.readers.plain_pickle import read_plain
from fedbe.errors import DataError


def text(value):
    """Python 2's str in protocol 2."""
    raw = value if isinstance(value, bytes) else value.encode("latin-1")
    return b"U" + bytes([len(raw)]) + raw if len(raw) < 256 else b"T" + struct.pack("<i", len(raw)) + raw


def number(value):
    return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)


def array(values, core=b"numpy.core.multiarray", dtype="u1"):
    """numpy's array in protocol 2: reconstruct an empty one, then set (1, shape, dtype, fortran, data)."""
    shape = b"".join(number(size) for size in values.shape)
    kind = b"cnumpy\ndtype\nq\x0a" + text(dtype) + b"K\x00K\x01\x87Rq\x0b"
    kind += b"(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    start = b"c" + core + b"\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85" + text("b") + b"\x87Rq\x09"
    return start + b"(K\x01" + shape + b"\x86" + kind + b"\x89" + text(values.tobytes()) + b"tb"


def batch(labels, pixels, key="labels", **kinds):
    """A CIFAR batch as in the official "python" archives."""
    content = b"\x80\x02}q\x01(" + text("batch_label") + b"q\x02" + text("training batch 1 of 5") + b"q\x03"
    content += text(key) + b"q\x04]q\x05(" + b"".join(number(label) for label in labels) + b"e"
    content += text("data") + array(pixels, **kinds)
    return content + text("filenames") + b"]q\x0e(" + text("cat.png") + b"eu."


def test_a_batch_in_the_official_structure():
    pixels = np.arange(2 * 3072, dtype=np.int64).astype(np.uint8).reshape(2, 3072)
    batch_dict = read_plain(batch([6, 9], pixels), "data_batch_1")
    assert batch_dict["labels"] == [6, 9]
    assert batch_dict["batch_label"] == "training batch 1 of 5"
    assert batch_dict["filenames"] == ["cat.png"]
    assert np.array_equal(batch_dict["data"], pixels)


def test_numpy_2_names_and_byte_keys_are_accepted():
    pixels = np.ones((1, 3), np.uint8)
    content = batch([1], pixels, core=b"numpy._core.multiarray")
    as_bytes = content.replace(text("labels"), b"C\x06labels")
    assert read_plain(as_bytes, "x")["labels"] == [1]


def test_memo_constants_and_single_items():
    # {"a": [None, True], "b": the same list}
    content = b"\x80\x02}" + text("a") + b"]q\x00Na\x88as" + text("b") + b"h\x00s."
    batch_dict = read_plain(content, "x")
    assert batch_dict == {"a": [None, True], "b": [None, True]}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"cos\nsystem\nU\x02id\x85R.", "asks for 'os.system'"),
        (b"cbuiltins\neval\nU\x011\x85R.", "asks for 'builtins.eval'"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "pickle operation STACK_GLOBAL"),
        (b"(U\x02idios\nsystem\n.", "pickle operation INST"),
        (b"cnumpy\nndarray\nK\x01\x85R.", "an object other than an array of bytes"),
        (b"cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R.", "an object other than an array of bytes"),
        (b"}U\x01ab.", "state of an object other than an array"),
        (b"\x80\x02}q\x01(U\x05lab", "damaged or cut short"),
        (b"", "damaged or cut short"),
        (b"not a pickle", "damaged or cut short|refused"),
    ],
)
def test_everything_else_is_refused(content, sentence):
    with pytest.raises(DataError, match=sentence):
        read_plain(content, "batch")


def test_nothing_named_in_the_file_is_called(tmp_path):
    target = tmp_path / "made"
    content = b"cos\nmkdir\n" + text(str(target)) + b"\x85R."
    with pytest.raises(DataError, match=r"os\.mkdir"):
        read_plain(content, "batch")
    assert not target.exists()


def test_repeated_nested_lists_do_not_cause_endless_work():
    # a = [1]; b = [a, a]; c = [b, b]; … 200 times
    content = b"]K\x01aq\x00" + b"".join(b"0](h%ch%ceq%c" % (n, n, n + 1) for n in range(200)) + b"."
    value, depth = read_plain(content.replace(b"0]", b"]"), "x"), 0
    while isinstance(value, list):
        value, depth = value[0], depth + 1
    assert depth == 201


@pytest.mark.parametrize("code", [b"B", b"T"], ids=["bytes", "text of Python 2"])
def test_a_text_that_is_repeated_takes_memory_once(code):
    content = b"](" + code + struct.pack("<i", 100_000) + b"x" * 100_000 + b"q\x01" + b"h\x01" * 2_000 + b"e."
    tracemalloc.start()
    texts = read_plain(content, "x")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert texts == ["x" * 100_000] * 2_001
    assert most < 2e6


def test_arrays_share_data_that_is_repeated():
    one = array(np.zeros((100, 200), np.uint8))
    data = text(bytes(20_000))
    first, again = one.replace(data, data + b"q\x20"), one.replace(data, b"h\x20")
    tracemalloc.start()
    arrays = read_plain(b"](" + first + again * 500 + b"e.", "x")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(arrays) == 501
    assert arrays[-1].shape == (100, 200)
    assert most < 2e6


def test_keys_that_take_forever_to_hash_are_refused():
    content = b"}K\x01" + b"2\x86" * 60 + b"Ns."  # the key (k, k) of k = (j, j) of …: hashing it takes 2⁶⁰ steps
    with pytest.raises(DataError, match="operation DUP"):
        read_plain(content, "x")
    content = b"}K\x01\x85" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(60)) + b"Ns."
    with pytest.raises(DataError, match="keys are not texts or numbers"):
        read_plain(content, "x")


def test_a_list_that_contains_itself_is_refused():
    with pytest.raises(DataError, match="damaged"):
        read_plain(b"]q\x00h\x00a.", "x")


def test_an_array_with_too_little_data_is_damaged():
    content = batch([1], np.ones((2, 4), np.uint8)).replace(text(b"\x01" * 8), text(b"\x01" * 7))
    with pytest.raises(DataError, match="damaged"):
        read_plain(content, "batch")
