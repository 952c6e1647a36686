"""Data sets that the `datasets` library can load: from the Hub, its cache, or a folder it understands.

`commit` looks up the revision of a model or of a data set before anything is loaded, in the user's cache and on the Hub. It
needs no torch, so that a wrong revision is reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secure_fed.activity import activity
from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, DataError, ModelError, SecureFedError
from secure_fed.learning.data.on_disk import LONG, Column
from secure_fed.learning.data.rows import Table

if TYPE_CHECKING:
    from pyarrow import Schema


Classes = tuple[tuple[str, tuple[str, ...]], ...]  # as `Table.classes`
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PATIENCE = 5.0  # seconds for the Hub's answer


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
        others = [one for one in test_splits if one in splits and one != data.split]
        tests = [data.test_split] if data.test_split else others
        train, *tested = (_table(data.name, split, splits[split], wanted, label) for split in (data.split, *tests))
    return train, tested


def no_split(data: DataConfig, setting: str, there: Sequence[str]) -> DataError:
    """The error for a split that the data set does not have. there: the names of its splits, if they are known."""
    split = data.split if setting == "data.split" else data.test_split
    others = f", and has {', '.join(map(repr, there))}" if there else ""
    return DataError(
        f"{setting} is {split!r}, which data.name {data.name!r} does not have{others}; set {setting} to one of its splits"
    ).about(setting, split, f"one of {', '.join(there)}" if there else "a split of the data set")


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
        _require_read("dataset", repository, data.revision, files)
    return splits


def _require_read(kind: str, repository: str, revision: str, files: list[Path]) -> None:
    """Refuse files of the cache that belong to another commit: `datasets` reads its newest copy if the Hub is out of reach."""
    wanted = commit(kind, repository, revision)
    others = {path.parent.name for path in files if _COMMIT.fullmatch(path.parent.name)} - {wanted}
    if wanted and others:
        raise _refused(kind, repository, revision, f"was not read, but the newest copy in the cache, {min(others)}")


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


def _declared(features: Mapping[str, Any], columns: Collection[str]) -> Classes:
    found = []
    for column in columns:
        feature = features.get(column)
        names = getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None)
        found += [(column, tuple(names))] if names else []
    return tuple(found)


@cache
def require_reachable(model: str, revision: str) -> None:
    """ModelError, within seconds, for a Hub model that is not in the cache while the Hub cannot be reached."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    with activity(f"asking the Hub for {model}"):
        try:
            if constants.HF_HUB_OFFLINE or try_to_load_from_cache(model, "config.json", revision=revision or None):
                return
            HfApi().repo_info(model, revision=revision or None, repo_type="model", timeout=_PATIENCE)
        except (HfHubHTTPError, ValueError):  # an answer, or no name of the Hub: loading says what is wrong with it
            return
        except Exception as error:
            raise ModelError(
                f"model.name is {model!r}, which is no folder and not in the cache, and the Hub cannot be reached: give a "
                "folder or builtin/tiny, or go online (HF_HUB_OFFLINE=1 uses the cache alone)"
            ).about("model.name", model, "a folder, or a model in the cache") from error


@cache
def commit(kind: str, repository: str, revision: str) -> str:
    """The commit that a revision names; "" if only loading can tell. kind: "model" or "dataset", of one id of the Hub.

    ConfigError for a revision that the Hub does not have or, offline, that the cache does not have.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RevisionNotFoundError

    if constants.HF_HUB_OFFLINE:
        found = _commit_in_cache(kind, repository, revision)
        if not found or not _is_cached(kind, repository, found):
            raise _refused(
                kind, repository, revision, "is not in the cache, and the Hub cannot be asked (HF_HUB_OFFLINE)"
            )
        return found
    with activity(f"asking the Hub for revision {revision} of {repository}"):
        try:
            return HfApi().repo_info(repository, revision=revision, repo_type=kind, timeout=_PATIENCE).sha or ""
        except RevisionNotFoundError as error:
            raise _refused(kind, repository, revision, "does not exist on the Hub") from error
        except Exception:  # no network, no such repository, no access: loading says which, or finds it in the cache
            return _commit_in_cache(kind, repository, revision)


def _refused(kind: str, repository: str, revision: str, why: str) -> ConfigError:
    setting = f"{'model' if kind == 'model' else 'data'}.revision"
    return ConfigError(
        f"{setting} is {revision!r}, which {why}: set it to a commit, tag or branch of {repository!r}, or go online"
    ).about(setting, revision, f"a revision of {repository}")


def _commit_in_cache(kind: str, repository: str, revision: str) -> str:
    """The commit of a revision by the cache's own notes; "" if there are none."""
    from huggingface_hub import constants

    note = Path(constants.HF_HUB_CACHE, f"{kind}s--{repository.replace('/', '--')}", "refs", revision)
    if note.is_file():
        return note.read_text(encoding="utf-8").strip()
    return revision if _COMMIT.fullmatch(revision) else ""


def _is_cached(kind: str, repository: str, wanted: str) -> bool:
    """Whether the cache has this commit: a model's files, or the rows that `datasets` prepared from a data set's files."""
    if kind == "model":
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE, f"models--{repository.replace('/', '--')}", "snapshots", wanted).is_dir()
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    owner, _, name = repository.rpartition("/")
    folder = "___".join(filter(None, (owner, camelcase_to_snakecase(name))))
    return any(Path(config.HF_DATASETS_CACHE, folder).glob(f"*/*/{wanted}"))
