"""The report's guarantee in detail: the trade-off curve against closed forms, and the observers it holds against."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from secure_fed.report.guarantee import allowed
from secure_fed.report.terminal import _against, _hides_cohort
from tests.secure_fed.conftest import RunFolder
from tests.secure_fed.test_report_privacy import PrivateEdit, told

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
