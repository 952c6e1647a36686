"""Long columns on disk: equal to the same columns in memory, private, and of bounded memory."""

import csv
import gzip
import json
import os
import stat
import tempfile
import tracemalloc
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from transformers import AutoTokenizer

from secure_fed.config import RunConfig
from secure_fed.errors import DataError
from secure_fed.learning import problem, tasks
from secure_fed.learning.data import files, fingerprint, hub, on_disk, sources
from secure_fed.learning.data.on_disk import OnDisk, in_parts, kept, taken
from secure_fed.learning.models.locate import locate
from tests.cells import chosen, every
from tests.golden import refused


@dataclass(frozen=True)
class Pair:
    one: str
    other: tuple[int, ...]


ENTRIES = {
    "texts": ["", "a", "é\u2028\0", "\ud800", "x" * 100],
    "lists": [["a", "b"], [], [None, "c"], ["d"], [1, 2.5]],
    "mixed": [None, "a", 3, {"b": [1, {"c": None}]}, 2**80],
    "objects": [Pair(str(number), (number,) * number) for number in range(5)],
    "arrays of two kinds": [np.arange(3), np.arange(2, dtype=np.int32), np.ones(1), np.zeros(4), np.arange(3)],
    "matrices": [np.full((2, number), number) for number in range(5)],
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_disk, "LONG", 3)


@pytest.mark.usefixtures("small")
@every("name", ENTRIES)
def test_entries_come_back_in_any_order(name: str) -> None:
    entries = ENTRIES[name]
    column = kept(entries)
    assert isinstance(column, OnDisk)
    places = [4, 0, 0, -1]
    for found, expected in (
        (list(column), entries),
        (list(column[1:4]), entries[1:4]),
        (list(column.take(places).take([1, 3])), [entries[0], entries[-1]]),
        (list(taken(column, [])), []),
        ([column[-2]], [entries[-2]]),
        ([entry for part in in_parts(column) for entry in part], entries),
        (list(kept(column[:2], column[2:])), entries),
    ):
        assert list(map(repr, found)) == list(map(repr, expected))
    with pytest.raises(IndexError):
        column[5]


@pytest.mark.usefixtures("small")
@every("kind", ["int32", "int64", "float32", "bool"])
def test_arrays_keep_their_kind_and_cannot_be_written(kind: str) -> None:
    arrays = [np.arange(size).astype(kind) for size in (3, 1, 7, 2)]
    column = kept(arrays)
    assert isinstance(column, OnDisk)
    for found, own in zip(column, arrays, strict=True):
        assert found.dtype == own.dtype
        assert np.array_equal(found, own)
        with pytest.raises(ValueError, match="read-only"):
            found[0] = 1
    assert column.take([2, 0]).lengths.tolist() == [7, 3]
    with pytest.raises(TypeError):
        kept([*arrays, np.arange(2).astype("int8")])


@pytest.mark.usefixtures("small")
def test_few_entries_and_numbers_stay_in_memory() -> None:
    for entries in (["a", "b"], list(range(50)), [None] * 50, [0.5] * 50):
        assert kept(entries) == tuple(entries)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no list of open files")
@pytest.mark.usefixtures("small")
def test_a_file_has_no_name_and_is_readable_by_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(on_disk, "_last", None)
    before = os.umask(0)
    try:
        columns = [kept(["secret"] * 5) for _ in range(50)]
    finally:
        os.umask(before)
    assert all(isinstance(column, OnDisk) for column in columns)
    assert list(tmp_path.iterdir()) == []
    assert open_files(tmp_path) == [0o600], "columns share a file: a process may open some thousand"
    del columns
    assert open_files(tmp_path) == []


def open_files(folder: Path) -> list[int]:
    """The modes of this process's open files in a folder."""
    modes = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # of the listing itself
            if str(folder) in os.readlink(f"/proc/self/fd/{descriptor}"):
                modes.append(stat.S_IMODE(os.fstat(int(descriptor)).st_mode))
    return modes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forked processes")
@pytest.mark.usefixtures("small")
def test_a_forked_process_does_not_write_over_its_parents_columns() -> None:
    before = kept(["before"] * 5)
    child = os.fork()
    if not child:
        same = list(kept(["child"] * 50)) == ["child"] * 50 and list(before) == ["before"] * 5
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    after = kept(["parent"] * 50)
    assert (list(before), list(after)) == (["before"] * 5, ["parent"] * 50)


