"""FRA-LoRA on a noised mean, against the same computation with dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from privacy.denoise import shrunk
from secure_fed.config import MethodConfig, PrivacyConfig, RunConfig
from secure_fed.learning.models.adapters.lora import Pair, pairs
from secure_fed.methods import build
from secure_fed.methods.fra_lora import FraLora
from secure_fed.methods.method import CHANGE, Method, State
from secure_fed.tensors.tensors import LowRank, Tensors
from tests.cells import every
from tests.secure_fed import toys
from tests.secure_fed.methods.refactorised import HEAD, RANK
from tests.secure_fed.methods.refactorised import best as best

STD = 0.05
RULES = ["tangent", "shrink", "truncate", "none"]


def fra(denoise: str = "shrink", name: str = "fra_lora", **settings: object) -> Method:
    own = MethodConfig(name=name, rank=RANK, alpha=3.0, denoise=denoise, **settings)  # type: ignore[arg-type]
    return build(RunConfig(method=own, privacy=PrivacyConfig(unit="client", epsilon=8.0)))


def started(method: Method, *, used: bool = True) -> State:
    """The initial state, or with `used` a state whose B is not zero."""
    state = State(method.prepare(toys.model(), HEAD, 3))
    generator = torch.Generator().manual_seed(1)
    b = {pair.b: torch.randn(state.tensors[pair.b].shape, generator=generator) for pair in pairs(state.tensors)}
    return State(state.tensors | b) if used else state


def noised_mean(method: Method, state: State, signal: float = 1.0, std: float = STD) -> Tensors:
    """A dense mean: a rank-one signal in each matrix, and noise on every coordinate."""
    generator = torch.Generator().manual_seed(2)

    def member(shape: tuple[int, ...]) -> Tensor:
        signals = [torch.randn(side, generator=generator) for side in shape]
        clean = torch.outer(*signals) if len(shape) == 2 else signals[0]
        return signal * clean + std * torch.randn(shape, generator=generator)

    return Tensors((name, member(shape)) for name, shape in method.layout(state, CHANGE).entries)


def product(tensors: Tensors, pair: Pair) -> Tensor:
    return tensors.tensor(pair.b).double() @ tensors.tensor(pair.a).double()


def clean(matrix: Tensor, rule: str, std: float = STD) -> Tensor:
    """The denoised mean, as a dense matrix."""
    if rule == "none":
        return matrix
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    if rule == "shrink":
        s = shrunk(s, (matrix.shape[0], matrix.shape[1]), std)
    return u[:, :RANK] * s[:RANK] @ vt[:RANK]


def wanted(method: Method, state: State, mean: Tensors, pair: Pair, rule: str) -> Tensor:
    step = mean.tensor(f"{pair.module}.delta").double()
    if rule == "tangent":
        b, a = (state.tensors.tensor(name).double() for name in (pair.b, pair.a))
        step = step - (step - b @ (b.pinverse() @ step)) @ (torch.eye(a.shape[1]).double() - a.pinverse() @ a)
    else:
        step = clean(step, rule)
    return best(product(state.tensors, pair) + step / method.adapter.scaling)


def close(left: Tensor, right: Tensor) -> bool:
    return bool((left - right).norm() <= 1e-6 * (1e-3 + right.norm()))


@every("name", ["fra_lora", "fra_then_ffa"])
@every("rule", RULES)
def test_a_noised_mean_is_denoised_and_added_as_in_dense_matrices(name: str, rule: str) -> None:
    """Denoising works on s B A, the scale of the mean and its noise, and not on B A. The head is taken as it is."""
    method = fra(rule, name)
    state = started(method)
    mean = noised_mean(method, state)
    found = method.apply(state, {CHANGE: mean}, STD)
    assert found.round == 1
    assert all(torch.equal(found.tensors.tensor(n), state.tensors.tensor(n) + mean.tensor(n)) for n in HEAD)
    for pair in pairs(state.tensors):
        want = wanted(method, state, mean, pair, rule)
        assert close(product(found.tensors, pair), want)
        others = [wanted(method, state, mean, pair, other) for other in RULES if other != rule]
        assert not any(close(product(found.tensors, pair), other) for other in others)
        a, b = found.tensors.tensor(pair.a), found.tensors.tensor(pair.b)
        assert torch.allclose(a @ a.T, b.T @ b, atol=1e-5), "balanced"
        assert (b.gather(0, b.abs().argmax(0)[None]) > 0).all(), "signs fixed"
        assert (a.dtype, b.dtype) == (torch.float32, torch.float32)


def test_the_switch_round_gives_an_orthonormal_a_under_noise_too() -> None:
    method = fra(name="fra_then_ffa", switch_round=1)
    for used, signal in ((True, 1.0), (True, 0.0), (False, 0.0)):
        state = started(method, used=used)
        mean = noised_mean(method, state, signal)
        found = method.apply(state, {CHANGE: mean}, STD).tensors
        for pair in pairs(state.tensors):
            assert torch.allclose(found.tensor(pair.a) @ found.tensor(pair.a).T, torch.eye(RANK), atol=1e-6)
            assert close(product(found, pair), wanted(method, state, mean, pair, "shrink"))


@every("used", [True, False])
@every("name", ["fra_lora", "fra_then_ffa"])
def test_where_nothing_survives_the_product_stays_and_can_still_learn(name: str, used: bool) -> None:
    """Three rounds of noise alone. From the initial state, where B A = 0, A must not become 0."""
    method = fra(name=name)
    state = first = started(method, used=used)
    for _ in range(3):
        state = method.apply(state, {CHANGE: noised_mean(method, state, signal=0.0)}, 100 * STD)
    for pair in pairs(state.tensors):
        assert close(product(state.tensors, pair), product(first.tensors, pair))
        a, b = state.tensors.tensor(pair.a), state.tensors.tensor(pair.b)
        assert (a.norm(dim=1) > 0.1).all()
        if not used:
            assert not b.any()
            assert torch.allclose(a @ a.T, torch.eye(RANK), atol=1e-6)


def test_one_live_direction_beside_nothing_leaves_a_full_a() -> None:
    method = fra()
    state = started(method, used=False)
    found = method.apply(state, {CHANGE: noised_mean(method, state, signal=1.0, std=1e-4)}, STD).tensors
    for pair in pairs(state.tensors):
        a, b = found.tensor(pair.a), found.tensor(pair.b)
        assert b[:, 0].norm() > 0.5
        assert not b[:, 1].any()
        assert a[1].norm() == pytest.approx(1.0, abs=1e-6)
        assert abs(float(a[0] @ a[1])) < 1e-5


def test_in_the_tangent_space_a_small_step_survives_whatever_the_noise() -> None:
    """The projection keeps a client's change to first order in the step; the lost part is of second order."""
    method = fra("tangent")
    state = started(method)
    generator = torch.Generator().manual_seed(4)
    lost = []
    for size in (1e-2, 1e-3):
        after = Tensors(
            (n, t + size * torch.randn(t.shape, generator=generator)) for n, t in state.tensors.dense().items()
        )
        mean = method.contribute(CHANGE, state.tensors, after, {})
        whole, kept = (method.apply(state, {CHANGE: mean}, std).tensors for std in (0.0, 1e6))
        pair = pairs(state.tensors)[0]
        changed = product(after, pair) - product(state.tensors, pair)
        lost.append(float((product(whole, pair) - product(kept, pair)).norm() / changed.norm()))
    assert lost[0] < 0.05
    assert lost[1] < 0.2 * lost[0]


