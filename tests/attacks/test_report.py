"""The page of an audit: its content, order and escaping; missing and wrong values do not stop it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from attacks import record
from attacks.record import content
from attacks.report import curves, display, page, sweep
from secure_fed.errors import RunDirectoryError
from tests.attacks import samples
from tests.attacks.outline import Outline
from tests.attacks.samples import verdict
from tests.cells import chosen, every

Audit = dict[str, Any]

HOSTILE = '<script>alert("&")</script>$x^2$'


def outlined(audit: Audit) -> Outline:
    return Outline(paged(audit))


DRAWING = curves.drawing


@lru_cache
def _page(told: str, drawn: bool) -> str:
    assert drawn == (curves.drawing is DRAWING)
    return page.page(samples.audit(json.loads(told)))


def paged(audit: Audit) -> str:
    """The page, made once for equal audits with drawings, and once without."""
    return _page(json.dumps(audit), curves.drawing is DRAWING)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without plots, which take most of the time."""
    monkeypatch.setattr(curves, "drawing", lambda *args, **named: "<svg></svg>")


@pytest.fixture(scope="module")
def violation() -> Audit:
    return samples.violation()


def test_the_verdict_comes_first_and_at_the_end_again_whole(unprotected: Audit, undrawn: None) -> None:
    text = outlined(unprotected).text
    titles = (
        "A leak was found, and no guarantee covers it",
        "The evidence",
        "Every attack, by every adversary",
        "True positives at low false-positive rates",
        "Accounted epsilon and lower bounds",
        "With more and less privacy",
        "Clients, most exposed first",
        "The examples that stand out most",
        "Without any model",
        "What an audit does not prove",
        "How it was measured",
        "The verdict for the record",
    )
    places = [text.index(f"{title} ") for title in titles]
    assert places == sorted(places)
    assert text.endswith(f"The verdict for the record {verdict(unprotected)['text']} ")


def test_the_verdict_that_the_audit_carries_is_the_one_that_is_shown(protected: Audit, undrawn: None) -> None:
    carried = samples.copied(
        protected, verdict={"level": "none_found", "text": "Words of its own.", "summary": "Words of its own."}
    )
    assert outlined(carried).text.count("Words of its own.") == 2


def test_the_bounds_of_a_run_without_a_delta_are_at_zero(unprotected: Audit, protected: Audit, undrawn: None) -> None:
    assert "delta of lower bounds 0 " in outlined(unprotected).text
    assert "delta of lower bounds 1e-05 " in outlined(protected).text


def epsilons(audit: Audit) -> dict[str, str]:
    """The first screen's bars of epsilon: names and what stands beside them."""
    described = re.search(r'aria-label="epsilon allowed and epsilon shown"[^>]*><desc>(.*?)</desc>', paged(audit))
    assert described is not None
    return dict(one.split(": ", 1) for one in described[1].split("; "))


def test_the_first_screen_shows_what_is_allowed_beside_what_was_found(
    unprotected: Audit, protected: Audit, violation: Audit, undrawn: None
) -> None:
    assert epsilons(violation) == {"Allowed by the guarantee": "ε ≤ 0.99", "Shown by the audit": "ε ≥ 3.08"}
    assert epsilons(unprotected) == {"Allowed, without a guarantee": "no limit", "Shown by the audit": "ε ≥ 2.02"}
    assert epsilons(protected)["Allowed by the guarantee"] == "ε ≤ 7.97: right in ≤ 99.97 %"
    assert epsilons(samples.copied(protected, unit="client"))["Allowed by the guarantee"] == "not comparable"
    html = paged(violation)
    assert html.index("epsilon allowed and epsilon shown") < html.index("<svg></svg>") < html.index("THE GUARANTEE IS")


def test_a_narrow_contradiction_reads_as_one_on_the_first_screen(violation: Audit, undrawn: None) -> None:
    narrow = samples.copied(violation, epsilon_accounted=0.9931)
    for cell in narrow["cells"]:
        cell["epsilon_lower"] = 0.9934 if cell.get("auc") is not None else None
    assert epsilons(narrow) == {"Allowed by the guarantee": "ε ≤ 0.9931", "Shown by the audit": "ε ≥ 0.9934"}
    assert "promises at most epsilon 0.9931 for" in outlined(narrow).text


