"""Texts that were read back, on the page and on the terminal; and guarantees that no coins can test."""

from __future__ import annotations

import re
from typing import Any

import pytest

from attacks.report import curves, display, page
from attacks.report.verdict import verdict
from tests.attacks import samples
from tests.attacks.outline import Outline
from tests.cells import every

Audit = dict[str, Any]


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without drawings, which take most of the time."""
    monkeypatch.setattr(curves, "drawing", lambda *args, **named: "<svg></svg>")


def outlined(audit: Audit) -> Outline:
    return Outline(page.page(audit))


def test_attacks_on_other_things_than_membership_show_their_own_numbers(unprotected: Audit) -> None:
    """Of texts the words first, whatever the order in the file is."""
    turned = samples.copied(unprotected)
    for cell in turned["cells"]:
        cell["measured"] = dict(reversed(cell["measured"].items()))
    html = page.page(turned)
    shown = "<b>word recall 83.0 %</b><small>word precision 90.0 %</small><small>recall with position 80.0 %</small>"
    assert html.count(shown) == 2
    assert "<b>cosine 0.710</b><small>mean count error 1.800</small>" in html


def texts(audit: Audit, **measured: Any) -> Audit:
    """The audit with that found by every attack on texts."""
    changed = samples.copied(audit)
    for cell in changed["cells"]:
        if cell["attack"] == "sum_inversion" and cell["applicable"]:
            cell["measured"] = measured
    return changed


@every(
    ("measured", "css", "said"),
    [
        ({"bag_recall": 0.3, "bag_precision": 1.0}, "sign", "part of the texts"),
        (
            {"bag_recall": 0.4, "bag_precision": 1.0, "most_exposed": {"bag_recall": 0.9, "bag_precision": 1.0}},
            "leak",
            "leak: most exposed 90.0 %",
        ),
        (
            {"bag_recall": 0.1, "bag_precision": 1.0, "all_rounds": {"bag_recall": 0.6, "bag_precision": 1.0}},
            "leak",
            "leak: all rounds together 60.0 %",
        ),
        (
            {"guessed_bag_recall": 0.6, "guessed_bag_precision": 1.0, "baseline_bag_recall": 0.1},
            "leak",
            "leak: guessed 60.0 %",
        ),
        ({"bag_recall": 0.1, "bag_precision": 1.0}, "own", "word precision 100.0 %"),
    ],
)
def test_a_cell_of_texts_is_marked_by_what_came_back(protected: Audit, measured: Audit, css: str, said: str) -> None:
    html = page.page(texts(protected, **measured))
    assert (
        len(
            re.findall(
                rf'<td class="{css}"><b>(?:guessed )?word recall [^/]*</b>(?:<small>[^<]*</small>)*<small>{said}</small></td>',
                html,
            )
        )
        == 2
    )


def test_the_numbers_of_the_most_exposed_are_among_all_numbers_and_no_name_is(protected: Audit) -> None:
    most = {"client": "St Mary", "round": 1, "bag_recall": 0.12, "bag_precision": 1.0}
    html = page.page(texts(protected, bag_recall=0.1, bag_precision=1.0, most_exposed=most))
    assert "most exposed: word recall 12.0 %" in html
    assert "St Mary" not in html


def test_no_headline_says_that_there_is_no_leak_where_a_part_of_the_texts_is_read_back(
    protected: Audit, capsys: pytest.CaptureFixture[str]
) -> None:
    part = texts(protected, bag_recall=0.3, bag_precision=1.0)
    assert "Nothing of membership was found, and part of the texts was read back" in outlined(part).text
    assert "Nothing was found" not in outlined(part).text
    display.show(part)
    printed = capsys.readouterr().out
    assert "verdict: nothing of membership found; part of the texts read back" in printed
    assert "in part" in printed
    assert "Nothing was found" in outlined(protected).text


def test_a_guarantee_without_an_epsilon_that_coins_can_test_is_not_called_none(
    protected: Audit, capsys: pytest.CaptureFixture[str]
) -> None:
    """Noise in shares, or neighbours that are replaced: the run is protected, and the audit has nothing to set against it."""
    shares = samples.copied(protected, epsilon_accounted=None)
    text = outlined(shares).text
    display.show(shares)
    for said in (text, capsys.readouterr().out):
        assert "no guarantee" not in said
        assert "none that coins can test" in said
    assert "promises no epsilon" not in text
    assert "makes no promise" not in text


def test_what_such_a_run_promises_is_named(protected: Audit, capsys: pytest.CaptureFixture[str]) -> None:
    named = {"epsilon_accounted": None, "epsilon_promised": 7.08, "adjacency": "one client replaced by another"}
    replaced = samples.copied(protected, **named)
    display.show(replaced)
    assert "7.08, which coins cannot test" in capsys.readouterr().out
    assert "epsilon 7.08 for neighbours that differ by one client replaced by another" in outlined(replaced).text
    said = verdict(replaced)["text"]
    assert "could not have contradicted the run's guarantee of epsilon 7.08 (one client replaced by another): " in said


def test_a_choice_of_attacks_is_not_said_to_be_all(protected: Audit) -> None:
    assert "Every attack, by every adversary" in outlined(protected).text
    some = samples.copied(protected, asked_for=["loss"])
    assert "Every attack, by every adversary" not in outlined(some).text
    assert "Only the requested attacks were made: " in verdict(some)["text"]
    assert "asked for" not in verdict(protected)["text"]


def test_of_a_model_that_stays_with_clients_in_part_little_is_said_to_be_known(protected: Audit) -> None:
    assert "stay with the clients" in verdict(samples.copied(protected, personal=["classifier.weight"]))["text"]
    assert "stay with the clients" not in verdict(protected)["text"]
