"""The privacy statement of a run: the same numbers in words and as data, before the run starts and after it has ended."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privacy import accounting
from privacy.statement import NOT_COVERED, PROSE, Statement
from secure_fed.config import SecureAggregationConfig
from secure_fed.errors import RunDirectoryError
from secure_fed.federation import Federation
from secure_fed.runs import guarantee
from secure_fed.runs.guarantee import only_masks
from tests.secure_fed import toys
from tests.secure_fed.in_turn import BANDED, IN_TURN
from tests.secure_fed.private_toys import EXAMPLE, NOISE, federation

Z = {"privacy.noise_multiplier": 1.0}
LOCAL = {**NOISE, "privacy.noise": "local"}
POISSON = {**NOISE, "federation.cohort": 2}
PLACES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "sum": (
        POISSON,
        (
            "Unit: a client with everything it has. Neighbouring data sets: one client added or removed.",
            "a client takes part in a round if its own secret coin says so, rate 0.6667",
            "Noise is added by the server",
            "the server is trusted: it sees every contribution before it adds the noise",
            "3 noised sums, and every model made of them",
        ),
    ),
    "fixed": (
        {**POISSON, "federation.sampling": "fixed"},
        ("one client replaced by another", "fixed size", "counted without replacement", "Renyi"),
    ),
    "local": (
        LOCAL,
        (
            "one client replaced by another",
            "no amplification is counted; a client takes part in at most 3 rounds",
            "Noise is added by each client, to its own contribution",
            "nobody but the client's own machine",
            "whether and when a client takes part",
        ),
    ),
    "in turn": (
        {**IN_TURN, "federation.cohort": 1},
        (
            "differential privacy against everybody but the server",
            "one client's data present or absent; a client without data sends zeros; everything else is public: the order,",
            "one such mechanism, whose output one client changes by at most 1.41421 times the clip norm",
            "clients in turn, by a public order: each at most once in 3 rounds, and at most 2 times in the run; 1 place in",
            "exact: one Gaussian mechanism for the whole run",
            "to the sum of each pass, independent in every round",
            "adds the noise, and keeps the noise secret. Released",
            "a person with data at several clients, who is protected only as a group of that many clients",
        ),
    ),
    "banded": (
        {**BANDED, "federation.cohort": 1},
        ("correlated over 3 rounds: each round's noise cancels part of the noise of",),
    ),
    "in turn, local": (
        {**LOCAL, "federation.sampling": "schedule", "federation.cohort": 2},
        ("privacy against everybody: ", "a client takes part in at most 2 rounds, in turn, by a public order"),
    ),
    "in turn, shares": (
        {**IN_TURN, "privacy.noise": "distributed", "secure_aggregation.enabled": True, "federation.cohort": 3},
        (
            "privacy against everybody: ",
            "a client without data sends zeros and its share of the noise; everything else is public",
            "clients in turn, by a public order: each in every round; 3 places in every round",
            "Renyi privacy of distributed discrete Gaussians",
            "before masking, independent in every round",
        ),
    ),
    "example": (
        {**EXAMPLE, **Z},
        (
            "Unit: one example of one client. Neighbouring data sets: one example added or removed.",
            "every client draws its batches by secret coins",
            "to every step of its training",
            "how many examples a client has",
        ),
    ),
}


def stated(built: Federation) -> Statement:
    plan = built.assembly.protection.plan
    assert plan is not None
    return guarantee.statement_of(built.assembly, plan.releases)


@pytest.mark.parametrize("place", PLACES)
def test_a_statement_says_what_a_reader_needs_to_doubt_it(place: str) -> None:
    settings, words = PLACES[place]
    statement = stated(federation(settings))
    for said in (*words, *NOT_COVERED, "Gaussian with noise multiplier 1,", "clipped to norm 0.1", "0.001"):
        assert said in statement.text
    seen, beside = told(statement.text)
    assert statement.epsilon <= seen < 1.01 * statement.epsilon, "rounded up, if at all"
    assert statement.epsilon_participants <= beside < 1.01 * statement.epsilon_participants
    assert statement.private
    assert stated(federation(settings, 1)).text == f"{_VOID}{statement.text}"


@pytest.mark.parametrize("place", PLACES)
def test_where_units_are_held_out_their_number_is_said_to_be_public(place: str) -> None:
    settings, _ = PLACES[place]
    for share in (0.0, 0.1):
        built = federation({**settings, "evaluation.audit_fraction": share})
        assert any("the number of all units" in words for words in stated(built).not_covered) is (share > 0)
        card = guarantee.planned(built.assembly)["privacy"]["text"]
        assert ("the number of all units, which is taken as public" in card) is (share > 0)


MASKED = {"secure_aggregation.enabled": True, "secure_aggregation.dropout": 0.2, "secure_aggregation.corrupt": 0.2}
SHARES = {**NOISE, **MASKED, "privacy.noise": "distributed", "federation.cohort": 5}
ACTIVE = {"secure_aggregation.active": True}
HIDDEN = {**SHARES, "privacy.hidden_cohort": True, "federation.cohort": 2}
COUNTED = (
    "colluding with at most 1 of the 5 clients invited to a sum, learns only noised sums, in each of which the guarantee "
    "counts on 3 shares of noise; no sum of fewer than 4 clients is unmasked; "
)
LIES = (
    "a server that lies could read a single client's contribution, protected only by that client's share of the noise"
)
KEYS = "the party that distributes the clients' signing keys is trusted to distribute the right ones"
DRAWN = "the server is trusted: before it adds the noise it sees sums over the clients that it draws, possibly a single one;"
COHORT = "the server is trusted: before it adds the noise it sees sums over a round's clients;"
COLLUDING = "while at most 20 % of a round's clients (rounded up) collude with it"
OWN = "nobody but the client's own machine"
TRUST: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "central": (POISSON, ("the server is trusted: it sees every contribution before it adds the noise",)),
    "central behind masks": (
        {**POISSON, **MASKED, "federation.cohort": 3},
        (DRAWN, "as long as it keeps to the protocol", COLLUDING),
    ),
    "fixed cohorts behind masks": (
        {**POISSON, **MASKED, "federation.cohort": 3, "federation.sampling": "fixed"},
        (COHORT, "as long as it keeps to the protocol", COLLUDING),
    ),
    "all clients behind masks": ({**POISSON, **MASKED, "federation.cohort": 5}, (COHORT,)),
    "distributed": (SHARES, ("no single party: a server that keeps to the protocol, " + COUNTED + LIES,)),
    "distributed, active": (SHARES | ACTIVE, ("no single party: any server, even one that lies, " + COUNTED + KEYS,)),
    "hidden": (HIDDEN, ("no single party: a server that keeps to the protocol, " + COUNTED + LIES,)),
    "local behind masks": ({**LOCAL, **MASKED}, (f"{OWN}, with masks or without",)),
    "example behind masks": ({**EXAMPLE, **Z, **MASKED}, (f"{OWN}, with masks or without",)),
    "local": (LOCAL, (OWN,)),
}


@pytest.mark.parametrize("case", TRUST)
def test_who_is_trusted(case: str) -> None:
    settings, words = TRUST[case]
    said = stated(federation(settings, sizes=[4] * 5)).trust
    for phrase in words:
        assert phrase in said
    others = (DRAWN, COHORT, LIES, KEYS, "with masks or without")
    assert [one for one in others if one in said] == [one for one in others if any(one in phrase for phrase in words)]


def test_of_a_server_that_may_lie_coins_draw_no_client_alone() -> None:
    settings = {**POISSON, **MASKED, **ACTIVE, "federation.cohort": 36}
    said = stated(federation(settings, sizes=[1] * 40)).trust
    assert "it sees sums over the clients that it draws, of whom at least two are honest;" in said
    assert "even if it lies about keys or about who takes part" in said
    assert COLLUDING in said
    alone = only_masks(SecureAggregationConfig(enabled=True, active=True), coins=True)
    assert "sums over the clients that it draws, of whom at least two are honest." in alone


def test_one_may_collude_where_so_few_take_part_unless_the_share_is_none() -> None:
    for share, colluding, shares in ((0.1, "at most 1", 3), (0.0, "none", 4)):
        said = stated(federation({**SHARES, "secure_aggregation.corrupt": share}, sizes=[4] * 5)).trust
        assert f"colluding with {colluding} of the 5 clients invited to a sum" in said
        assert f"counts on {shares} shares of noise" in said
    central = {**NOISE, **MASKED, "federation.cohort": 5, "secure_aggregation.corrupt": 0.0}
    assert "while no client colludes with it" in stated(federation(central, sizes=[4] * 5)).trust


def test_what_chance_leaves_to_a_ring_is_said() -> None:
    settings = {**SHARES, "federation.cohort": 1000, "secure_aggregation.corrupt": 0.1, "privacy.delta": 1e-5}
    settings |= {"evaluation.audit_fraction": 0.0}
    built = federation(settings, sizes=[1] * 1000)
    assert built.assembly.masks is not None
    chance = built.assembly.masks.sums.terms.choice(1000).failure
    assert 0 < chance <= 2.0**-40
    said = re.search(
        r"is unmasked, except with a probability of at most 2\^(-[\d.]+) for each sum; ", stated(built).trust
    )
    assert said is not None
    assert chance <= 2.0 ** float(said[1]) < 1.1 * chance


def test_shares_of_noise_have_a_statement_of_their_own() -> None:
    seen, hidden = (stated(federation(settings, sizes=[4] * 5)) for settings in (SHARES, HIDDEN))
    for statement in (seen, hidden):
        assert statement.mechanism.startswith("distributed discrete Gaussian with noise multiplier 1,")
        assert statement.noise == "by the clients: each adds its share to its own contribution before masking"
        assert (
            statement.adjacency
            == "one client's data present or absent; a client without data sends zeros and its share of the noise"
        )
        assert statement.epsilon == statement.epsilon_participants
        assert statement.released.startswith("3 noised sums")
    assert seen.sampling.startswith("no amplification is counted: the participants of a round are visible")
    assert "whether and when a client takes part" in seen.not_covered
    assert "trains if its own secret coin says so, rate 0.4" in hidden.sampling
    assert not any("whether and when" in one for one in hidden.not_covered)
    assert any("how long it takes to answer, which may reveal whether it trained" in one for one in hidden.not_covered)
    assert hidden.epsilon < seen.epsilon


@pytest.mark.parametrize(
    ("settings", "words", "never"),
    [
        ({}, "no secure aggregation: the server sees every client's contribution", "sums"),
        (MASKED, "from a server that keeps to the protocol, while at most 20 %", "even one that lies"),
        (
            MASKED | ACTIVE,
            "from the server, even one that lies about keys or about who takes part, while at most 20 %",
            "may read",
        ),
        (MASKED | ACTIVE, "It learns sums over a round's clients. Nothing bounds", "A server that lies"),
        (
            {**MASKED, "federation.sampling": "poisson", "federation.cohort": 3},
            "It learns sums over the clients that it draws, possibly a single one.",
            "over a round",
        ),
        (
            MASKED | {"secure_aggregation.corrupt": 0.0},
            "a server that keeps to the protocol, while no client colludes",
            "%",
        ),
    ],
    ids=["nothing", "passive", "active", "active, all", "coins", "nobody colludes"],
)
def test_a_run_without_privacy_says_what_masks_do_and_no_more(
    settings: dict[str, Any], words: str, never: str, tmp_path: Path
) -> None:
    built = federation({**settings, "federation.rounds": 1}, sizes=[4] * 5)
    before = (built.export(built.assembly.initial, tmp_path / "before") / "README.md").read_text()
    said = built.run().summary["privacy_statement"]
    assert said in before
    assert words in said
    assert never not in said
    assert said.startswith("No differential privacy")
    assert "the training data" in said or "its training data" in said


@pytest.mark.parametrize(
    ("settings", "place", "hidden"),
    [
        (NOISE, "sum", False),
        (SHARES, "shares", False),
        (HIDDEN, "shares", True),
        (LOCAL, "contribution", False),
        ({**EXAMPLE, **Z}, "gradients", False),
    ],
    ids=["sum", "shares", "hidden", "contribution", "gradients"],
)
def test_a_program_can_tell_where_the_noise_is(settings: dict[str, Any], place: str, hidden: bool) -> None:
    terms = federation({**settings, "federation.rounds": 1}, sizes=[4] * 5).run().whole["privacy"]
    assert (terms["place"], terms["hidden_cohort"]) == (place, hidden)
    assert (terms["realised"] is not None) == (place == "shares")


def told(text: str) -> tuple[float, float]:
    """Epsilon and the participants' epsilon, read from the text of a statement."""
    found = re.search(r"\(([\d.]+), 0\.001\)-differential privacy against (.*?)\. Unit", text)
    assert found is not None
    beside = re.search(r"Against observers who see which clients take part, epsilon is ([\d.]+)\.", text)
    assert (beside is None) == found[2].startswith("everybody")
    return float(found[1]), float((beside or found)[1])


