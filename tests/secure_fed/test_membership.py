"""The membership inference figure that every run reports beside its accuracy.

Every private run has one, or says why not and what would give one; figures of rows are for the owner of the data alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from secure_fed.commands.cli import main
from secure_fed.commands.comparison.rows import row_of
from secure_fed.commands.comparison.tables import notes
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, DataError
from secure_fed.export import trained
from secure_fed.federation import Federation
from secure_fed.learning.data.audit_unit import Unit
from secure_fed.learning.evaluation import confidence_of_classes, confidence_of_likelihood
from secure_fed.report.page import write_report
from secure_fed.report.record import owned as owned_record
from secure_fed.report.terminal import rows
from secure_fed.runs.membership import EXAMPLES, looked_at, mean_of_units, of_data
from secure_fed.runs.result import SCHEMA
from tests.cells import chosen
from tests.secure_fed import private_toys, toys
from tests.secure_fed.in_turn import BANDED, IN_TURN
from tests.secure_fed.test_holding import CLIENT, numbered
from tests.secure_fed.test_published import ONE, config, write
from tests.secure_fed.test_result_schema import check

CLASSES = 12  # a label that was not learned is seldom guessed
OVERFIT = {
    "method.modules_to_save": ["first", "classifier"],
    "method.target_modules": "query",
    "federation.rounds": 4,
    "training.lr": 0.01,
    "training.steps": 40,
    "training.batch_size": 64,
    "evaluation.audit_fraction": 1.0,
    "evaluation.every": 4,
}


def test_a_model_that_knows_its_examples_by_heart_is_caught() -> None:
    train = [[{**item, "labels": i % CLASSES} for i, item in enumerate(own)] for own in numbered((40, 40))]
    result = toys.federation(OVERFIT, train=train, model=Wide()).run()
    found = result.summary["membership"]
    assert found["auc"] > 0.9
    assert found["auc_interval"][0] > 0.8
    assert found["members"] + found["non_members"] == 80


class Wide(torch.nn.Module):
    """A model wide enough to memorise random labels."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = torch.nn.Linear(6, 256)
            self.query = torch.nn.Linear(256, 64)
            self.classifier = torch.nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classifier(self.query(self.first(3 * x).relu()).relu())
        return scores


def test_a_model_that_did_not_train_is_at_chance() -> None:
    result = toys.federation(
        {"evaluation.audit_fraction": 1.0, "training.lr": 1e-12}, train=numbered((150, 150, 150))
    ).run()
    low, high = result.summary["membership"]["auc_interval"]
    assert low < 0.5 < high


def test_small_runs_say_why_nothing_was_measured() -> None:
    found = toys.federation().run().summary["membership"]
    assert found["auc"] is found["auc_interval"] is found["tpr_at_fpr"] is None
    assert "too few" in found["why"]


def test_with_privacy_for_clients_the_units_are_clients() -> None:
    settings = {**CLIENT, "evaluation.audit_fraction": 0.6}
    federation = toys.federation(settings, train=numbered((3,) * 80))
    result = federation.run()
    found = of_data(federation.assembly, result.state)
    assert found is not None
    assert found["unit"] == "client"
    assert found["non_members"] == 80 - result.summary["clients"]
    assert any("membership" in words for words in result.summary["privacy"]["not_covered"])


def test_a_unit_counts_by_the_mean_of_a_few_of_its_examples() -> None:
    units = [Unit("a", "a", list(range(100))), Unit("b", "b", [7]), Unit("c", "c", [])]
    examples, owner = looked_at(units)
    assert len(examples) == EXAMPLES + 1
    means = mean_of_units(np.array([*range(EXAMPLES), 7.0]), owner, 3)
    assert means[0] == pytest.approx(np.mean(range(EXAMPLES)))
    assert means[1] == 7
    assert np.isfinite(means[2])


def test_the_logit_of_a_probability_is_exact_where_float32_has_ended() -> None:
    scores = torch.tensor([[40.0, 0.0, 1.0], [0.0, 0.0, 0.0], [-3.0, 5.0, 0.5]])
    labels = torch.tensor([0, 1, 2])
    p = scores.double().softmax(1).gather(1, labels[:, None]).squeeze(1)
    found = confidence_of_classes(scores, labels)
    assert found.dtype == torch.float64
    assert found[0] == pytest.approx(40 - np.log(1 + np.e))
    assert torch.allclose(found[1:], torch.log(p / (1 - p))[1:])
    assert torch.allclose(confidence_of_likelihood(torch.log(p[1:])), torch.log(p / (1 - p))[1:])
    assert torch.isfinite(confidence_of_likelihood(torch.tensor([0.0, -1e-9, -800.0]))).all()


MASKED = {"secure_aggregation.enabled": True}
CLIENT_LEVEL = {**private_toys.CLIENT, "privacy.noise_multiplier": 1.0}
# Everywhere that noise can be, masked or not; in each, phantoms cost these few numbers too much, or are turned off.
WITHOUT: dict[str, dict[str, Any]] = {
    "central": {**CLIENT_LEVEL, "evaluation.phantoms": 0},
    "central and masked": {**CLIENT_LEVEL, **MASKED, "evaluation.phantoms": 0},
    "local": {**CLIENT_LEVEL, "privacy.noise": "local"},
    "distributed": {**CLIENT_LEVEL, **MASKED, "privacy.noise": "distributed"},
    "hidden": {**CLIENT_LEVEL, **MASKED, "privacy.noise": "distributed", "privacy.hidden_cohort": True},
    "in turn": {**IN_TURN, **BANDED, "evaluation.phantoms": 0},
    "example": {**private_toys.EXAMPLE, "privacy.noise_multiplier": 1.0},
}
OTHERS = toys.examples(1234, 15)


