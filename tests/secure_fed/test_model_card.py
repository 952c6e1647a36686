"""The README of an export: its statements on privacy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from privacy.entropy import SeededEntropy
from secure_fed.export.model_card import ModelCard, run_facts
from secure_fed.methods import cards
from secure_fed.runs.guarantee import NO_PRIVACY
from tests.secure_fed import toys

PRIVATE: dict[str, Any] = {"privacy.unit": "client", "privacy.noise_multiplier": 1.0, "federation.cohort": 2}


def readme(federation: Any, out: Path) -> str:
    """The README of an export before training, with the planned privacy statement."""
    return (federation.export(federation.assembly.initial, out) / "README.md").read_text(encoding="utf-8")


def test_an_export_states_what_protects_it(tmp_path: Path) -> None:
    section = readme(toys.federation(PRIVATE), tmp_path / "out").split("## Privacy\n\n")[1].split("\n\n## Use")[0]
    assert (
        "1e-05)-differential privacy against readers of the released models. Unit: a client with everything it has."
        in section
    )
    assert "\n" not in section
    assert "NOT PRIVATE" not in section


def test_an_export_of_injected_noise_is_flagged_in_bold(tmp_path: Path) -> None:
    text = readme(toys.federation(PRIVATE, entropy=SeededEntropy(0)), tmp_path / "out")
    assert "\n**NOT PRIVATE: noise or sampling coins were seeded or injected" in text


def test_an_export_without_privacy_says_so(tmp_path: Path) -> None:
    assert f"## Privacy\n\n{NO_PRIVACY}\n\n## Use" in readme(toys.federation(), tmp_path / "out")


def test_the_table_holds_the_other_facts_and_no_statement() -> None:
    facts = run_facts(
        toys.config(),
        cards()[0],
        3,
        {"accuracy": 0.5, "macro_f1": 0.25, "loss": 1.0},
        None,
        "A statement | of some length.",
    )
    text = ModelCard("t", "base", ("a",), facts).text("peft")
    assert "| rounds | 3 |" in text
    averaged = toys.config({"federation.average_last": 2})
    rounds = [run_facts(averaged, cards()[0], rounds, {}, None)["rounds"] for rounds in (3, 2)]
    assert rounds == ["3; this is the mean of the models of the last 2", "2"], "a run that has not ended has no mean"
    assert "| privacy |" not in text
    assert "\nA statement | of some length.\n" in text


def test_a_deployed_run_is_not_called_a_simulation() -> None:
    assert "in a simulated federation: one process held every client's data. " in ModelCard("t", "base").text("peft")
    text = ModelCard("t", "base", deployed=True).text("peft")
    assert "in a federation of separate nodes, each with its own client's data. " in text
    assert "simulated" not in text


@pytest.mark.parametrize(("unit", "bare"), [("client", True), ("example", False)])
def test_personal_tensors_without_noise_are_said_to_be_so(unit: str, bare: bool) -> None:
    config = toys.config({**PRIVATE, "privacy.unit": unit, "method.personal": ["classifier.*"]})
    facts = run_facts(config, cards()[0], 3, {}, "anna", "A statement.")
    assert ("WITHOUT NOISE" in facts["personal tensors"]) is bare
