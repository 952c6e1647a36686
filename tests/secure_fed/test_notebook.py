"""A result in a notebook: its public part as a small table without scripts, and a figure."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

import secure_fed
from secure_fed.learning.data.holdout import HELD_OUT
from secure_fed.report.result import Result
from tests.secure_fed import private_toys, toys


def words(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html)).strip()


def curves(figure: Figure) -> dict[str, dict[str, list[float]]]:
    """For each panel, the values of its lines by their labels."""
    return {
        axes.get_ylabel(): {str(line.get_label()): list(line.get_ydata()) for line in axes.get_lines()}  # type: ignore[arg-type]
        for axes in figure.axes
    }


@pytest.fixture(scope="module")
def result() -> Result:
    return toys.federation({"federation.rounds": 3}).run()


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Result:
    settings = {**private_toys.NOISE, "federation.rounds": 3}
    return private_toys.federation(settings).run(tmp_path_factory.mktemp("private") / "run")


def test_a_result_is_a_small_table(result: Result) -> None:
    assert isinstance(result, secure_fed.Result)
    html = result._repr_html_()
    said = words(html)
    assert f"accuracy {100 * result.summary['accuracy']:.1f} %" in said
    assert "rounds 3, each with 3 of 3 clients" in said
    assert "No differential privacy" in said
    assert len(html) < 10_000
    assert not re.findall(r"<script|<link|<img|<iframe|https?:|\bon\w+=", html)


def test_names_are_escaped(result: Result) -> None:
    hostile = replace(result, summary={**result.summary, "data": "<script>alert('x')</script>"})
    assert "<script" not in hostile._repr_html_()
    assert "&lt;script&gt;" in hostile._repr_html_()


def test_the_membership_figure_is_explained(result: Result) -> None:
    found = {"of": "data", "unit": "example", "auc": 0.47, "auc_interval": [0.38, 0.56], "members": 60}
    found |= {"non_members": 58}
    said = words(replace(result, summary={**result.summary, "membership": found})._repr_html_())
    assert "names the one that trained in 47 of 100 pairs; a guess at random does in 50" in said
    assert "60 and 58 are too few to show whether there is a leak. A value below 50 is chance; it does not" in said


def test_a_private_result_shows_its_public_part(private: Result) -> None:
    said = words(private._repr_html_())
    assert "epsilon" in said
    assert private.withheld["seconds"] > 0
    assert not re.search(r"\btime\b", said)
    assert repr(private) == "<Result of fedlora: Toy on given in Python, 3 rounds>"


def test_accuracy_on_rows_held_out_of_private_ones_is_withheld(private: Result) -> None:
    own = replace(private, summary={**private.summary, "test": {"from": HELD_OUT["example"], "rows": 9}})
    said = words(own._repr_html_())
    assert "accuracy is withheld here" in said
    assert f"{private.summary['accuracy']:.1%}" not in said


def test_the_figure_has_accuracy_and_loss_by_round(result: Result) -> None:
    drawn = curves(result.plot())
    assert set(drawn) == {"accuracy", "loss"}
    assert drawn["accuracy"]["accuracy"] == [record["accuracy"] for record in result.records]
    assert drawn["loss"]["train loss"] == [record["train_loss"] for record in result.records]
    picture = result.plot()._repr_png_()  # type: ignore[attr-defined]
    assert picture.startswith(b"\x89PNG")
    assert 3_000 < len(picture) < 60_000


def test_the_figure_of_a_private_result_has_epsilon_and_nothing_that_is_withheld(private: Result) -> None:
    known = replace(private, records=[{**record, "train_loss": 1.0} for record in private.records])
    drawn = curves(known.plot())
    assert set(drawn) == {"accuracy", "test loss", "epsilon"}
    (spent,) = drawn["epsilon"].values()
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(private.summary["epsilon"])
    assert len(set(spent)) == 3
    killed = replace(private, summary={**private.summary, "releases": private.summary["releases"] + 2})
    (more,) = curves(killed.plot())["epsilon"].values()
    assert private.plan is not None
    assert more[-1] == private.plan.epsilon(private.summary["releases"] + 2) > spent[-1], "of interrupted rounds, too"


def test_how_many_are_held_out_is_said_of_runs_without_privacy_alone() -> None:
    half = {"evaluation.audit_fraction": 0.5}
    counted = " ".join(toys.federation(half, sizes=(30, 30, 30)).notes)
    assert re.search(r"\d+ of 90 examples, chosen at random, are not trained on", counted)
    settings = {**private_toys.EXAMPLE, "privacy.noise_multiplier": 1.0, **half}
    uncounted = " ".join(private_toys.federation(settings, sizes=(30, 30, 30)).notes)
    assert "some examples, chosen at random, are not trained on" in uncounted


def test_a_callback_is_given_a_result_that_shows_itself(tmp_path: Path) -> None:
    given: list[object] = []
    toys.federation({"federation.rounds": 1}, callbacks=[SimpleNamespace(on_end=given.append)]).run()
    assert [type(one) for one in given] == [Result]
