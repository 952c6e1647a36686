"""Every private run has a membership figure, or says why not and what would give one; figures of rows are the owner's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from secure_fed.commands.cli import main
from secure_fed.commands.comparison.rows import row_of
from secure_fed.commands.comparison.tables import notes
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, DataError
from secure_fed.export import trained
from secure_fed.federation import Federation
from secure_fed.report.page import write_report
from secure_fed.report.record import owned as owned_record
from secure_fed.report.terminal import rows
from secure_fed.runs.result import SCHEMA
from tests.cells import chosen
from tests.secure_fed import private_toys, toys
from tests.secure_fed.in_turn import BANDED, IN_TURN
from tests.secure_fed.test_holding import numbered
from tests.secure_fed.test_membership import CLASSES, OVERFIT, Wide
from tests.secure_fed.test_published import ONE, config, write
from tests.secure_fed.test_result_schema import check

MASKED = {"secure_aggregation.enabled": True}
CLIENT = {**private_toys.CLIENT, "privacy.noise_multiplier": 1.0}
# Everywhere that noise can be, masked or not; in each, phantoms cost these few numbers too much, or are turned off.
WITHOUT: dict[str, dict[str, Any]] = {
    "central": {**CLIENT, "evaluation.phantoms": 0},
    "central and masked": {**CLIENT, **MASKED, "evaluation.phantoms": 0},
    "local": {**CLIENT, "privacy.noise": "local"},
    "distributed": {**CLIENT, **MASKED, "privacy.noise": "distributed"},
    "hidden": {**CLIENT, **MASKED, "privacy.noise": "distributed", "privacy.hidden_cohort": True},
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
    usual = {**CLIENT, "evaluation.phantoms": 12}
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
    settings = {**CLIENT, "data.test": "", "data.test_fraction": 0.34, "evaluation.phantoms": 0}
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
        Federation(config(CLIENT, small_model, tmp_path, **named))
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
