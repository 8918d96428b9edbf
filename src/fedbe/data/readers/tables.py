"""Tables: one example in each row of a CSV or Parquet file.

    csv:patients.csv?label=diagnosis&client=hospital

The column `label` has the classes, the column `client` the client of each row (for the split "column"). Every other
column is an input: numbers as they are, texts one-hot.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray

from fedbe.data.arrays import from_arrays
from fedbe.data.dataset import Dataset
from fedbe.errors import DataError, missing_extra, nearest

LABELS = ("label", "labels", "target", "class", "y")
CLIENTS = ("client_id", "client")
MAX_CELLS = 2**29  # values of a Parquet file: 4 GiB as float64
MAX_CELLS_RATIO = 100  # values for each byte of the file; real tables have fewer than 8
FREE_CELLS = 2**22  # so many are always read: 32 MiB
BATCH_ROWS = 4096  # rows of a Parquet file that are read before the memory is looked at
MAX_WIDTH_RATIO = 16  # inputs for each byte of a CSV file, texts one-hot; real tables have fewer than 4
MAX_CATEGORIES = 100  # distinct texts in one column; more are a mistake (names, ids)

Columns = dict[str, NDArray[Any]]


def split_options(path: Path) -> tuple[Path, dict[str, str]]:
    """The path, and the options after its last "?".

    >>> split_options(Path("data.csv?label=sick"))
    (PosixPath('data.csv'), {'label': 'sick'})
    """
    head, mark, query = str(path).rpartition("?")
    if not mark or path.exists():
        return path, {}
    return Path(head), dict(parse_qsl(query, keep_blank_values=True))


def read(path: Path) -> Dataset:
    """Read a table.

    Args:
        path: A .csv or .parquet file, with options: "?label=COLUMN&client=COLUMN". The default label is a column called
            label, labels, target, class or y; the default client a column called client_id or client, if there is one.

    Raises:
        DataError: The file is not a table, a column is missing, or a value is missing or not finite.
        ExtraError: A Parquet file needs the extra parquet.
    """
    path, options = split_options(path)
    if unknown := sorted(options.keys() - {"label", "client"}):
        raise DataError(f"unknown option '{unknown[0]}' of {path}: choose label or client")
    columns = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    label = _column(columns, options.get("label"), LABELS, "label", path)
    client = _column(columns, options.get("client"), CLIENTS, "client", path)
    if label is None:
        raise DataError(
            f"{path} must have a column called {', '.join(LABELS)}, or name it: {path}?label=COLUMN; "
            f"it has {', '.join(list(columns)[:10])}"
        )
    inputs = {name: column for name, column in columns.items() if name not in (label, client)}
    if not inputs:
        raise DataError(f"{path} must have a column of inputs next to the label '{label}'")
    labels = complete(columns[label], label, path)
    ids = None if client is None else complete(columns[client], client, path)
    ratio = MAX_CELLS_RATIO if path.suffix == ".parquet" else MAX_WIDTH_RATIO
    matrix = encoded(inputs, path, max_cells(path.stat().st_size, ratio))
    return from_arrays(path.stem, matrix, _labels(labels), client_ids=ids)


def _column(columns: Columns, wanted: str | None, usual: Sequence[str], what: str, path: Path) -> str | None:
    if wanted is not None and wanted not in columns:
        raise DataError(f"{path} has no column '{wanted}' for the {what}: {nearest(wanted, columns)}")
    return wanted if wanted is not None else next((name for name in usual if name in columns), None)


def complete(values: NDArray[Any], name: str, path: Path | str) -> NDArray[Any]:
    """The values of a column of labels or client ids; a DataError if one is missing: NaN, None or an empty text."""
    if values.dtype.kind == "f":
        is_missing = bool(np.isnan(values).any())
    else:
        is_missing = values.dtype.kind in "OU" and any(v is None or not str(v).strip() for v in values.flat)
    if is_missing:
        raise DataError(f"{path}: the column '{name}' has missing values; fill or remove these rows")
    return values


def _labels(values: NDArray[Any]) -> NDArray[Any]:
    """Whole numbers as integers; everything else as it is. A CSV cannot tell 1 from 1.0."""
    is_whole = values.dtype.kind == "f" and np.isfinite(values).all() and (values == np.rint(values)).all()
    return values.astype(np.int64) if is_whole else values


def encoded(columns: Columns, path: Path | str, limit: int = MAX_CELLS) -> NDArray[np.float32]:
    """All columns side by side [N, D]: numbers as they are, one input for each distinct text, in sorted order.

    Args:
        columns: Columns of one length, by name.
        path: The name for messages.
        limit: How many values the result may have.
    """
    for name, values in columns.items():
        if values.ndim != 1 or (values.dtype.kind == "O" and any(value is None for value in values)):
            raise DataError(
                f"{path}: the column '{name}' must have one number or text in each row, got {values.dtype} "
                f"{list(values.shape)}; fill or remove rows with missing values"
            )
    categories = {name: _categories(values, name, path) for name, values in columns.items() if _is_text(values)}
    rows, width = len(next(iter(columns.values()))), sum(len(categories.get(name, "1")) for name in columns)
    if rows * width > limit:
        raise DataError(
            f"{path} must have at most {limit:,} inputs for its size, got {rows:,} rows of {width:,}: texts have one "
            "input for each distinct text, so turn them into numbers"
        )
    matrix, at = np.zeros((rows, width), np.float32), 0
    for name, values in columns.items():
        if name in categories:
            number = {text: at + i for i, text in enumerate(categories[name])}
            matrix[np.arange(rows), [number[str(text)] for text in values]] = 1
        elif np.isfinite(values.astype(np.float64)).all():
            matrix[:, at] = values
        else:
            raise DataError(f"{path}: the column '{name}' has missing or infinite values; fill or remove these rows")
        at += len(categories.get(name, "1"))
    return matrix


def _is_text(values: NDArray[Any]) -> bool:
    return values.dtype.kind not in "biuf"


def _categories(values: NDArray[Any], name: str, path: Path | str) -> list[str]:
    """The distinct texts, sorted."""
    categories = sorted({str(text) for text in values})
    if len(categories) > MAX_CATEGORIES:
        raise DataError(
            f"{path}: the column '{name}' has {len(categories)} distinct texts, more than {MAX_CATEGORIES}: "
            "remove it, or turn it into numbers"
        )
    return categories


def _read_csv(path: Path) -> Columns:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise DataError(f"{path} is not a CSV file in UTF-8 ({problem})") from problem
    rows = [row for row in rows if row]
    if len(rows) < 2:
        raise DataError(f"{path} must have a line of column names and at least one row")
    header, *body = rows
    if len(header) == 1 and (other := next((sign for sign in ";\t|" if sign in header[0]), None)):
        raise DataError(f"{path} must have commas between its columns, got {other!r}; write it again with commas")
    if broken := next((i for i, row in enumerate(body, start=2) if len(row) != len(header)), None):
        raise DataError(f"{path}, row {broken}: expected {len(header)} values, got {len(body[broken - 2])}")
    if len(set(header)) < len(header):
        raise DataError(f"{path} has two columns with one name")
    return {name: _typed(column) for name, column in zip(header, zip(*body, strict=True), strict=True)}


def _typed(column: Sequence[str]) -> NDArray[Any]:
    """Numbers if all values are numbers; an empty value is a missing number."""
    try:
        return np.array([float(value) if value.strip() else np.nan for value in column])
    except ValueError:
        return _objects(column)


def _objects(texts: Sequence[str]) -> NDArray[Any]:
    """Texts as objects: in an array of NumPy's own texts, each would need the memory of the longest one."""
    values = np.empty(len(texts), dtype=object)
    values[:] = texts
    return values


