"""Trimmed means and medians of a round's changes: their values, lying clients, and the settings that refuse them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from secure_fed.config import FederationConfig
from secure_fed.errors import ConfigError
from secure_fed.rounds.sums import Intake, OpenSum, Record, empty_sum
from secure_fed.rounds.transport import Reply
from secure_fed.tensors.layout import Layout, LayoutError
from secure_fed.tensors.sums import NotFiniteError
from secure_fed.tensors.tensors import LowRank, Tensors
from secure_fed.tensors.trimmed import TrimmedSum
from tests.secure_fed import toys

LIARS = (0, 1)


def contribution(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(12, 2, generator=generator), torch.randn(2, 16, generator=generator)
    return Tensors({"d": LowRank(left, right), "w": torch.randn(3, 4, generator=generator)})


LAYOUT = Layout.of(contribution(0))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 10, 11])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.29, 0.5])
def test_it_is_what_numpy_makes_of_all_contributions(count: int, share: float) -> None:
    added, flat = TrimmedSum(LAYOUT, share), []
    for seed in range(count):
        added.add(contribution(seed), weight=1.0 + seed)  # weights are ignored
        flat.append(LAYOUT.flatten(contribution(seed)).double().numpy())
    cut = min(math.ceil(share * count), (count - 1) // 2)
    expected = np.mean(np.sort(flat, axis=0)[cut : count - cut], axis=0)
    if share == 0.5:
        assert np.allclose(expected, np.median(flat, axis=0))
    found = LAYOUT.flatten(added.total()).double().numpy() / added.weight
    assert np.allclose(found, expected, atol=1e-5)
    assert (added.count, added.weight) == (count, float(count))


def test_it_refuses_what_a_sum_refuses_and_keeps_what_it_was_given() -> None:
    added, given = TrimmedSum(LAYOUT, 0.2), contribution(0)
    assert float(LAYOUT.flatten(added.total()).abs().sum()) == 0
    added.add(given)
    before = added.total()
    for part in given.parts().values():
        part.mul_(7.0)
    assert toys.same(before, added.total())
    with pytest.raises(NotFiniteError):
        added.add(contribution(1) * math.inf)
    with pytest.raises(LayoutError):
        added.add(contribution(1).without(["w"]))
    assert added.count == 1


def test_the_share_is_that_of_the_settings() -> None:
    for settings, share in (
        (FederationConfig(aggregate="median"), 0.5),
        (FederationConfig(aggregate="trimmed_mean"), 0.2),
    ):
        made = empty_sum(settings, precise=False)(LAYOUT)
        assert isinstance(made, TrimmedSum)
        assert made._share == share


def trained(
    monkeypatch: pytest.MonkeyPatch, aggregate: str, liars: tuple[int, ...], method: str
) -> tuple[Tensors, Record]:
    """(state, last record) after three rounds of ten clients, of whom `liars` send -100 times their change."""
    honest = OpenSum._add

    def lying(self: OpenSum, reply: Reply, intake: Intake) -> None:
        factor = -100.0 if reply.client in liars else 1.0
        honest(self, replace(reply, contribution=reply.contribution * factor), intake)

    settings: dict[str, Any] = {"federation.aggregate": aggregate, "method.name": method}
    with monkeypatch.context() as patched:
        patched.setattr(OpenSum, "_add", lying)
        result = toys.federation(settings, sizes=[12] * 10).run()
    return result.state.tensors, result.records[-1]


@pytest.mark.parametrize("method", ["fedlora", "fra_lora"])
def test_two_of_ten_clients_spoil_the_mean_and_neither_median_nor_trimmed_mean(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    start, _ = trained(monkeypatch, "mean", (), method)
    head = "classifier.weight"
    honest = start.tensor(head)
    apart = {}
    for aggregate in ("mean", "median", "trimmed_mean"):
        spoilt, _ = trained(monkeypatch, aggregate, LIARS, method)
        apart[aggregate] = float(torch.linalg.vector_norm(spoilt.tensor(head) - honest))
    moved = float(torch.linalg.vector_norm(honest - toys.model().classifier.weight.detach()))
    assert apart["mean"] > 5 * moved
    assert apart["median"] < moved
    assert apart["trimmed_mean"] < moved


def test_under_the_example_unit_it_is_made_of_what_is_private_already() -> None:
    settings = {
        "privacy.unit": "example",
        "privacy.epsilon": 8.0,
        "privacy.delta": 1e-3,
        "federation.aggregate": "median",
    }
    assert toys.federation(settings, sizes=[12] * 4).run().summary["privacy"]["private"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "masks": (
        {"secure_aggregation.enabled": True},
        r"secure_aggregation.enabled = true: the server sees only sums.*bounding_inputs",
    ),
    "clients": (
        {"privacy.unit": "client", "privacy.epsilon": 8.0},
        "privacy.unit = 'client': one client may move a median by more than the clip norm",
    ),
    "weights": ({"federation.weighting": "examples"}, "federation.weighting = 'examples': each client reports its own"),
    "sketches": (
        {"method.name": "fra_lora", "method.transport_form": "sketch"},
        "a median of sketches is no sketch of a median",
    ),
    "phantoms": ({"evaluation.phantoms": 4, "evaluation.audit_unit": "client"}, "phantoms are scored by sums"),
    "two": ({"federation.cohort": 2}, "a cohort of fewer than 3 clients"),
    "passes": ({"method.name": "fedask"}, "method.name = 'fedask': its passes are linear in the changes"),
    "power": ({"method.name": "fedpower"}, "method.name = 'fedpower': its passes are linear in the changes"),
    "votes": ({"method.name": "fedara"}, "method.name = 'fedara': it counts the clients' votes"),
    "trim of a median": ({"federation.trim": 0.3}, "federation.trim = 0.3 has no effect"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_where_it_makes_no_sense(case: str) -> None:
    settings, says = REFUSED[case]
    with pytest.raises(ConfigError, match=says):
        toys.federation({**settings, "federation.aggregate": "median"}).run()
