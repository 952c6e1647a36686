"""Files of examples read into columns: JSON Lines, CSV, TSV and Parquet, plain or gzipped, UTF-8 only.

Reading knows nothing of labels or models. Names of columns in CSV count without spaces around them. A `Table` keeps
where each row came from, so that whoever finds a value wrong later can still say in which file and on which line.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, cast

from secure_fed.errors import DataError, plainly

if TYPE_CHECKING:
    from _csv import Reader as CsvReader

_BOM = "\ufeff"
_LONGEST_FIELD = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Table:
    """The wanted columns of one file or one split of a data set.

    source:  what to call it in a message: a path, or a data set and its split
    columns: the wanted columns that are present; a cell absent from a row is None
    present: the names of all columns there are, wanted or not
    lines:   for each row the line it starts on (text files), or its number from 1
    unit:    what `lines` counts: "line" or "row"
    classes: the names of integer labels, by label column, where the source itself declares them
    """

    source: str
    columns: dict[str, list[object]]
    present: tuple[str, ...]
    lines: Sequence[int]
    unit: str = "line"
    classes: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __len__(self) -> int:
        return len(self.lines)

    def place(self, row: int) -> str:
        """The place of row number `row` (from 0), in words."""
        return f"{self.source}, {self.unit} {self.lines[row]}"

    def column(self, name: str, setting: str) -> list[object]:
        """The column called `name`, which the user chose by `setting`."""
        if name not in self.columns:
            there = ", ".join(repr(column) for column in self.present)
            raise DataError(
                f"{self.source} has no column {name!r}: it has {there}; set {setting} to one of them or rename one"
            )
        return self.columns[name]


_Reader = Callable[[Path, Collection[str]], Table]


def read(path: Path, wanted: Collection[str], setting: str = "data.train") -> Table:
    """The `wanted` columns of one file, read by how its name ends; `setting` is the key that named it."""
    if not path.exists():
        raise DataError(f"there is no file {path}; set {setting} to a file that exists")
    reader = _READERS.get(kind(path))
    if reader is None:
        kinds = ", ".join(_READERS)
        raise DataError(f"{path} is not a kind of file that {setting} can read ({kinds}, each also with .gz)")
    table = reader(path, wanted)
    if not len(table):
        raise DataError(f"{path} is empty: it holds no example; give {setting} a file with at least one")
    return table


def kind(path: PurePath) -> str:
    """The ending that says how to read the file, without `.gz`: ".jsonl", ".csv", ..."""
    name = path.name.lower().removesuffix(".gz")
    return PurePath(name).suffix


def stem(path: PurePath) -> str:
    """The file's name without folder, kind and `.gz`: "site.1" for "a/site.1.csv.gz"."""
    name = path.name[:-3] if path.name.lower().endswith(".gz") else path.name
    return PurePath(name).stem


