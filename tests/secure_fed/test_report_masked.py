"""The report of runs behind masks: what the server saw, the cost of the masks, and the numbers that stay secret."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from secure_fed.report import formatting as words
from secure_fed.report.masks import secure_aggregation
from secure_fed.report.page import write_report
from secure_fed.report.record import read
from tests.secure_fed import toys
from tests.secure_fed.conftest import make_private
from tests.secure_fed.masked_edit import CASES, masked

pytestmark = pytest.mark.usefixtures("drawn_once")

RunFolder = Callable[..., Path]
Run = dict[str, Any]
Edit = Callable[[Run], None]


def told(folder: Path) -> str:
    """The report's text, without markup."""
    page = write_report(folder).read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL)))


NO_NOISE = "The sum carries no noise"
TRUSTED_SUMS = "it is trusted with the sums"
INSIDE = "no sum without noise exists anywhere"
COINS = "if they draw one client alone, the sum is that client's contribution"
WITHOUT = "even without masks"
HIDDEN = "a secret coin of its own decides whether it trains for it"
EVERY = (NO_NOISE, TRUSTED_SUMS, INSIDE, COINS, WITHOUT, HIDDEN)


@pytest.mark.parametrize(
    ("case", "said", "one_client"),
    [
        ("coins", {NO_NOISE, COINS}, "what one client sent only if coins draw no other yes the sum"),
        ("nothing", {NO_NOISE}, "what one client sent no yes the sum"),
        (
            "central",
            {TRUSTED_SUMS, COINS},
            "what one client sent only if coins draw no other yes, without noise the sum",
        ),
        ("central fixed", {TRUSTED_SUMS}, "what one client sent no yes, without noise the sum"),
        (
            "distributed",
            {INSIDE},
            "what one client sent no yes, with that client's share of the noise, too little",
        ),
        (
            "hidden",
            {INSIDE, HIDDEN},
            "who takes part in a round, and when that all take part, not which of them train yes",
        ),
        ("local", {WITHOUT}, "what one client sent no yes, with that client's noise the sum"),
        ("example", {WITHOUT}, "what one client sent no yes, made by noised training the sum"),
    ],
)
def test_every_combination_says_what_the_server_sees(
    run_folder: RunFolder, case: str, said: set[str], one_client: str
) -> None:
    text = told(run_folder(edit=masked(case)))
    assert {sentence for sentence in EVERY if sentence in text} == said
    assert one_client in text
    assert "no secure aggregation" not in text
    assert "It hid nothing from whoever ran that process" in text


def deployed(edit: Edit) -> Edit:
    """The edit, of a run whose clients were separate nodes."""

    def both(run: Run) -> None:
        edit(run)
        run["run"]["charter"] = "ab" * 32

    return both


@pytest.mark.parametrize("edit", [masked("nothing"), masked("distributed"), lambda run: None, make_private])
def test_a_deployed_run_is_not_called_a_simulation(run_folder: RunFolder, edit: Edit) -> None:
    """Its coordinator cannot measure the clients' time, and held none of their data."""
    assert "This run was a simulation: one process held the data" in told(run_folder(edit=edit))
    text = told(run_folder(edit=deployed(edit), name="deployed"))
    assert "This run was no simulation: every client was a separate node with its own data" in text
    assert "one process" not in text
    assert "in turn" not in text
    assert "time of all clients together 4.8 s" not in text


@pytest.mark.parametrize("case", CASES)
def test_which_server_masks_are_good_against(run_folder: RunFolder, case: str) -> None:
    passive = told(run_folder(edit=masked(case)))
    assert "Masks hold against a server that follows the protocol and remembers all that it sees." in passive
    assert "A server that lies about keys or survivors may read single clients" in passive


@pytest.mark.parametrize("case", CASES)
def test_a_server_that_lies_is_named_only_where_that_is_covered(run_folder: RunFolder, case: str) -> None:
    active = told(run_folder(edit=masked(case, active=True)))
    assert "Masks hold against a server that lies, too" in active
    assert "Whoever hands out the clients' signing keys is trusted" in active
    assert "may read single clients" not in active
    assert ("long enough to contain two honest clients" in active) is (
        case in ("central", "coins")
    )  # where secret coins draw the cohort
    assert COINS not in active
    assert "may lie: clients check what they receive, and sign it" in active


def test_masks_alone_are_no_protection(run_folder: RunFolder) -> None:
    text = told(run_folder(edit=masked("nothing")))
    assert "Privacy: this run is not protected" in text
    assert "No differential privacy protects this run. Secure aggregation hides single contributions" in text
    assert "Nothing limits what the trained model reveals" in text
    assert "visible to the server" not in text


