"""Data sets that the `datasets` library can load: from the Hub, its cache, or a folder it understands."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secure_fed.activity import activity
from secure_fed.config import DataConfig
from secure_fed.errors import DataError, SecureFedError
from secure_fed.learning.data import revisions
from secure_fed.learning.data.on_disk import LONG, Column
from secure_fed.learning.data.table import Table

if TYPE_CHECKING:
    from pyarrow import Schema

Classes = tuple[tuple[str, tuple[str, ...]], ...]  # as `Table.classes`


def read(
    data: DataConfig, wanted: Collection[str], label: str, test_splits: Sequence[str]
) -> tuple[Table, list[Table]]:
    """The training split of a data set, and its test split, or those of its splits among `test_splits`, in that order.

    `data.name` is a Hub id, `id:configuration` if the data set has several, or a folder. If `save_to_disk` wrote the folder
    from rows without splits, it is the training split.
    """
    with _explained(data):
        splits = _load(data)
    for setting, split in (("data.split", data.split), ("data.test_split", data.test_split or data.split)):
        if split not in splits:
            raise no_split(data, setting, list(splits))
    tests = (
        [data.test_split] if data.test_split else [one for one in test_splits if one in splits and one != data.split]
    )
    with _explained(data):
        train, *others = (_table(data.name, split, splits[split], wanted, label) for split in (data.split, *tests))
    return train, others


@contextmanager
def _explained(data: DataConfig) -> Iterator[None]:
    try:
        yield
    except SecureFedError:
        raise
    except Exception as error:  # of any kind: the user can only check the name and the network
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise DataError(
            f"data.name {data.name!r} is no built-in data set, no folder of examples, and none that the Hub "
            f"gave us ({reason}); correct data.name, connect to the network, or set data.train to a file"
        ) from error


def no_split(data: DataConfig, setting: str, there: Sequence[str]) -> DataError:
    """The error for a split that the data set does not have. there: the names of its splits, if they are known."""
    split = data.split if setting == "data.split" else data.test_split
    others = f", and has {', '.join(map(repr, there))}" if there else ""
    return DataError(
        f"{setting} is {split!r}, which data.name {data.name!r} does not have{others}; set {setting} to one of its splits"
    ).about(setting, split, f"one of {', '.join(there)}" if there else "a split of the data set")


def _load(data: DataConfig) -> Any:
    """The splits by name: memory-mapped from the user's cache or a saved folder, or files of a folder as a stream.

    A data set of the Hub is downloaded into the cache that all programs share, so that it is there offline and for the next
    run. A folder is the user's own, and `datasets` would leave a copy of it in that cache, so its files are read in place.
    """
    import datasets

    name = data.name
    if (Path(name) / "dataset_dict.json").is_file():
        return datasets.load_from_disk(name)
    if (Path(name) / "state.json").is_file():
        return {data.split: datasets.load_from_disk(name)}
    if Path(name).is_dir():
        return datasets.load_dataset(name, streaming=True)
    repository, _, configuration = name.partition(":")
    splits = datasets.load_dataset(repository, configuration or None, revision=data.revision or None)
    if data.revision:
        files = [Path(file["filename"]) for rows in splits.values() for file in rows.cache_files]
        revisions.require_read("dataset", repository, data.revision, files)
    return splits


def _table(name: str, split: str, rows: Any, wanted: Collection[str], label: str) -> Table:
    """One split, read in batches, with the class names that its features declare, for a label or a list of labels."""
    present = dict.fromkeys(rows.column_names or ())  # unknown for a stream of text files
    read = rows.select_columns([column for column in wanted if column in present]) if present else rows
    columns = {column: Column() for column in wanted}
    count = 0
    with activity("") as now:
        for batch in read.iter(LONG):
            size = len(next(iter(batch.values()), ()))
            count += size
            present |= dict.fromkeys(batch)
            for column, cells in columns.items():
                cells.extend(batch.get(column) or [None] * size)
            now.says(f"{count:,} rows of {split}", anew=False)
    whole = {column: columns[column].whole() for column in wanted if column in present}
    declared = _declared(rows.features or {}, [label])
    return Table(f"{name} ({split})", whole, tuple(present), range(1, count + 1), "row", declared)


def declared_in(schema: Schema, columns: Collection[str]) -> Classes:
    """The class names that `datasets` stored in the schema of an Arrow table, for columns that still have this type."""
    if b"huggingface" not in (schema.metadata or {}):
        return ()
    import datasets

    try:
        features = datasets.Features.from_arrow_schema(schema)
    except (ValueError, KeyError, TypeError):  # written by another version of `datasets`
        return ()
    return _declared(features, columns)


def _declared(features: Mapping[str, Any], columns: Collection[str]) -> Classes:
    found = []
    for column in columns:
        feature = features.get(column)
        names = getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None)
        found += [(column, tuple(names))] if names else []
    return tuple(found)
