"""The report of protected runs: the guarantee, its limits and pictures; what the server saw behind masks, and their cost."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from secure_fed.report import formatting as words
from secure_fed.report import markup
from secure_fed.report.guarantee import allowed, share
from secure_fed.report.markup import Bar
from secure_fed.report.masks import secure_aggregation
from secure_fed.report.record import read
from tests.cells import every
from tests.golden import golden
from tests.secure_fed.conftest import make_private
from tests.secure_fed.masked_edit import masked
from tests.secure_fed.pages import GONE, Edit, RunFolder, changed, reports, text_of, told
from tests.secure_fed.test_report_measured import of_dummies

pytestmark = pytest.mark.usefixtures("never_drawn")


def private(**values: Any) -> dict[str, Edit]:
    """A case: the private run, with these values of the statement in its result."""
    return {"edit": changed({f"result.privacy.{name}": value for name, value in values.items()}, make_private)}


def stated(**terms: Any) -> dict[str, Edit]:
    """A case: the private run, with these terms of its statement, before there was a result too."""
    return {"edit": lambda run: make_private(run, **terms)}


FIELDS = ("operator", "site", "purpose", "legal_basis", "recipients", "retention", "reason")
PRIVATE: dict[str, dict[str, Any]] = {
    "noise of the server on sums": stated(),
    "noise of each client": {"edit": changed({"config.privacy.noise": "local"}, make_private)},
    "noise in training": {
        "edit": changed(
            {
                **{"config.privacy.unit": "example", "config.privacy.noise": "auto", "result.unit": "example"},
                **{"result.privacy.unit": "one example of one client", "result.privacy.participations": 5},
            },
            make_private,
        )
    },
    "NOT PRIVATE: the noise was injected": stated(private=False),
    "NOT PRIVATE: epsilon is infinite": stated(epsilon=math.inf),
    "NOT PRIVATE: nothing is stated": {"edit": changed({"result.privacy": None}, make_private)},
    "one epsilon against all but the server": private(epsilon=2.0, epsilon_participants=2.0),
    "weak": stated(epsilon=10.1, epsilon_participants=12.0),
    "weak against the other clients": stated(epsilon=8.0, epsilon_participants=19.1),
    "not yet weak": stated(epsilon=10.0, epsilon_participants=10.0),
    "next to nothing": stated(epsilon=15_737.7, epsilon_participants=15_737.7),
    "not finished": {"planned": 20, "finished": False, **stated()},
    "ended early": {"planned": 20, "edit": changed({"result.ended_early": "release 4 would cost 3.2"}, make_private)},
    "ended early and went on": {
        "planned": 20,
        "edit": changed({"result.ended_early": "the ledger was spent", "result.rounds": 2}, make_private),
    },
    "an exact Gaussian": private(gaussian_mu=1.5, groups=[{"units": 2, "delta": 1e-5, "epsilon": 14.0, "exact": True}]),
    "nothing for two units together": private(groups=[]),
    **{
        f"dummy clients {how} the guarantee": {"edit": of_dummies(mu)} for how, mu in (("within", 1.5), ("beyond", 0.5))
    },
    "a ledger": {"edit": changed({"config.privacy.ledger": "l.sqlite"}, make_private)},
    "for the record": {"edit": changed({f"config.record.{name}": f"the {name}" for name in FIELDS}, make_private)},
    "personal tensors": {"edit": changed({"config.method.personal": ["classifier.*"]}, make_private)},
}
SKETCH = {"rows.*.sketch_residual": 0.001, "rows.1.sketch_residual": 0.02, "result.metrics.sketch_residual": 0.001}
RING = {"clients": 1000, "neighbours": 96, "threshold": 40, "corrupt": 39, "failure": 7e-13, "abort": 1e-6}
LOST = {
    **{"rows.0.lost": "a client dealt shares that do not fit", "rows.0.caught": {"client-3": "dealt wrong shares"}},
    **{"rows.0.masked.survivors": None, "rows.1.caught": {"client-1": "opened wrong shares"}},
}
MASKED: dict[str, dict[str, Any]] = {
    "masks alone": {"edit": masked("nothing")},
    "masks alone, cohorts at random": {"edit": masked("coins")},
    "masks alone, a server that may lie": {"edit": masked("nothing", active=True)},
    "masks alone, cohorts at random, a server that may lie": {"edit": masked("coins", active=True)},
    "a ring of masks": {"edit": masked("nothing", **RING)},
    "a lost round, and who lied": {"edit": changed(LOST, masked("nothing"))},
    "a message that was refused": {"edit": changed({"rows.2.rejected": ["ward B"]}, masked("nothing"))},
    "sketches": {"edit": changed(SKETCH, masked("nothing"))},
    "every client a node": {"edit": changed({"run.charter": "ab" * 32}, masked("nothing"))},
    "NOT FOUND: no result of masks": {"edit": changed({"result.secure_aggregation": None}, masked("nothing"))},
    "NOT FOUND: a round without": {"edit": changed({"rows.1.masked": GONE}, masked("nothing"))},
}
BOTH: dict[str, dict[str, Any]] = {
    "masks, and noise of the server on sums": {"edit": masked("central")},
    "the same, cohorts of fixed size": {"edit": masked("central fixed")},
    "shares of noise": {"edit": masked("distributed")},
    "shares of noise, a hidden cohort": {"edit": masked("hidden")},
    "noise of each client": {"edit": masked("local")},
    "noise in training": {"edit": masked("example")},
    "a server that may lie": {"edit": masked("central", active=True)},
    "shares of noise, a server that may lie": {"edit": masked("distributed", active=True)},
    "one epsilon against all": {
        "edit": changed(
            {"result.privacy.epsilon": 2.0, "result.privacy.epsilon_participants": 2.0}, masked("distributed")
        )
    },
    "shares of noise, not finished": {"planned": 20, "finished": False, "edit": masked("distributed")},
    "sketches with noise": {"edit": changed(SKETCH, masked("local"))},
    "every client a node": {"edit": changed({"run.charter": "ab" * 32}, masked("distributed"))},
    "NOT PRIVATE: no result of masks": {"edit": changed({"result.secure_aggregation": None}, masked("distributed"))},
    "NOT PRIVATE: a round without": {"edit": changed({"rows.1.masked": GONE}, masked("distributed"))},
}


@pytest.mark.parametrize(("name", "cases"), [("private", PRIVATE), ("masked", MASKED), ("private_masked", BOTH)])
def test_the_words_of_every_kind_of_protection(
    run_folder: RunFolder, name: str, cases: dict[str, dict[str, Any]]
) -> None:
    golden(f"secure_fed/report_{name}.txt", reports(run_folder, cases))


def test_what_is_for_the_owner_alone_is_not_passed_on(run_folder: RunFolder) -> None:
    """The owner's page says where, when and on what the run was made, and names the copies that nothing protects."""
    recorded = changed({"config.record.site": "cellar 2", "config.record.purpose": "triage"}, make_private)
    folder = run_folder(3, edit=recorded)
    (folder / "private" / "unprotected").mkdir(parents=True)
    origin = {"began": "2026-11-29T06:58:28+01:00", "machine": "ward-7 (Linux)", "commit": "ab" * 20}
    facts = {"origin": origin, "ended": "2026-11-29T07:03:28+01:00", "partition": {"digest": "cd" * 32}}
    (folder / "private" / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    shown, own = told(folder), text_of(folder / "private" / "report.html")
    assert "purpose triage" in shown
    secret = ("cellar 2", "Copies without any protection", "cd" * 32, facts["ended"], *origin.values())
    for one in secret:
        assert one not in shown
        assert one in own
    assert f"(report.html) {hashlib.sha256((folder / 'report.html').read_bytes()).hexdigest()}" in own
    assert "rm -r runs/hand-made/private/unprotected" in own


# What no wording may change.


@pytest.mark.parametrize(
    "terms", [{"private": False}, {"private": "true"}, {"private": 1}, {"private": None}, {"epsilon": math.inf}]
)
@pytest.mark.parametrize("finished", [True, False])
def test_only_a_plain_true_and_a_finite_epsilon_are_a_guarantee(
    run_folder: RunFolder, terms: dict[str, Any], finished: bool
) -> None:
    text = told(run_folder(3, finished=finished, **stated(**terms)))
    assert text.index("NOT PRIVATE") < text.index("In short")
    assert "This run is (" not in text
    assert "epsilon void" in text
    assert "ε ≤" not in text


@pytest.mark.parametrize("spoil", [{"result.secure_aggregation": None}, {"rows.1.masked": GONE}], ids=str)
def test_shares_of_noise_outside_masks_guarantee_nothing(run_folder: RunFolder, spoil: dict[str, Any]) -> None:
    text = told(run_folder(3, edit=changed(spoil, masked("distributed"))))
    assert "NOT PRIVATE" in text
    assert "This run is (" not in text
    assert "epsilon no guarantee" in text


@pytest.mark.parametrize("case", ["central", "central fixed"])
def test_no_secret_size_is_told(run_folder: RunFolder, case: str) -> None:
    """The page shows no number that depends on the cohort size, even if the run's files contain some."""
    secret = {"client_seconds": 7.77, "server_seconds": 8.88, "survivors": 777}
    totals = {"client_seconds": 93.24, "server_seconds": 106.56, "survivors": 777}
    edit = changed(
        {f"rows.*.masked.{name}": value for name, value in secret.items()}
        | {f"result.secure_aggregation.{name}": value for name, value in totals.items()}
        | {"rows.*.seconds": 9.99},
        masked(case),
    )
    text = told(run_folder(edit=edit))
    for shown in ("7.8 s", "8.9 s", "10 s", "1 min 33 s", "1 min 47 s", "777", "in the smallest sum", "in the sum "):
        assert shown not in text


@pytest.mark.parametrize(
    ("case", "says"), [("central", "but not after the run was resumed"), ("nothing", "all later rounds")]
)
def test_for_how_long_a_wrong_dealer_was_left_out(run_folder: RunFolder, case: str, says: str) -> None:
    """A record of a secret cohort does not name it, so a resumed run cannot leave it out."""
    record = read(run_folder(edit=masked(case)))
    lost = dict(record.rounds[0]) | {"lost": "a client dealt shares that do not fit"}
    assert says in secure_aggregation(replace(record, rounds=(lost, *record.rounds[1:])))


# Numbers and pictures.


def test_a_bar_is_as_long_as_its_epsilon() -> None:
    names = [Bar("a", 2.0, ""), Bar("b", 4.0, ""), Bar("c", 12.0, ""), Bar("d", math.inf, "")]
    drawn = markup.limits("bars", names)
    two, four, *beyond = [float(one) for one in re.findall(r'<path d="M\d+ \d+h([\d.]+)', drawn)]
    assert four == pytest.approx(2 * two)
    assert beyond == [pytest.approx(5 * two - 6)] * 2  # the whole axis, without the tip of the arrow
    assert drawn.count("var(--warn)") == 2
    # an epsilon's mark on the axis is the share of right guesses that it allows
    assert re.findall(r">([\d.]+ %)<", drawn) == ["50 %", "73 %", "88 %", "95 %", "99.3 %", "99.97 %"]


@every(
    "epsilon, delta, said",
    [
        (0.0, 0.0, "50.00 %"),
        (1.0, 0.0, "73.11 %"),
        (2.961, 1e-5, "95.08 %"),
        (0.0, 0.01, "50.50 %"),
        (800.0, 0.1, "100 %"),
    ],
)
def test_a_share_of_right_guesses_is_rounded_up(epsilon: float, delta: float, said: str) -> None:
    assert share(epsilon, delta) == said


@every("mu, said", [(0.0, "50.0 %"), (1.5, "77.4 %"), (9.0, "99.98 %")])
def test_a_known_mu_allows_fewer_right_guesses_and_never_more(mu: float, said: str) -> None:
    """Phi(0.75) is 0.7734. Beyond 99.9 % epsilon alone is said."""
    assert share(8.5, 0.0, mu) == said
    assert share(0.0, 0.0, mu) == "50.00 %"


@every("bound, said", [(2.0**-40, "2^-40"), (7e-13, "2^-40.3"), (1e-6, "2^-19.9"), (0.5, "2^-1")])
def test_a_power_of_two_is_no_smaller_than_what_it_bounds(bound: float, said: str) -> None:
    assert words.power_of_two(bound) == said
    assert 2.0 ** float(said.removeprefix("2^")) >= bound


@every(
    "seconds, said",
    [(0.0, "0 s"), (0.0096, "9.6 ms"), (0.65, "650 ms"), (0.9996, "1 s"), (4.8, "4.8 s"), (75, "1 min 15 s")],
)
def test_short_times_are_not_rounded_away(seconds: float, said: str) -> None:
    assert words.time(seconds) == said


ALARMS = np.array([0.0, 1e-3, 0.2, 0.9])


def test_an_exact_gaussian_allows_its_own_curve_and_any_other_what_its_epsilons_do() -> None:
    exact = allowed({"gaussian_mu": 1.5, "curve": []})(ALARMS)
    np.testing.assert_allclose(exact, norm.sf(norm.isf(ALARMS) - 1.5))
    loose = allowed({"gaussian_mu": None, "curve": [{"delta": 0.1, "epsilon": 1.0}, {"delta": 0.01, "epsilon": 2.0}]})
    found = loose(ALARMS)
    assert found[0] == pytest.approx(0.01)
    assert found[1] == pytest.approx(np.exp(2.0) * 1e-3 + 0.01)
    assert found[3] == pytest.approx(min(1 - np.exp(-1.0) * (0.9 - 0.9), 1 - np.exp(-2.0) * (0.99 - 0.9)))
