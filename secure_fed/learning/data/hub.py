"""Data sets that the `datasets` library can load: from the Hub, its cache, or a folder it understands."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secure_fed.config import DataConfig
from secure_fed.errors import DataError
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
    name = data.name
    try:
        splits = _load(data)
    except Exception as error:  # of any kind: the user can only check the name and the network
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise DataError(
            f"data.name {name!r} is no built-in data set, no folder of examples, and none that the Hub "
            f"gave us ({reason}); correct data.name, connect to the network, or set data.train to a file"
        ) from error
    for setting, split in (("data.split", data.split), ("data.test_split", data.test_split or data.split)):
        if split not in splits:
            raise no_split(data, setting, list(splits))
    tests = (
        [data.test_split] if data.test_split else [one for one in test_splits if one in splits and one != data.split]
    )
    train, *others = (_table(name, split, splits[split], wanted, label) for split in (data.split, *tests))
    return train, others


def no_split(data: DataConfig, setting: str, there: Sequence[str]) -> DataError:
    """The error for a split that the data set does not have. there: the names of its splits, if they are known."""
    split = data.split if setting == "data.split" else data.test_split
    others = f", and has {', '.join(map(repr, there))}" if there else ""
    return DataError(
        f"{setting} is {split!r}, which data.name {data.name!r} does not have{others}; set {setting} to one of its splits"
    ).about(setting, split, f"one of {', '.join(there)}" if there else "a split of the data set")


def _load(data: DataConfig) -> Any:
    import datasets

    name = data.name
    if (Path(name) / "dataset_dict.json").is_file():
        return datasets.load_from_disk(name)
    if (Path(name) / "state.json").is_file():
        return {data.split: datasets.load_from_disk(name)}
    if Path(name).is_dir():
        return datasets.load_dataset(name)
    repository, _, configuration = name.partition(":")
    return datasets.load_dataset(repository, configuration or None, revision=data.revision or None)


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
