"""One party's side of the learning problem: its protected units are those of a simulation over the same rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from secure_fed.deployment.problem import of_coordinator, of_node
from secure_fed.errors import DataError
from secure_fed.learning import tasks
from secure_fed.learning.data import fingerprint, sources
from secure_fed.learning.data.rows import Vocabulary
from tests.secure_fed.deployment.parties import founded, rows_of
from tests.secure_fed.deployment.test_deployed_run import MASKED, config_of

PERSONS = 4  # row i is about person i modulo 4
UNITS = {
    "client": [list(range(8))],
    "group": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "example": [[index] for index in range(8)],
}


@pytest.mark.parametrize("unit", UNITS)
def test_the_units_of_a_node_are_its_clients_persons_or_examples(tmp_path: Path, unit: str) -> None:
    column = {"group_column": "person"} if unit == "group" else {}
    config = config_of(MASKED, {"privacy": {"unit": unit, "epsilon": 8.0, **column}})
    part = [row | {"person": f"p{index % PERSONS}"} for index, row in enumerate(rows_of(8, 1))]
    party = founded(tmp_path, config, [part] * 4, lambda number: None)
    declared = tuple(replace(one, examples=len(UNITS[unit])) for one in party.charter.members)
    charter, file = replace(party.charter, members=declared), party.homes[0] / "train.jsonl"
    classes = Vocabulary(charter.labels, charter.label_names)
    rows = sources.of_known_classes(tasks.build(charter.config.data), [file], classes, "data.train")
    problem = of_node(charter, charter.config, 0, [file])
    assert problem.unit_digest == fingerprint.of_units(rows, UNITS[unit])


def test_a_node_with_more_examples_than_it_may_count_as_does_not_take_part(tmp_path: Path) -> None:
    config = config_of({"federation": {"weighting": "examples"}})
    party = founded(tmp_path, config, [rows_of(8, 1)] * 2, lambda number: None)
    few = tuple(replace(one, examples=7) for one in party.charter.members)
    with pytest.raises(DataError, match=r"declares 7 units and its data has 8 examples.*write a new card"):
        of_node(replace(party.charter, members=few), party.charter.config, 0, [party.homes[0] / "train.jsonl"])


def test_a_coordinator_asks_its_own_test_rows(tmp_path: Path, small_tokenizer: Any) -> None:
    charter = founded(tmp_path / "parties", config_of({}), [rows_of(8, 1)] * 2, lambda number: None).charter
    shape: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": len(small_tokenizer)}
    GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(tmp_path / "gpt2")
    small_tokenizer.save_pretrained(tmp_path / "gpt2")
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps({"text": f"word{n}", "target": "calm"}) + "\n" for n in range(9)))
    changed = {"data.task": "causal_lm", "data.text_b": "target", "data.metric": "f1", "evaluation.generate": 3}
    named: dict[str, Any] = {"model.name": str(tmp_path / "gpt2"), **changed}
    config = charter.config.replace({(one.split(".")[0], one.split(".")[1]): value for one, value in named.items()})
    asked = of_coordinator(charter, config, [file]).asked
    assert asked is not None
    assert list(asked.rows.text) == ["word0", "word3", "word6"]
