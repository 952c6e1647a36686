"""Atomic writes: whole files under concurrent writers, private ones for the owner alone, no remains of failed writes."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from secure_fed.errors import StorageError
from secure_fed.runs import durable
from secure_fed.runs.durable import atomic_write, clear_parts, part_of
from tests.cells import every


def test_of_two_who_write_at_once_each_writes_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writer waits with its file open until the other has opened its own: with one name, both would write to one file."""
    both = threading.Barrier(2, timeout=10)
    monkeypatch.setattr(durable, "crash_point", lambda name: both.wait())
    contents, failed = [b"a" * 300_000, b"b" * 200_000], []

    def write(content: bytes) -> None:
        try:
            atomic_write(tmp_path / "file", content)
        except (StorageError, threading.BrokenBarrierError) as error:
            failed.append(error)
            both.abort()

    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert not failed
    assert (tmp_path / "file").read_bytes() in contents
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("instant", ["file:written", "file:synced"])
def test_whatever_stops_a_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, instant: str
) -> None:
    atomic_write(tmp_path / "file", "old")

    def fail(name: str) -> None:
        if name == instant:
            raise failure

    monkeypatch.setattr(durable, "crash_point", fail)
    with pytest.raises((StorageError, KeyboardInterrupt, MemoryError)):
        atomic_write(tmp_path / "file", "new")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.skipif(os.name == "nt", reason="no such rights there")
@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o640)])
def test_who_may_read_it_from_the_first_byte_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private: bool, mode: int
) -> None:
    seen = []

    def look(name: str) -> None:
        seen.extend(stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir())

    monkeypatch.setattr(durable, "crash_point", look)
    before = os.umask(0o027)
    try:
        atomic_write(tmp_path / "file", "content", private=private)
    finally:
        os.umask(before)
    assert seen == [mode] * 3, "while it is written, when it is whole, and under its name"


def test_a_link_laid_in_the_way_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("untouched")
    for name in ("file.part", "file"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    atomic_write(tmp_path / "file", "new")
    assert (tmp_path / "elsewhere").read_text() == "untouched"
    assert not (tmp_path / "file").is_symlink()


@every(
    ("name", "becomes"),
    [
        ("a.json.0123456789abcdef.part", "a.json"),
        ("a.json.0123456789abcdef.part.0123456789abcdef.part", "a.json.0123456789abcdef.part"),
        ("a.json.part", ""),
        ("a.json.0123456789ABCDEF.part", ""),
        ("a.json.0123456789abcdef.part\n", ""),
        (".0123456789abcdef.part", ""),
        ("a.json", ""),
    ],
)
def test_only_what_a_writer_names_so_is_taken_for_its(name: str, becomes: str) -> None:
    assert part_of(name) == becomes


def test_what_a_killed_writer_leaves_has_such_a_name_and_can_be_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is listed at each point where a kill would leave a file."""
    kept = []
    monkeypatch.setattr(durable, "crash_point", lambda name: kept.extend(file.name for file in tmp_path.iterdir()))
    atomic_write(tmp_path / "a", "content")
    monkeypatch.undo()
    assert [part_of(name) for name in kept] == ["a", "a", ""]
    for name in (kept[0], "own.part"):
        (tmp_path / name).touch()
    clear_parts(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"a", "own.part"}
    clear_parts(tmp_path / "nothing")
