"""Recovered texts: when they are a leak, which numbers decide, and the report's sentences.

On the page and on the terminal; and guarantees that no coins can test.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from attacks.evidence.attempts import attempts
from attacks.report import curves, display, page
from tests.attacks import samples
from tests.attacks.outline import Outline
from tests.attacks.samples import verdict
from tests.attacks.test_verdict import audit_of, cell
from tests.cells import every

Measured = dict[str, Any]


def words(share: float, right: float = 1.0, **more: Any) -> Measured:
    """Figures of the exact test by words alone."""
    return {"bag_recall": share, "bag_precision": right, **more}


def guesses(share: float, right: float, usual: float | None = None) -> Measured:
    """Figures of guesses where the exact test does not apply."""
    baseline = {} if usual is None else {"baseline_bag_recall": usual}
    return {
        "recall": None,
        "bag_recall": None,
        "guessed_bag_recall": share,
        "guessed_bag_precision": right,
        **baseline,
    }


def judged(measured: Measured, *others: Measured, **changes: Any) -> tuple[str, str]:
    """The verdict on an audit without findings on membership and with these findings on texts."""
    found = verdict(audit_of(cell(0.5), {"auc": None, "vantage": "server", "measured": measured}, *others, **changes))
    return found["level"], found["text"]


def test_words_that_came_back_and_are_right_are_a_leak_although_their_places_are_open() -> None:
    level, text = judged(words(1.0, recall=0.98, precision=0.23, updates=10, exact_applicable=10))
    assert level == "leak"
    assert text.startswith("A leak was found. Texts can be read back: a server that sees every single update")
    assert (
        "named 100.0 % of the words of a client's texts (all of its answers are right), and 98.0 % of the pairs of word and"
        " place (23.0 % of its answers are right), as a mean over 10 updates." in text
    )
    assert "Nothing of membership was found." in text
    assert "ittle" not in text


def test_pairs_alone_are_a_leak_as_well() -> None:
    assert judged({"recall": 0.6, "precision": 0.9})[0] == "leak"
    level, text = judged(words(0.9, 0.1, recall=0.6, precision=0.9))
    assert level == "leak"
    assert "named 60.0 % of the words of a client's texts in their places (90.0 % of its answers are right)" in text


@every(
    "measured",
    [
        words(0.5),  # not more than half
        words(1.0, 0.5),  # half of what was named is wrong
        {"recall": 1.0, "precision": 0.01},
        words(0.1),
        guesses(0.9, 0.5, 0.1),
        guesses(0.9, 0.9, 0.75),  # little more than the commonest words give
        guesses(0.9, 0.9),  # nobody measured what these give
        {"matching": {"bag_recall": 0.9, "bag_precision": 0.9, "baseline": 0.8}},
        {"matching": {"bag_recall": 0.9, "bag_precision": 0.4, "baseline": 0.1}},
        {"most_exposed": words(0.5), **words(0.3)},
    ],
)
def test_what_is_no_leak(measured: Measured) -> None:
    assert judged(measured)[0] == "none_found"


@every(
    "measured",
    [
        words(0.51, 0.51),
        words(0.2, all_rounds=words(1.0)),
        words(0.2, all_rounds={**words(0.2), "most_exposed": words(0.9)}),
        words(0.4, most_exposed=words(1.0)),
        guesses(0.9, 0.51, 0.7),
        {**guesses(0.4, 1.0, 0.1), "most_exposed_guess": guesses(0.9, 1.0, 0.1)},
        words(0.1, all_rounds=guesses(0.9, 1.0, 0.1)),
        {"matching": {"bag_recall": 1.0, "bag_precision": 0.9, "baseline": 0.1}},
        {"guessed_recall": 0.58, "guessed_precision": 1.0, "baseline_recall": 0.1},
    ],
)
def test_what_is_a_leak_wherever_it_stands(measured: Measured) -> None:
    level, text = judged(measured)
    assert level == "leak"
    assert "Texts can be read back:" in text
    assert judged(measured, baseline={"auc": 0.6, "at_chance": False})[0] == "leak"  # no coin has a part in it
    alone = verdict(audit_of({"auc": None, "vantage": "server", "measured": measured}))
    assert alone["level"] == "leak"
    assert "says nothing about membership" in alone["text"]


def test_a_void_audit_of_membership_says_so_beside_texts() -> None:
    text = judged(words(0.9), baseline={"auc": 0.6, "at_chance": False})[1]
    assert text.startswith("A leak was found. Texts can be read back:")
    assert "This audit of membership is void." in text
    text = judged(words(0.1), baseline={"auc": 0.6, "at_chance": False})[1]
    assert text.startswith("This audit of membership is void.")
    assert "Little of the texts was read back" in text


def test_texts_are_told_beside_a_violation_and_beside_a_leak_of_membership() -> None:
    texts = {"auc": None, "vantage": "server", "measured": words(0.9)}
    broken = verdict(audit_of(cell(0.8, epsilon_lower=3.0), texts, unit="example", epsilon_accounted=1.0))
    assert broken["level"] == "violation"
    assert "Texts can be read back:" in broken["text"]
    text = verdict(audit_of(cell(0.8), texts))["text"]
    assert text.startswith("A leak was found, and no guarantee covers it. An outsider")
    assert text.count("A leak was found") == 1
    assert "Texts can be read back:" in text


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.199, "Little of the texts was read back"),
        (0.2, "Part of the texts can be read back"),
        (0.501, "Texts can be"),
    ],
)
def test_how_much_it_is_has_a_word_that_is_true(share: float, said: str) -> None:
    assert said in judged(words(share))[1]


def test_where_a_part_was_read_it_is_not_said_that_no_leak_or_nothing_was_found() -> None:
    level, text = judged(words(0.3))
    assert level == "none_found"
    assert "Nothing of membership was found." in text
    assert "Finding nothing" not in text
    assert "Nothing was found." in judged(words(0.1))[1]


def test_much_that_is_mostly_wrong_is_not_called_little() -> None:
    text = judged(words(0.9, 0.1))[1]
    assert "most of the guesses are wrong: a server" in text
    assert "90.0 % of the words of a client's texts (10.0 % of its answers are right)" in text
    assert "ittle" not in text


def test_the_most_exposed_stands_beside_the_mean() -> None:
    text = judged(words(0.52, updates=8, exact_applicable=6, most_exposed=words(0.75)))[1]
    assert (
        "named 52.0 % of the words of a client's texts (all of its answers are right), as a mean over 8 updates, to 6 of which"
        " the exact test applies; in the most exposed case 75.0 % of the words (all of its answers are right)." in text
    )
    assert "most exposed" not in judged(words(0.52, most_exposed=words(0.52)))[1]


def test_guesses_are_told_with_their_precision_and_what_public_texts_give() -> None:
    text = judged(guesses(0.58, 0.97, 0.12))[1]
    assert (
        "Texts can be read back: by guesses a server that sees every single update named 58.0 % of the words of a"
        " client's texts (97.0 % of its answers are right; as many answers, the commonest in public texts, give 12.0 %)."
        in text
    )
    text = judged(guesses(0.58, 0.97, 0.5))[1]
    assert "no better or not clearly better than from public texts alone" in text
    text = judged({"recall": None, "guessed_recall": 0.58, "guessed_precision": 1.0})[1]
    assert "so this is not counted as a leak" in text
    assert "named 58.0 % of the words of a client's texts in their places (all of its answers are right)" in text
    assert "Nothing was found" not in text


def test_guesses_that_name_more_stand_beside_the_exact_test() -> None:
    text = judged({**guesses(0.4, 0.9, 0.35), **words(0.1)})[1]
    assert text.index("Little of the texts was read back") < text.index("Texts were guessed")


def test_sums_are_of_all_their_clients_and_of_whom_is_said() -> None:
    assert "words of the texts of all clients of a sum" in judged(words(0.3, sums=2, cohorts_known=True))[1]
    assert "of all clients that may be in a sum" in judged(words(0.3, sums=2, cohorts_known=False))[1]


def test_every_adversary_has_a_sentence_and_stronger_ones_do_not_repeat_it() -> None:
    sums, single = words(0.04, sums=3, updates=3), words(0.9, updates=3)
    named = [
        ("sum_inversion", "secure_server", sums),
        ("sum_inversion", "server", sums),
        ("gradient", "server", single),
    ]
    found = [{"attack": name, "vantage": at, "auc": None, "measured": of} for name, at, of in named]
    seen = [{"name": name, "title": name} for name in ("outsider", "secure_server", "server")]
    text = verdict(audit_of(cell(0.5), *found, vantages=seen))["text"]
    assert text.count("Little of the texts was read back: a server that sees only sums") == 1
    assert text.count("read back") == 2
    assert text.index("Texts can be read back: a server that sees every") < text.index("Little of the texts")


@every("odd", [None, float("nan"), -0.1, 1.1, "all", True, [0.9]])
def test_what_is_no_share_is_no_number(odd: Any) -> None:
    (found,) = samples.audit(audit_of({"auc": None, "measured": {"bag_recall": odd, "guessed_recall": odd}})).cells
    assert attempts(found) == ()
    assert judged({"bag_recall": odd})[0] == "none_found"


def test_a_precision_that_is_missing_is_not_held_against_what_was_read() -> None:
    assert judged({"bag_recall": 0.9})[0] == "leak"


def test_attacks_that_look_for_no_texts_say_nothing_of_them() -> None:
    text = judged({"l1_error": 0.9, "baseline_l1": 1.2})[1]
    assert "texts" not in text.replace("two texts", "")


Audit = dict[str, Any]


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without drawings, which take most of the time."""
    monkeypatch.setattr(curves, "drawing", lambda *args, **named: "<svg></svg>")


