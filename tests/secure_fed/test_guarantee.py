"""The privacy statement of a run: the same numbers in words and as data, before and after it, and in an export's README."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privacy import accounting
from privacy.entropy import SeededEntropy
from privacy.statement import NOT_COVERED, PROSE, Statement
from secure_fed.config import SecureAggregationConfig
from secure_fed.errors import RunDirectoryError
from secure_fed.export.model_card import ModelCard, run_facts
from secure_fed.federation import Federation
from secure_fed.methods import cards
from secure_fed.runs import guarantee
from secure_fed.runs.guarantee import NO_PRIVACY, only_masks
from tests.cells import chosen
from tests.golden import golden, refused
from tests.secure_fed import toys
from tests.secure_fed.in_turn import BANDED, IN_TURN
from tests.secure_fed.private_toys import EXAMPLE, NOISE, federation

Z = {"privacy.noise_multiplier": 1.0}
LOCAL = {**NOISE, "privacy.noise": "local"}
POISSON = {**NOISE, "federation.cohort": 2}
TURNS = {**IN_TURN, "federation.cohort": 1}
MASKED = {"secure_aggregation.enabled": True, "secure_aggregation.dropout": 0.2, "secure_aggregation.corrupt": 0.2}
SHARES = {**NOISE, **MASKED, "privacy.noise": "distributed", "federation.cohort": 5}
ACTIVE = {"secure_aggregation.active": True}
HIDDEN = {**SHARES, "privacy.hidden_cohort": True, "federation.cohort": 2}
BEHIND = {**POISSON, **MASKED, "federation.cohort": 3}
FIVE = [4] * 5
PLACES: dict[str, dict[str, Any]] = {
    "sum": POISSON,
    "fixed": {**POISSON, "federation.sampling": "fixed"},
    "local": LOCAL,
    "in turn": TURNS,
    "banded": {**BANDED, "federation.cohort": 1},
    "in turn, local": {**LOCAL, "federation.sampling": "schedule", "federation.cohort": 2},
    "in turn, shares": {**TURNS, **MASKED, "privacy.noise": "distributed", "federation.cohort": 5},
    "example": {**EXAMPLE, **Z},
    "shares": SHARES,
    "hidden": HIDDEN,
}
# Further cases of whom a person has to trust.
TRUST: dict[str, dict[str, Any]] = {
    "central behind masks": BEHIND,
    "fixed cohorts behind masks": {**BEHIND, "federation.sampling": "fixed"},
    "all clients behind masks": {**BEHIND, "federation.cohort": 5},
    "nobody colludes, central": {**BEHIND, "federation.cohort": 5, "secure_aggregation.corrupt": 0.0},
    "shares, active": SHARES | ACTIVE,
    "shares, nobody colludes": {**SHARES, "secure_aggregation.corrupt": 0.1},
    "local behind masks": {**LOCAL, **MASKED},
    "example behind masks": {**EXAMPLE, **Z, **MASKED},
}
EPSILONS = r"(?<=\()[\d.]+(?=, 0\.001\))|(?<=epsilon is )[\d.]+"


def stated(built: Federation) -> Statement:
    plan = built.assembly.protection.plan
    assert plan is not None
    return guarantee.statement_of(built.assembly, plan.releases)


def text_of(found: dict[str, str]) -> str:
    """One sentence or clause a line."""
    whole = "\n\n".join(f"{case}: {said}" for case, said in found.items())
    return re.sub("([.;]) ", "\\1\n  ", whole)


def test_a_statement_says_what_a_reader_needs_to_doubt_it() -> None:
    """The whole text of each, in which the numbers are those of the data."""
    found = {place: stated(federation(settings, sizes=FIVE)) for place, settings in PLACES.items()}
    for statement in found.values():
        assert all(said in statement.text for said in NOT_COVERED)
        seen, beside = told(statement.text)
        assert statement.epsilon <= seen < 1.01 * statement.epsilon, "rounded up, if at all"
        assert statement.epsilon_participants <= beside < 1.01 * statement.epsilon_participants
        assert statement.private
    golden("guarantee/statements.txt", text_of({place: one.text for place, one in found.items()}), hide=EPSILONS)
    assert found["hidden"].epsilon < found["shares"].epsilon, "own coins are worth something"
    assert stated(federation(POISSON, 1)).text == f"{_VOID}{stated(federation(POISSON)).text}"


def test_who_is_trusted() -> None:
    found = {case: stated(federation(settings, sizes=FIVE)).trust for case, settings in TRUST.items()}
    many = {**BEHIND, **ACTIVE, "federation.cohort": 36}
    found["many clients at random, active"] = stated(federation(many, sizes=[1] * 40)).trust
    found["only masks, active"] = only_masks(SecureAggregationConfig(enabled=True, active=True), coins=True)
    golden("guarantee/trust.txt", text_of(found))


@pytest.mark.parametrize("place", chosen(PLACES, ["sum", "example"]))
def test_where_units_are_held_out_their_number_is_said_to_be_public(place: str) -> None:
    for share in (0.0, 0.1):
        built = federation({**PLACES[place], "evaluation.audit_fraction": share}, sizes=FIVE)
        assert any("the number of all units" in words for words in stated(built).not_covered) is (share > 0)
        card = guarantee.planned(built.assembly)["privacy"]["text"]
        assert ("the number of all units, which is taken as public" in card) is (share > 0)


def test_what_chance_leaves_to_a_ring_is_said() -> None:
    settings = {**SHARES, "federation.cohort": 1000, "secure_aggregation.corrupt": 0.1, "privacy.delta": 1e-5}
    settings |= {"evaluation.audit_fraction": 0.0}
    built = federation(settings, sizes=[1] * 1000)
    assert built.assembly.masks is not None
    chance = built.assembly.masks.sums.terms.choice(1000).failure
    assert 0 < chance <= 2.0**-40
    (said,) = re.findall(r"except with a probability of at most 2\^(-[\d.]+) for each sum$", stated(built).trust)
    assert chance <= 2.0 ** float(said) < 1.1 * chance


def test_a_run_without_privacy_says_what_masks_do_and_no_more(tmp_path: Path) -> None:
    """The whole text of each: masks are no differential privacy."""
    coins = {"federation.sampling": "poisson", "federation.cohort": 3}
    more: dict[str, dict[str, Any]] = {
        "nothing": {},
        "passive": MASKED,
        "active": MASKED | ACTIVE,
        "at random": MASKED | coins,
        "nobody colludes": MASKED | {"secure_aggregation.corrupt": 0.0},
    }
    found = {}
    for case, settings in more.items():
        built = federation({**settings, "federation.rounds": 1}, sizes=FIVE)
        assert guarantee.planned(built.assembly) == {}
        with refused(ValueError, worded=case == "nothing"):
            guarantee.statement_of(built.assembly, 1)
        card = readme(built, tmp_path / case)
        summary = built.run().summary
        numbers = ("epsilon", "epsilon_participants", "delta", "epsilon_cumulative", "privacy")
        assert (summary["unit"], *(summary[name] for name in numbers)) == ("none", *[None] * 5)
        found[case] = summary["privacy_statement"]
        assert f"## Privacy\n\n{found[case]}\n\n## Use" in card
    assert found["nothing"] == NO_PRIVACY
    golden("guarantee/no_privacy.txt", text_of(found))


def told(text: str) -> tuple[float, float]:
    """Epsilon and the participants' epsilon, read from the text of a statement."""
    found = re.search(r"\(([\d.]+), 0\.001\)-differential privacy against (.*?)\. Unit", text)
    assert found is not None
    beside = re.search(r"Against whoever sees which clients take part [^.]*, epsilon is ([\d.]+)\.", text)
    assert (beside is None) == ("the other clients" in found[2])
    return float(found[1]), float((beside or found)[1])