def test_nothing_found_of_so_few_units_that_nothing_could_be_is_told_on_the_first_screen(
    protected: Audit, undrawn: None
) -> None:
    blind = samples.copied(protected)
    for cell in blind["cells"]:
        if cell.get("epsilon_lower") is not None:
            cell.update(epsilon_lower=0.0, epsilon_showable=3.05)
    first, _ = outlined(blind).text.split("Every attack, by every adversary", 1)
    assert "could have shown more than 3.05" in first
    for cell in blind["cells"]:
        cell["epsilon_showable"] = 30.0
    assert "could have shown more" not in outlined(blind).text


def test_a_void_audit_shows_no_curve_on_its_first_screen(unprotected: Audit, undrawn: None) -> None:
    void = samples.copied(unprotected, baseline={"auc": 0.63, "auc_interval": [0.6, 0.66], "at_chance": False})
    first, rest = paged(void).split("Every attack, by every adversary")
    assert "<svg></svg>" not in first
    assert rest.count("<svg></svg>") == paged(unprotected).count("<svg></svg>")


def test_the_file_is_written_whole_and_is_the_same_again(protected: Audit, tmp_path: Path) -> None:
    path = page.write(samples.audit(protected), tmp_path / "audit.html")
    first = path.read_bytes()
    assert page.write(record.read(content(samples.audit(protected))), path).read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_needs_nothing_but_itself(unprotected: Audit) -> None:
    outline = outlined(unprotected)
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(outline.tags)
    for name, value in outline.attributes:
        assert not name.startswith("on")
        assert name not in ("href", "xlink:href", "src") or value.startswith("#")
    identifiers = [value for name, value in outline.attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))
    used = {found for _, value in outline.attributes for found in re.findall(r"url\(#([^)]+)\)", value)}
    assert used
    assert used <= set(identifiers)


def test_what_does_not_apply_says_so_with_its_reason_and_has_no_number(unprotected: Audit, undrawn: None) -> None:
    html = paged(unprotected)
    cells = re.findall(r'<td class="none">(.*?)</td>', html)
    assert len(cells) == 9
    assert all(re.fullmatch(r"<b>does not apply</b><small>.+</small>", cell) for cell in cells)
    assert not any(re.search(r"\d", cell) for cell in cells)
    assert "no canaries were planted" in html
    untried = samples.copied(unprotected, cells=unprotected["cells"][1:])
    assert '<td class="none"><b>not tried</b></td>' in paged(untried)


def test_a_leak_is_marked_by_word_as_well_as_by_colour(unprotected: Audit, protected: Audit, undrawn: None) -> None:
    marked = re.findall(r'<td class="leak">(.*?)</td>', paged(unprotected))
    assert len(marked) == 18  # two of them texts out of sums
    assert all("leak</small>" in cell for cell in marked)
    assert sum("<b>word recall 83.0 %</b>" in cell for cell in marked) == 2
    assert 'class="leak"' not in paged(protected)
    assert paged(protected).count("not above chance</small>") == 19


def test_a_contradiction_is_loud_and_stands_by_every_bound(violation: Audit, undrawn: None) -> None:
    outline = outlined(violation)
    assert "CONTRADICTION: the run claims epsilon 0.99 for one training example; a lower bound is 3.08" in outline.text
    assert outline.text.count("BROKEN") == 6
    assert ("class", "loud") in outline.attributes
    assert "The privacy guarantee is contradicted" in outline.text


def test_a_bound_against_an_adversary_who_is_trusted_breaks_nothing(violation: Audit, undrawn: None) -> None:
    cells = [{**one, "epsilon_accounted": None} for one in violation["cells"]]
    text = outlined(samples.copied(violation, cells=cells)).text
    assert "BROKEN" not in text
    assert "CONTRADICTION" not in text
    assert "none against this adversary" in text


def test_bounds_are_rounded_down_and_promises_up(violation: Audit, undrawn: None) -> None:
    rounded = samples.copied(violation, epsilon_accounted=0.9812)
    rounded["cells"][0]["epsilon_lower"] = 3.999
    text = outlined(rounded).text
    assert "claims epsilon 0.982" in text
    assert "a lower bound is 3.99" in text


