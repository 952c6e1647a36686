"""An audit for people: the page, the terminal, the notebook; missing and wrong values do not stop them.

Three pages are kept whole in tests/golden/attacks/, as lines of text with the classes of their cells. Of every other page are
kept the lines in which it differs from one of these.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from attacks import record
from attacks.record import content
from attacks.report import curves, display, page
from attacks.report.display import Audited
from attacks.report.sentences import headline, how_to_read
from secure_fed.errors import RunDirectoryError
from tests.attacks import samples
from tests.attacks.refusals import Capsys
from tests.attacks.samples import DUMMIES, FAILED, REPLACED, copied, verdict
from tests.cells import chosen, every
from tests.golden import golden, refused

Audit = dict[str, Any]
HOSTILE = '<script>alert("&")</script>$x^2$'
LINES = {"tr", "p", "li", "h1", "h2", "h3", "dt", "div", "section", "summary", "figcaption", "desc", "svg"}


class Outline(HTMLParser):
    """Tags, attributes and lines of text; unclosed or crossing tags are an error."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.written = [""]
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.open.append(tag)
        name = dict(attrs).get("class") or ("drawing" if tag == "svg" else "")
        if tag in LINES:
            self.written.append("")
        elif tag in ("td", "th", "dd", "small"):
            self.written[-1] += " | "
        if name and tag in (*LINES, "td"):
            self.written[-1] += f"[{name}] "

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in LINES:
            self.written.append("")

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.written[-1] += data

    @property
    def lines(self) -> list[str]:
        return [line for line in (" ".join(one.split()) for one in self.written) if line]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without plots, which take most of the time."""
    monkeypatch.setattr(curves, "drawing", lambda *args, **named: "<svg></svg>")


def cells(audit: Audit, attack: str | None = None, **changes: Any) -> Audit:
    """The audit with its results, or the cells of one attack that apply, changed."""
    changed = copied(audit)
    for one in changed["cells"]:
        if one["auc"] is not None if attack is None else one["attack"] == attack and one["applicable"]:
            one |= changes
    return changed


def texts(**measured: Any) -> Audit:
    """The protected sample with that found of texts in sums."""
    return cells(PROTECTED, "sum_inversion", measured=measured)


def words(share: float, **more: Any) -> Audit:
    return {"bag_recall": share, "bag_precision": 1.0, **more}


def only(audit: Audit, name: str, **found: Any) -> Audit:
    """The audit with this attack alone, as if requested by name."""
    few = [one | (found if one["applicable"] else {}) for one in audit["cells"] if one["attack"] == name]
    return copied(audit, asked_for=[name], cells=few, attacks=[one for one in audit["attacks"] if one["name"] == name])


def rows(audit: Audit, *changes: Audit, **more: Any) -> Audit:
    """The audit with its last runs of a comparison changed."""
    changed = copied(audit, **more)
    for run, change in zip(changed["sweep"][::-1], changes[::-1], strict=False):
        run |= change
    return changed


def reasons() -> Audit:
    """Every adversary with its own reason why the first attack was not made."""
    told = copied(LEAKING)
    own = {"secure_server": "it is asked by name", "server": "it needs no attack"}
    for one in told["cells"]:
        if one["attack"] == "loss":
            one |= samples.nothing(own.get(one["vantage"], "it hears too little"))
    return told


def held(text: str) -> Audit:
    told = copied(LEAKING)
    told["exposed"][2]["text"] = text
    return told


PROTECTED, LEAKING, BROKEN = samples.protected(), samples.unprotected(), samples.violation()
BASES = {"protected": PROTECTED, "leaking": LEAKING, "contradicting": BROKEN}
ONE = only(PROTECTED, "loss")
OF_RUN = {"attack": "update_score", "vantage": "server", "delta": 1e-5}
ESTIMATES = [
    {"name": "independent", "epsilon": 2.401, "point": None},
    {"name": "sampled_gaussian", "epsilon": 4.609, "point": 6.109},
]
# Other pages, by the kept one with which each is compared.
CHANGED: dict[str, dict[str, Audit]] = {
    "protected": {
        "a verdict that the audit carries": copied(
            PROTECTED, verdict={"level": "none_found", "text": "Words of its own.", "summary": "Words of its own."}
        ),
        "a guarantee for another unit": copied(PROTECTED, unit="client"),
        "a guarantee that chance cannot test": copied(PROTECTED, epsilon_accounted=None),
        "neighbours that are replaced": copied(PROTECTED, **REPLACED),
        "bounds too blunt": cells(PROTECTED, epsilon_lower=0.0, epsilon_showable=3.05),
        "estimates": copied(
            cells(PROTECTED, "canary_cosine", estimates=ESTIMATES),
            main={"attack": "canary_cosine", "vantage": "fellow_client"},
        ),
        "dummy units": copied(PROTECTED, **DUMMIES),
        "one attack alone": ONE,
        "one attack alone, with a wide interval": only(PROTECTED, "loss", auc=0.47, auc_interval=[0.38, 0.56]),
        "one attack alone, with a narrow one": only(PROTECTED, "loss", auc=0.51, auc_interval=[0.49, 0.53]),
        "an attack of ones own": copied(
            ONE, asked_for=["loss", "mine"], cells=[*ONE["cells"], *({**one, "attack": "mine"} for one in ONE["cells"])]
        ),
        "an attack that applies nowhere": cells(PROTECTED, "lira", applicable=False),
        "a part of the texts": texts(**words(0.3)),
        "the texts of one client": texts(**words(0.4, most_exposed={"client": "St Mary", "round": 1, **words(0.9)})),
        "texts by all rounds together": texts(**words(0.1, all_rounds=words(0.6))),
        "guessed texts": texts(guessed_bag_recall=0.6, guessed_bag_precision=1.0, baseline_bag_recall=0.1),
    },
    "leaking": {
        "a void audit": copied(LEAKING, baseline=FAILED),
        "a baseline that was not made": copied(
            LEAKING, baseline={"auc": None, "at_chance": None, "why": "3 units are too few"}
        ),
        "a cell that was not tried": copied(LEAKING, cells=LEAKING["cells"][1:]),
        "each adversary's own reason": reasons(),
        "two runs side by side": copied(
            rows(LEAKING, {"tpr_at_1": {"tpr": 0.25, "tpr_interval": [0.2, 0.3]}}, {}), sweep=LEAKING["sweep"][1:]
        ),
        "no other run": copied(LEAKING, sweep=[]),
        "each number of a run by its own attack": rows(
            LEAKING,
            {**OF_RUN, "epsilon_lower_attack": "loss", "epsilon_lower_vantage": "outsider"},
            {**OF_RUN, "epsilon_lower": None, "epsilon_lower_attack": None, "delta": 0.0},
        ),
        "runs that differ in more than privacy": rows(
            LEAKING, *({"of": {"data": "notes", "method": method}} for method in ("fedlora", "bitfit", "bitfit"))
        ),
        "texts of the data": held("Mrs Example has asthma"),
        "false accusations": copied(LEAKING, accusations=[{"first": 10, "false": 0}, {"first": 50, "false": 12}]),
        "a leak by one attack alone": only(LEAKING, "lira"),
    },
    "contradicting": {
        "a narrow contradiction": copied(cells(BROKEN, epsilon_lower=0.9934), epsilon_accounted=0.9931),
        "bounds down and promises up": copied(cells(BROKEN, "loss", epsilon_lower=3.999), epsilon_accounted=0.9812),
        "bounds against a trusted adversary": cells(BROKEN, epsilon_accounted=None),
    },
}


OTHERS = {name: (base, audit) for base, audits in CHANGED.items() for name, audit in audits.items()}


@cache
def outlined(base: str) -> Outline:
    return Outline(page.page(samples.audit(BASES[base])))


@pytest.mark.parametrize("base", BASES)
def test_a_page_is_the_kept_one(base: str, undrawn: None) -> None:
    golden(f"attacks/page_{base}.txt", "\n".join(outlined(base).lines) + "\n")


def test_other_pages_differ_as_kept(undrawn: None) -> None:
    """In lines that are new (+) or gone (-), but for the table of all numbers, which the whole pages have."""

    def read(page: Outline) -> list[str]:
        return [line for line in page.lines if "| 1.2 s |" not in line]

    told = []
    for name, (base, audit) in OTHERS.items():
        old, new = read(outlined(base)), read(Outline(page.page(samples.audit(audit))))
        assert old != new, name
        assert "St Mary" not in " ".join(new), "a client's name"
        told.append(f"# {name}")
        for how, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            told += [f"- {line}" for line in old[a:b] if how == "delete"]
            told += [f"+ {line}" for line in new[c:d] if how != "equal"]
    golden("attacks/pages.txt", "\n".join(told) + "\n")


def test_a_terminal_of_80_columns_shows_every_attack(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    some = ("one attack alone", "an attack that applies nowhere", "a part of the texts", "neighbours that are replaced")
    told = []
    for name, audit in (
        ("leaking", copied(LEAKING, method=HOSTILE)),
        ("nothing", {}),
        *((name, OTHERS[name][1]) for name in (*some, "a guarantee that chance cannot test", "estimates")),
    ):
        display.show(samples.audit(audit))
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= 80
        assert " ".join(verdict(audit)["text"].split()) in " ".join(printed.split())
        told.append(f"# {name}\n{printed}")
    golden("attacks/terminals.txt", re.sub(r" +$", "", "\n".join(told), flags=re.M))


def test_an_audit_in_a_notebook_is_small_and_escaped() -> None:
    named = samples.audit(copied(only(PROTECTED, "loss"), attacks=[{"name": "loss", "title": "<script>x</script>"}]))
    html = Audited(named)._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;x&lt;/script&gt;" in html
    assert headline(named) in html
    assert how_to_read(named) in html
    assert len(html) < 10_000


def test_the_file_is_written_whole_and_is_the_same_again(tmp_path: Path, undrawn: None) -> None:
    path = page.write(samples.audit(PROTECTED), tmp_path / "audit.html")
    first = path.read_bytes()
    assert page.write(record.read(content(samples.audit(PROTECTED))), path).read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_needs_nothing_but_itself_and_names_from_outside_are_text_never_markup() -> None:
    audit = copied(LEAKING, run_dir=f"runs/{HOSTILE}"[:-12], method=HOSTILE)
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
    outline = Outline(page.page(samples.audit(audit)))
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(outline.tags)
    assert " ".join(outline.lines).count(HOSTILE) > 50
    for name, value in outline.attributes:
        assert not name.startswith("on")
        assert name not in ("href", "xlink:href", "src") or value.startswith("#")
    identifiers = [value for name, value in outline.attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))
    used = {found for _, value in outline.attributes for found in re.findall(r"url\(#([^)]+)\)", value)}
    assert used
    assert used <= set(identifiers)


# Wrong values.


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in an audit, of lists only the first two entries."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, one in inside:
        yield (*at, key)
        yield from paths(one, (*at, key))


def small() -> Audit:
    """The leaking audit with one drawing and few cells, so that it can be spoiled everywhere."""
    kept = LEAKING["cells"][:2] + LEAKING["cells"][22:24] + LEAKING["cells"][-1:]
    curve = {name: values[::300] for name, values in LEAKING["roc"]["loss/outsider"].items()}
    few = {"cells": kept, "roc": {"loss/outsider": curve}, "exposed": LEAKING["exposed"][:2]}
    return copied({**LEAKING, **few, "verdict": verdict(LEAKING)})


def test_a_damaged_audit_is_one_sentence_that_names_the_value() -> None:
    whole = samples.whole(small())
    assert record.read(whole, "x").cells
    for damage in (
        {"cells": "x"},
        {"cells": [1]},
        {"cells": [{**whole["cells"][0], "auc": "high"}]},
        {"cells": [{"attack": "loss"}]},
        {"rounds": 1.5},
        {"verdict": {"level": "splendid", "text": "All is well.", "summary": ""}},
        {"significance": math.nan},
        {"delta": 10**400},
        {"baseline": {**whole["baseline"], "auc_interval": [0.1]}},
        {"roc": {"loss/outsider": {**whole["roc"]["loss/outsider"], "fpr": [None]}}},
    ):
        with refused(RunDirectoryError):
            record.read({**whole, **damage}, "private/audit.json")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "spoil", chosen([None, math.nan, [1, "x"], {"a": None}, "x"], [None]), ids=["null", "nan", "list", "object", "text"]
)
def test_whatever_one_value_is_it_is_named_or_the_page_is_written(spoil: Any, undrawn: None, capsys: Capsys) -> None:
    """Drawings get numbers alone, and have a test of their own."""
    whole = samples.whole(small())
    for path in paths(whole):
        content = copied(whole)
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


CURVES: tuple[Audit, ...] = (
    {"fpr": [0, 1], "tpr": [0, 1], "low": [], "high": []},
    {"fpr": [0, 0, 1], "tpr": [0, 1, 1], "low": [0, 0, 1], "high": [1, 1, 1]},
    {"fpr": [0, 1e-9, 1], "tpr": [0, 0, 1], "low": [0, 0, 0], "high": [0, 1, 1]},
)
ODD_ROWS: tuple[Audit, ...] = (
    {"auc": None, "accuracy": None, "epsilon_lower": None},
    {"auc_interval": None, "epsilon": None},
    {},
)
ODD_CELLS: tuple[Audit, ...] = ({"epsilon_lower": 0.0}, {"epsilon_lower": None}, {"members": 0, "non_members": 0})


@pytest.mark.nightly
@every(("curve", "row", "cell"), zip(CURVES, ODD_ROWS, ODD_CELLS, strict=True))
def test_drawings_of_odd_numbers(curve: Audit, row: Audit, cell: Audit) -> None:
    """A curve, rows of the comparison and cells have a drawing each, so that one page tries an oddity of every one."""
    audit = small()
    audit["roc"].update({"loss/outsider": curve})
    for spoilt, oddity in ((audit["sweep"], row), (audit["cells"], cell)):
        for one in spoilt:
            one.update(oddity)
    assert "nan" not in page.page(samples.audit(audit))
