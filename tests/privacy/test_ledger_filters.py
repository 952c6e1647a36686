"""The RDP filter against exact Gaussian privacy, another library's conversion, and conversions that are wrong."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist

import pytest

from privacy.errors import BudgetExhausted, PlanError
from privacy.filters import ORDERS, Budget, Cost
from privacy.ledger import Ledger
from tests.cells import every
from tests.privacy.ledger_child import UNIT

BUDGETS = [(0.5, 1e-6), (1.0, 1e-5), (3.0, 1e-5), (8.0, 1e-5), (8.0, 1e-9), (50.0, 1e-3)]


def gaussian_delta(mu: float, epsilon: float) -> float:
    """The exact delta of a Gaussian mechanism of sensitivity mu and standard deviation 1 (Balle, Wang 2018)."""
    law = NormalDist().cdf
    return law(mu / 2 - epsilon / mu) - math.exp(epsilon) * law(-mu / 2 - epsilon / mu)


@every(("epsilon", "delta"), BUDGETS)
def test_gaussians_that_fill_the_filter_are_within_the_budget(epsilon: float, delta: float) -> None:
    budget = Budget.fixed(epsilon, delta, "rdp")
    assert budget.order is not None
    mu = math.sqrt(2 * budget.limits[0] / budget.order)  # rho(order) = order mu^2 / 2
    assert gaussian_delta(mu, epsilon) <= delta
    # The conversion costs less than half of epsilon: the same noise does not meet epsilon / 2.
    assert gaussian_delta(mu, epsilon / 2) > delta


@every(("epsilon", "delta"), BUDGETS)
def test_a_filter_that_forgets_the_conversion_is_caught(epsilon: float, delta: float) -> None:
    order = Budget.fixed(epsilon, delta, "rdp").order
    assert order is not None
    assert gaussian_delta(math.sqrt(2 * epsilon / order), epsilon) > delta


@every(("epsilon", "delta"), BUDGETS)
def test_the_limit_is_what_dp_accounting_converts_to_the_budget(epsilon: float, delta: float) -> None:
    rdp = pytest.importorskip("dp_accounting.rdp.rdp_privacy_accountant")
    budget = Budget.fixed(epsilon, delta, "rdp")
    converted, _ = rdp.compute_epsilon([budget.order], [budget.limits[0]], delta)
    assert converted == pytest.approx(epsilon, rel=1e-9)


def test_the_order_is_the_best_for_gaussians_and_is_kept(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.db", data_set="ward", epsilon=3.0, delta=1e-5, composition="rdp")
    (order,) = ledger.orders
    at = {order: Budget(3.0, 1e-5, "rdp", order).limits[0] / order for order in ORDERS}
    assert at[order] == max(at.values())
    assert Ledger.open(ledger.path).orders == (order,)


def test_rho_is_added_up_and_the_rest_is_not(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.db", data_set="ward", epsilon=3.0, delta=1e-5, composition="rdp")
    (limit,) = ledger.budget.limits
    for run in range(10):  # basic composition would admit six of these
        ledger.reserve(str(run), Cost(0.5, 1e-5, (limit / 10,)), data_digest="d", unit=UNIT, terms={})
    spent = ledger.spent()
    assert spent.epsilon == pytest.approx(3.0)
    assert spent.delta == 1e-5
    with pytest.raises(BudgetExhausted, match=r"needs RDP 0\.01 at order .*, and RDP .* is left of RDP"):
        ledger.reserve("more", Cost(0.5, 1e-5, (0.01,)), data_digest="d", unit=UNIT, terms={})


def test_an_rdp_ledger_is_not_given_an_epsilon_alone(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.db", data_set="ward", epsilon=3.0, delta=1e-5, composition="rdp")
    for rdp in (None, (), (0.1, 0.2)):
        with pytest.raises(PlanError, match="give rho at that order"):
            ledger.reserve("a", Cost(0.5, 1e-5, rdp), data_digest="d", unit=UNIT, terms={})
    assert ledger.spent() == Cost(0.0, 0.0, (0.0,))


def test_a_ledger_without_limits_holds_everything_but_infinity(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.db", data_set="ward", epsilon=None, delta=None)
    ledger.reserve("a", Cost(1e308, 1.0), data_digest="d", unit=UNIT, terms={})
    with pytest.raises(BudgetExhausted):
        ledger.reserve("b", Cost(1e308, 1.0), data_digest="d", unit=UNIT, terms={})
    assert ledger.spent() == Cost(1e308, 1.0)


@pytest.mark.parametrize(
    "budget",
    [
        (float("nan"), 1e-5, "basic"),
        (-1.0, 1e-5, "basic"),
        (1.0, 1.0, "basic"),
        (1.0, -1e-5, "basic"),
        (None, 1e-5, "rdp"),
        (1.0, None, "rdp"),
        (1.0, 0.0, "rdp"),
        (1e-4, 1e-5, "rdp"),
        (1.0, 1e-5, "strong"),
    ],
)
def test_a_budget_of_which_nothing_follows_is_refused(tmp_path: Path, budget: tuple[float, float, str]) -> None:
    epsilon, delta, composition = budget
    with pytest.raises(PlanError):
        Ledger.create(
            tmp_path / "ledger.db",
            data_set="ward",
            epsilon=epsilon,
            delta=delta,
            composition=composition,  # type: ignore[arg-type]
        )
    assert list(tmp_path.iterdir()) == []
