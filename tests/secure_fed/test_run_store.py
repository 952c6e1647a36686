"""The run directory: what is stored, what is refused, and the messages of the refusals."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from secure_fed.errors import RunDirectoryError, StorageError
from secure_fed.methods.method import State
from secure_fed.runs import durable
from secure_fed.runs import store as run_store
from secure_fed.runs.directory import CONFIG
from secure_fed.runs.durable import append_line, atomic_write
from secure_fed.runs.store import RunStore, read_checkpoint, read_personal, read_records, resumable
from secure_fed.tensors.tensors import LowRank, Tensors
from tests.cells import chosen
from tests.golden import golden, refused
from tests.secure_fed import toys
from tests.secure_fed.conftest import Ran

pytestmark = pytest.mark.usefixtures("never_drawn")

FACTS = {
    "label_names": ["x", "y"],
    "clients": ["a", "b"],
    "partition": {"jensen_shannon": float("nan"), "sizes": [3, 4]},
    "versions": {"torch": "2"},
}
STATE = State(
    Tensors({"w": torch.arange(6.0).view(2, 3), "p": LowRank(torch.ones(4, 1), torch.ones(1, 4))}),
    round=1,
    memory=Tensors({"m/change/w": torch.ones(2)}),
    clip_norm=0.1 + 0.2,
)
ANY: Callable[[State], bool] = lambda state: True  # noqa: E731 - whether a state fits the run
PERSONAL = {0: Tensors({"head": torch.ones(2)}), 12: Tensors({"head": torch.zeros(2)})}


@pytest.fixture
def held(tmp_path: Path) -> Path:
    """A run directory with one of three rounds done."""
    store = RunStore(tmp_path / "run")
    store.begin(toys.config(), FACTS, ANY)
    store.save(STATE, PERSONAL, {"round": 1}, {})
    store.close()
    return tmp_path / "run"


def begin(
    path: Path,
    settings: dict[str, Any] | None = None,
    facts: dict[str, Any] = FACTS,
    admits: Callable[[State], bool] = ANY,
) -> None:
    store = RunStore(path)
    try:
        store.begin(toys.config(settings), facts, admits)
    finally:
        store.close()


# Files are read as they were written.


def test_a_state_comes_back_bit_for_bit(held: Path) -> None:
    """Views of the file would keep it from being replaced on some systems, and unaligned views may compute other bits."""
    checkpoint = read_checkpoint(held)
    assert checkpoint is not None
    assert checkpoint.state.round == 1
    assert toys.same(checkpoint.state.tensors, STATE.tensors)
    assert toys.same(checkpoint.state.memory, STATE.memory)
    assert checkpoint.state.clip_norm == STATE.clip_norm
    for part in checkpoint.state.tensors.parts().values():
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()
        assert part.data_ptr() % 64 == 0
    personal = read_personal(held, 1)
    assert personal.keys() == PERSONAL.keys()
    assert all(toys.same(personal[client], kept) for client, kept in PERSONAL.items())
    assert run_store.read_config(held) == toys.config()
    assert run_store.read_facts(held)["clients"] == ["a", "b"]
    assert not list(held.glob("*.part"))


# Which run a directory belongs to.


def test_a_state_that_does_not_fit_is_refused_before_the_configuration_is_replaced(held: Path) -> None:
    before = (held / CONFIG).read_bytes()
    with refused(RunDirectoryError):
        begin(held, {"federation.rounds": 9}, admits=lambda state: state.round != STATE.round)
    assert (held / CONFIG).read_bytes() == before


def test_another_configuration_is_refused_with_every_difference_named(held: Path) -> None:
    with refused(RunDirectoryError):
        begin(held, {"training.lr": 0.5, "federation.seed": 3})
    assert run_store.read_config(held) == toys.config()


def test_other_data_are_refused(held: Path) -> None:
    for changed in ({"clients": ["a", "c"]}, {"partition": {"sizes": [2, 5]}}):
        with refused(RunDirectoryError):
            begin(held, facts={**FACTS, **changed})
    begin(held, facts={**FACTS, "versions": {"torch": "3"}})  # other versions of packages are not other data


def test_a_reader_and_a_run_exclude_each_other_as_two_of_a_kind_do(held: Path) -> None:
    first = RunStore(held)
    for another in (lambda: RunStore(held), lambda: run_store.locked(held).__enter__()):
        with refused(RunDirectoryError):
            another()
    first.close()
    with run_store.locked(held):
        for another in (lambda: RunStore(held), lambda: run_store.locked(held).__enter__()):
            with refused(RunDirectoryError):
                another()
    with pytest.raises(ZeroDivisionError), run_store.locked(held):
        raise ZeroDivisionError
    RunStore(held).close()  # a reader that fails lets go


def test_where_no_lock_can_be_made_a_run_is_read_without(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (held / ".lock").unlink(missing_ok=True)
    (held / ".lock").mkdir()
    with run_store.locked(held):
        assert read_records(held)
    for refusal in (PermissionError(errno.EACCES, "Permission denied"), OSError(errno.EROFS, "Read-only")):
        monkeypatch.setattr(run_store.filelock.FileLock, "acquire", Mock(side_effect=refusal))
        with run_store.locked(held):
            assert read_records(held)


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_where_there_is_no_run_nothing_is_held_and_nothing_made(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with run_store.locked(tmp_path / name):
        assert not list(tmp_path.glob("**/.lock"))
    assert not (tmp_path / "nothing").exists()
    with refused(RunDirectoryError):
        run_store.read_config(tmp_path / name)


def test_what_stops_a_run_from_outside_says_how_it_goes_on(held: Path, tmp_path: Path) -> None:
    for path, stop in (
        (held, KeyboardInterrupt()),
        (held, StorageError("full")),
        (tmp_path / "none", KeyboardInterrupt()),
    ):
        with refused(type(stop)), resumable(path):
            raise stop


def test_a_directory_with_a_run_or_anything_else_is_no_place_for_a_new_one(held: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    for path in (held, tmp_path / "notes", tmp_path / "notes" / "diary.txt"):
        with refused(RunDirectoryError):
            run_store.require_unused(path)
    with refused(RunDirectoryError):
        begin(tmp_path / "notes")
    run_store.require_unused(tmp_path / "nothing yet")


def test_what_a_killed_start_leaves_is_cleared_away_and_is_a_place_for_a_new_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    RunStore(path).close()
    (path / ".lock").touch()
    (path / "config.json.0123456789abcdef.part").write_text('{"mod')
    run_store.require_unused(path)
    begin(path)
    assert run_store.read_config(path) == toys.config()
    for name in ("checkpoint.safetensors.0123456789abcdef.part", "report.html.0123456789abcdef.part", "own.part"):
        (path / name).write_text("half")
    RunStore(path).close()
    assert [file.name for file in path.glob("*.part")] == ["own.part"]


# Damage.


def test_a_damaged_checkpoint_is_refused(held: Path) -> None:
    file = held / "checkpoint.safetensors"
    content = file.read_bytes()
    flipped = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]  # the tensors are at the end
    for damaged in (*(content[:kept] for kept in (0, 5, 100, -1)), flipped):
        file.write_bytes(damaged)
        with refused(RunDirectoryError, hide=r"Error while .*(?=\))"):  # in safetensors' words
            read_checkpoint(held)


@pytest.mark.parametrize("metadata", [None, {}, {"round": "1"}, {"said": "{"}, {"said": '{"round": "many"}'}])
def test_a_checkpoint_that_is_not_ours_is_refused(held: Path, metadata: dict[str, str] | None) -> None:
    import safetensors.torch

    safetensors.torch.save_file({"state/w": torch.ones(2)}, held / "checkpoint.safetensors", metadata)
    with refused(RunDirectoryError):
        read_checkpoint(held)


def restored(held: Path) -> Any:
    store = RunStore(held)
    try:
        return store.restore()
    finally:
        store.close()


def test_a_run_that_has_lost_its_checkpoint_is_refused(held: Path) -> None:
    """A run that was killed in its first round has none yet."""
    (held / "checkpoint.safetensors").unlink()
    assert restored(held) == (None, [])
    for name, content in {"metrics.jsonl": '{"round": 1}\n{"round": 2}\n', "result.json": "{}"}.items():
        (held / name).write_text(content)
        with refused(RunDirectoryError):
            restored(held)
        (held / "metrics.jsonl").write_text('{"round": 1}\n')


@pytest.mark.parametrize("torn", ['{"round": 2, "acc', '{"round": 2}', "7\n", "{}\n", "\0\0\0\0"])
def test_lines_beyond_the_checkpoint_are_dropped_whole_or_torn(held: Path, torn: str) -> None:
    with (held / "metrics.jsonl").open("a") as file:
        file.write(torn)
    store = RunStore(held)
    _, records = store.restore()
    store.save(State(STATE.tensors, 2), {}, {"round": 2, "new": True}, {})
    store.close()
    assert records == [{"round": 1}]
    assert read_records(held) == [{"round": 1}, {"round": 2, "new": True}]


def test_metrics_that_lack_a_finished_round_are_refused(held: Path) -> None:
    (held / "metrics.jsonl").write_text("")
    with refused(RunDirectoryError):
        restored(held)


# A full disk.


class FullDisk:
    """Replaces `os.fsync`: after `after` calls the disk is full."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, descriptor: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_data_are_handed_to_the_disk_before_it_is_asked_to_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    monkeypatch.setattr(durable.os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    atomic_write(tmp_path / "file", "12345")
    append_line(tmp_path / "lines", "12345678")
    assert (sizes[0], sizes[-1]) == (5, 9)
    monkeypatch.setattr(durable.os, "fsync", FullDisk(0))
    with refused(StorageError):
        append_line(tmp_path / "lines", "new")