def outlined(audit: Audit) -> Outline:
    return Outline(page.page(samples.audit(audit)))


def test_attacks_on_other_things_than_membership_show_their_own_numbers(unprotected: Audit) -> None:
    """Of texts the words first, whatever the order in the file is."""
    turned = samples.copied(unprotected)
    for one in turned["cells"]:
        one["measured"] = dict(reversed(one["measured"].items()))
    html = page.page(samples.audit(turned))
    shown = "<b>word recall 83.0 %</b><small>word precision 90.0 %</small><small>recall with position 80.0 %</small>"
    assert html.count(shown) == 2
    assert "<b>cosine 0.710</b><small>mean count error 1.800</small>" in html


def texts(audit: Audit, **measured: Any) -> Audit:
    """The audit with that found by every attack on texts."""
    changed = samples.copied(audit)
    for one in changed["cells"]:
        if one["attack"] == "sum_inversion" and one["applicable"]:
            one["measured"] = measured
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
    html = page.page(samples.audit(texts(protected, **measured)))
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
    html = page.page(samples.audit(texts(protected, bag_recall=0.1, bag_precision=1.0, most_exposed=most)))
    assert "most exposed: word recall 12.0 %" in html
    assert "St Mary" not in html


def test_no_headline_says_that_there_is_no_leak_where_a_part_of_the_texts_is_read_back(
    protected: Audit, capsys: pytest.CaptureFixture[str]
) -> None:
    part = texts(protected, bag_recall=0.3, bag_precision=1.0)
    assert "Nothing of membership was found, and part of the texts was read back" in outlined(part).text
    assert "Nothing was found" not in outlined(part).text
    display.show(samples.audit(part))
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
    display.show(samples.audit(shares))
    for said in (text, capsys.readouterr().out):
        assert "no guarantee" not in said
        assert "none that coins can test" in said
    assert "promises no epsilon" not in text
    assert "makes no promise" not in text


def test_what_such_a_run_promises_is_named(protected: Audit, capsys: pytest.CaptureFixture[str]) -> None:
    named = {"epsilon_accounted": None, "epsilon_promised": 7.08, "adjacency": "one client replaced by another"}
    replaced = samples.copied(protected, **named)
    display.show(samples.audit(replaced))
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
