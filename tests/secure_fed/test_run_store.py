"""The run directory: what is stored, what is refused, and the messages of the refusals."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from secure_fed.commands import cli
from secure_fed.errors import RunDirectoryError, StorageError
from secure_fed.methods.method import State
from secure_fed.runs import durable
from secure_fed.runs import store as run_store
from secure_fed.runs.directory import CONFIG
from secure_fed.runs.durable import append_line, atomic_write
from secure_fed.runs.store import RunStore, read_checkpoint, read_personal, read_records, resumable
from secure_fed.tensors.tensors import LowRank, Tensors
from tests.cells import chosen
from tests.secure_fed import toys

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
    checkpoint = read_checkpoint(held)
    assert checkpoint is not None
    assert checkpoint.state.round == 1
    assert toys.same(checkpoint.state.tensors, STATE.tensors)
    assert toys.same(checkpoint.state.memory, STATE.memory)
    assert checkpoint.state.clip_norm == STATE.clip_norm
    personal = read_personal(held, 1)
    assert personal.keys() == PERSONAL.keys()
    assert all(toys.same(personal[client], kept) for client, kept in PERSONAL.items())


def test_what_is_read_does_not_hang_on_the_file(held: Path) -> None:
    """Views of the file would keep it from being replaced on some systems, and unaligned views may compute other bits."""
    checkpoint = read_checkpoint(held)
    assert checkpoint is not None
    for part in checkpoint.state.tensors.parts().values():
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()
        assert part.data_ptr() % 64 == 0


def test_facts_and_configuration_are_readable_json(held: Path) -> None:
    assert run_store.read_config(held) == toys.config()
    assert run_store.read_facts(held)["clients"] == ["a", "b"]


def test_no_part_files_are_left(held: Path) -> None:
    assert not list(held.glob("*.part"))


# Which run a directory belongs to.


def test_a_state_that_does_not_fit_is_refused_before_the_configuration_is_replaced(held: Path) -> None:
    before = (held / CONFIG).read_bytes()
    with pytest.raises(RunDirectoryError, match="holds the state of another model"):
        begin(held, {"federation.rounds": 9}, admits=lambda state: state.round != STATE.round)
    assert (held / CONFIG).read_bytes() == before


def test_another_configuration_is_refused_with_every_difference_named(held: Path) -> None:
    with pytest.raises(RunDirectoryError) as refused:
        begin(held, {"training.lr": 0.5, "federation.seed": 3})
    message = str(refused.value)
    assert "was started with another configuration (now, and then)" in message
    assert "training.lr: 0.5, not 0.05" in message
    assert "federation.seed: 3, not 0" in message
    assert run_store.read_config(held) == toys.config()


def test_rounds_may_be_raised_and_not_lowered(held: Path) -> None:
    begin(held, {"federation.rounds": 5})
    assert run_store.read_config(held).federation.rounds == 5
    with pytest.raises(RunDirectoryError, match=r"planned for 5 rounds.*not lowered to 4"):
        begin(held, {"federation.rounds": 4})


@pytest.mark.parametrize(
    ("changed", "named"), [({"clients": ["a", "c"]}, "clients"), ({"partition": {"sizes": [2, 5]}}, "partition")]
)
def test_other_data_are_refused(held: Path, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(RunDirectoryError, match=rf"started with other data: {named} in run\.json differs"):
        begin(held, facts={**FACTS, **changed})


def test_other_versions_of_packages_are_not_other_data(held: Path) -> None:
    begin(held, facts={**FACTS, "versions": {"torch": "3"}})


def test_two_at_once_are_refused(held: Path) -> None:
    first = RunStore(held)
    with pytest.raises(RunDirectoryError, match="is in use by another process; wait for it, or choose another"):
        RunStore(held)
    first.close()
    RunStore(held).close()


def test_a_reader_and_a_run_exclude_each_other_as_two_readers_do(held: Path) -> None:
    first = RunStore(held)
    with pytest.raises(RunDirectoryError, match="is in use by another process"), run_store.locked(held):
        pass
    first.close()
    with run_store.locked(held):
        with pytest.raises(RunDirectoryError, match="is in use by another process"):
            RunStore(held)
        with pytest.raises(RunDirectoryError, match="is in use by another process"), run_store.locked(held):
            pass
    RunStore(held).close()


def test_a_reader_that_fails_lets_go(held: Path) -> None:
    with pytest.raises(ZeroDivisionError), run_store.locked(held):
        raise ZeroDivisionError
    RunStore(held).close()


@pytest.mark.parametrize(
    "refusal", [PermissionError(errno.EACCES, "Permission denied"), OSError(errno.EROFS, "Read-only")]
)
def test_where_no_lock_can_be_made_a_run_is_read_without(
    held: Path, monkeypatch: pytest.MonkeyPatch, refusal: OSError
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise refusal

    monkeypatch.setattr(run_store.filelock.FileLock, "acquire", refuse)
    entered = False
    with run_store.locked(held):
        entered = True
    assert entered


def test_a_lock_file_that_cannot_be_opened_is_as_none(held: Path) -> None:
    (held / ".lock").unlink(missing_ok=True)
    (held / ".lock").mkdir()
    with run_store.locked(held):
        assert read_records(held)


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_where_there_is_no_run_nothing_is_held_and_nothing_made(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with run_store.locked(tmp_path / name):
        assert not list(tmp_path.glob("**/.lock"))
    assert not (tmp_path / "nothing").exists()


def test_what_stops_a_run_from_outside_says_how_it_goes_on(held: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt, match=r"^go on with `secure-fed train --resume --out .*`$"), resumable(held):
        raise KeyboardInterrupt
    with pytest.raises(StorageError, match=r"^full, with `secure-fed train --resume --out .*`$"), resumable(held):
        raise StorageError("full")
    with pytest.raises(KeyboardInterrupt, match=r"^$"), resumable(tmp_path / "nothing"):
        raise KeyboardInterrupt


def test_a_directory_with_a_run_or_anything_else_is_no_place_for_a_new_one(held: Path, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="already holds a run; add --resume"):
        run_store.require_unused(held)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    with pytest.raises(RunDirectoryError, match="is not an empty directory"):
        run_store.require_unused(tmp_path / "notes")
    with pytest.raises(RunDirectoryError, match="is not an empty directory"):
        begin(tmp_path / "notes")
    with pytest.raises(RunDirectoryError, match="is not an empty directory"):
        run_store.require_unused(tmp_path / "notes" / "diary.txt")
    run_store.require_unused(tmp_path / "nothing yet")


def test_what_a_killed_start_leaves_is_a_place_for_a_new_run(tmp_path: Path) -> None:
    RunStore(tmp_path / "run").close()
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / "config.json.0123456789abcdef.part").write_text('{"mod')
    run_store.require_unused(tmp_path / "run")
    begin(tmp_path / "run")
    assert run_store.read_config(tmp_path / "run") == toys.config()
    assert not list((tmp_path / "run").glob("*.part"))


def test_only_what_was_being_written_to_a_run_is_cleared_away(tmp_path: Path) -> None:
    for name in ("checkpoint.safetensors.0123456789abcdef.part", "report.html.0123456789abcdef.part", "own.part"):
        (tmp_path / name).write_text("half")
    RunStore(tmp_path).close()
    assert [file.name for file in tmp_path.glob("*.part")] == ["own.part"]


def test_a_configuration_alone_is_a_run_that_has_not_begun(tmp_path: Path) -> None:
    """A kill between the first two files leaves such a directory."""
    begin(tmp_path)
    (tmp_path / "run.json").unlink()
    begin(tmp_path)
    assert run_store.read_facts(tmp_path)["clients"] == ["a", "b"]


def test_reading_a_directory_without_a_run_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"holds no run: it has no config\.json.*without --resume"):
        run_store.read_config(tmp_path)


# Damage.


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_damaged_checkpoint_is_refused(held: Path, kept: int) -> None:
    file = held / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(
        RunDirectoryError, match=r"checkpoint\.safetensors is damaged .*restore it, or run again into another folder"
    ):
        read_checkpoint(held)


def test_a_flipped_bit_in_a_tensor_is_refused(held: Path) -> None:
    file = held / "checkpoint.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1  # the tensors are at the end
    file.write_bytes(content)
    with pytest.raises(RunDirectoryError, match=r"damaged .its tensors are not those that were written"):
        read_checkpoint(held)


@pytest.mark.parametrize("left", [{"result.json": "{}"}, {"metrics.jsonl": '{"round": 1}\n{"round": 2}\n'}])
def test_a_run_that_has_lost_its_checkpoint_is_refused(held: Path, left: dict[str, str]) -> None:
    for name, content in left.items():
        (held / name).write_text(content)
    (held / "checkpoint.safetensors").unlink()
    store = RunStore(held)
    with pytest.raises(
        RunDirectoryError, match=r"checkpoint\.safetensors, the state after them, is missing: restore it"
    ):
        store.restore()
    store.close()


def test_a_run_that_was_killed_in_its_first_round_has_no_checkpoint_yet(held: Path) -> None:
    (held / "checkpoint.safetensors").unlink()
    store = RunStore(held)
    assert store.restore() == (None, [])
    store.close()


@pytest.mark.parametrize("metadata", [None, {}, {"round": "1"}, {"said": "{"}, {"said": '{"round": "many"}'}])
def test_a_checkpoint_that_is_not_ours_is_refused(held: Path, metadata: dict[str, str] | None) -> None:
    import safetensors.torch

    safetensors.torch.save_file({"state/w": torch.ones(2)}, held / "checkpoint.safetensors", metadata)
    with pytest.raises(RunDirectoryError, match="is damaged"):
        read_checkpoint(held)


@pytest.mark.parametrize("name", ["config.json", "run.json"])
def test_a_damaged_json_file_is_refused_by_name(held: Path, name: str) -> None:
    (held / name).write_text('{"model": ')
    with pytest.raises(RunDirectoryError, match=rf"{name} is damaged: it cannot be read as JSON"):
        begin(held)


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
    store = RunStore(held)
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl is damaged: it records 0 of the 1 finished rounds"):
        store.restore()
    store.close()


# A full disk.


class FullDisk:
    """Replaces `os.fsync`: after `after` calls the disk is full."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, descriptor: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_refused_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    atomic_write(tmp_path / "file", "old")
    monkeypatch.setattr(durable.os, "fsync", FullDisk(0))
    with pytest.raises(StorageError, match=r"file cannot be written: No space left on device; make that"):
        atomic_write(tmp_path / "file", "new")
    with pytest.raises(StorageError, match="lines cannot be written: No space left"):
        append_line(tmp_path / "lines", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert not list(tmp_path.glob("*.part"))


def test_data_are_handed_to_the_disk_before_it_is_asked_to_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    monkeypatch.setattr(durable.os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    atomic_write(tmp_path / "file", "12345")
    append_line(tmp_path / "lines", "12345678")
    assert sizes[0] == 5
    assert sizes[-1] == 9


Start = Callable[[], int]


@pytest.fixture
def command(small_model: Path, small_data: Path, tmp_path: Path) -> list[str]:
    """The arguments of `secure-fed train` for a run of two short rounds."""
    toml = tmp_path / "run.toml"
    toml.write_text(
        f"""
        [model]
        name = '{small_model.as_posix()}'
        [data]
        train = '{(small_data / "train.jsonl").as_posix()}'
        test = '{(small_data / "test.jsonl").as_posix()}'
        client = 'site'
        [federation]
        rounds = 2
        cohort = 2
        [training]
        steps = 1
        """
    )
    return ["train", str(toml), "--json"]


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """The error on standard error, which is one sentence and no traceback."""
    told = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("round ")]
    assert len(told) <= 2, told
    assert told[-1].startswith("secure-fed: ")
    return told[-1]


@pytest.mark.parametrize("writes", chosen(range(9), [0, 3, 7, 8]))
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_when_there_is_room(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], writes: int
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(durable.os, "fsync", FullDisk(writes))
        # Syncing a folder is optional and may fail; it must not count as a write.
        patched.setattr(durable, "sync_folder", lambda folder: None)
        assert cli.main([*command, "--out", str(out)]) == 1
    said = sentence(capsys)
    assert "No space left on device" in said
    begun, ended = writes > 0, writes > 7  # config.json is written first, and the report after the result
    assert ("train --resume --out" in said) == (begun and not ended)
    assert cli.main([*command, "--out", str(out), "--resume"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 2
    assert [record["round"] for record in read_records(out)] == [1, 2]


def test_a_folder_that_cannot_be_made_is_one_sentence(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert cli.main([*command, "--out", str(tmp_path / "file" / "run")]) == 2
    assert "cannot be written" in sentence(capsys)


def test_a_folder_of_somebody_elses_is_one_sentence(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(run_store.filelock.FileLock, "acquire", refuse)
    assert cli.main([*command, "--out", str(tmp_path / "run")]) == 2
    assert "run cannot be written: Permission denied" in sentence(capsys)


def test_resuming_needs_a_run_or_the_settings_of_one(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "--resume", "--out", str(tmp_path / "none")]) == 2
    assert "holds no run: it has no config.json" in sentence(capsys)
    assert not (tmp_path / "none").exists()
    assert cli.main(["train", "--resume"]) == 2
    assert "--resume needs --out" in sentence(capsys)
    (tmp_path / "diary.txt").write_text("dear diary")
    assert cli.main([*command, "--resume", "--out", str(tmp_path)]) == 2
    assert "is not an empty directory" in sentence(capsys)


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
        with pytest.raises(
            RunDirectoryError, match=r"started with other data: examples_digest in .* differs; resume with"
        ):
            toys.federation(more, **{"train": same, **own}).run(tmp_path / "run", resume=True)
    assert toys.federation(more, train=same).run(tmp_path / "run", resume=True).state.round == 3
