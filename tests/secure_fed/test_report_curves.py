"""The report's section on diagnostics: it shows the measured ones and no others."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from secure_fed.errors import RunDirectoryError
from secure_fed.report.page import write_report

pytestmark = pytest.mark.usefixtures("drawn_once")

RunFolder = Callable[..., Path]
Run = dict[str, Any]

MEASURED: dict[str, dict[str, float | None]] = {
    "variation": {
        "magnitude": 0.5,
        "direction": 0.25,
        "magnitude_a": 0.125,
        "direction_a": 0.0625,
        "magnitude_b": 0.75,
        "direction_b": 1.5,
    },
    "discrepancy": {"magnitude": 2.75, "direction": 0.875},
    "drift": {"mean": 0.9375, "worst": 0.625},
    "aggregation_error": {"fedavg": 0.375, "fra": 0.1875},
}


def measuring(*names: str, **evaluation: float) -> Callable[[Run], None]:
    def edit(run: Run) -> None:
        run["config"]["evaluation"] |= {"diagnostics": list(names), **evaluation}
        for row in run["rows"]:
            row.update({name: dict(MEASURED[name]) for name in names})
            if "bandwidth" in evaluation:
                row["transfer_seconds"] = 2.5

    return edit


def told(folder: Path) -> tuple[str, str]:
    """The report's section on diagnostics, as markup and as text."""
    html = write_report(folder).read_text(encoding="utf-8")
    found = re.search(r"<section>\n<h2>Diagnostics</h2>.*?</section>", html, re.DOTALL)
    markup = found.group() if found else ""
    return markup, re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", markup))


def test_nothing_is_said_of_what_was_not_asked_for(run_folder: RunFolder) -> None:
    assert told(run_folder()) == ("", "")


@pytest.mark.parametrize(
    ("name", "drawings", "words"),
    [
        ("variation", 2, ["Product: 0.5 in round 12", "Factor A: 0.125 in", "Factor B: 0.75 in", "Factor B: 1.5 in"]),
        ("discrepancy", 2, ["Clients: 2.75 in round 12", "Clients: 0.875 in round 12"]),
        ("drift", 1, ["Mean: 0.9375 in round 12", "Worst: 0.625 in round 12"]),
        ("aggregation_error", 1, ["A and B apart: 0.375 in", "Products, truncated: 0.1875 in"]),
    ],
)
def test_each_is_drawn_and_said(run_folder: RunFolder, name: str, drawings: int, words: list[str]) -> None:
    markup, text = told(run_folder(edit=measuring(name)))
    assert markup.count("<svg") == drawings
    assert all(word in text for word in words)


def test_all_of_them_together(run_folder: RunFolder) -> None:
    markup, _ = told(run_folder(edit=measuring(*MEASURED)))
    assert markup.count("<svg") == 6
    labels = re.findall(r'aria-label="([^"]*)"', markup)
    assert len(set(labels)) == 6


def test_factors_are_drawn_before_their_product(run_folder: RunFolder) -> None:
    def frozen_a(run: Run) -> None:
        measuring("variation")(run)
        for row in run["rows"]:
            del row["variation"]["magnitude_a"], row["variation"]["direction_a"]

    markup, text = told(run_folder(edit=frozen_a))
    assert "Factor A" not in text
    assert ">product<" in markup
    assert ">factor B<" in markup


def test_a_direction_that_there_was_not_is_a_gap(run_folder: RunFolder) -> None:
    def first_has_none(run: Run) -> None:
        measuring("discrepancy")(run)
        run["rows"][0]["discrepancy"]["direction"] = None

    assert "Clients: 0.875 in round 12" in told(run_folder(edit=first_has_none))[1]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (
            0.5,
            "accuracy of 50.0 % was reached after 3 rounds. Until then 3.70 MB travelled from the clients and 5.20 MB to",
        ),
        (0.3, "was reached after 1 round. Until then 1.23 MB travelled"),
        (0.99, "The target accuracy of 99.0 % was not reached in 12 rounds."),
    ],
)
def test_the_target(run_folder: RunFolder, target: float, said: str) -> None:
    assert said in told(run_folder(edit=measuring(target_accuracy=target)))[1]


@pytest.mark.nightly
def test_time_over_a_line_of_a_run_that_is_not_finished(run_folder: RunFolder) -> None:
    text = told(run_folder(4, planned=9, finished=False, edit=measuring(bandwidth=1.0)))[1]
    assert "Over lines of 1 MB/s, clients would spend 10 s sending and receiving." in text


def test_time_over_a_line(run_folder: RunFolder) -> None:
    def finished(run: Run) -> None:
        measuring(bandwidth=0.5)(run)
        bandwidth = {"megabytes_per_second": 0.5, "transfer_seconds": 30.0, "compute_seconds": 13.5, "seconds": 43.5}
        run["result"]["diagnostics"] = {"bandwidth": bandwidth}

    text = told(run_folder(edit=finished))[1]
    assert "Over lines of 0.5 MB/s, clients would spend 30 s sending and receiving, and 14 s computing" in text
    assert "44 s together" in text


def test_a_diagnostic_that_no_run_writes(run_folder: RunFolder) -> None:
    def spoilt(run: Run) -> None:
        measuring("drift")(run)
        run["rows"][3]["drift"] = 0.5

    with pytest.raises(RunDirectoryError, match="it holds a value that no run writes"):
        write_report(run_folder(edit=spoilt))
