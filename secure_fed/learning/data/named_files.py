"""The files that settings name, and the names of their columns, checked before any example is read.

Needs no torch, so that a wrong name is reported at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, DataError, plainly
from secure_fed.learning.data import chats, files, hub
from secure_fed.learning.data.rows import Columns

TEST_SPLITS = ("test", "validation", "valid", "dev")  # the first that exists is the test data

_BUILTIN = "builtin/notes"


@dataclass(frozen=True, slots=True)
class Named:
    """The files of training and of test examples. owners: the client of each training file, if each belongs to a client."""

    train: tuple[Path, ...]
    test: tuple[Path, ...]
    owners: tuple[str, ...] | None = None


def find(data: DataConfig) -> Named | None:
    """The files that [data] names; None for the built-in notes and for a data set of the Hub."""
    paths, test_paths = _paths(data.train, "data.train"), _paths(data.test, "data.test")
    if test_paths and not paths:
        raise DataError(f"data.test is {str(test_paths[0])!r} and data.train is not set; set data.train too")
    if paths:
        return _of_paths(paths, test_paths, keyed=not isinstance(data.train, str))
    return None if generated(data) else _of_name(data)


def of_both(data: DataConfig) -> Iterator[str]:
    """A warning if a file, or a split of a data set, is both of training and of test examples."""
    if data.test_split and data.test_split == data.split:
        yield (
            f"data.test_split is {data.split!r}, which is data.split too, so accuracy is measured on texts that were trained on"
        )
        return
    named = find(data)
    trained = {path.resolve() for path in named.train} if named else set()
    if named and (both := [path for path in named.test if path.resolve() in trained]):
        yield f"data.test names {both[0]}, which data.train names too, so accuracy is measured on texts that were trained on"


def require_columns(data: DataConfig, columns: Columns, group: str = "", non_members: str | Sequence[str] = "") -> None:
    """Refuse a missing file, or a file without a column that the task (`columns`) or [data] needs."""
    named, others = find(data) or Named((), ()), of_non_members(non_members)
    if generated(data):
        require_columns_of_notes(data, group)
        return
    read = {"data.text": columns.text, "data.text_b": columns.text_b, "data.label": columns.label}
    owned = {"data.client": data.client, "privacy.group_column": group, "data.language": spoken(data)}
    for setting, paths, needed in (
        ("data.train", named.train, read | owned),
        ("data.test", named.test, read),
        ("evaluation.non_members", others, read),
    ):
        for path in paths:
            head = files.head(path, [name for name in needed.values() if name], setting)
            if data.task == "chat":
                chats.form(head.present, head.source, columns.text)
            for chosen_by, name in needed.items():
                if name:
                    head.column(name, chosen_by)


def require_columns_of_notes(data: DataConfig, group: str) -> None:
    """Refuse a column that the built-in notes do not have."""
    if data.client not in ("", "site"):
        raise DataError(f"data.client is {data.client!r}; {_BUILTIN} has one such column, 'site'")
    for setting, column in (("privacy.group_column", group), ("data.language", spoken(data))):
        if column:
            raise DataError(f"{setting} is {column!r}, but {_BUILTIN} has no such column; use files")


def spoken(data: DataConfig) -> str:
    """The column of each row's language, if the partition uses it; otherwise ""."""
    return data.language if data.partition == "language" else ""


def generated(data: DataConfig) -> bool:
    """Whether the examples are the built-in notes, which follow from settings and seed alone."""
    return not data.train and not data.test and data.name == _BUILTIN


def of_non_members(named: str | Sequence[str]) -> tuple[Path, ...]:
    """The files of `evaluation.non_members`. A folder stands for the files of its test split."""
    paths = _paths(named, "evaluation.non_members")
    found = [file for path in paths for file in (of_test(path) if path.is_dir() else [path])]
    if paths and not found:
        raise DataError(f"{paths[0]} holds no test examples (test.jsonl, ...); set evaluation.non_members to a file")
    return tuple(found)


def of_test(folder: Path) -> list[Path]:
    """The files of the first split of `TEST_SPLITS` in the folder."""
    return next((found for split in TEST_SPLITS if (found := files.split_files(folder, split))), [])


def _of_paths(paths: Sequence[Path], test_paths: Sequence[Path], *, keyed: bool) -> Named:
    if len(paths) == 1 and paths[0].is_dir():
        train, test = files.split_files(paths[0], "train"), of_test(paths[0])
        if not train:
            _require_files(paths[0], "data.train")
            raise DataError(
                f"{paths[0]} holds no training examples (train.jsonl, train.csv, train.parquet, ...); "
                f"set data.train to a folder that does, or to a file"
            )
        keyed = False
    else:
        train, test = list(paths), []
    if test_paths:
        test = [file for path in test_paths for file in (of_test(path) if path.is_dir() else [path])]
        if not test:
            _require_files(test_paths[0], "data.test")
            raise DataError(f"{test_paths[0]} holds no test examples (test.jsonl, ...); set data.test to a file")
    return Named(tuple(train), tuple(test), _unique([files.stem(path) for path in train]) if keyed else None)


def _require_files(folder: Path, setting: str) -> None:
    """Refuse a folder that `save_to_disk` of `datasets` wrote: only `data.name` can name such a folder."""
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        raise DataError(
            f"{folder} was written by save_to_disk of datasets, which {setting} does not read: set data.name to it, or "
            f"{setting} to a file that to_parquet wrote"
        )


def _of_name(data: DataConfig) -> Named | None:
    for folder in _paths(data.name, "data.name"):
        if folder.is_file():
            raise DataError(f"data.name is the file {data.name!r}; set data.train to it instead")
        if folder.exists() and data.revision:
            raise ConfigError(
                f"data.revision is {data.revision!r}, and data.name {data.name!r} is no Hub data set but a folder, which has "
                "one revision: leave data.revision out"
            ).about("data.revision", data.revision, "left out beside a folder")
        if folder.is_dir() and (train := files.split_files(folder, data.split)):
            test = files.split_files(folder, data.test_split) if data.test_split else of_test(folder)
            if data.test_split and not test:
                raise hub.no_split(data, "data.test_split", [])
            return Named(tuple(train), tuple(test))
    if data.revision:
        hub.commit("dataset", data.name.partition(":")[0], data.revision)
    return None


def _paths(value: str | Sequence[str], setting: str) -> list[Path]:
    """The paths of a setting. A path that the system cannot look up is refused; it need not exist."""
    if not isinstance(value, str) and not any(value):
        raise ConfigError(f"{setting} is a list without a file; name at least one, or leave the setting out")
    paths = []
    for text in filter(None, [value] if isinstance(value, str) else value):
        with plainly(DataError, f"{text} cannot be read", f"set {setting} to a file or a folder that can"):
            paths.append(Path(text).expanduser())
            paths[-1].exists()
    return paths


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    """The names in order; repeated names get "-2", "-3", ... appended."""
    taken: list[str] = []
    for name in names:
        candidates = (name, *(f"{name}-{count}" for count in range(2, len(names) + 2)))
        taken.append(next(candidate for candidate in candidates if candidate not in taken))
    return tuple(taken)
