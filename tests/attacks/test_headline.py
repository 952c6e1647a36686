"""The head of an audit: the number of attacks made, the attacks not made, and how to read an AUC."""

from __future__ import annotations

import re
from typing import Any

import pytest

from attacks.catalogue import ATTACKS
from attacks.report.display import Audited, show
from attacks.report.page import page
from attacks.report.reading import read
from attacks.report.verdict import headline, how_to_read, recorded, untried, verdict
from secure_fed.report.page import plots
from tests.attacks import samples


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without drawings."""
    monkeypatch.setattr(plots, "drawing", lambda title, draw, inches=(): "<svg></svg>")


def only(audit: dict[str, Any], *names: str) -> dict[str, Any]:
    """The audit with these attacks alone, as if requested by name."""
    cells = [cell for cell in audit["cells"] if cell["attack"] in names]
    attacks = [one for one in audit["attacks"] if one["name"] in names]
    few = samples.copied(audit, asked_for=list(names), cells=cells, attacks=attacks)
    return few | {"verdict": verdict(few)}


def at(audit: dict[str, Any], auc: float, interval: list[float]) -> dict[str, Any]:
    """The audit with this AUC in the cells of its one attack."""
    cells = [cell | ({"auc": auc, "auc_interval": interval} if cell["applicable"] else {}) for cell in audit["cells"]]
    return samples.copied(audit, cells=cells)


def title(html: str) -> str:
    """The first heading of a page below its name."""
    (first, *_) = re.findall(r"<h2>(.*?)</h2>", html)
    return str(first)


def test_one_attack_that_found_nothing_says_how_many_there_are(
    protected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    audit = only(protected, "loss")
    assert audit["verdict"]["level"] == "none_found"
    html = page(audit)
    assert title(html) == f"1 of {len(ATTACKS)} attacks tried: nothing was found"
    assert "No attack that was tried proves an epsilon above 0" in html
    others = untried(read(audit))
    assert others.startswith("Not tried: ")
    assert all((one.title in others) == (name != "loss") for name, one in ATTACKS.items())
    assert others in html
    show(audit)
    assert f"verdict: 1 of {len(ATTACKS)} attacks tried: nothing found" in capsys.readouterr().out


def test_a_leak_found_by_one_attack_is_still_a_leak(unprotected: dict[str, Any]) -> None:
    assert title(page(only(unprotected, "lira"))).startswith(f"1 of {len(ATTACKS)} attacks tried: a leak was found")


def test_attacks_of_ones_own_are_counted_beside(protected: dict[str, Any]) -> None:
    audit = only(protected, "loss")
    own = [cell | {"attack": "mine"} for cell in audit["cells"]]
    both = samples.copied(audit, asked_for=["loss", "mine"], cells=[*audit["cells"], *own])
    assert headline(read(both), "none_found").startswith(f"1 of {len(ATTACKS)} attacks and 1 of your own tried: ")


def test_an_audit_of_all_attacks_says_how_many_could_be_made(protected: dict[str, Any]) -> None:
    assert headline(read(protected), recorded(protected)[0]) == "Nothing was found"
    assert untried(read(protected)) == ""
    cells = [cell | ({"applicable": False} if cell["attack"] == "lira" else {}) for cell in protected["cells"]]
    fewer = samples.copied(protected, cells=cells)
    of = len(samples.ATTACKS)
    said = f"Nothing was found by {of - 1} of {of} attacks that were possible"
    assert headline(read(fewer), "none_found") == said


@pytest.mark.parametrize(
    ("auc", "interval", "wide"),
    [(0.47, [0.38, 0.56], True), (0.51, [0.49, 0.53], False), (0.62, [0.54, 0.7], False)],
)
def test_an_auc_is_explained_where_it_is_shown(
    protected: dict[str, Any], auc: float, interval: list[float], wide: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = at(only(protected, "loss"), auc, interval)
    said = how_to_read(read(audit))
    assert "An AUC below 0.5 does not show privacy" in said
    assert ("are too few to show whether there is a leak" in said) == wide
    assert said in page(audit)
    show(audit)
    assert said in " ".join(capsys.readouterr().out.split())
    assert said in Audited(audit)._repr_html_()


def test_an_audit_in_a_notebook_is_small_and_escaped(protected: dict[str, Any]) -> None:
    html = Audited(samples.copied(protected, attacks=[{"name": "loss", "title": "<script>x</script>"}]))._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;x&lt;/script&gt;" in html
    assert "Nothing was found" in html
    assert len(html) < 10_000
