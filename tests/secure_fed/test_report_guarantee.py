"""The guarantee of a report: the limit for each observer, what each party sees, and its details against closed forms."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from secure_fed.report import markup
from secure_fed.report.guarantee import (
    allowed,
    carried,
    guarantee_picture,
    observers,
    path_picture,
    share,
    stated,
    stations,
)
from secure_fed.report.markup import Bar, Station
from secure_fed.report.record import RunRecord, read
from secure_fed.report.terminal import _against, _hides_cohort
from tests.secure_fed.conftest import RunFolder
from tests.secure_fed.masked_edit import masked
from tests.secure_fed.test_report_privacy import PrivateEdit, told


def limits(record: RunRecord) -> dict[str, float]:
    guarantee = stated(record)
    assert guarantee is not None
    return {one.name: one.epsilon for one in observers(guarantee)}


def bars(drawn: str) -> list[float]:
    """The lengths of the bars of a drawing."""
    return [float(one) for one in re.findall(r'<path d="M\d+ \d+h([\d.]+)', drawn)]


def test_against_a_server_that_adds_the_noise_nothing_holds(run_folder: RunFolder, private_edit: PrivateEdit) -> None:
    record = read(run_folder(edit=private_edit()))
    found = limits(record)
    assert found == {"Readers of the model": 2.961, "Whoever sees cohorts": 7.5, "The server": math.inf}
    assert [one.limit for one in stations(record, stated(record))] == ["", "trusted", "epsilon 2.97"]
    assert [one.noise for one in stations(record, stated(record))] == ["", "+ noise", ""]


@pytest.mark.parametrize(
    ("case", "found"),
    [("central", {"Everybody but the server": 2.0, "The server": math.inf}), ("distributed", {"Everybody": 2.0})],
)
def test_one_bar_stands_for_all_that_one_epsilon_holds_against(
    run_folder: RunFolder, case: str, found: dict[str, float]
) -> None:
    def edit(run: dict[str, Any]) -> None:
        masked(case)(run)
        run["result"]["privacy"] |= {"epsilon": 2.0, "epsilon_participants": 2.0}

    assert limits(read(run_folder(edit=edit))) == found


@pytest.mark.parametrize(
    ("case", "sees", "noise"),
    [
        ("distributed", "sees only the sum of a round, noise included", "+ share of the noise"),
        ("local", "sees only the sum of a round, noise included", "+ noise"),
        ("example", "sees only the sum of a round", "+ noise in every step"),
    ],
)
def test_noise_of_the_clients_holds_against_the_server(run_folder: RunFolder, case: str, sees: str, noise: str) -> None:
    record = read(run_folder(edit=masked(case)))
    clients, server, _ = stations(record, stated(record))
    assert limits(record)["The server"] == 7.5
    assert (clients.noise, server.sees, server.limit, server.noise) == (noise, sees, "epsilon 7.5", "")
    assert carried(record)[0].startswith("masked updates")


@pytest.mark.parametrize(
    ("case", "sees"), [("coins", "sees each sum, even of one client"), ("nothing", "sees only the sum of a round")]
)
def test_masks_alone_limit_nobody(run_folder: RunFolder, case: str, sees: str) -> None:
    record = read(run_folder(edit=masked(case)))
    assert guarantee_picture(record) == ""
    assert stations(record, None)[1].sees == sees


def test_without_masks_the_server_sees_every_update(run_folder: RunFolder) -> None:
    record = read(run_folder())
    assert stations(record, None)[1] == Station("Server", "sees every update", "no limit")
    assert guarantee_picture(record) == ""
    assert "No limit: nothing bounds how often" in path_picture(record)
    assert ">8 clients<" in path_picture(record)


@pytest.mark.parametrize("terms", [{"private": False}, {"epsilon": math.inf}, {"private": "true"}])
def test_a_void_guarantee_limits_nobody(
    run_folder: RunFolder, private_edit: PrivateEdit, terms: dict[str, Any]
) -> None:
    record = read(run_folder(edit=private_edit(**terms)))
    assert {one.limit for one in stations(record, stated(record))} == {"", "no limit"}
    assert guarantee_picture(record) == ""


def test_a_bar_is_as_long_as_its_epsilon() -> None:
    names = [Bar("a", 2.0, ""), Bar("b", 4.0, ""), Bar("c", 12.0, ""), Bar("d", math.inf, "")]
    drawn = markup.limits("bars", names)
    two, four, *beyond = bars(drawn)
    assert four == pytest.approx(2 * two)
    assert beyond == [pytest.approx(5 * two - 6)] * 2  # the whole axis, without the tip of the arrow
    assert drawn.count("var(--warn)") == 2


def test_the_axis_says_what_an_epsilon_means_for_a_guess() -> None:
    drawn = markup.limits("axis", [])
    assert re.findall(r">([\d.]+ %)<", drawn) == ["50 %", "73 %", "88 %", "95 %", "99.3 %", "99.97 %"]


@pytest.mark.parametrize(
    ("epsilon", "delta", "said"),
    [
        (0.0, 0.0, "50.00 %"),
        (1.0, 0.0, "73.11 %"),
        (2.961, 1e-5, "95.08 %"),
        (0.0, 0.01, "50.50 %"),
        (800.0, 0.1, "100 %"),
    ],
)
def test_a_share_of_right_guesses_is_rounded_up(epsilon: float, delta: float, said: str) -> None:
    assert share(epsilon, delta) == said


def test_a_drawing_holds_text_and_no_markup() -> None:
    hostile = "<script>&\"'"
    drawn = markup.path(hostile, [Station(hostile, hostile, hostile, hostile)] * 2, [hostile])
    drawn += markup.limits(hostile, [Bar(hostile, 1.0, hostile)])
    assert "<script" not in drawn
    assert drawn.count("&lt;script&gt;&amp;&quot;&#x27;") == 2 + 8 + 1 + 2 + 8 + 2, "title, words and description"


ALARMS = np.array([0.0, 1e-3, 0.2, 0.9])


def test_an_exact_gaussian_allows_its_own_curve_and_any_other_what_its_epsilons_do() -> None:
    exact = allowed({"gaussian_mu": 1.5, "curve": []})(ALARMS)
    np.testing.assert_allclose(exact, norm.sf(norm.isf(ALARMS) - 1.5))
    loose = allowed({"gaussian_mu": None, "curve": [{"delta": 0.1, "epsilon": 1.0}, {"delta": 0.01, "epsilon": 2.0}]})
    found = loose(ALARMS)
    assert found[0] == pytest.approx(0.01)
    assert found[1] == pytest.approx(np.exp(2.0) * 1e-3 + 0.01)
    assert found[3] == pytest.approx(min(1 - np.exp(-1.0) * (0.9 - 0.9), 1 - np.exp(-2.0) * (0.99 - 0.9)))


def test_the_page_says_other_deltas_and_groups(run_folder: RunFolder, private_edit: PrivateEdit) -> None:
    text = told(run_folder(edit=private_edit()))
    assert "The guarantee in detail" in text
    assert "The guarantee is not exactly that of one Gaussian" in text
    assert "at delta 1e-05: This bound is loose. units epsilon 2 9" in text
    assert "epsilon holds against readers of the models" in text


@pytest.mark.parametrize(
    ("those", "words", "hides"),
    [
        (["reader"], ("  against participants", "epsilon 7.5"), True),
        (["reader", "participant"], ("  holds against", "everybody but the server"), False),
        (["reader", "participant", "server"], ("  holds against", "everybody"), False),
    ],
)
def test_a_terminal_says_one_epsilon_where_one_holds(those: list[str], words: tuple[str, str], hides: bool) -> None:
    terms = {"holds_against": those, "place": "sum"}
    assert _against(terms, "7.5") == [words]
    assert _hides_cohort({"privacy": terms}) is hides
