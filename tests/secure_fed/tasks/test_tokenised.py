"""Rows as token ids: of the built-in notes once per process, of a user's data at every reading, of many rows through files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from secure_fed.config import RunConfig
from secure_fed.learning import problem, tasks
from secure_fed.learning.data import fingerprint, notes, on_disk
from secure_fed.learning.data.encode import Encoded
from secure_fed.learning.data.on_disk import OnDisk
from secure_fed.learning.models.loading import load
from secure_fed.learning.problem import tokenised
from tests.secure_fed.tasks.test_end_to_end import Configured, configured  # noqa: F401
from tests.secure_fed.tasks.toy_tasks import TOYS

CONFIG = RunConfig.from_dict({"data": {"examples": 30}})
TASK = tasks.build(CONFIG.data)
ROWS = notes.generate(30, seed=5, split="train")


def test_the_same_notes_are_tokenised_once_and_other_settings_again() -> None:
    tokenizer = load(CONFIG.model, TASK, ROWS.label_names, 0).tokenizer
    first = tokenised(CONFIG, TASK, tokenizer, ROWS)
    again = replace(ROWS)
    assert tokenised(CONFIG, TASK, tokenizer, again) is first
    fresh = TASK.encode(tokenizer, ROWS, CONFIG.model.max_length)
    assert fresh is not first
    assert all(np.array_equal(ours, own) for ours, own in zip(first.input_ids, fresh.input_ids, strict=True))
    short = tokenised(replace(CONFIG, model=replace(CONFIG.model, max_length=8)), TASK, tokenizer, ROWS)
    assert short.lengths.max() == 8
    others = tokenised(CONFIG, TASK, tokenizer, notes.generate(30, seed=6, split="train"))
    assert not np.array_equal(others.lengths, first.lengths)
    own = RunConfig.from_dict({"data": {"train": "mine.jsonl"}})
    assert tokenised(own, TASK, tokenizer, ROWS) is not tokenised(own, TASK, tokenizer, ROWS)


def test_notes_of_a_seed_and_a_count_are_generated_once() -> None:
    first = notes.generate(30, seed=5, split="train")
    assert notes.generate(30, seed=5, split="train") is first
    assert notes.generate(29, seed=5, split="train").text == first.text[:29]
    assert notes.generate(30, seed=5, split="test").text != first.text


def contents(made: problem.Problem) -> list[list[bytes]]:
    """The content of every example, of each client and of the test set, as a batch has it."""
    return [[fingerprint.content(own[index]) for index in range(len(own))] for own in (*made.train, made.test)]


@pytest.mark.parametrize("task", TOYS)
def test_examples_and_digests_do_not_depend_on_where_they_are(
    task: str,
    configured: Configured,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: dict[str, Any] = {"privacy.unit": "example", "privacy.epsilon": 8.0}
    config = configured(task, **settings)
    memory = problem.configured(config)
    monkeypatch.setattr(on_disk, "LONG", 4)
    monkeypatch.setattr(problem, "WINDOW", 7)
    disk = problem.configured(config)
    for own in (*disk.train, disk.test):
        assert isinstance(own, Encoded)
        assert isinstance(own.input_ids, OnDisk)
    assert contents(disk) == contents(memory)
    assert (disk.data_digest, disk.unit_digest) == (memory.data_digest, memory.unit_digest)
    assert disk.facts == memory.facts
    assert disk.warning == memory.warning
    batch = disk.collate([disk.test[0], disk.test[3]])
    assert set(batch) == set(memory.collate([memory.test[0], memory.test[3]]))
