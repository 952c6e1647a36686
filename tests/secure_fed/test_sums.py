"""The plain sum against the sum of dense vectors; trimmed means and medians, lying clients, and settings that refuse them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_fed.config import FederationConfig
from secure_fed.errors import ConfigError
from secure_fed.rounds.sums import empty_sum
from secure_fed.rounds.transport import Reply, Request
from secure_fed.tensors.sums import NotFiniteError, PlainSum, TrimmedSum, stacks
from secure_fed.tensors.tensors import Layout, LayoutError, LowRank, Tensors
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import toys
from tests.secure_fed.private_toys import EXAMPLE

torch.set_num_threads(1)


def contribution(seed: int, rank: int = 2, *, dense: bool = False) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(12, rank, generator=generator), torch.randn(rank, 16, generator=generator)
    made = Tensors({"d": LowRank(left, right), "w": torch.randn(3, 4, generator=generator)})
    return made.dense() if dense else made


LAYOUT = Layout.of(contribution(0))


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.lists(st.integers(0, 5), max_size=8),
    dense=st.lists(st.booleans(), min_size=8, max_size=8),
    weights=st.lists(st.floats(0, 100), min_size=8, max_size=8),
)
def test_total_is_the_weighted_sum(ranks: list[int], dense: list[bool], weights: list[float]) -> None:
    """Factors and dense matrices come in any order; the total may be factors or a dense matrix."""
    added, want = PlainSum(LAYOUT), torch.zeros(LAYOUT.size, dtype=torch.float64)
    for seed, rank in enumerate(ranks):
        given_ = contribution(seed, rank, dense=dense[seed])
        added.add(given_, weights[seed])
        want += weights[seed] * LAYOUT.flatten(given_).double()
    total = added.total()
    assert Layout.of(total) == LAYOUT
    assert torch.allclose(LAYOUT.flatten(total).double(), want, rtol=1e-4, atol=1e-3)
    assert added.count == len(ranks)
    assert added.weight == pytest.approx(sum(weights[: len(ranks)]))


def test_factors_are_stacked_while_they_are_small_and_formed_after() -> None:
    added = PlainSum(LAYOUT)
    for count, still_factors in ((1, True), (2, True), (3, True), (4, False), (5, False)):
        added.add(contribution(count))
        assert isinstance(added.total()["d"], LowRank) == still_factors
    assert stacks((12, 16), 6)
    assert not stacks((12, 16), 7)
    assert stacks((1024, 2048), 128)
    assert not stacks((1024, 2048), 129)


def test_the_factors_of_a_total_tell_of_the_sum_alone() -> None:
    """They show neither the order of contributions nor how the sum divides into contributions."""
    factors = []
    for order in ((1, 2, 3), (3, 1, 2)):
        added = PlainSum(LAYOUT)
        for seed in order:
            added.add(contribution(seed))
        total = added.total()["d"]
        assert isinstance(total, LowRank)
        factors.append(total)
    assert torch.allclose(factors[0].left, factors[1].left, atol=1e-5)
    assert torch.allclose(factors[0].right, factors[1].right, atol=1e-4)
    one = contribution(1)["d"]
    assert isinstance(one, LowRank)
    cosines = torch.nn.functional.normalize(one.left, dim=0).T @ factors[0].left
    assert cosines.abs().max() < 0.99


@every("dense", [False, True])
def test_what_is_given_is_neither_changed_nor_kept_and_a_total_does_not_change(dense: bool) -> None:
    added, given_ = PlainSum(LAYOUT), contribution(1, dense=dense)
    kept = given_.to_bytes()
    added.add(given_)
    first = added.total()
    before = first.to_bytes()
    added.add(contribution(2, dense=dense))
    assert (given_.to_bytes(), first.to_bytes()) == (kept, before)
    total = LAYOUT.flatten(added.total())
    for part in given_.parts().values():
        part.fill_(1e6)
    assert torch.equal(LAYOUT.flatten(added.total()), total)


def test_another_layout_or_weight_is_refused_and_leaves_the_sum() -> None:
    added = PlainSum(LAYOUT)
    added.add(contribution(1))
    kept, usual = added.total().to_bytes(), contribution(0)
    for wrong in (usual.without(["w"]), usual | {"z": torch.ones(2)}, usual | {"w": torch.ones(4, 3)}):
        with refused(LayoutError):
            added.add(wrong)
    for weight in (-1.0, math.nan, math.inf):
        with refused(ValueError):
            added.add(usual, weight)
    assert added.total().to_bytes() == kept
    assert (added.count, added.weight) == (1, 1.0)


LARGE = 300  # a matrix with this many rows is added separately, not in the vector of small tensors


@every("number", [math.inf, -math.inf, math.nan])
@every("where", ["d", "small", "large"])
def test_a_contribution_that_is_not_finite_is_refused_and_leaves_the_sum(number: float, where: str) -> None:
    """It may come first or later, and the number may be in any tensor."""
    good = Tensors({"d": contribution(1)["d"], "small": torch.ones(7), "large": torch.ones(LARGE, LARGE)})
    parts = {name: part.clone() for name, part in good.parts().items()}
    next(part for name, part in parts.items() if name.startswith(where)).view(-1)[-1] = number
    bad = Tensors.from_parts(parts)
    added = PlainSum(Layout.of(good))
    for weight in (1.0, 0.0):
        with pytest.raises(NotFiniteError):
            added.add(bad, weight)
    assert (added.count, added.total().norm()) == (0, 0)
    added.add(good, 3.0)
    with pytest.raises(NotFiniteError):
        added.add(bad)
    assert (added.count, added.weight) == (1, 3.0)
    assert torch.equal(added.total().tensor("large"), torch.full((LARGE, LARGE), 3.0))
    assert torch.equal(added.total().tensor("small"), torch.full((7,), 3.0))


def test_large_numbers_are_finite() -> None:
    """The sum of the four numbers overflows float32, although each is finite."""
    added = PlainSum(Layout((("x", (4,)),)))
    added.add(Tensors({"x": torch.full((4,), 2e38)}))
    assert added.count == 1
    assert torch.equal(added.total().tensor("x"), torch.full((4,), 2e38))


def test_one_vector_adds_as_each_tensor_by_itself() -> None:
    """The sums are equal to the bit. float64 tensors are summed in float64, all others in float32."""
    generator = torch.Generator().manual_seed(0)
    types = {"half": torch.float16, "single": torch.float32, "double": torch.float64}
    given_ = [
        Tensors({name: torch.randn(5, 3, generator=generator).to(dtype) for name, dtype in types.items()})
        for _ in range(6)
    ]
    added = PlainSum(Layout.of(given_[0]))
    for number, one in enumerate(given_):
        added.add(one, 0.3 + number)
    for name, dtype in types.items():
        want = torch.zeros(5, 3, dtype=torch.promote_types(dtype, torch.float32))
        for number, one in enumerate(given_):
            want.add_(one.tensor(name), alpha=0.3 + number)
        assert torch.equal(added.total().tensor(name), want)
        assert added.total().tensor(name).dtype == want.dtype


LIARS = (0, 1)


@every("count", [1, 2, 3, 5, 10, 11])
@every("share", [0.1, 0.2, 0.29, 0.5])
def test_it_is_what_numpy_makes_of_all_contributions(count: int, share: float) -> None:
    own = (
        FederationConfig(aggregate="median") if share == 0.5 else FederationConfig(aggregate="trimmed_mean", trim=share)
    )
    added, flat = empty_sum(own, precise=False)(LAYOUT), []
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


def trained(aggregate: str, liars: tuple[int, ...], method: str) -> Tensors:
    """The state after three rounds of ten clients, of whom `liars` send -100 times their change."""
    built = toys.federation({"federation.aggregate": aggregate, "method.name": method}, sizes=[12] * 10)
    honest = built.assembly.transport

    def exchange(requests: Mapping[int, Request]) -> Iterator[Reply]:
        for reply in honest.exchange(requests):
            yield replace(reply, contribution=reply.contribution * (-100.0 if reply.client in liars else 1.0))

    built.assembly = replace(built.assembly, transport=SimpleNamespace(exchange=exchange))
    return built.run().state.tensors


@pytest.mark.parametrize("method", chosen(["fedlora", "fra_lora"], ["fedlora"]))
def test_two_of_ten_clients_spoil_the_mean_and_neither_median_nor_trimmed_mean(method: str) -> None:
    head = "classifier.weight"
    honest = trained("mean", (), method).tensor(head)
    apart = {
        aggregate: float((trained(aggregate, LIARS, method).tensor(head) - honest).norm())
        for aggregate in ("mean", "median", "trimmed_mean")
    }
    moved = float((honest - toys.model().classifier.weight.detach()).norm())
    assert apart["mean"] > 5 * moved
    assert apart["median"] < moved
    assert apart["trimmed_mean"] < moved


def test_under_the_example_unit_it_is_made_of_what_is_private_already() -> None:
    settings = {**EXAMPLE, "privacy.noise_multiplier": 1.0, "federation.aggregate": "median", "federation.rounds": 1}
    assert toys.federation(settings, sizes=[6] * 3).run().summary["privacy"]["private"]


@pytest.mark.parametrize(
    "settings",
    [
        {"secure_aggregation.enabled": True},
        {"privacy.unit": "client", "privacy.epsilon": 8.0},
        {"federation.weighting": "examples"},
        {"method.name": "fra_lora", "method.transport_form": "sketch"},
        {"evaluation.dummies": 4, "evaluation.audit_unit": "client"},
        {"federation.cohort": 2},
        {"method.name": "fedask"},
        {"method.name": "fedpower"},
        {"method.name": "fedara"},
        {"federation.trim": 0.3},
    ],
    ids=lambda settings: next(iter(reversed(settings.values()))),
)
def test_a_median_is_refused_where_it_makes_no_sense(settings: dict[str, Any]) -> None:
    with refused(ConfigError, "federation.trim" if "federation.trim" in settings else "federation.aggregate"):
        toys.federation({**settings, "federation.aggregate": "median"})
