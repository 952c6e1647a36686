"""What is computed where its data are: personal tensors, the final model and the figure of a member's own rows at its node; and
dummies, which are nobody's data, at the coordinator and in the steps of nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from privacy.entropy import SeededEntropy
from secure_fed.commands.cli import main
from secure_fed.deployment import home, messages
from secure_fed.deployment.envelope import Envelope, unsealed
from secure_fed.deployment.home import RUN, Home
from secure_fed.deployment.memberships import MODEL
from secure_fed.deployment.messages import End, Refusal
from secure_fed.deployment.node import Node
from secure_fed.deployment.relay import held
from secure_fed.errors import RunDirectoryError
from secure_fed.export.trained import Trained, load_run
from secure_fed.runs.directory import CHECKPOINT
from tests.golden import refused
from tests.secure_fed import toys
from tests.secure_fed.deployment.parties import Deployed, rows_of, written
from tests.secure_fed.deployment.test_deployed_run import (
    MASKED,
    SHARES,
    deployed,
    simulated,
    stage_of,
)
from tests.secure_fed.deployment.test_owner import printed

PERSONAL = {"method": {"personal": ["classifier"]}}
CENTRAL = {"privacy": {"unit": "client", "epsilon": 8.0, "noise": "central"}}


def at_node(party: Deployed, number: int) -> Path:
    """The folder of the final model at this node."""
    return Home.load(party.homes[number]).federation(party.charter.digest) / MODEL


@pytest.mark.parametrize("tables", [(), pytest.param((MASKED,), marks=pytest.mark.nightly)], ids=["open", "masked"])
def test_personal_tensors_stay_at_their_node_and_survive_its_restart(tmp_path: Path, tables: Any) -> None:
    party = deployed(tmp_path, *tables, PERSONAL, seed=5)
    last = "0 unmask" if tables else ""

    def dies(node: int, asked: Envelope, answer: Envelope) -> Envelope:
        if node == 102 and messages.kind(asked) != "offer" and stage_of(asked) == last:  # after its first round
            party.carrier.nodes_.pop(102).close()
            party.carrier.nodes_[202] = Node(party.homes[2], SeededEntropy(5))
        return answer

    party.carrier.touch = dies
    result = party.conduct()
    same = simulated(tmp_path, *tables, PERSONAL, seed=5, out=tmp_path / "run")
    assert toys.same(result.state.tensors, same.state.tensors)
    models = [load_run(at_node(party, number)) for number in range(4)]
    for number, own in enumerate(models):
        assert toys.same(own.state.tensors, load_run(tmp_path / "run", f"c{number}").state.tensors)
    assert not toys.same(models[0].state.tensors, models[1].state.tensors)
    sent = {name for _, *both in party.carrier.seen for envelope in both for name in envelope.arrays}
    assert any("bias" in name for name in sent)
    assert not [name for name in sent if "classifier" in name]
    assert next(models[2].predict(["fever and cough"]))["label"] in party.charter.label_names
    assert (result.summary["accuracy"], result.summary["personal"]) == (None, ["classifier.bias", "classifier.weight"])
    with refused(RunDirectoryError):
        load_run(party.folder / RUN, "c1")


def fit(model: Trained, row: dict[str, Any]) -> float:
    """log p - log(1 - p) of a row's label."""
    inputs = model.tokenizer(
        row["text"], truncation=True, max_length=model.config.model.max_length, return_tensors="pt"
    )
    with torch.no_grad():
        chance = model.model(**inputs).logits.double().softmax(-1)[0, model.label_names.index(row["label"])]
    return float(torch.log(chance) - torch.log1p(-chance))


def with_others(party: Deployed, number: int, rows: list[dict[str, Any]]) -> None:
    """Let a node name these rows as not trained on."""
    place = party.homes[number]
    written(place / "others.jsonl", rows)
    toml = (place / home.NODE).read_text(encoding="utf-8")
    (place / home.NODE).write_text(toml.replace("[node]\n", '[node]\nnon_members = "others.jsonl"\n'), encoding="utf-8")
    party.carrier.nodes_[100 + number] = Node(place, SeededEntropy(5))


