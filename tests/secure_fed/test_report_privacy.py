"""The report's section on privacy: the guarantee, its limits, and the observers it holds against."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privacy.entropy import SeededEntropy
from secure_fed.errors import RunDirectoryError
from secure_fed.report.page import write_report
from tests.secure_fed import toys

pytestmark = pytest.mark.usefixtures("drawn_once")

RunFolder = Callable[..., Path]
PrivateEdit = Callable[..., Callable[[dict[str, Any]], None]]
Run = dict[str, Any]


def told(folder: Path) -> str:
    """The report's text, without markup."""
    page = write_report(folder).read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL)))


def changed(edit: Callable[[Run], None], *changes: Callable[[Run], None]) -> Callable[[Run], None]:
    def both(run: Run) -> None:
        for one in (edit, *changes):
            one(run)

    return both


def test_a_private_run_says_what_it_guarantees_rounded_up(run_folder: RunFolder, private_edit: PrivateEdit) -> None:
    text = told(run_folder(edit=private_edit()))
    assert "This run is (2.97, 1e-05)-differentially private. Protected: a client with everything it has." in text
    assert "epsilon 2.97 " in text
    assert "whether one client's data were used or not" in text
    assert "at most 95.08 %" in text  # (e^2.961 + delta) / (e^2.961 + 1), rounded up
    assert "epsilon against participants 7.5" in text
    assert "delta 1e-05 (1 in 100,000)" in text
    assert "releases 12 charged, 12 planned" in text
    assert "ledger runs/hand-made/budget.sqlite" in text
    assert "spent in the ledger epsilon 2.97 of 3 (delta 1e-05), when this run ended" in text
    assert "an evaluation on private test data" in text
    assert "The guarantee in words." in text
    assert "No differential privacy" not in text
    assert "weak guarantee" not in text
    assert "NOT PRIVATE" not in text


def test_the_page_says_that_itself_is_not_private(run_folder: RunFolder, private_edit: PrivateEdit) -> None:
    assert "Files of the run directory name the clients" in told(run_folder(edit=private_edit()))


@pytest.mark.parametrize("noise", ["central", "local"])
def test_the_server_is_trusted_where_it_adds_the_noise(
    run_folder: RunFolder, private_edit: PrivateEdit, noise: str
) -> None:
    local = changed(private_edit(), lambda run: run["config"]["privacy"].update(noise=noise))
    text = told(run_folder(edit=local))
    assert ("there is no guarantee: it is trusted" in text) is (noise == "central")
    assert ("The guarantee holds against the server too" in text) is (noise == "local")
    assert ("a client held its own data or other data" in text) is (noise == "local")
    assert ("readers do not learn how many clients took part" in text) is (noise == "central")


def test_with_noise_in_training_the_unit_is_an_example(run_folder: RunFolder, private_edit: PrivateEdit) -> None:
    def example(run: Run) -> None:
        run["config"]["privacy"] |= {"unit": "example", "noise": "auto"}
        run["result"]["unit"] = "example"
        run["result"]["privacy"].update(unit="one example of one client", participations=5)

    text = told(run_folder(edit=changed(private_edit(), example)))
    assert "differentially private. Protected: one example of one client" in text
    assert "The server sees every client's contribution, made by noised training" in text
    assert "a person with several examples is protected less" in text
    assert "rounds of one client at most 5" in text
    assert "expected" not in text


def test_injected_noise_is_not_private_beyond_doubt(run_folder: RunFolder, private_edit: PrivateEdit) -> None:
    text = told(run_folder(edit=private_edit(private=False)))
    assert text.index("NOT PRIVATE") < text.index("In short")
    assert "This run is NOT PRIVATE, although it added noise." in text
    assert "epsilon void" in text
    assert "This run is (" not in text


@pytest.mark.parametrize("private", ["true", 1, None])
def test_only_a_plain_true_is_private(run_folder: RunFolder, private_edit: PrivateEdit, private: object) -> None:
    assert "This run is NOT PRIVATE" in told(run_folder(edit=private_edit(private=private)))


def test_an_infinite_epsilon_is_no_guarantee(run_folder: RunFolder, private_edit: PrivateEdit) -> None:
    text = told(run_folder(edit=private_edit(epsilon=math.inf)))
    assert "no finite epsilon can be stated" in text
    assert "epsilon void" in text


def test_privacy_that_was_asked_for_and_is_nowhere_stated(run_folder: RunFolder, private_edit: PrivateEdit) -> None:
    text = told(run_folder(edit=changed(private_edit(), lambda run: run["result"].update(privacy=None))))
    assert "NOT PRIVATE" in text
    assert "settings protect unit 'client', but its files state no guarantee" in text
    assert "epsilon no guarantee" in text


