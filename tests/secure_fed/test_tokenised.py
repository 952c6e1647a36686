"""Token ids of the built-in notes are computed once per process; those of a user's data, at every reading."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from secure_fed.config import RunConfig
from secure_fed.learning import tasks
from secure_fed.learning.data import notes
from secure_fed.learning.models.loading import load
from secure_fed.learning.problem import tokenised

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
