"""The sources of examples: the built-in notes, a Hub data set, a folder, or files of your own.

`find` names the files that the settings of [data] mean, and `require_columns` checks the names of their columns before any
example is read. Both need no torch, so that a wrong name is reported at once. `load` reads the training and the test rows. Rows
of `evaluation.non_members` are of the same kind, and no client trains on them: a row that is also a training row is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from unicodedata import normalize

from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, DataError, plainly
from secure_fed.learning.data import chats, files, hub
from secure_fed.learning.data.holdout import HELD_OUT, Indices, at_random, each_by_itself, whole_clients
from secure_fed.learning.data.rows import (
    Columns,
    Reads,
    Rows,
    Table,
    Vocabulary,
    normal_text,
    require_some_text,
    require_text_to_learn,
)

GENERATED, SPLIT, FILES = "generated", "test split of the data", "data.test"
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


def _of_paths(paths: Sequence[Path], test_paths: Sequence[Path], *, keyed: bool) -> Named:
    if len(paths) == 1 and paths[0].is_dir():
        train, test = files.split_files(paths[0], "train"), test_files(paths[0])
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
        test = _expanded(test_paths)
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
            test = files.split_files(folder, data.test_split) if data.test_split else test_files(folder)
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


def generated(data: DataConfig) -> bool:
    """Whether the examples are the built-in notes, which follow from settings and seed alone."""
    return not data.train and not data.test and data.name == _BUILTIN


def language_column(data: DataConfig) -> str:
    """The column of each row's language, if the partition uses it; otherwise ""."""
    return data.language if data.partition == "language" else ""


def overlaps(data: DataConfig) -> Iterator[str]:
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


def files_of_non_members(named: str | Sequence[str]) -> tuple[Path, ...]:
    """The files of `evaluation.non_members`. A folder stands for the files of its test split."""
    paths = _paths(named, "evaluation.non_members")
    found = _expanded(paths)
    if paths and not found:
        raise DataError(f"{paths[0]} holds no test examples (test.jsonl, ...); set evaluation.non_members to a file")
    return tuple(found)


def test_files(folder: Path) -> list[Path]:
    """The files of the first split of `TEST_SPLITS` in the folder."""
    return next((found for split in TEST_SPLITS if (found := files.split_files(folder, split))), [])


def _expanded(paths: Sequence[Path], of_folder: Callable[[Path], list[Path]] = test_files) -> list[Path]:
    """The paths, and in place of each folder its files."""
    return [file for path in paths for file in (of_folder(path) if path.is_dir() else [path])]


def require_columns(
    data: DataConfig, columns: Columns, person: str = "", non_members: str | Sequence[str] = "", ranks: str = ""
) -> None:
    """Refuse a missing file, or a file without a column that the task (`columns`) or [data] needs."""
    named, others = find(data) or Named((), ()), files_of_non_members(non_members)
    if generated(data):
        require_columns_of_notes(data, person, ranks)
        return
    read = {"data.text": columns.text, "data.text_b": columns.text_b, "data.label": columns.label}
    owned = {"data.client": data.client, **_others(data, person, ranks)}
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


def _others(data: DataConfig, person: str, ranks: str) -> dict[str, str]:
    """The columns of training rows beside the task's and the clients', by their settings."""
    return {"privacy.person_column": person, "data.language": language_column(data), "method.ranks_column": ranks}


def require_columns_of_notes(data: DataConfig, person: str, ranks: str = "") -> None:
    """Refuse a column that the built-in notes do not have."""
    if data.client not in ("", "site"):
        raise DataError(f"data.client is {data.client!r}; {_BUILTIN} has one such column, 'site'")
    for setting, column in _others(data, person, ranks).items():
        if column:
            raise DataError(f"{setting} is {column!r}, but {_BUILTIN} has no such column; use files")


@dataclass(frozen=True, slots=True)
class Source:
    """Labelled examples, divided into training and test.

    whole: the training rows, including the rows held out for testing, in their original order
    keyed: whether the user declared the client of each example (`train.client`), by naming a column or by
           one file for each client
    tested: the origin of the test rows
    languages: the language of each training row, if the partition uses it
    others: the rows of `evaluation.non_members`, if there are any
    form: the form of the inputs, where there are several
    ranks: the rank of each client, if a column gives it
    """

    train: Rows
    test: Rows
    whole: Rows
    keyed: bool
    tested: str = GENERATED
    languages: tuple[str, ...] | None = None
    others: Rows | None = None
    form: str = ""
    ranks: Mapping[str, int] = field(default_factory=dict)