_VOID = "NOT PRIVATE: noise or sampling coins were seeded or injected, so none of this holds. "


@pytest.mark.parametrize(("place", "noise"), [("sum", "sum"), ("local", "contribution"), ("hidden", "shares")])
def test_a_run_says_at_its_end_what_it_planned_and_where_the_noise_is(place: str, noise: str, tmp_path: Path) -> None:
    settings = {**PLACES[place], "federation.rounds": 1}
    result = federation(settings, sizes=FIVE).run(tmp_path / "run")
    said, facts = result.summary, json.loads((tmp_path / "run" / "run.json").read_text())
    statement = stated(federation(settings, sizes=FIVE))
    assert facts["privacy"]["text"] == said["privacy_statement"] == statement.text
    for name, value in statement.to_dict().items():
        assert facts["privacy"][name] == said["privacy"][name] == value
    assert said["epsilon"] == said["privacy"]["epsilon"] == statement.epsilon
    assert json.loads((tmp_path / "run" / "result.json").read_text())["privacy"] == said["privacy"]
    terms = result.whole["privacy"]
    assert (terms["place"], terms["hidden_cohort"]) == (noise, place == "hidden")
    assert (terms["realised"] is not None) == (noise == "shares")


def test_resuming_compares_the_numbers_of_a_guarantee_and_not_its_words(tmp_path: Path) -> None:
    """A run started by an earlier version with other wording can be resumed; with another noise multiplier it cannot."""
    federation(NOISE).run(tmp_path)
    facts = json.loads((tmp_path / "run.json").read_text())
    reworded = dict.fromkeys(PROSE, "as an earlier version worded it")
    (tmp_path / "run.json").write_text(json.dumps(facts | {"privacy": facts["privacy"] | reworded}))
    assert federation(NOISE).run(tmp_path, resume=True).state.round == 3
    less = facts["privacy"] | {"noise_multiplier": 0.5}
    (tmp_path / "run.json").write_text(json.dumps(facts | {"privacy": less}))
    with refused(RunDirectoryError):
        federation(NOISE).run(tmp_path, resume=True)