def test_what_it_took_and_how_it_was_set(run_folder: RunFolder) -> None:
    text = told(run_folder(edit=masked("distributed")))
    for row in (
        "sent by the clients 14.8 MB, about 309 kB for each client and round",
        "sent to the clients 20.8 MB, about 434 kB for each client and round",
        "time, and number of survivors hidden, because they would reveal the cohort size",
        "clients invited to a sum 4; no sum of fewer than 3 is unmasked",
        "masks shared with all 3 others",
        "threshold 2 of these others can open a client's masks together",
        "at most 1 of the 3 that a client shares masks with, by assumption; no probability of failure",
        "sums lost by chance none, unless more clients vanish than planned for",
    ):
        assert row in text
    assert "2^-" not in text
    without_privacy = told(run_folder(edit=masked("nothing"), name="without privacy"))
    for row in (
        "time of all clients together 4.8 s, about 100 ms for each client and round",
        "time of the server 114 ms",
        "clients in the smallest sum 3 of 4 invited",
        "in the sum",
    ):
        assert row in without_privacy


def test_what_is_left_to_chance_is_a_power_of_two_rounded_up(run_folder: RunFolder) -> None:
    ring = {"clients": 1000, "neighbours": 96, "threshold": 40, "corrupt": 39, "failure": 7e-13, "abort": 1e-6}
    text = told(run_folder(edit=masked("distributed", **ring)))
    assert "masks shared with 96 others, on a ring in random order" in text
    assert (
        "at most 39 of the 96 that a client shares masks with, except with a probability of at most 2^-40.3 in each sum"
        in text
    )
    assert "sums lost by chance each with a probability of at most 2^-19.9; also if more" in text
    assert "at most 300 of the 1,000 clients invited to a sum collude with the server" in text


@pytest.mark.parametrize(("bound", "said"), [(2.0**-40, "2^-40"), (7e-13, "2^-40.3"), (1e-6, "2^-19.9"), (0.5, "2^-1")])
def test_a_power_of_two_is_no_smaller_than_what_it_bounds(bound: float, said: str) -> None:
    assert words.power_of_two(bound) == said
    assert 2.0 ** float(said.removeprefix("2^")) >= bound


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "0 s"), (0.0096, "9.6 ms"), (0.65, "650 ms"), (0.9996, "1 s"), (4.8, "4.8 s"), (75, "1 min 15 s")],
)
def test_short_times_are_not_rounded_away(seconds: float, said: str) -> None:
    assert words.time(seconds) == said


@pytest.mark.parametrize("case", ["central", "central fixed"])
def test_no_secret_size_is_told(run_folder: RunFolder, case: str) -> None:
    """The page shows no number that depends on the cohort size, even if the run's files contain some."""

    def with_secrets(run: Run) -> None:
        masked(case)(run)
        for row in run["rows"]:
            row["masked"] |= {"client_seconds": 7.77, "server_seconds": 8.88, "survivors": 777}
            row["seconds"] = 9.99
        run["result"]["secure_aggregation"] |= {"client_seconds": 93.24, "server_seconds": 106.56, "survivors": 777}

    text = told(run_folder(edit=with_secrets))
    assert "time, and number of survivors hidden, because they would reveal the cohort size" in text
    assert "sent by the clients, expected" in text
    for secret in ("7.8 s", "8.9 s", "10 s", "1 min 33 s", "1 min 47 s", "777", "in the smallest sum", "in the sum "):
        assert secret not in text


def test_a_lost_round_and_who_lied_in_the_protocol_are_named(run_folder: RunFolder) -> None:
    def spoiled(run: Run) -> None:
        masked("nothing")(run)
        dealer, holder = {"client-3": "dealt wrong shares"}, {"client-1": "opened wrong shares"}
        run["rows"][0] |= {"lost": "a client dealt shares that do not fit", "caught": dealer}
        run["rows"][0]["masked"]["survivors"] = None
        run["rows"][1] |= {"caught": holder}

    text = told(run_folder(edit=spoiled))
    assert "round 1 lost a client dealt shares that do not fit" in text
    assert "client client-3 dealt wrong shares; left out from then on. The blame is wrong only if many holders" in text
    assert "client client-1 opened wrong shares; corrected. The blame is wrong only if" in text
    assert "clients in the smallest sum 3 of 4 invited" in text


@pytest.mark.parametrize(
    ("case", "says"), [("central", "but not after the run was resumed"), ("nothing", "all later rounds")]
)
def test_for_how_long_a_wrong_dealer_was_left_out(run_folder: RunFolder, case: str, says: str) -> None:
    """A record of a secret cohort does not name it, so a resumed run cannot leave it out."""
    record = read(run_folder(edit=masked(case)))
    lost = dict(record.rounds[0]) | {"lost": "a client dealt shares that do not fit"}
    text = secure_aggregation(replace(record, rounds=(lost, *record.rounds[1:])))
    assert (
        f"A client that dealt wrong shares was left out of {'later rounds, ' if case == 'central' else ''}{says}"
        in text
    )