def split_files(folder: Path, split: str) -> list[Path]:
    """The files of a split in a folder: `train.csv`, or shards such as `train-00000-of-00002.parquet`.

    Shards come in the order of their names. Two kinds side by side are refused: they may well be one data set
    written twice.
    """
    with plainly(DataError, f"{folder} cannot be read", "give a folder that can"):
        inside = sorted(folder.iterdir())
    starts = (f"{split}.", f"{split}-", f"{split}_")
    found = [path for path in inside if kind(path) in _READERS and path.name.lower().startswith(starts)]
    if len({kind(path) for path in found}) > 1:
        names = ", ".join(path.name for path in found)
        raise DataError(f"{folder} holds {split!r} as more than one kind of file ({names}); leave one there")
    return found


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        if path.name.lower().endswith(".gz"):
            with gzip.open(path, "rb") as packed:
                yield cast("IO[bytes]", packed)
        else:
            with path.open("rb") as plain:
                yield plain
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file: {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, plain or gzipped, with their ends and without a byte order mark."""
    with _opened(path) as file:
        yield from decoded(file, str(path))


def decoded(lines: Iterable[bytes], source: str) -> Iterator[str]:
    """Lines of UTF-8 with their ends and without a byte order mark; `source` is what to call them in a message."""
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{source}, line {number}: byte 0x{line[error.start]:02x} is not UTF-8; save it as UTF-8"
            ) from error
        yield text.removeprefix(_BOM) if number == 1 else text


def _json_lines(path: Path, wanted: Collection[str]) -> Table:
    present: dict[str, None] = {}
    records: list[tuple[int, dict[str, object]]] = []
    for number, line in enumerate(text_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            why = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", error)
            raise DataError(
                f"{path}, line {number} is not JSON as it should be: {why}; write one object a line"
            ) from error
        if not isinstance(record, dict):
            found = type(record).__name__
            raise DataError(f"{path}, line {number} is a JSON {found}, not an object; write one object a line")
        present |= dict.fromkeys(record)
        records.append((number, {name: record[name] for name in wanted if name in record}))
    columns = {name: [record.get(name) for _, record in records] for name in wanted if name in present}
    return Table(str(path), columns, tuple(present), [number for number, _ in records])


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError(f"{_doubled([name for name, _ in pairs])!r} stands in one object twice")
    return record


def _doubled(names: Sequence[str]) -> str | None:
    """A name that occurs more than once, if any does."""
    return next((name for name, times in Counter(names).items() if times > 1), None)


def _delimited(delimiter: str, path: Path, wanted: Collection[str]) -> Table:
    """Fields may be longer than 128 KiB: that limit guards against bad quoting, which `strict` refuses."""
    rows = csv.reader(text_lines(path), delimiter=delimiter, strict=True)
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        return _csv_table(path, rows, wanted)
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.line_num}: {error}; check its quotes") from error
    finally:
        csv.field_size_limit(before)


def _csv_table(path: Path, rows: CsvReader, wanted: Collection[str]) -> Table:
    present = tuple(name.strip() for name in next(rows, ()))
    if (doubled := _doubled(present)) is not None:
        raise DataError(f"{path}, line 1 names the column {doubled!r} twice; rename one of the two")
    columns: dict[str, list[object]] = {name: [] for name in wanted if name in present}
    picked = [(present.index(name), cells) for name, cells in columns.items()]
    lines = []
    start = rows.line_num + 1  # a quoted field may span lines: a row is named by its first
    for row in rows:
        if row:
            if len(row) != len(present):
                counts = f"{len(row)} fields where line 1 names {len(present)} columns"
                raise DataError(f"{path}, line {start} has {counts}; quote fields that hold the separator")
            for index, cells in picked:
                cells.append(row[index])
            lines.append(start)
        start = rows.line_num + 1
    return Table(str(path), columns, present, lines)


def _parquet(path: Path, wanted: Collection[str]) -> Table:
    import pyarrow
    from pyarrow import parquet

    with _opened(path) as file:
        content = file.read()
    if not content:
        raise DataError(f"{path} is empty: it holds no bytes; give a Parquet file")
    try:
        opened = parquet.ParquetFile(pyarrow.BufferReader(content))
        present = tuple(opened.schema_arrow.names)
        if (doubled := _doubled(present)) is not None:
            raise DataError(f"{path} has two columns called {doubled!r}; rename one of the two")
        read_columns = opened.read(columns=[name for name in wanted if name in present])
        columns = {name: read_columns.column(name).to_pylist() for name in read_columns.column_names}
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # also a date that Python has not
        why = f"{error}".strip().partition("\n")[0]
        raise DataError(f"{path} is not a whole Parquet file: {why}") from error
    return Table(str(path), columns, present, range(1, opened.metadata.num_rows + 1), unit="row")


_READERS: dict[str, _Reader] = {
    ".jsonl": _json_lines,
    ".json": _json_lines,
    ".csv": partial(_delimited, ","),
    ".tsv": partial(_delimited, "\t"),
    ".parquet": _parquet,
}
