"""Files of examples, read into columns by the endings of their names, independently of labels and models."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path, PurePath

from secure_fed.errors import DataError, plainly
from secure_fed.learning.data.formats import FORMATS, Head, Reader, Some
from secure_fed.learning.data.table import Table


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


def kind(path: PurePath) -> str:
    """The ending that decides how to read the file, without `.gz`: ".jsonl", ".csv", ..."""
    name = path.name.lower().removesuffix(".gz")
    return PurePath(name).suffix


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