def load(
    data: DataConfig,
    task: Reads,
    *,
    seed: int,
    person: str = "",
    unit: str = "none",
    non_members: str | Sequence[str] = "",
    ranks: str = "",
) -> Source:
    """The training and test examples that `data` names, read by `task`; the same arguments give the same rows.

    `data.train` overrides `data.name`. Without test data, `data.test_fraction` of the training rows is held
    out by `seed`. The column `data.client` names the client of an example; without it, each file of a list is
    one client, with the file's name. `person` is the column that names the person of a training example. unit:
    the unit of privacy, which is held out as a whole. non_members: files of rows that no client trains on. ranks: the column
    with the rank of a training row's client.
    """
    named = find(data)
    if generated(data):
        from secure_fed.learning.data import notes

        require_columns_of_notes(data, person, ranks)
        train = notes.generate(data.examples, seed=seed, split="train")
        test = notes.generate(data.test_examples, seed=seed, split="test")
        return Source(train, test, train, keyed=data.client == "site")
    language = language_column(data)
    wanted = _wanted(task, data.client, person, language, ranks)
    if named:
        train_tables = [files.read(path, wanted, "data.train") for path in named.train]
        test_tables = [files.read(path, wanted, "data.test") for path in named.test]
    else:
        train_tables, test_tables = _from_hub(data, wanted, task.columns.label)
    _require_texts(task, train_tables, test_tables)
    train, test = task.read(train_tables, test_tables)
    train = _owned(data, train, train_tables, need_client=True, person=person)
    if train.client is None and named and named.owners is not None:
        owned = zip(named.owners, train_tables, strict=True)
        train = replace(train, client=tuple(owner for owner, table in owned for _ in range(len(table))))
    keyed = train.client is not None
    languages = _keys(train_tables, language, "data.language") if language else None
    if test_tables:
        source = Source(train, _owned(data, test, test_tables, need_client=False), train, keyed, SPLIT, languages)
    else:
        kept, out, tested = _held_out(data, train, unit, seed, keyed=keyed)
        kept_languages = languages and tuple(languages[int(index)] for index in kept)
        source = Source(train.take(kept), train.take(out), train, keyed, tested, kept_languages)
    if paths := files_of_non_members(non_members):
        found = of_one_party(task, paths, "evaluation.non_members")
        others = task.rows(found, task.classes(train_tables))
        require_apart(others, source.train)
        source = replace(source, others=others)
    source = replace(source, ranks=_ranks(train_tables, ranks, train.client or ()) if ranks else {})
    return replace(source, form=task.form(train_tables), tested=FILES if data.test else source.tested)


def _ranks(tables: Sequence[Table], name: str, clients: Sequence[str]) -> dict[str, int]:
    """The rank of each client: the same integer in all its rows."""
    if not clients:
        raise DataError(
            f"method.ranks_column is {name!r}, but no row has a client: set data.client, or give a file for each"
        ).about("method.ranks_column", name, "data that name their clients")
    found: dict[str, int] = {}
    rows = (
        (table, row, value) for table in tables for row, value in enumerate(table.column(name, "method.ranks_column"))
    )
    for client, (table, row, value) in zip(clients, rows, strict=True):
        text = str(value).strip()
        if not re.fullmatch("[0-9]{1,6}", text, re.ASCII):
            raise DataError(
                f"{table.place(row)}: the rank in {name!r} is {text!r:.40}, not 1 to 6 digits; correct it, or set "
                "method.ranks_column to another column"
            ).about("method.ranks_column", value, "integers of at most six digits")
        if found.setdefault(client, int(text)) != int(text):
            raise DataError(
                f"{table.place(row)}: the rank in {name!r} is {value!r}, but client {client!r} has {found[client]} before; "
                "give all its rows one rank, or set method.ranks_column to another column"
            ).about("method.ranks_column", value, "one rank for a client")
    return found


def _wanted(task: Reads, *others: str) -> Collection[str]:
    """The names of the columns to read: the task's columns, and `others`."""
    names = (task.columns.text, task.columns.text_b, task.columns.label, *task.beside, *others)
    return dict.fromkeys(name for name in names if name)


def _from_hub(data: DataConfig, wanted: Collection[str], label: str) -> tuple[list[Table], list[Table]]:
    """The tables of training and of test examples."""
    train, tests = hub.read(data, wanted, label, TEST_SPLITS)
    if data.test_split:
        return [train], tests
    # Benchmarks publish test splits whose labels are all -1.
    labelled = (t for t in tests if not label or any(value not in (-1, None) for value in t.columns.get(label, ())))
    return [train], list(islice(labelled, 1))