@pytest.mark.parametrize("place", chosen(WITHOUT, ["central", "distributed", "example"]))
def test_a_private_run_without_phantoms_tells_what_would_give_a_figure_and_gives_its_owner_one(place: str) -> None:
    alone = toys.federation(WITHOUT[place], sizes=(4,) * 8).run()
    why = alone.summary["membership"]["why"]
    assert alone.summary["membership"]["auc"] is None
    assert why.endswith("given as non_members, would give the owner of the data a figure")
    assert "membership_of_rows" not in alone.withheld

    result = toys.federation(WITHOUT[place], sizes=(4,) * 8, non_members=OTHERS).run()
    found = result.withheld["membership_of_rows"]
    assert (found["members"], found["non_members"], found["non_members_from"]) == (32, 15, "non_members")
    assert 0 <= found["auc"] <= 1
    assert "membership_of_rows" not in result.summary, "it is computed from members' losses, without noise"
    assert str(found["auc"]) not in json.dumps([result.summary, result.public_records])
    assert "private/" in result.summary["membership"]["why"]
    shown = dict(rows(result.summary))
    assert shown["membership"].startswith("no figure: ")
    owned = dict(rows(result.whole))
    assert "for" in {name.strip() for name in owned}
    assert owned["  may mislead"] == found["misleads"]


def test_named_rows_are_compared_in_a_run_with_phantoms_too_and_without_privacy() -> None:
    usual = {**CLIENT_LEVEL, "evaluation.phantoms": 12}
    both = toys.federation(usual, sizes=(4,) * 8, non_members=OTHERS).run()
    assert both.summary["membership"]["auc"] is not None
    assert both.withheld["membership_of_rows"]["auc"] is not None
    open_ = toys.federation(non_members=OTHERS).run()
    assert open_.summary["membership_of_rows"]["auc"] is not None, "nothing is withheld of a run without privacy"
    assert open_.withheld == {}


def test_what_a_model_knows_by_heart_is_found_among_rows() -> None:
    every = [[{**item, "labels": i % CLASSES} for i, item in enumerate(own)] for own in numbered((40, 40))]
    learned, others = [own[:20] for own in every], [item for own in every for item in own[20:]]
    settings = {**OVERFIT, "evaluation.audit_fraction": 0.0}
    found = (
        toys.federation(settings, train=learned, model=Wide(), non_members=others).run().summary["membership_of_rows"]
    )
    assert found["auc"] > 0.9
    assert found["auc_interval"][0] > 0.8


@pytest.mark.usefixtures("never_drawn")
def test_test_rows_held_out_of_the_data_stand_for_non_members(small_model: Path, tmp_path: Path) -> None:
    """In figures.json and in the owner's page; the rest of the run has the reason and the place."""
    write(tmp_path, ONE)
    settings = {**CLIENT_LEVEL, "data.test": "", "data.test_fraction": 0.34, "evaluation.phantoms": 0}
    folder = tmp_path / "run"
    Federation(config(settings, small_model, tmp_path)).run(folder)
    public = json.loads((folder / "result.json").read_text())
    own = json.loads((folder / "private" / "figures.json").read_text())["membership_of_rows"]
    assert own["non_members_from"] == "test"
    assert "held out of the same data client by client" in own["misleads"]
    assert "membership_of_rows" not in public
    assert "figure of single rows in private/" in (why := public["membership"]["why"])
    check(public)
    write_report(folder)
    shown, owned = ((folder / place / "report.html").read_text() for place in (".", "private"))
    assert "Rows that trained, and rows that did not" in owned
    assert "Rows that trained, and rows that did not" not in shown
    assert "no figure (why: below)" in shown
    assert f"no figure: {why}" in trained.load_run(folder).card.text("peft")
    row = row_of("mine", {0: owned_record(folder)}, None)
    assert f"mine: no membership figure: {why}." in notes([row])


def test_the_result_of_a_run_without_privacy_fits_the_schema(tmp_path: Path) -> None:
    toys.federation(non_members=OTHERS).run(tmp_path / "run")
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["schema"] == SCHEMA
    assert found["membership_of_rows"]["of"] == "rows"
    check(found)


def test_rows_that_train_are_no_non_members(small_model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="non_members has 1 rows that are also training rows, such as row 16"):
        toys.federation(non_members=[*OTHERS, toys.examples(1, 5)[2]])
    write(tmp_path, ONE)
    others = [{"text": "some other words", "label": "calm"}, {"text": "  Word1 CALM word2", "label": "wild"}]
    (tmp_path / "others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in others))
    named = {"evaluation.non_members": str(tmp_path / "others.jsonl")}
    with pytest.raises(DataError, match="such as row 2") as refused:
        Federation(config(CLIENT_LEVEL, small_model, tmp_path, **named))
    assert refused.value.setting == "evaluation.non_members"


def test_the_setting_is_checked_like_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="has no effect"):
        RunConfig.from_dict({"evaluation": {"non_members": "others.jsonl"}})  # beside the built-in notes
    with pytest.raises(ConfigError) as refused:
        toys.federation({"evaluation.non_members": "others.jsonl", "data.train": ""})
    assert refused.value.setting == "evaluation.non_members"
    write(tmp_path, ONE)
    (tmp_path / "others.jsonl").write_text(json.dumps({"txt": "no such column"}) + "\n")
    asked = [f"data.train={tmp_path / 'train.jsonl'}", f"evaluation.non_members={tmp_path / 'others.jsonl'}"]
    assert main(["train", "--out", str(tmp_path / "run"), *(part for one in asked for part in ("--set", one))]) == 2
    assert "others.jsonl has no column 'text'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
