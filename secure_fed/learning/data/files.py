"""Files of examples, read into columns: JSON Lines, CSV, TSV and Parquet, plain or gzipped, UTF-8 only.

The ending of a file's name decides how it is read. Each kind has a reader of the file's rows, and two that read as little as
possible: one for the names of its columns, and one that checks whether it has a row. A file of one text a line is read with
`read_lines`. Nothing here depends on labels or models.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, cast

from secure_fed.errors import DataError, plainly
from secure_fed.learning.data.hub import declared_in
from secure_fed.learning.data.on_disk import LONG, Column
from secure_fed.learning.data.rows import Table

if TYPE_CHECKING:
    from _csv import Reader as CsvReader

    from pyarrow.parquet import ParquetFile


_BOM = "\ufeff"
_LONGEST_FIELD = 2**31 - 1
_BUFFER = 2**20  # bytes of a Parquet column that are read at once
Reader = Callable[[Path, Collection[str]], Table]
Head = Callable[[Path, Collection[str]], tuple[str, ...]]  # the names of a file's columns
Some = Callable[[Path], bool]  # whether a file holds a row


def read(path: Path, wanted: Collection[str], setting: str = "data.train") -> Table:
    """The `wanted` columns of one file, read by the ending of its name; `setting` is the key that named it."""
    table = _readers(path, setting)[0](path, wanted)
    if not len(table):
        raise _empty(path, setting)
    return table


def head(path: Path, wanted: Collection[str], setting: str) -> Table:
    """The file's columns without rows; the file is read only until the `wanted` columns are found."""
    present = _readers(path, setting)[1](path, wanted)
    if not present:
        raise _empty(path, setting)
    return Table(str(path), {name: [] for name in present}, present, ())


def require_an_example(path: Path, setting: str) -> None:
    """Refuse a file without examples, and a folder whose training files have none. Only a file's first row is read."""
    found = split_files(path, "train") if path.is_dir() else [path]
    if not found:
        raise DataError(
            f"{path} holds no training examples (train.jsonl, train.csv, ...); give {setting} a folder that does"
        )
    for file in found:
        if not _readers(file, setting)[2](file):
            raise _empty(file, setting)


def _readers(path: Path, setting: str) -> tuple[Reader, Head, Some]:
    if not path.exists():
        raise DataError(f"there is no file {path}; set {setting} to a file that exists")
    if kind(path) not in FORMATS:
        kinds = ", ".join(FORMATS)
        raise DataError(f"{path} is not a kind of file that {setting} can read ({kinds}, each also with .gz)")
    return FORMATS[kind(path)]


def _empty(path: Path, setting: str) -> DataError:
    return DataError(f"{path} is empty: it holds no example; give {setting} a file with at least one")


def read_lines(path: Path, name: str) -> Table:
    """A file of one text a line as a table, like `read_stream`."""
    return _numbered(text_lines(path), str(path), name)


def read_stream(stream: Iterable[bytes], source: str, name: str) -> Table:
    """One text a line of UTF-8 as the column `name`; blank lines are skipped, and lines keep their numbers."""
    return _numbered(decoded(stream, source), source, name)


def _numbered(lines: Iterable[str], source: str, name: str) -> Table:
    numbers, texts = array("q"), Column()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            numbers.append(number)
            texts.append(line.rstrip("\r\n"))
    return Table(source, {name: texts.whole()}, (name,), numbers)


def kind(path: PurePath) -> str:
    """The ending that decides how to read the file, without `.gz`: ".jsonl", ".csv", ..."""
    return PurePath(path.name.lower().removesuffix(".gz")).suffix


def stem(path: PurePath) -> str:
    """The file's name without folder, kind and `.gz`: "site.1" for "a/site.1.csv.gz"."""
    name = path.name[:-3] if path.name.lower().endswith(".gz") else path.name
    return PurePath(name).stem