def test_two_runs_stand_side_by_side_and_more_are_a_table(unprotected: Audit, undrawn: None) -> None:
    two = samples.copied(unprotected, sweep=unprotected["sweep"][1:])
    assert "With and without privacy" in outlined(two).text
    assert 'class="panels"' in paged(two)
    assert 'class="panels"' not in paged(unprotected)
    text = outlined(unprotected).text
    assert "epsilon 1 0.99 71.0 % 0.497 (0.470 to 0.524) 0.9 % refused 0.00" in text
    assert text.index("epsilon 1 0.99") < text.index("epsilon 8 7.97") < text.index("no privacy unprotected")
    rates = samples.copied(two)
    rates["sweep"][0]["tpr_at_1"] = {"tpr": 0.25, "tpr_interval": [0.2, 0.3]}
    assert "25.0 % (20.0 % to 30.0 %)" in outlined(rates).text
    assert "With and without privacy" not in outlined(samples.copied(unprotected, sweep=[])).text


def test_each_number_of_a_sweep_has_its_own_attack_adversary_and_delta(unprotected: Audit, undrawn: None) -> None:
    of = {"attack": "update_score", "vantage": "server", "delta": 1e-5}
    bound = {"epsilon_lower_attack": "loss", "epsilon_lower_vantage": "outsider"}
    told = samples.copied(unprotected)
    told["sweep"][1] |= of | bound
    told["sweep"][2] |= {**of, "epsilon_lower": None, "epsilon_lower_attack": None, "delta": 0.0}
    titles = {one["name"]: one["title"] for one in (*told["attacks"], *told["vantages"])}
    text = outlined(told).text
    assert f"0.512 (0.485 to 0.539) [{titles['update_score']}; {titles['server']}]" in text
    assert f"0.10 at delta 1e-05 [{titles['loss']}; {titles['outsider']}]" in text
    assert text.count(" at delta ") - text.count(" at delta 0, ") == 2, "none without a bound"
    assert "Bounds of runs without a guarantee are at delta 0" in text


def test_texts_are_shown_only_where_the_audit_holds_them(unprotected: Audit, undrawn: None) -> None:
    assert "the page says which units were trained on" in outlined(unprotected).text
    shown = samples.copied(unprotected)
    shown["exposed"][2]["text"] = "Mrs Example has asthma"
    text = outlined(shown).text
    assert "Mrs Example has asthma" in text
    assert "treat it as you treat the data" in text
    assert "Their content is not shown" not in text


def test_false_accusations_are_shown_among_the_first_and_counted_in_one_line(unprotected: Audit, undrawn: None) -> None:
    told = samples.copied(unprotected, accusations=[{"first": 10, "false": 0}, {"first": 50, "false": 12}])
    text = outlined(told).text
    assert "Of the first 10, none had not trained; of the first 50, 12 had not trained." in text
    assert "Of units drawn at random 50.1 % had not." in text
    assert text.count("no: a false accusation") == 2


def test_each_adversary_has_its_own_reason(unprotected: Audit, undrawn: None) -> None:
    told = samples.copied(unprotected)
    reasons = {
        "outsider": "it hears too little",
        "fellow_client": "it hears too little",
        "server": "it needs no attack",
    }
    for one in told["cells"]:
        if one["attack"] == "loss":
            one |= samples.nothing(reasons.get(one["vantage"], "it is asked by name"))
    text = outlined(told).text
    assert (
        "Loss threshold. Outsider and Fellow client: it hears too little. Server behind secure aggregation: it is asked by"
        " name. Server without secure aggregation: it needs no attack." in text
    )


ESTIMATES = [
    {"name": "independent", "epsilon": 2.401, "point": None},
    {"name": "sampled_gaussian", "epsilon": 4.609, "point": 6.109},
]


def test_estimates_stand_beside_the_bound_with_what_they_suppose(protected: Audit, undrawn: None) -> None:
    told = samples.copied(protected, main={"attack": "canary_cosine", "vantage": "fellow_client"})
    for one in told["cells"]:
        one["estimates"] = ESTIMATES if one["attack"] == "canary_cosine" else []
    text = outlined(told).text
    assert "Estimates, which are no bounds" in text
    assert "if canaries are independent 2.40 – the exact distribution of non-members' scores" in text
    assert "if the mechanism is Gaussian too 4.60 6.10 the same, and a Gaussian mechanism" in text
    assert "estimates never count as a contradiction" in text
    assert "Estimates, which are no bounds" not in outlined(protected).text


def test_a_confidence_is_said_of_the_bound_and_not_of_what_was_accounted(protected: Audit, undrawn: None) -> None:
    text = outlined(protected).text
    assert "each with a confidence" not in text
    assert "Accounting gives an upper bound on epsilon by calculation, without any experiment." in text
    assert "all lower bounds hold together with a confidence of 95 %" in text