@pytest.mark.parametrize(
    ("epsilon", "seen", "said"),
    [
        (10.0, 10.0, None),
        (10.1, 12.0, "A weak guarantee: epsilon is 12. With an epsilon above 10"),
        (
            8.0,
            19.1,
            "A weak guarantee against readers who also know who took part: epsilon is 19.1. With an epsilon above 10",
        ),
    ],
)
def test_a_large_epsilon_is_called_weak(
    run_folder: RunFolder, private_edit: PrivateEdit, epsilon: float, seen: float, said: str | None
) -> None:
    text = told(run_folder(edit=private_edit(epsilon=epsilon, epsilon_participants=seen)))
    assert ("more than 20,000 times as likely" in text) is (said is not None)
    assert said is None or said in text


def test_a_huge_epsilon_bounds_next_to_nothing(run_folder: RunFolder, private_edit: PrivateEdit) -> None:
    text = told(run_folder(edit=private_edit(epsilon=15_737.7, epsilon_participants=15_737.7)))
    assert "the bound is above 99.99 %, which rules out next to nothing" in text
    assert "epsilon 15,800" in text


def test_an_unfinished_run_states_its_plan(run_folder: RunFolder, private_edit: PrivateEdit) -> None:
    text = told(run_folder(3, planned=20, finished=False, edit=private_edit()))
    assert "This run is planned to be (2.97, 1e-05)-differentially private" in text
    assert "These numbers are those of its whole plan" in text
    assert "The plan in words." in text
    assert "Not finished: 3 of 20 rounds done" in text


def test_a_run_that_spent_its_budget_is_finished(run_folder: RunFolder, private_edit: PrivateEdit) -> None:
    early = changed(
        private_edit(), lambda run: run["result"].update(ended_early="release 8 would bring epsilon to 3.2")
    )
    text = told(run_folder(7, planned=20, edit=early))
    assert "Ended early: 7 of 20 rounds" in text
    assert "20 rounds, 7 of them done before the run ended" in text
    assert "ended before its last planned round: release 8 would bring epsilon to 3.2" in text
    assert "This run is (2.97, 1e-05)-differentially private" in text
    assert "Not finished" not in text


def test_a_result_that_ended_early_and_went_on_is_old(run_folder: RunFolder, private_edit: PrivateEdit) -> None:
    early = changed(private_edit(), lambda run: run["result"].update(ended_early="the ledger was spent", rounds=5))
    assert "Not finished: 7 of 20 rounds done" in told(run_folder(7, planned=20, edit=early))


def test_sizes_are_expected_ones_where_the_cohort_is_secret(run_folder: RunFolder, private_edit: PrivateEdit) -> None:
    text = told(run_folder(edit=private_edit()))
    assert "with about 4 of the clients in each" in text
    assert "sent by clients, expected 14.8 MB" in text
    assert "clients (expected)" in text
    assert "No train loss is shown" in text


def test_personal_tensors_are_named_as_what_no_noise_covers(run_folder: RunFolder, private_edit: PrivateEdit) -> None:
    own = changed(private_edit(), lambda run: run["config"]["method"].update(personal=["classifier.*"]))
    assert "The personal tensors (classifier.*) carry no noise" in told(run_folder(edit=own))


def test_statements_are_text_never_markup(run_folder: RunFolder, private_edit: PrivateEdit) -> None:
    hostile = "<script>alert(1)</script>"
    terms = dict.fromkeys(
        ("unit", "adjacency", "mechanism", "sampling", "accountant", "noise", "trust", "released"), hostile
    )
    edit = changed(
        private_edit(**terms, not_covered=[hostile]),
        lambda run: run["result"]["privacy"].update(ledger=hostile, data_set=hostile),
        lambda run: run["result"].update(privacy_statement=hostile),
    )
    page = write_report(run_folder(edit=edit)).read_text(encoding="utf-8")
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 12


@pytest.mark.parametrize("terms", [{"epsilon": "small"}, {"delta": None}, {"not_covered": 3}, {"clip_norm": "one"}])
def test_a_statement_that_no_run_writes_is_one_sentence(
    run_folder: RunFolder, private_edit: PrivateEdit, terms: dict[str, Any]
) -> None:
    with pytest.raises(RunDirectoryError, match="it holds a value that no run writes"):
        write_report(run_folder(edit=private_edit(**terms)))


@pytest.mark.parametrize(
    "settings",
    [
        {"privacy.unit": "client", "federation.cohort": 2},
        {"privacy.unit": "client", "privacy.noise": "local"},
        {"privacy.unit": "example"},
    ],
)
def test_a_real_run_is_reported_finished_and_unfinished(settings: dict[str, Any], tmp_path: Path) -> None:
    toys.federation({**settings, "privacy.noise_multiplier": 1.0, "federation.rounds": 2}).run(tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert f"Protected: {result['privacy']['unit']}." in told(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    assert "is planned to be (" in told(tmp_path / "run")


def test_a_real_run_with_injected_noise_is_reported_as_not_private(tmp_path: Path) -> None:
    settings = {"privacy.unit": "client", "privacy.noise_multiplier": 1.0, "federation.rounds": 2}
    toys.federation(settings, entropy=SeededEntropy(0)).run(tmp_path / "run")
    assert "This run is NOT PRIVATE" in told(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    assert "This run is NOT PRIVATE" in told(tmp_path / "run")