def split_files(folder: Path, split: str) -> list[Path]:
    """The files of a split in a folder: `train.csv`, or shards such as `train-00000-of-00002.parquet`.

    Shards are in the order of their names. Two kinds of file together are refused: they may be one data set
    written twice.
    """
    with plainly(DataError, f"{folder} cannot be read", "give a folder that can"):
        inside = sorted(folder.iterdir())
    starts = (f"{split}.", f"{split}-", f"{split}_")
    found = [path for path in inside if kind(path) in FORMATS and path.name.lower().startswith(starts)]
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
        raise DataError(f"{path} is not a whole gzip file ({error}): pack it again, or give it without .gz") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, plain or gzipped, with their ends and without a byte order mark."""
    with _opened(path) as file:
        yield from decoded(file, str(path))


def decoded(lines: Iterable[bytes], source: str) -> Iterator[str]:
    """Lines of UTF-8 with their ends and without a byte order mark; `source` is their name in error messages."""
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{source}, line {number}: byte 0x{line[error.start]:02x} is not UTF-8; save it as UTF-8"
            ) from error
        yield text.removeprefix(_BOM) if number == 1 else text


def _doubled(names: Sequence[str]) -> str | None:
    """A name that occurs more than once, if any does."""
    return next((name for name, times in Counter(names).items() if times > 1), None)


def _json_lines(path: Path, wanted: Collection[str]) -> Table:
    present: dict[str, None] = {}
    lines, columns = array("q"), {name: Column() for name in wanted}
    for number, record in _records(path):
        present |= dict.fromkeys(record)
        lines.append(number)
        for name, column in columns.items():
            column.append(record.get(name))
    return Table(str(path), {name: columns[name].whole() for name in wanted if name in present}, tuple(present), lines)


def _json_head(path: Path, wanted: Collection[str]) -> tuple[str, ...]:
    """Objects may leave out columns, so a column that the first object lacks may still come."""
    present: dict[str, None] = {}
    for _, record in _records(path):
        present |= dict.fromkeys(record)
        if present.keys() >= set(wanted):
            break
    return tuple(present)


def _json_some(path: Path) -> bool:
    return next(_records(path), None) is not None


def _records(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """The objects of a file, each with the number of its line."""
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
        yield number, record


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError(f"{_doubled([name for name, _ in pairs])!r} stands in one object twice")
    return record


def _delimited(delimiter: str, path: Path, wanted: Collection[str]) -> Table:
    with _csv_rows(path, delimiter) as rows:
        present = _csv_names(path, rows)
        columns = {name: Column() for name in wanted if name in present}
        picked = [(present.index(name), cells) for name, cells in columns.items()]
        lines = array("q")
        start = rows.line_num + 1  # a quoted field may span lines: a row is named by its first
        for row in rows:
            if row:
                if len(row) != len(present):
                    counts = f"{len(row)} field{'s' * (len(row) > 1)} where line 1 names {len(present)} columns"
                    remedy = (
                        "add the missing fields" if len(row) < len(present) else "quote fields that hold the separator"
                    )
                    raise DataError(f"{path}, line {start} has {counts}; {remedy}")
                for index, cells in picked:
                    cells.append(row[index])
                lines.append(start)
            start = rows.line_num + 1
    return Table(str(path), {name: cells.whole() for name, cells in columns.items()}, present, lines)


def _delimited_head(delimiter: str, path: Path, wanted: Collection[str]) -> tuple[str, ...]:
    with _csv_rows(path, delimiter) as rows:
        return _csv_names(path, rows)


def _delimited_some(delimiter: str, path: Path) -> bool:
    with _csv_rows(path, delimiter) as rows:
        _csv_names(path, rows)
        return any(rows)


@contextmanager
def _csv_rows(path: Path, delimiter: str) -> Iterator[CsvReader]:
    """Fields may be longer than 128 KiB: that limit guards against bad quoting, which `strict` refuses.

    Where the first line of a .csv has semicolons and no comma, semicolons divide its fields: Excel's way in many countries.
    """
    if delimiter == ",":
        names = next(text_lines(path), "")
        delimiter = ";" if ";" in names and "," not in names else ","
    rows = csv.reader(text_lines(path), delimiter=delimiter, strict=True)
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        yield rows
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.line_num}: {error}; check its quotes") from error
    finally:
        csv.field_size_limit(before)


def _csv_names(path: Path, rows: CsvReader) -> tuple[str, ...]:
    """The names of the columns, which the first row holds. Spaces around them are ignored."""
    present = tuple(name.strip() for name in next(rows, ()))
    if (doubled := _doubled(present)) is not None:
        raise DataError(f"{path}, line 1 names the column {doubled!r} twice; rename one of the two")
    return present


def _parquet(path: Path, wanted: Collection[str]) -> Table:
    with _whole_parquet(path) as opened:
        present = _parquet_names(path, opened)
        columns = {name: Column() for name in wanted if name in present}
        for batch in opened.iter_batches(LONG, columns=list(columns)):
            for name, column in columns.items():
                column.extend(batch.column(name).to_pylist())
        whole = {name: column.whole() for name, column in columns.items()}
        declared = declared_in(opened.schema_arrow, columns)
        return Table(str(path), whole, present, range(1, opened.metadata.num_rows + 1), "row", declared)


def _parquet_head(path: Path, wanted: Collection[str]) -> tuple[str, ...]:
    with _whole_parquet(path) as opened:
        return _parquet_names(path, opened)


def _parquet_some(path: Path) -> bool:
    with _whole_parquet(path) as opened:
        return bool(opened.metadata.num_rows)


@contextmanager
def _whole_parquet(path: Path) -> Iterator[ParquetFile]:
    import pyarrow
    from pyarrow import parquet

    with _opened(path) as file:
        packed = isinstance(file, gzip.GzipFile)
        content = file.read() if packed else file.read(1)
        if not content:
            raise DataError(f"{path} is empty: it holds no bytes; give a Parquet file")
        try:
            yield parquet.ParquetFile(pyarrow.BufferReader(content) if packed else file, buffer_size=_BUFFER)
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # also a date Python lacks
            why = f"{error}".strip().partition("\n")[0]
            raise DataError(
                f"{path} is not a whole Parquet file ({why}): set data.train or data.test to another file"
            ) from error


def _parquet_names(path: Path, opened: ParquetFile) -> tuple[str, ...]:
    present = tuple(opened.schema_arrow.names)
    if (doubled := _doubled(present)) is not None:
        raise DataError(f"{path} has two columns called {doubled!r}; rename one of the two")
    return present


FORMATS: dict[str, tuple[Reader, Head, Some]] = {
    ".jsonl": (_json_lines, _json_head, _json_some),
    ".json": (_json_lines, _json_head, _json_some),
    ".csv": (partial(_delimited, ","), partial(_delimited_head, ","), partial(_delimited_some, ",")),
    ".tsv": (partial(_delimited, "\t"), partial(_delimited_head, "\t"), partial(_delimited_some, "\t")),
    ".parquet": (_parquet, _parquet_head, _parquet_some),
}
