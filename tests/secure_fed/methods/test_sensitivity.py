"""The sensitivity of each method's release to one client, by brute force, and the effect of rounding on it.

Neighbouring cohorts differ in one client. A release is a function of the sum of clipped contributions. The sum is formed with
dense matrices: for FRA-LoRA the changes of whole matrices and of the head, for other methods the changes of the tensors sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from privacy.mechanisms import clip_factor
from secure_fed.methods import METHODS
from secure_fed.methods.averaged import change
from secure_fed.methods.method import CHANGE, Method, State
from secure_fed.tensors.low_rank import in_own_factors
from secure_fed.tensors.tensors import LowRank, Tensors
from tests.cells import every
from tests.contracts.runs import OF_A_CLASS
from tests.secure_fed.methods.rounds import HEAD_PREFIXES, method_of, start, trained

C = 0.5
SIZES = (1e-7, 1e-4, 1e-2, 0.3, 1.0, 30.0, 1e4)
Means = Mapping[str, Tensors]


@dataclass(frozen=True)
class Pass:
    """One pass of a method's round, from a state whose B is not zero, with the means of the earlier passes."""

    method: Method
    state: State
    name: str
    means: Means

    def contribution(self, after: Tensors) -> Tensors:
        return self.method.contribute(self.name, self.state.tensors, after, self.means)


Clipped = Callable[[Pass, Tensors], Tensors]


SKETCHED = "fra_lora with sketches"
# Every method in round 0; in later rounds too, if other tensors or products are then sent.
CASES = [
    *((name, 0) for name in [*METHODS, SKETCHED]),
    *(("fra_then_ffa", 1), ("fra_then_ffa", 2), ("rolora", 1), ("fedtt_plus", 1)),
]


OF_A_CLASS_OR_LATER = [case for case in CASES if case[0] in (*OF_A_CLASS, SKETCHED) or case[1]]


@cache
def made(name: str) -> Method:
    return method_of("fra_lora", transport_form="sketch", sketch=4) if name == SKETCHED else method_of(name)


@cache
def _begun(name: str, round_: int) -> State:
    tensors = start(made(name)).tensors
    generator = torch.Generator().manual_seed(1)
    moved = {
        n: tensors.tensor(n) + torch.randn(tensors[n].shape, generator=generator) for n in tensors if "lora_B" in n
    }
    return State(tensors | moved, round_)


@cache
def started(name: str, round_: int, pass_name: str) -> Pass:
    method, state = made(name), _begun(name, round_)
    means: dict[str, Tensors] = {}
    for earlier in method.plan(state).passes:
        if earlier == pass_name:
            break
        means[earlier] = method.contribute(earlier, state.tensors, trained(method, state, 9, 1.0), means)
    return Pass(method, state, pass_name, means)


def passes(name: str, round_: int) -> list[Pass]:
    return [started(name, round_, part) for part in made(name).plan(_begun(name, round_)).passes]


def clipped(at: Pass, after: Tensors) -> Tensors:
    """The clipped contribution that a client sends under client-level privacy."""
    contribution = in_own_factors(at.contribution(after))
    return contribution * clip_factor(contribution.norm(), C)


def formed(tensors: Tensors) -> Tensors:
    """Dense float64 tensors; products of factors are formed in float64."""
    return Tensors(
        (n, m.left.double() @ m.right.double() if isinstance(m, LowRank) else m.double()) for n, m in tensors.items()
    )


def distances(at: Pass, clip: Clipped) -> list[float]:
    """The distances between the sums with and without one more client, for each of SIZES, beside none or one other."""
    found = []
    for seed, size in enumerate(SIZES):
        others = [clip(at, trained(at.method, at.state, 50 + seed + k, SIZES[k + 2])) for k in range(seed % 2)]
        one_more = clip(at, trained(at.method, at.state, seed, size))
        total = formed(one_more * 0.0)
        for other in others:
            total = total + formed(other)
        found.append(((total + formed(one_more)) - total).norm())
    return found


@every(("name", "round_"), CASES)
def test_one_client_moves_the_sum_by_no_more_than_the_clip_norm(name: str, round_: int) -> None:
    for at in passes(name, round_):
        found = distances(at, clipped)
        assert max(found) <= C
        assert max(found) == pytest.approx(C, rel=1e-5), "a large change is as large as it may be"
        if name != "fedara":  # votes are 1, however small the change
            assert found[0] < 1e-3 * C, "a small one is left alone"


def clipped_by_tensor(at: Pass, after: Tensors) -> Tensors:
    """Broken: clips every tensor to C separately."""
    contribution = at.contribution(after)
    parts = [contribution.select([name]) for name in contribution]
    return Tensors({n: m for part in parts for n, m in (part * clip_factor(part.norm(), C)).items()})


def clipped_in_factors(at: Pass, after: Tensors) -> Tensors:
    """Broken: clips the change of A and B before their product is formed."""
    moved = change(at.state.tensors, after)
    moved = moved * clip_factor(moved.norm(), C)
    return at.contribution(at.state.tensors.select(after) + moved)


def clipped_without_head(at: Pass, after: Tensors) -> Tensors:
    """Broken: leaves the head out of the norm."""
    contribution = at.contribution(after)
    adapter = contribution.without(name for name in contribution if name.startswith(HEAD_PREFIXES))
    return contribution * clip_factor(adapter.norm(), C)


