import importlib.util
import tracemalloc

import numpy as np
import pytest
import torch

from fedbe.data import load_task
from fedbe.data.readers import tables
from fedbe.errors import DataError, ExtraError

TABLE = """age,sex,hospital,sick
30,f,north,yes
40,m,south,no
50,f,north,no
60.5,m,south,yes
"""
COLUMNS = {"age": [30, 40, 50, 60.5], "sex": ["f", "m", "f", "m"], "sick": ["yes", "no", "no", "yes"]}


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "patients.csv"
    path.write_text(TABLE)
    return path


def test_a_table_with_named_columns(table):
    data = tables.read(type(table)(f"{table}?label=sick&client=hospital"))
    assert data.inputs.tolist() == [[30, 1, 0], [40, 0, 1], [50, 1, 0], [60.5, 0, 1]]  # age, female, male
    assert data.classes == ("no", "yes")
    assert data.labels.tolist() == [1, 0, 0, 1]
    assert data.client_ids.tolist() == [0, 1, 0, 1]
    assert data.name == "patients"


def test_the_usual_names_need_no_options(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("x,target\n" + "".join(f"{i},{1 + i % 2}\n" for i in range(10)))
    task = load_task(path)
    assert task.train.classes == ("1", "2")
    assert task.train.inputs.dtype == torch.float32
    for source in (f"csv:{path}?label=target", f"{path}?label=target"):
        assert load_task(source).train.digest() == task.train.digest()


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (TABLE, "", "must have a column called label"),
        (TABLE, "?label=sik", "no column 'sik' .*'sick'"),
        (TABLE, "?label=sick&clients=hospital", "unknown option 'clients'"),
        ("label\n1\n2\n", "", "a column of inputs next to"),
        ("a,label\n1,2\n,3\n", "", "the column 'a' has missing or infinite values"),
        ("a,label\n1,2,3\n", "", "row 2: expected 2 values, got 3"),
        ("a,a,label\n1,2,3\n", "", "two columns with one name"),
        ("a,label\n", "", "at least one row"),
        ("a;label\n1,5;2\n2,5;3\n", "", "commas between its columns, got ';'"),
        ("a\tlabel\n1\t2\n", "", "commas between its columns"),
        ("a,label\n1,yes\n2,\n", "", "the column 'label' has missing values"),
        ("a,label\n1,0\n2,\n", "", "the column 'label' has missing values"),
        ("a,label,client\n1,0,north\n2,1, \n", "", "the column 'client' has missing values"),
        ("a,label,client\n1,0,7\n2,1,\n", "", "the column 'client' has missing values"),
        ("a,label\n1,0.5\n2,0.25\n", "", "single-label classification"),
        ("a,label\n" + "".join(f"name{i},1\n" for i in range(101)), "", "101 distinct texts, more than 100"),
    ],
)
def test_tables_that_cannot_be_read(tmp_path, text, options, message):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        load_task(f"csv:{path}{options}")


def test_bytes_are_not_a_csv(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(DataError, match="not a CSV file"):
        load_task(path)


@pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="needs pyarrow: pip install -c constraints.txt -e '.[parquet]'"
)
def test_parquet(tmp_path, table):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "patients.parquet"
    parquet.write_table(pyarrow.table({**COLUMNS, "hospital": ["north", "south"] * 2}), path)
    options = "?label=sick&client=hospital"
    from_csv, from_parquet = (tables.read(type(table)(f"{p}{options}")) for p in (table, path))
    assert torch.equal(from_csv.inputs, from_parquet.inputs)
    assert from_csv.labels.tolist() == from_parquet.labels.tolist()
    path.write_bytes(b"garbage")
    with pytest.raises(DataError, match="not a Parquet file"):
        load_task(path)


@pytest.mark.parametrize(
    ("column", "match"),
    [
        ([[1, 2], [3]], r"numbers or texts only, got list"),
        ([b"\xff", b"y"], r"numbers or texts only, got binary"),
        (["x", None], r"string with missing values"),
        (np.zeros(3_000_000, np.int8), r"must have at most 4,194,304 values"),
    ],
    ids=["lists", "bytes", "missing texts", "a bomb"],
)
def test_a_parquet_file_that_is_not_a_table_of_numbers_and_texts(tmp_path, column, match):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "odd.parquet"
    parquet.write_table(pyarrow.table({"a": column, "label": np.zeros(len(column), np.int8)}), path)
    with pytest.raises(DataError, match=match):
        tables.read(path)


@pytest.mark.parametrize("column", ["label", "client"])
def test_a_parquet_file_with_missing_labels_or_clients(tmp_path, column):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "nulls.parquet"
    parquet.write_table(pyarrow.table({"a": [1, 2], "label": [0, 1], "client": [0, 1]} | {column: [1, None]}), path)
    with pytest.raises(DataError, match=f"the column '{column}' has missing values"):
        tables.read(path)


def most_memory(action):
    """The peak of what Python allocates during the action, in MB."""
    tracemalloc.start()
    try:
        action()
    except DataError as error:
        print(error)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most / 1e6