@pytest.mark.parametrize(
    "tables", [(PERSONAL,), pytest.param((SHARES,), marks=pytest.mark.nightly)], ids=["open", "shares"]
)
def test_a_member_measures_the_final_model_on_its_own_rows_and_sends_nothing(tmp_path: Path, tables: Any) -> None:
    party = deployed(tmp_path, *tables, seed=5)
    others = rows_of(9, 77)
    with_others(party, 0, others)
    party.conduct()
    with printed() as lines, held(party.homes[0]):
        assert main(["node", "status", str(party.homes[0]), "--json"]) == 0
    (joined,) = json.loads(lines[0])["federations"]
    found, model = joined["membership_of_rows"], load_run(joined["model"])
    trained = [json.loads(line) for line in (party.homes[0] / "train.jsonl").read_text().splitlines()]
    inside, outside = (np.array([fit(model, row) for row in rows]) for rows in (trained, others))
    naive = (inside[:, None] > outside[None]).mean() + (inside[:, None] == outside[None]).mean() / 2
    assert found["auc"] == pytest.approx(naive, abs=1e-9)
    assert (found["members"], found["non_members"]) == (8, 9)
    ends = [answer for _, asked, answer in party.carrier.seen if messages.kind(asked) == "end"]
    assert len(ends) == 4
    assert len({one.header for one in ends}) == 1, "the answer is the same with a figure and without"
    for number, words in ((0, "of 8 rows that trained here against 9"), (1, "not measured")):
        with printed() as lines, held(party.homes[number]):
            main(["node", "status", str(party.homes[number])])
        assert any("membership" in line and words in line for line in lines)


def test_rows_that_the_node_trains_on_are_no_others(tmp_path: Path) -> None:
    party = deployed(tmp_path)
    with_others(party, 0, rows_of(8, 0)[:3])  # of its own training rows
    answer = party.told(party.carrier.nodes_[100])
    assert isinstance(answer, Refusal)
    assert "non_members" not in answer.sentence, "the coordinator learns only that its data do not fit"
    assert "non_members has 3 rows that are also training rows" in home.Journal(party.homes[0]).last(1)[0]["what"]


def test_a_member_that_misses_the_end_gets_the_final_model_at_the_next_start(tmp_path: Path) -> None:
    party = deployed(tmp_path, CENTRAL, {"federation": {"sampling": "schedule"}})

    def leaves(node: int, asked: Envelope, answer: Envelope) -> Envelope:
        if node == 103 and getattr(messages.decode(unsealed(asked)), "round", 0) == 1:
            party.carrier.deaf.add(103)
        return answer

    party.carrier.touch = leaves
    result = party.conduct()
    assert party.said[-2] == "c3 did not confirm the final model; the next start sends it again"
    assert not (at_node(party, 3) / CHECKPOINT).exists()
    party.carrier.deaf.clear()
    party.conduct()
    kept = load_run(at_node(party, 3))
    assert toys.same(kept.state.tensors, result.state.tensors)
    assert result.summary["privacy_statement"] in kept.card.facts.values()


def test_a_final_model_that_is_none_of_the_federation_is_refused(tmp_path: Path) -> None:
    party = deployed(tmp_path, PERSONAL)
    final = party.conduct().state.tensors
    personal = [name for name in final if name.startswith("classifier")]
    model, before = final.without(personal), (at_node(party, 0) / CHECKPOINT).read_bytes()
    name, node = next(iter(model)), party.carrier.nodes_[100]
    lies = {
        "with a tensor of the member's own": End(2, final),
        "without a tensor": End(2, model.without([name])),
        "of another shape": End(2, model | {name: torch.zeros(2, 2)}),
        "not finite": End(2, model | {name: model.tensor(name) * torch.nan}),
        "after more rounds": End(3, model),
    }
    party.told(node)
    for lie in lies.values():
        assert isinstance(party.told(node, lie), Refusal)
    assert (at_node(party, 0) / CHECKPOINT).read_bytes() == before
    assert isinstance(party.told(node, End(2, model * 0.5)), messages.Ended)
    assert (at_node(party, 0) / CHECKPOINT).read_bytes() != before