def _read_parquet(path: Path) -> Columns:
    try:
        from pyarrow import ArrowException, parquet, types
    except ImportError as problem:
        raise missing_extra("Parquet files need pyarrow", "parquet") from problem
    try:
        with parquet.ParquetFile(path) as file:
            cells, limit = file.metadata.num_rows * file.metadata.num_columns, max_cells(path.stat().st_size)
            if cells > limit:
                raise DataError(f"{path} must have at most {limit:,} values for its size, got {cells:,}")
            texts = _text_columns(file.schema_arrow, path)
        # As a dictionary, a text that is repeated needs memory once.
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            table = _read_within(file, 8 * limit, path)
        names = table.column_names
        columns = {name: _values(column) for name, column in zip(names, table.columns, strict=True)}
    except (ArrowException, OSError, UnicodeDecodeError) as problem:  # the last one: a damaged name of a column
        raise DataError(f"{path} is not a Parquet file ({problem})") from problem
    if len(columns) < len(names):
        raise DataError(f"{path} has two columns with one name")
    for name, column in columns.items():
        is_text = column.dtype.kind == "O" and all(isinstance(value, str) for value in column)
        if not (is_text or column.dtype.kind in "biuf"):
            missing = " with missing values" if table[name].null_count else ""
            kind = table[name].type
            received = f"{kind.value_type if types.is_dictionary(kind) else kind}{missing}"
            raise DataError(f"{path}: the column '{name}' must have numbers or texts only, got {received}")
    return columns


def _text_columns(schema: Any, path: Path) -> list[str]:
    """The names of the columns of texts. Lists, bytes and so on are refused before any of them is read."""
    from pyarrow import types

    texts = []
    for field in schema:
        kind = field.type.value_type if types.is_dictionary(field.type) else field.type
        if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
            texts.append(field.name)
        elif not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)):
            raise DataError(f"{path}: the column '{field.name}' must have numbers or texts only, got {kind}")
    return texts


def _read_within(file: Any, limit: int, path: Path) -> Any:
    """All rows, as long as they need at most `limit` bytes: a file says nothing about it that can be relied on."""
    import pyarrow

    before, batches = pyarrow.total_allocated_bytes(), []
    for batch in file.iter_batches(BATCH_ROWS):
        batch.validate(full=True)  # a damaged file has numbers of texts that do not exist
        batches.append(batch)
        if pyarrow.total_allocated_bytes() - before > limit:
            raise DataError(f"{path} must unpack to at most {limit:,} bytes for its size, but has more")
    return pyarrow.Table.from_batches(batches, None if batches else file.schema_arrow)


def _values(column: Any) -> NDArray[Any]:
    """A column of a Parquet file. Rows with the same text share one object."""
    if not any(hasattr(chunk, "dictionary") for chunk in column.chunks):
        values: NDArray[Any] = column.to_numpy()
        return values
    if column.null_count:
        return np.array([None])
    chunks = column.unify_dictionaries().chunks
    texts = chunks[0].dictionary.to_numpy(zero_copy_only=False)
    return np.concatenate([texts[chunk.indices.to_numpy(zero_copy_only=False)] for chunk in chunks])


def max_cells(file_bytes: int, ratio: int = MAX_CELLS_RATIO) -> int:
    """How many values a table of this size may have."""
    return min(MAX_CELLS, max(FREE_CELLS, ratio * file_bytes))