def test_what_is_planned_and_not_released_is_not_refunded(tmp_path: Path) -> None:
    """Each of two clients takes part in one of two rounds; either might have taken part in both, so epsilon counts both."""
    settings = {**LOCAL, "federation.cohort": 1, "federation.rounds": 2, "privacy.participations": 2}
    said = federation(settings, sizes=(4, 4)).run(tmp_path / "run").summary
    while said["releases"] == 2:
        settings["federation.seed"] = settings.get("federation.seed", 0) + 1
        said = federation(settings, sizes=(4, 4)).run().summary
    assert said["releases"] == 1
    assert said["epsilon"] == said["epsilon_cumulative"] == accounting.epsilon(accounting.replaced(1.0), 2, 1e-3)
    assert said["privacy"]["released"].startswith("at most 2 noised contributions")


def test_what_stays_at_a_client_is_told_apart() -> None:
    """Tensors that stay with clients are trained without noise if contributions are noised, with noise if gradients are."""
    for settings, told in ((NOISE, True), (LOCAL, True), ({**EXAMPLE, **Z}, False)):
        personal = stated(federation({**settings, "method.personal": ["classifier"]}))
        plain = stated(federation(settings))
        assert (len(personal.not_covered) > len(plain.not_covered)) == told
        assert personal.epsilon == plain.epsilon


def test_an_export_after_a_round_was_made_again(tmp_path: Path) -> None:
    """The repeated round costs more than planned, and the export must not state a smaller epsilon."""
    stopped, built = federation(NOISE), federation(NOISE)
    inner = stopped.assembly.transport

    class Failing:
        def exchange(self, requests: Any) -> Any:
            if next(iter(requests.values())).round == 1:
                raise KeyboardInterrupt
            return inner.exchange(requests)

    stopped.assembly = replace(stopped.assembly, transport=Failing())
    with pytest.raises(KeyboardInterrupt):
        stopped.run(tmp_path / "run")
    result = built.run(tmp_path / "run", resume=True)
    assert result.summary["epsilon"] == accounting.epsilon(accounting.unamplified(1.0), 4, 1e-3)
    card = (built.export(result.state, tmp_path / "out") / "README.md").read_text()
    assert told(card)[0] >= result.summary["epsilon"]


PRIVATE: dict[str, Any] = {"privacy.unit": "client", "privacy.noise_multiplier": 1.0, "federation.cohort": 2}


def readme(federation: Any, out: Path) -> str:
    """The README of an export before training, with the planned privacy statement."""
    return (federation.export(federation.assembly.initial, out) / "README.md").read_text(encoding="utf-8")


def test_an_export_states_what_protects_it(tmp_path: Path) -> None:
    section = readme(toys.federation(PRIVATE), tmp_path / "out").split("## Privacy\n\n")[1].split("\n\n## Use")[0]
    assert (
        "1e-05)-differential privacy against whoever gets the final model, or the model of any round. Unit: a client"
        in section
    )
    assert "\n" not in section
    assert "NOT PRIVATE" not in section
    injected = readme(toys.federation(PRIVATE, entropy=SeededEntropy(0)), tmp_path / "injected")
    assert "\n**NOT PRIVATE: noise or sampling coins were seeded or injected" in injected


def test_the_table_holds_the_other_facts_and_no_statement() -> None:
    measured = {"accuracy": 0.5, "macro_f1": 0.25, "loss": 1.0}
    facts = run_facts(toys.config(), cards()[0], 3, measured, None, "A statement | of some length.")
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