def test_how_long_a_round_took_is_told_where_nothing_hides(run_folder: RunFolder) -> None:
    assert "down in the sum time lr" in told(run_folder(edit=masked("nothing")))


@pytest.mark.parametrize(("case", "head"), [("central", "down (expected) lr"), ("hidden", "down lr")])
def test_the_time_of_a_round_would_tell_how_many_trained(run_folder: RunFolder, case: str, head: str) -> None:
    assert head in told(run_folder(edit=masked(case)))


def test_with_a_hidden_cohort_all_take_part(run_folder: RunFolder) -> None:
    text = told(run_folder(edit=masked("hidden")))
    assert "with all of the clients, of whom about 4 train, in each" in text
    assert "clients that train in a round about 4" in text
    assert "expected" not in text


def dropped(case: str) -> Edit:
    def edit(run: Run) -> None:
        masked(case)(run)
        run["result"]["secure_aggregation"] = None

    return edit


def unborne(case: str) -> Edit:
    def edit(run: Run) -> None:
        masked(case)(run)
        del run["rows"][3]["masked"]

    return edit


@pytest.mark.parametrize("edit", [dropped, unborne])
def test_masks_that_the_files_do_not_bear_out_are_no_masks(run_folder: RunFolder, edit: Callable[[str], Edit]) -> None:
    text = told(run_folder(edit=edit("nothing")))
    assert "Secure aggregation: NOT FOUND" in text
    assert "No differential privacy and no secure aggregation protect this run." in text
    assert "Each client's contribution is visible to the server" in text


@pytest.mark.parametrize("edit", [dropped, unborne])
def test_shares_of_noise_outside_masks_guarantee_nothing(run_folder: RunFolder, edit: Callable[[str], Edit]) -> None:
    text = told(run_folder(edit=edit("distributed")))
    assert "NOT PRIVATE" in text
    assert "This run is (" not in text
    assert "epsilon no guarantee" in text


def test_an_unfinished_run_tells_what_it_took_so_far(run_folder: RunFolder) -> None:
    text = told(run_folder(3, planned=20, finished=False, edit=masked("distributed")))
    assert "sent by the clients 3.70 MB" in text
    assert "threshold" not in text.split("Every setting")[0]
    assert "at most 30 % of a round's clients, rounded up, collude with the server" in text


def test_a_refused_message_is_no_update_with_strange_numbers(run_folder: RunFolder) -> None:
    def refuse(run: Run) -> None:
        masked("nothing")(run)
        run["rows"][3]["rejected"] = ["ward B"]

    text = told(run_folder(edit=refuse))
    assert "The server left out 1 update that did not follow the protocol." in text
    assert "What these clients sent did not follow the protocol of secure aggregation." in text
    assert "not finite" not in text


@pytest.mark.parametrize("case", ["nothing", "local"])
def test_what_a_sketch_lost_is_told(run_folder: RunFolder, case: str) -> None:
    def sketch(run: Run) -> None:
        masked(case)(run)
        for row in run["rows"]:
            row["sketch_residual"] = 0.02 if row["round"] == 7 else 0.001
        run["result"]["metrics"]["sketch_residual"] = 0.001

    text = told(run_folder(edit=sketch))
    assert "At most 2.0 % of the mean update's norm was lost (round 7)" in text
    assert "lost by the sketch, last round 0.1 %" in text
    assert ("lost by the sketch time" in text) is (case == "nothing")
    assert ("measured with the noise in both" in text) is (case == "local")


SETTINGS = {"secure_aggregation.enabled": True}
CLIENT = {**SETTINGS, "privacy.unit": "client", "privacy.noise_multiplier": 1.0, "privacy.delta": 1e-3}


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS,
        pytest.param({**CLIENT, "federation.cohort": 3}, marks=pytest.mark.nightly),
        pytest.param(
            {**CLIENT, "privacy.noise": "distributed", "secure_aggregation.active": True}, marks=pytest.mark.nightly
        ),
        {**CLIENT, "privacy.noise": "distributed", "privacy.hidden_cohort": True, "federation.cohort": 3},
    ],
    ids=["nothing", "central", "distributed", "hidden"],
)
def test_a_real_run_is_reported_finished_and_unfinished(settings: dict[str, Any], tmp_path: Path) -> None:
    toys.federation({**settings, "federation.rounds": 2}, sizes=(4, 5, 6, 7)).run(tmp_path / "run")
    for finished in (True, False):
        text = told(tmp_path / "run")
        assert ("Its parameters" in text) is finished
        assert "Its cost" in text
        assert "NOT" not in text.split("Every setting")[0]
        (tmp_path / "run" / "result.json").unlink(missing_ok=True)