def _require_texts(task: Reads, train: Sequence[Table], test: Sequence[Table]) -> None:
    """Refuse columns without text, and training rows without any. A test row may be empty: it teaches nothing."""
    columns = [("data.text", task.columns.text), ("data.text_b", task.columns.text_b)]
    for table in (*train, *test):
        for setting, name in columns:
            if name:
                require_some_text(table, name, setting)
    require_text_to_learn(train, [(name, setting) for setting, name in columns if name in task.learned])


def _owned(data: DataConfig, rows: Rows, tables: Sequence[Table], *, need_client: bool, person: str = "") -> Rows:
    """The rows with their clients and persons from the tables; test tables may lack the client column."""
    has_client = data.client and (need_client or all(data.client in table.columns for table in tables))
    client = _keys(tables, data.client, "data.client") if has_client else None
    return replace(rows, client=client, person=_keys(tables, person, "privacy.person_column") if person else None)


def _keys(tables: Sequence[Table], name: str, setting: str) -> tuple[str, ...]:
    """The client or person of each row. Spaces around a name are ignored, and so is which of Unicode's forms it has: two
    spellings of one person would be protected apart.
    """
    keys: list[str] = []
    for table in tables:
        for row, value in enumerate(table.column(name, setting)):
            if not isinstance(value, int | str) or not str(value).strip():
                raise DataError(
                    f"{table.place(row)}: the {setting.rpartition('.')[2].partition('_')[0]} in {name!r} is {value!r}, "
                    f"neither an integer nor a name; correct it or set {setting} to another column"
                )
            keys.append(normalize("NFC", str(value).strip()))
    return tuple(keys)


def _held_out(data: DataConfig, rows: Rows, unit: str, seed: int, *, keyed: bool) -> tuple[Indices, Indices, str]:
    """The training rows, the held-out test rows, and how these were chosen: by unit, if privacy protects one.

    Clients that secure-fed makes from the remaining rows contain no held-out rows.
    """
    share = data.test_fraction
    if unit == "none":
        return *at_random(rows, share, seed), HELD_OUT["row"]
    if unit == "person":
        return *each_by_itself(rows, share, seed, persons=True), HELD_OUT["person"]
    if unit == "client" and keyed and data.partition in ("auto", "natural"):
        return *whole_clients(rows, share, seed), HELD_OUT["client"]
    return *each_by_itself(rows, share, seed, persons=False), HELD_OUT["example"]


def of_known_classes(task: Reads, paths: Sequence[Path], classes: Vocabulary, setting: str, person: str = "") -> Rows:
    """The rows of files of one party, which does not see the other parties' labels: the classes are given."""
    tables = of_one_party(task, paths, setting, person)
    rows = task.rows(tables, classes)
    return replace(rows, person=_keys(tables, person, "privacy.person_column")) if person else rows


def of_one_party(task: Reads, paths: Sequence[Path], setting: str, *others: str) -> list[Table]:
    """The tables of one party's files: the columns of the task, and others by name.

    A folder stands for its files called train if the setting is data.train, and otherwise for its test split's files.
    """
    train = setting == "data.train"
    found = _expanded(paths, partial(files.split_files, split="train") if train else test_files)
    tables = [files.read(path, _wanted(task, *others), setting) for path in found]
    if not any(map(len, tables)):
        places = ", ".join(map(str, paths)) or "nothing"
        raise DataError(f"{places} holds no examples; set {setting} to a file or a folder that does")
    _require_texts(task, tables if train else [], [] if train else tables)
    return tables


def require_apart(rows: Rows, trained: Rows, setting: str = "evaluation.non_members") -> None:
    """Refuse rows of this setting whose texts are also the texts of a training row, whatever their labels are."""
    members = set(_plain(trained))
    if both := [number for number, row in enumerate(_plain(rows), 1) if row in members]:
        raise are_members(len(both), both[0], "labels, white space and capitals do not count", setting)


def are_members(count: int, first: int, compared: str, setting: str = "evaluation.non_members") -> DataError:
    return DataError(
        f"{setting} has {count} rows that are also training rows, such as row {first} ({compared}): what a client "
        "trains on is a member, so take them out"
    ).about(setting, count, "rows that no client trains on")


def _plain(rows: Rows) -> list[tuple[str, str]]:
    seconds = rows.text_b or ("",) * len(rows)
    return [(normal_text(one), normal_text(two)) for one, two in zip(rows.text, seconds, strict=True)]
