"""The page of an audit with any value missing or wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from attacks.report import curves, display, page
from attacks.report.verdict import verdict
from tests.attacks import samples
from tests.attacks.outline import Outline
from tests.cells import chosen, every

Audit = dict[str, Any]


@pytest.mark.parametrize("audit", [{}, {"cells": [{}]}, {"sweep": [{}], "clients": [{}], "exposed": [{}]}])
def test_an_audit_of_next_to_nothing_has_a_page(audit: Audit, capsys: pytest.CaptureFixture[str]) -> None:
    assert "This audit cannot tell" in Outline(page.page(audit)).text
    display.show(audit)
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    "spoil",
    chosen([None, math.nan, [1, "x"], {"a": None}, -1, 10**400], [None]),
    ids=["null", "nan", "list", "object", "-1", "huge"],
)
def test_whatever_one_value_is_the_page_is_written(
    spoil: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without drawings, which take most of the time, get numbers alone, and have a test of their own."""
    monkeypatch.setattr(curves, "drawing", lambda *args, **named: "<svg></svg>")
    whole = small()
    for path in paths(whole):
        audit = samples.copied(whole)
        place: Any = audit
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = spoil
        Outline(page.page(audit))
        verdict(audit)
    display.show(audit)
    assert "verdict" in capsys.readouterr().out


CURVES: tuple[dict[str, Any], ...] = (
    {"fpr": [0, 1], "tpr": [0, 1], "low": [], "high": None},
    {"fpr": [0, 1, 2], "tpr": [0, 1]},
    {"fpr": [0, 1], "tpr": [0, 1]},
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
    assert "nan" not in page.page(audit)