def test_one_long_text_does_not_make_all_rows_long(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text("a,b,label\n" + "x" * 120_000 + f",1,{'y' * 120_000}\n" + "b,1,n\n" * 2_000)
    assert most_memory(lambda: tables.read(path)) < 10  # NumPy's own texts would be 960 MB for each column
    data = tables.read(path)
    assert data.inputs[:2].tolist() == [[0, 1, 1], [1, 0, 1]]
    assert data.labels.sum() == 1


def test_a_small_table_of_texts_does_not_become_large(tmp_path):
    path, columns = tmp_path / "one-hot.csv", 50
    rows = (",".join(f"a{(r + i) % 100}" for i in range(columns)) for r in range(2_000))
    path.write_text(",".join(f"c{i}" for i in range(columns)) + ",label\n" + "".join(f"{row},0\n" for row in rows))
    assert most_memory(lambda: tables.read(path)) < 30
    with pytest.raises(DataError, match=r"at most 6,\d+,\d+ inputs for its size, got 2,000 rows of 5,000"):
        tables.read(path)


@pytest.mark.parametrize("dictionary", [True, False], ids=["dictionary", "plain"])
def test_a_long_text_that_a_parquet_file_repeats_needs_memory_once(tmp_path, dictionary):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "long.parquet"
    columns = {"a": ["x" * 20_000] * 4_000, "label": [0, 1] * 2_000}
    parquet.write_table(pyarrow.table(columns), path, compression="zstd", use_dictionary=dictionary)
    before = pyarrow.total_allocated_bytes()
    assert most_memory(lambda: tables.read(path)) < 10
    assert tables.read(path).inputs.tolist() == [[1.0]] * 4_000
    assert pyarrow.total_allocated_bytes() - before < 10e6


@pytest.mark.parametrize("kind", ["large_string", "string_view", "large_binary", "struct", "list"])
def test_other_kinds_of_texts_in_a_parquet_file_need_no_more_memory(tmp_path, kind):
    """The file is small, its 2,000 texts of 30 kB have 60 MB."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    text, path = "x" * 30_000, tmp_path / "long.parquet"
    value = {"struct": {"b": text}, "list": [text], "large_binary": text.encode()}.get(kind, text)
    kinds = {"struct": pyarrow.struct([("b", pyarrow.string())]), "list": pyarrow.list_(pyarrow.string())}
    column = pyarrow.array([value] * 2_000, kinds.get(kind) or getattr(pyarrow, kind)())
    parquet.write_table(pyarrow.table({"a": column, "label": [0, 1] * 1_000}), path, compression="zstd")
    usual = pyarrow.default_memory_pool()
    counting = pyarrow.proxy_memory_pool(usual)
    pyarrow.set_memory_pool(counting)
    try:
        if kind in ("large_string", "string_view"):
            assert tables.read(path).inputs.tolist() == [[1.0]] * 2_000
        else:
            with pytest.raises(DataError, match="'a' must have numbers or texts only, got"):
                tables.read(path)
    finally:
        pyarrow.set_memory_pool(usual)
    assert counting.max_memory() < 20e6


def test_long_texts_that_a_parquet_file_compresses_have_a_budget(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "long.parquet"
    columns = {"a": ["x" * 20_000 + str(i) for i in range(6_000)], "label": [0, 1] * 3_000}
    parquet.write_table(pyarrow.table(columns), path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 200_000
    with pytest.raises(DataError, match=r"must unpack to at most \d+,\d+,\d+ bytes for its size, but has more"):
        tables.read(path)


def test_categories_of_a_parquet_file(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "categories.parquet"
    columns = {name: pyarrow.array(values).dictionary_encode() for name, values in COLUMNS.items()}
    parquet.write_table(pyarrow.table(columns), path, row_group_size=3)
    data = tables.read(type(path)(f"{path}?label=sick"))
    assert data.inputs.tolist() == [[30, 1, 0], [40, 0, 1], [50, 1, 0], [60.5, 0, 1]]
    parquet.write_table(pyarrow.table({"a": pyarrow.array(["x", None]).dictionary_encode(), "label": [0, 1]}), path)
    with pytest.raises(DataError, match="string with missing values"):
        tables.read(path)


def test_two_parquet_columns_with_one_name(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "twice.parquet"
    parquet.write_table(pyarrow.table([[1], [2], [0]], names=["a", "a", "label"]), path)
    with pytest.raises(DataError, match="two columns with one name"):
        tables.read(path)


def test_a_parquet_file_with_a_damaged_name(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "damaged.parquet"
    parquet.write_table(pyarrow.table({"height": [1, 2], "label": [0, 1]}), path)
    path.write_bytes(path.read_bytes().replace(b"height", b"h\xe1ight"))
    with pytest.raises(DataError, match="is not a Parquet file"):
        tables.read(path)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    path = tmp_path / "mine.parquet"
    path.write_bytes(b"")
    with pytest.raises(ExtraError, match=r"pip install .*\[parquet\]"):
        load_task(path)