_VOID = "NOT PRIVATE: noise or sampling coins were seeded or injected, so none of this holds. "


@pytest.mark.parametrize("place", ["sum", "local"])
def test_a_run_says_at_its_end_what_it_planned(place: str, tmp_path: Path) -> None:
    settings, _ = PLACES[place]
    said = federation(settings).run(tmp_path / "run").summary
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    statement = stated(federation(settings))
    assert facts["privacy"]["text"] == said["privacy_statement"] == statement.text
    for name, value in statement.to_dict().items():
        assert facts["privacy"][name] == said["privacy"][name] == value
    assert said["epsilon"] == said["privacy"]["epsilon"] == statement.epsilon
    assert json.loads((tmp_path / "run" / "result.json").read_text())["privacy"] == said["privacy"]


def test_resuming_compares_the_numbers_of_a_guarantee_and_not_its_words(tmp_path: Path) -> None:
    """A run started by an earlier version with other wording can be resumed; with another noise multiplier it cannot."""
    federation(NOISE).run(tmp_path)
    facts = json.loads((tmp_path / "run.json").read_text())
    reworded = dict.fromkeys(PROSE, "as an earlier version worded it")
    (tmp_path / "run.json").write_text(json.dumps(facts | {"privacy": facts["privacy"] | reworded}))
    assert federation(NOISE).run(tmp_path, resume=True).state.round == 3
    less = facts["privacy"] | {"noise_multiplier": 0.5}
    (tmp_path / "run.json").write_text(json.dumps(facts | {"privacy": less}))
    with pytest.raises(RunDirectoryError, match="started with another guarantee"):
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