def test_one_auc_has_one_interval(unprotected: Audit, tmp_path: Path) -> None:
    """That of the cell, beside other runs too: of the main attack, so that nothing is to be corrected for a choice."""
    told = samples.copied(unprotected, main={"attack": "rmia", "vantage": "outsider"})
    for one in told["cells"]:
        one["auc_interval_corrected"] = [0.111, 0.999]
    (tmp_path / "result.json").write_text(json.dumps({"epsilon": None, "accuracy": 0.9}))
    row = sweep._row(tmp_path, samples.audit(told))
    of_main = next(one for one in told["cells"] if (one["attack"], one["vantage"]) == ("rmia", "outsider"))
    assert (row.attack, row.auc, list(row.auc_interval or ())) == ("rmia", of_main["auc"], of_main["auc_interval"])


def test_a_long_list_is_folded_and_whole(unprotected: Audit, undrawn: None) -> None:
    text = outlined(unprotected).text
    assert "4 more clients" in text
    assert all(one["client"] in text for one in unprotected["clients"])


def test_a_baseline_above_chance_voids_the_audit(unprotected: Audit, undrawn: None) -> None:
    void = samples.copied(unprotected, baseline={"auc": 0.63, "auc_interval": [0.6, 0.66], "at_chance": False})
    text = outlined(void).text
    assert text.count("THIS AUDIT OF MEMBERSHIP IS VOID") == 1
    assert "This audit of membership is void." in text
    assert "stands if they were fair" in text
    assert "It is at chance: AUC 0.507 (0.480 to 0.534)" in outlined(unprotected).text
    unchecked = samples.copied(unprotected, baseline={"auc": None, "at_chance": None, "why": "3 units are too few"})
    assert "(3 units are too few)" in outlined(unchecked).text


def test_names_from_outside_are_text_never_markup(unprotected: Audit) -> None:
    audit = samples.copied(unprotected, run_dir=f"runs/{HOSTILE}"[:-12], method=HOSTILE)
    for several in ("attacks", "vantages", "clients", "exposed", "sweep"):
        for one in audit[several]:
            for key in ("title", "paper", "sees", "client", "unit", "label"):
                one[key] = HOSTILE
            if several == "exposed":
                one["text"] = HOSTILE
    for one in audit["cells"]:
        one |= {"why": HOSTILE, "note": HOSTILE, "epsilon_how": HOSTILE}
        one["measured"] = {HOSTILE: 0.5}
    audit["baseline"] = {"why": HOSTILE}
    outline = outlined(audit)
    assert {"script", "img"}.isdisjoint(outline.tags)
    assert outline.text.count(HOSTILE) > 50
    assert outline.tags.count("svg") == outlined(unprotected).tags.count("svg")