@pytest.mark.usefixtures("small")
def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**settings: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    monkeypatch.setattr(on_disk, "_last", None)
    with refused(DataError, hide=r"room in \S+"):
        kept(["a"] * 5)


ROWS = [
    {"text": f"word{i % 7} é {i}", "label": f"c{i % 2}", "site": f"s{i % 3}", "unread": "no"}
    | ({} if i % 5 else {"label_name": f"n{i % 2}"})
    for i in range(40)
]


def written(folder: Path, kind: str) -> str:
    """The rows as a file, or as a folder that only `datasets` reads."""
    path = folder / f"rows.{kind}"
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    names = ["text", "label", "site", "unread", "label_name"]
    if kind == "jsonl":
        path.write_text(text, encoding="utf-8")
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif kind in ("csv", "nested"):
        path = folder / "data" / "train.csv" if kind == "nested" else path
        path.parent.mkdir(exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, names).writerows([dict(zip(names, names, strict=True)), *ROWS])
    elif kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=7)
    else:
        path = folder / "saved"
        datasets.Dataset.from_list(ROWS).save_to_disk(path)
    return str(folder if kind == "nested" else path)


@every("kind", ["jsonl", "jsonl.gz", "csv", "parquet", "saved", "nested"])
def test_every_source_gives_the_same_rows_from_disk(kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        place = written(Path(folder), kind)
        data = {"name" if kind in ("saved", "nested") else "train": place, "client": "site"}
        config = RunConfig.from_dict({"data": data}).data
        cache = Path(folder, "cache")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        memory = sources.load(config, tasks.build(config), seed=0)
        patch.setattr(on_disk, "LONG", 3)
        disk = sources.load(config, tasks.build(config), seed=0)
        assert isinstance(disk.train.text, OnDisk)
        assert isinstance(memory.train.text, tuple)
        assert len(memory.whole) == len(ROWS)
        for one, other in ((memory.train, disk.train), (memory.test, disk.test), (memory.whole, disk.whole)):
            assert (list(one.text), one.label, one.client) == (list(other.text), other.label, other.client)
            assert fingerprint.of_rows(one) == fingerprint.of_rows(other)
            units = [[index] for index in range(len(one))]
            assert fingerprint.of_units(one, units) == fingerprint.of_units(other, units)
        assert not list(cache.rglob("*.arrow")), "a folder's rows were copied into the cache"


@pytest.mark.parametrize("kind", chosen(["jsonl", "parquet", "saved"], ["parquet"]))
def test_memory_does_not_grow_with_texts_and_tokens(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (on_disk, files, hub):
        monkeypatch.setattr(module, "LONG", 50)
    monkeypatch.setattr(problem, "WINDOW", 50)
    peak_of(tmp_path / "first", kind, 60)  # imports
    few, many = peak_of(tmp_path / "few", kind, 200), peak_of(tmp_path / "many", kind, 800)
    assert many - few < 600 * 1000, "a row has 1,500 bytes of text, and 1,600 of token ids"


def peak_of(folder: Path, kind: str, rows: int) -> int:
    """The most bytes that Python held while it read and tokenised this many rows."""
    made = [{"text": f"{i} " + "a b c d e " * 150, "label": i % 2, "other": "x" * 1000} for i in range(rows)]
    folder.mkdir()
    place = folder / ("saved" if kind == "saved" else f"train.{kind}")
    if kind == "jsonl":
        place.write_text("".join(json.dumps(row) + "\n" for row in made))
    elif kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(made), place)
    else:
        datasets.Dataset.from_list(made).save_to_disk(place)
    del made
    config = RunConfig.from_dict({"data": {"name" if kind == "saved" else "train": str(place)}})
    task, tokenizer = tasks.build(config.data), AutoTokenizer.from_pretrained(locate("builtin/tiny"))
    tracemalloc.start()
    try:
        source = sources.load(config.data, task, seed=0)
        fingerprint.of_rows(source.train, source.test)
        examples = problem.encoded(task, tokenizer, source.train, 400)
        assert examples.lengths.sum() > 0.7 * 400 * rows
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