def test_without_privacy_there_is_nothing_to_state() -> None:
    built = federation({})
    assert guarantee.planned(built.assembly) == {}
    with pytest.raises(ValueError, match="no guarantee"):
        guarantee.statement_of(built.assembly, 1)
    said = built.run().summary
    assert said["unit"] == "none"
    assert {said[name] for name in ("epsilon", "epsilon_participants", "delta", "epsilon_cumulative", "privacy")} == {
        None
    }
    assert said["privacy_statement"].startswith("No differential privacy")


def test_an_export_carries_the_statement(tmp_path: Path) -> None:
    for settings, words in (
        (NOISE, "differential privacy against readers of the released models. Unit: a client"),
        ({}, "No differential privacy"),
    ):
        built = toys.federation(settings)
        out = built.export(built.run().state, tmp_path / str(len(settings)))
        assert words in (out / "README.md").read_text()


def test_an_export_after_a_round_was_made_again(tmp_path: Path) -> None:
    """The repeated round costs more than planned, and the export must not state a smaller epsilon."""
    for number in range(2):
        built = federation(NOISE)
        transport = built.assembly.transport

        class Failing:
            def exchange(self, requests: Any, inner: Any = transport) -> Any:
                if next(iter(requests.values())).round == 1:
                    raise KeyboardInterrupt
                return inner.exchange(requests)

        if number == 0:
            built.assembly = replace(built.assembly, transport=Failing())
            with pytest.raises(KeyboardInterrupt):
                built.run(tmp_path / "run")
    result = built.run(tmp_path / "run", resume=True)
    assert result.summary["epsilon"] == accounting.epsilon(accounting.unamplified(1.0), 4, 1e-3)
    card = (built.export(result.state, tmp_path / "out") / "README.md").read_text()
    assert told(card)[0] >= result.summary["epsilon"]


def test_where_many_take_part_participants_learn_more() -> None:
    """Amplification by sampling holds only against observers who cannot see the cohort."""
    said = federation({**NOISE, "federation.cohort": 1, "privacy.delta": 1e-3}, sizes=[3] * 10).run().summary
    assert said["epsilon"] < 0.5 * said["epsilon_participants"]
    assert said["epsilon_participants"] == accounting.epsilon(accounting.unamplified(1.0), 3, 1e-3)
    everybody = federation({**NOISE, "federation.cohort": 10}, sizes=[3] * 10).run().summary
    assert everybody["epsilon"] == everybody["epsilon_participants"] == said["epsilon_participants"]