def test_at_the_start_the_tangent_space_is_what_b_alone_can_reach() -> None:
    """With B A = 0 the noise enters B alone, as in FFA-LoRA, and A's row space stays."""
    method = fra("tangent")
    state = started(method, used=False)
    mean = noised_mean(method, state)
    found = method.apply(state, {CHANGE: mean}, STD).tensors
    for pair in pairs(state.tensors):
        a = state.tensors.tensor(pair.a).double()
        step = mean.tensor(f"{pair.module}.delta").double() / method.adapter.scaling
        assert close(product(found, pair), step @ a.pinverse() @ a)


@every("rule", RULES)
def test_without_noise_the_rule_has_no_part_and_a_noised_mean_is_formed_first(rule: str) -> None:
    """With noise_std = 0 every rule gives the same bits as plain FRA-LoRA."""
    method, plain = fra(rule), FraLora(fra().adapter)
    state = started(method)
    mean = method.contribute(CHANGE, state.tensors, state.tensors * 1.1, {})
    assert any(isinstance(member, LowRank) for member in mean.values())
    for one in (mean, mean.dense()):
        assert toys.same(method.apply(state, {CHANGE: one}, 0.0).tensors, plain.apply(state, {CHANGE: one}).tensors)
    factors, dense = (method.apply(state, {CHANGE: one}, 0.01).tensors for one in (mean, mean.dense()))
    assert (factors - dense).norm() < 1e-5 * dense.norm()