def test_a_terminal_of_80_columns_shows_the_verdict_and_every_attack(
    unprotected: Audit, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    display.show(samples.audit(samples.copied(unprotected, method=HOSTILE)))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert printed.startswith("verdict: LEAK, no guarantee covers it\n")
    assert " ".join(verdict(unprotected)["text"].split()) in " ".join(printed.split())
    assert printed.count("LEAK") == 19
    assert "n/a" in printed
    assert "word recall" in printed
    assert "83.0 %" in printed
    assert "│ epsilon accounted │ no guarantee │" in " ".join(printed.split())
    assert "│ examples in training, held out │" in " ".join(printed.split())


def test_the_terminal_names_an_attack_that_applies_nowhere_below_the_table(
    unprotected: Audit, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    told = samples.copied(unprotected)
    gone = told["attacks"][0]
    for cell in told["cells"]:
        if cell["attack"] == gone["name"]:
            cell.update(applicable=False, why="no such tensors")
    display.show(samples.audit(told))
    table, _, below = capsys.readouterr().out.partition("AUC with its 95 % interval.")
    assert gone["title"] not in table
    assert told["attacks"][1]["title"] in table
    named = next(line for line in below.splitlines() if line.startswith("Not applicable in this run"))
    assert gone["title"] in named


def test_runs_that_differ_in_more_than_privacy_are_not_said_to_be_alike(unprotected: Audit, undrawn: None) -> None:
    told = samples.copied(unprotected)
    assert "The same training with different privacy" in outlined(told).text
    for run, method in zip(told["sweep"], ("fedlora", "bitfit", "bitfit"), strict=False):
        run["of"] = {"data": "notes", "method": method}
    text = outlined(told).text
    assert "These runs differ in more than their privacy: in their method." in text
    assert "The same training" not in text


def test_an_audit_of_nothing_has_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert "This audit cannot tell" in outlined({}).text
    display.show(samples.audit({}))
    assert "cannot tell" in capsys.readouterr().out


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in an audit, of lists only the first two entries."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, one in inside:
        yield (*at, key)
        yield from paths(one, (*at, key))


def small() -> Audit:
    """The leaking audit with one drawing and few cells, so that it can be spoiled everywhere."""
    audit = samples.unprotected()
    kept = audit["cells"][:2] + audit["cells"][22:24] + audit["cells"][-1:]
    curve = {name: values[::300] for name, values in audit["roc"]["loss/outsider"].items()}
    return audit | {
        "cells": kept,
        "roc": {"loss/outsider": curve},
        "verdict": verdict(audit),
        "exposed": audit["exposed"][:2],
    }


def test_a_damaged_audit_is_one_sentence_that_names_the_value() -> None:
    whole = samples.whole(small())
    assert record.read(whole, "x").cells
    for damage, said in (
        ({"cells": "x"}, "cells is 'x'"),
        ({"cells": [1]}, "cells is 1"),
        ({"cells": [{**whole["cells"][0], "auc": "high"}]}, "auc is 'high'"),
        ({"cells": [{"attack": "loss"}]}, "cells has no vantage"),
        ({"rounds": 1.5}, "rounds is 1.5"),
        ({"verdict": {"level": "splendid", "text": "All is well.", "summary": ""}}, "level is 'splendid'"),
        ({"significance": math.nan}, "significance is nan"),
        ({"delta": 10**400}, "too large"),
        ({"baseline": {**whole["baseline"], "auc_interval": [0.1]}}, "shorter"),
        ({"roc": {"loss/outsider": {**whole["roc"]["loss/outsider"], "fpr": [None]}}}, "fpr is None"),
    ):
        with pytest.raises(
            RunDirectoryError, match=r"^private/audit\.json is damaged, or of another version"
        ) as caught:
            record.read({**whole, **damage}, "private/audit.json")
        assert said in str(caught.value)
        assert str(caught.value).endswith("): audit the run again")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "spoil",
    chosen([None, math.nan, [1, "x"], {"a": None}, "x"], [None]),
    ids=["null", "nan", "list", "object", "text"],
)
def test_whatever_one_value_is_it_is_named_or_the_page_is_written(
    spoil: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without drawings, which take most of the time, get numbers alone, and have a test of their own."""
    monkeypatch.setattr(curves, "drawing", lambda *args, **named: "<svg></svg>")
    whole = samples.whole(small())
    for path in paths(whole):
        content = samples.copied(whole)
        place: Any = content
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = spoil
        try:
            audit = record.read(content)
        except RunDirectoryError:
            continue
        Outline(page.page(audit))
        display.show(audit)
    assert "verdict" in capsys.readouterr().out


CURVES: tuple[dict[str, Any], ...] = (
    {"fpr": [0, 1], "tpr": [0, 1], "low": [], "high": []},
    {"fpr": [0, 0, 1], "tpr": [0, 1, 1], "low": [0, 0, 1], "high": [1, 1, 1]},
    {"fpr": [0, 1e-9, 1], "tpr": [0, 0, 1], "low": [0, 0, 0], "high": [0, 1, 1]},
)
ROWS: tuple[dict[str, Any], ...] = (
    {"auc": None, "accuracy": None, "epsilon_lower": None},
    {"auc_interval": None, "epsilon": None},
    {},
)
CELLS: tuple[dict[str, Any], ...] = ({"epsilon_lower": 0.0}, {"epsilon_lower": None}, {"members": 0, "non_members": 0})


@pytest.mark.nightly
@every(("curve", "row", "cell"), zip(CURVES, ROWS, CELLS, strict=True))
def test_drawings_of_odd_numbers(curve: dict[str, Any], row: dict[str, Any], cell: dict[str, Any]) -> None:
    """A curve, rows of the comparison and cells have a drawing each, so that one page tries an oddity of every one."""
    audit = small()
    audit["roc"].update({"loss/outsider": curve})
    for spoilt, oddity in ((audit["sweep"], row), (audit["cells"], cell)):
        for one in spoilt:
            one.update(oddity)
    assert "nan" not in page.page(samples.audit(audit))
