"""Data sets that the `datasets` library can load: from the Hub, its cache, or a folder it understands."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secure_fed.errors import DataError
from secure_fed.learning.data.table import Table

if TYPE_CHECKING:
    from pyarrow import Schema

Classes = tuple[tuple[str, tuple[str, ...]], ...]  # as `Table.classes`


def read(name: str, wanted: Collection[str], label: str, test_splits: Sequence[str]) -> tuple[Table, list[Table]]:
    """The training split of data set `name`, and its splits among `test_splits`, in that order.

    `name` is a Hub id, `id:configuration` if the data set has several, or a folder. If `save_to_disk` wrote the folder from
    rows without splits, it is the training split.
    """
    try:
        splits = _load(name)
    except Exception as error:  # of any kind: the user can only check the name and the network
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise DataError(
            f"data.name {name!r} is no built-in data set, no folder of examples, and none that the Hub "
            f"gave us ({reason}); correct data.name, connect to the network, or set data.train to a file"
        ) from error
    if "train" not in splits:
        there = ", ".join(repr(split) for split in splits)
        raise DataError(f"data.name {name!r} has the splits {there} and no 'train'; set data.name to another")
    tables = {
        split: _table(name, split, splits[split], wanted, label) for split in ("train", *test_splits) if split in splits
    }
    return tables.pop("train"), list(tables.values())


def _load(name: str) -> Any:
    import datasets

    if (Path(name) / "dataset_dict.json").is_file():
        return datasets.load_from_disk(name)
    if (Path(name) / "state.json").is_file():
        return {"train": datasets.load_from_disk(name)}
    if Path(name).is_dir():
        return datasets.load_dataset(name)
    repository, _, configuration = name.partition(":")
    return datasets.load_dataset(repository, configuration or None)


def _table(name: str, split: str, rows: Any, wanted: Collection[str], label: str) -> Table:
    """One split, with the class names that its features declare, for a label or for the entries of a list of labels."""
    present = tuple(rows.column_names)
    columns = {column: list(rows[column]) for column in wanted if column in present}
    declared = _declared(rows.features, [label])
    return Table(f"{name} ({split})", columns, present, range(1, len(rows) + 1), "row", declared)


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