@pytest.fixture
def command(small_model: Path, small_data: Path, tmp_path: Path) -> list[str]:
    """The arguments of `secure-fed train` for a run of two short rounds."""
    toml = tmp_path / "run.toml"
    files = [f"{name} = '{(small_data / name).as_posix()}.jsonl'" for name in ("train", "test")]
    tables = {
        "model": [f"name = '{small_model.as_posix()}'"],
        "data": [*files, "client = 'site'"],
        "federation": ["rounds = 2", "cohort = 2"],
        "method": ["name = 'fra_lora'"],
        "training": ["steps = 1", "together = 1"],
    }
    toml.write_text("".join(f"[{name}]\n" + "\n".join(rows) + "\n" for name, rows in tables.items()))
    return ["train", str(toml), "--json"]


def sentence(error: str) -> str:
    """The error on standard error, which is one sentence and no traceback."""
    told = [line for line in error.splitlines() if not line.startswith("round ")]
    assert len(told) <= 2, told
    assert told[-1].startswith("secure-fed: ")
    return told[-1]


@pytest.mark.parametrize("writes", chosen(range(10), [0, 3, 9]))
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_when_there_is_room(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Ran, writes: int
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(durable.os, "fsync", FullDisk(writes))
        # Syncing a folder is optional and may fail; it must not count as a write.
        patched.setattr(durable, "sync_folder", lambda folder: None)
        status, _, error = ran(*command, "--out", out)
    assert status == 1
    said = sentence(error)
    assert "No space left on device" in said
    begun, ended = writes > 0, writes > 8  # config.json is written first, and the report after the result
    assert ("train --resume --out" in said) == (begun and not ended)
    status, printed, _ = ran(*command, "--out", out, "--resume")
    assert (status, json.loads(printed)["rounds"]) == (0, 2)
    assert [record["round"] for record in read_records(out)] == [1, 2]


def test_a_folder_that_cannot_be_used_is_one_sentence(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Ran
) -> None:
    """One that cannot be made, one to resume that has no run, and one of somebody else's."""
    (tmp_path / "file").write_text("in the way")
    said = []
    for arguments in (
        [*command, "--out", tmp_path / "file" / "run"],
        ["train", "--resume", "--out", tmp_path / "none"],
        ["train", "--resume"],
        [*command, "--resume", "--out", tmp_path],
        [*command, "--out", tmp_path / "run"],
    ):
        if len(said) == 4:
            refusal = PermissionError(errno.EACCES, "Permission denied")
            monkeypatch.setattr(run_store.filelock.FileLock, "acquire", Mock(side_effect=refusal))
        status, _, error = ran(*arguments)
        assert status == 2
        said.append(sentence(error))
    golden("secure_fed/run_folders.txt", "\n".join(said) + "\n")
    assert not (tmp_path / "none").exists()


def test_resuming_on_other_examples_or_another_test_set_is_refused_in_python_too(tmp_path: Path) -> None:
    settings = {"evaluation.audit_fraction": 0.0, "federation.rounds": 2}
    toys.federation(settings, sizes=(8, 8, 20)).run(tmp_path / "run")
    more, same = (
        settings | {"federation.rounds": 3},
        [toys.examples(client + 1, size) for client, size in enumerate((8, 8, 20))],
    )
    others: tuple[dict[str, Any], ...] = (
        {"train": [toys.examples(40, 8), *same[1:]]},
        {"train": [same[1], same[0], same[2]]},
        {"test": toys.examples(41, 20)},
        {"train": [*same[:2], toys.examples(99, 20)], "test": same[2]},
    )
    for own in others:
        with refused(RunDirectoryError):
            toys.federation(more, **{"train": same, **own}).run(tmp_path / "run", resume=True)
    assert toys.federation(more, train=same).run(tmp_path / "run", resume=True).state.round == 3