def clipped_by_stored_numbers(at: Pass, after: Tensors) -> Tensors:
    """Broken: uses the norm of the factors' entries in place of the product's norm."""
    contribution = at.contribution(after)
    return contribution * clip_factor(Tensors(contribution.parts()).norm(), C)


@every(("name", "round_"), OF_A_CLASS_OR_LATER)
def test_a_clip_of_each_tensor_is_caught_in_every_class_of_methods(name: str, round_: int) -> None:
    for at in passes(name, round_):
        assert max(distances(at, clipped_by_tensor)) > 1.02 * C


@every(("name", "round_"), OF_A_CLASS_OR_LATER)
def test_a_clip_without_the_head_is_caught_in_every_class_of_methods(name: str, round_: int) -> None:
    heads = [at for at in passes(name, round_) if at.name == CHANGE]
    assert heads
    for at in heads:
        assert max(distances(at, clipped_without_head)) > 1.0002 * C


@pytest.mark.parametrize("broken", [clipped_in_factors, clipped_by_stored_numbers])
@pytest.mark.parametrize(("name", "round_"), [("fra_lora", 0), ("fra_then_ffa", 1)])
def test_a_clip_of_factors_is_caught_where_products_travel(name: str, round_: int, broken: Clipped) -> None:
    assert max(distances(started(name, round_, CHANGE), broken)) > 1.02 * C


# Rounding.


def change_of(b: torch.Tensor, a: torch.Tensor, b_i: torch.Tensor, a_i: torch.Tensor) -> LowRank:
    """2/3 (B_i A_i - B A) in the factors that FRA-LoRA's clients send."""
    return LowRank(torch.cat([b_i - b, b], 1) * (2 / 3), torch.cat([a_i, a_i - a], 0))


def difference_of(b: torch.Tensor, a: torch.Tensor, b_i: torch.Tensor, a_i: torch.Tensor) -> LowRank:
    """Broken: the same matrix as a difference of two products."""
    return LowRank(torch.cat([b_i, -b], 1) * (2 / 3), torch.cat([a_i, a], 0))


Sides = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def changed(size: float) -> Sides:
    """B, A, and both changed by a relative amount `size`."""
    generator = torch.Generator().manual_seed(0)
    b, a, db, da = (torch.randn(shape, generator=generator) for shape in ((90, 4), (4, 60), (90, 4), (4, 60)))
    return b, a, b + size * db, a + size * da


def regauged(size: float) -> Sides:
    """B, A, and (B + size dB) R, R^T A for an orthogonal R: nearly the same product from very different factors."""
    b, a, moved, _ = changed(size)
    r, _ = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(3)))
    return b, a, moved @ r, r.T @ a


def true_norm(product: LowRank) -> float:
    return float((product.left.double() @ product.right.double()).norm())


def exact_change(b: torch.Tensor, a: torch.Tensor, b_i: torch.Tensor, a_i: torch.Tensor) -> float:
    return float((2 / 3 * (b_i.double() @ a_i.double() - b.double() @ a.double())).norm())


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 1e-6])
def test_the_norm_of_a_tiny_change_is_right(size: float) -> None:
    sides = changed(size)
    assert math.sqrt(change_of(*sides).square_norm()) == pytest.approx(exact_change(*sides), rel=1e-6)


def test_as_a_difference_of_products_it_would_be_wrong() -> None:
    sides = changed(1e-6)
    square = difference_of(*sides).square_norm()
    assert square < 0 or abs(math.sqrt(square) / exact_change(*sides) - 1) > 1e-4


@every("sides", [changed, regauged])
@every("size", [1.0, 1e-2, 1e-4, 1e-6])
def test_rounding_makes_no_clipped_product_longer_than_the_clip_norm(
    size: float, sides: Callable[[float], Sides]
) -> None:
    """Neither in exact arithmetic nor as the float32 matrix that a server forms."""
    sent = in_own_factors(Tensors({"d": change_of(*sides(size))}))
    small = 1e-3 * sent.norm()
    product = (sent * clip_factor(sent.norm(), small))["d"]
    assert isinstance(product, LowRank)
    for norm in (true_norm(product), float(product.dense().double().norm())):
        assert small * (1 - 3e-6) < norm <= small


def test_factors_that_cancel_would_be_longer() -> None:
    """The reason for `in_own_factors` before clipping: rounding in factors that cancel would exceed the clip norm."""
    sent = Tensors({"d": change_of(*regauged(1e-6))})
    small = 1e-3 * sent.norm()
    product = (sent * clip_factor(sent.norm(), small))["d"]
    assert isinstance(product, LowRank)
    assert max(true_norm(product), float(product.dense().double().norm())) > small * (1 + 1e-4)


def test_own_factors_are_the_same_contribution_and_show_no_client() -> None:
    at = started("fra_lora", 0, CHANGE)
    contribution = at.contribution(trained(at.method, at.state, 1, 0.1))
    own = in_own_factors(contribution)
    assert (formed(own) - formed(contribution)).norm() < 1e-6 * contribution.norm()
    for name, member in own.items():
        if isinstance(member, LowRank):
            assert torch.allclose(member.left.T @ member.left, torch.eye(member.rank), atol=1e-5)
        else:
            assert member is contribution[name]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    sides = changed(0.1)
    sides[2][3, 1] = bad
    sent = in_own_factors(Tensors({"d": change_of(*sides)}))
    assert not sent.is_finite()
    assert clip_factor(sent.norm(), C) == 0
