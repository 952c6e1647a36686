"""Tensors as a vector space, their wire form, its length in bytes, the layout; and low-rank algebra against dense ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from secure_fed.tensors.low_rank import Svd, balanced, recompressed, right_orthonormal, tangent, truncated
from secure_fed.tensors.tensors import _TYPES, Layout, LayoutError, LowRank, Tensors, wire_size
from tests.cells import every
from tests.golden import refused

torch.set_num_threads(1)


def low_rank(rows: int = 6, columns: int = 4, rank: int = 2, seed: int = 0) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    return LowRank(torch.randn(rows, rank, generator=generator), torch.randn(rank, columns, generator=generator))


def mixed(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return Tensors({"w": torch.randn(3, 2, generator=generator), "d": low_rank(seed=seed), "b": torch.randn(5)})


def test_names_are_sorted_whatever_order_they_come_in() -> None:
    assert list(Tensors({"b": torch.ones(1), "a": torch.ones(1)})) == ["a", "b"]
    assert list(Tensors({"b": torch.ones(1)}) | {"a": torch.ones(1)}) == ["a", "b"]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), factor=st.floats(-3, 3))
def test_arithmetic_is_that_of_the_dense_vectors(seed: int, factor: float) -> None:
    x, y = mixed(seed), mixed(seed + 1)
    layout = Layout.of(x)
    want = layout.flatten(x) + factor * layout.flatten(y)
    assert torch.allclose(layout.flatten(x + y * factor), want, atol=1e-5)
    assert torch.allclose(layout.flatten(x - y * -factor), want, atol=1e-5)
    assert torch.allclose(layout.flatten(x.dense() + factor * y), want, atol=1e-5)


def test_sums_and_multiples_of_factors_stay_factors() -> None:
    total = mixed(1) + mixed(2) * 0.5
    member = total["d"]
    assert isinstance(member, LowRank)
    assert member.rank == 4
    assert not isinstance(total.dense()["d"], LowRank)


def test_different_names_do_not_add() -> None:
    with refused(ValueError):
        Tensors({"a": torch.ones(1), "b": torch.ones(1)}) + Tensors({"a": torch.ones(1), "c": torch.ones(1)})


def test_select_and_without() -> None:
    x = mixed()
    assert list(x.select(["w", "b"])) == ["b", "w"]
    assert list(x.without(["w"])) == ["b", "d"]
    with pytest.raises(KeyError):
        x.select(["missing"])


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), rank=st.integers(0, 6), seed=st.integers(0, 1000))
def test_norm_of_factors_is_that_of_their_product(rows: int, columns: int, rank: int, seed: int) -> None:
    member = low_rank(rows, columns, rank, seed)
    want = float((member.left.double() @ member.right.double()).norm())
    assert Tensors({"d": member}).norm() == pytest.approx(want, rel=1e-6, abs=1e-12)


def test_norm_is_over_everything_together() -> None:
    x = mixed()
    assert x.norm() == pytest.approx(float(Layout.of(x).flatten(x).double().norm()), rel=1e-6)
    assert Tensors().norm() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_the_norm(bad: float) -> None:
    for member in (torch.tensor([1.0, bad]), LowRank(torch.tensor([[bad]]), torch.ones(1, 2))):
        x = Tensors({"x": member})
        assert not x.is_finite()
        assert not math.isfinite(x.norm())


def test_wire_form_keeps_bits_names_and_factors() -> None:
    x = mixed() | {"half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}
    again = Tensors.from_bytes(x.to_bytes())
    assert list(again) == list(x)
    assert isinstance(again["d"], LowRank)
    assert all(torch.equal(part, again.parts()[name]) for name, part in x.parts().items())
    assert x.wire_size == len(x.to_bytes())
    assert x.numel == 6 + 5 + 2 + (6 + 4) * 2


def test_factors_that_do_not_multiply_are_refused() -> None:
    with refused(ValueError):
        LowRank(torch.ones(3, 2), torch.ones(3, 2))


def test_flatten_follows_the_names_and_unflatten_inverts_it() -> None:
    x = Tensors({"b": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "a": torch.tensor([0.0])})
    layout = Layout.of(x)
    assert layout.flatten(x).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert layout.unflatten(layout.flatten(x)).tensor("b").tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert layout.size == 5

    assert Layout.of(Tensors()).flatten(Tensors()).shape == (0,)


def test_a_digest_is_that_of_the_dense_shapes_and_names() -> None:
    x = mixed()
    assert Layout.of(x) == Layout.of(x.dense())
    assert Layout.of(x).digest == Layout.of(x.dense()).digest
    shapes = [{"a": torch.ones(2, 3)}, {"a": torch.ones(3, 2)}, {"b": torch.ones(2, 3)}, {"a": torch.ones(6)}]
    assert len({Layout.of(Tensors(members)).digest for members in shapes}) == 4


def test_another_layout_is_refused() -> None:
    layout = Layout.of(mixed())
    with refused(LayoutError):
        layout.flatten(mixed().without(["b"]))
    with refused(LayoutError):
        layout.unflatten(torch.zeros(3))


Part = tuple[str, tuple[int, ...], torch.dtype]


def written(parts: list[Part]) -> int:
    return len(safetensors.torch.save({name: torch.empty(shape, dtype=dtype) for name, shape, dtype in parts}))


NAMES = st.text('aZ7._"\\/ \x00\n\x1f\x7f\u00e9\u2028\u4e2d\uffff\U0001f600', max_size=12)
SHAPES = st.lists(st.integers(0, 12), max_size=4).map(tuple)
PARTS = st.lists(st.tuples(NAMES, SHAPES, st.sampled_from(list(_TYPES))), max_size=8, unique_by=lambda part: part[0])


@settings(max_examples=50)
@given(parts=PARTS)
def test_any_names_shapes_and_types(parts: list[Part]) -> None:
    assert wire_size(tuple(parts)) == written(parts)


@every("count", [0, 1, 2, 9, 10, 11, 99, 100, 101, 400])
def test_offsets_of_every_length(count: int) -> None:
    """Later offsets have more digits, so the order of tensors by type shows in the length of the file."""
    types = (torch.float32, torch.bool, torch.float64, torch.bfloat16)
    parts: list[Part] = [(f"layer.{number}.weight", (number % 5 + 1, 3), types[number % 4]) for number in range(count)]
    assert wire_size(tuple(parts)) == written(parts)


def test_no_number_is_needed() -> None:
    """40 TB of float32 on the meta device, and a product that counts as its factors."""
    large = Tensors({"w": torch.empty(10**7, 10**6, device="meta")})
    assert 4 * 10**13 < large.wire_size < 4 * 10**13 + 200
    product = LowRank(torch.empty(10**6, 2, device="meta"), torch.empty(2, 10**6, device="meta"))
    assert 16 * 10**6 < Tensors({"d": product}).wire_size < 16 * 10**6 + 300


def formed(svd: Svd) -> Tensor:
    return svd.u * svd.s @ svd.vt


def best(matrix: Tensor, rank: int) -> Tensor:
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u[:, :rank] * s[:rank] @ vt[:rank]


def exactly(matrix: LowRank) -> Tensor:
    return matrix.left.double() @ matrix.right.double()


@every(("rows", "columns"), [(40, 25), (25, 40), (30, 30)])
@every("inner", [4, 12, 16, 17, 24, 40])
@every("dense", [False, True])
def test_both_paths_find_the_best_approximation(rows: int, columns: int, inner: int, dense: bool) -> None:
    matrix = low_rank(rows, columns, inner, seed=inner)
    want = exactly(matrix)
    found = truncated(want.float() if dense else matrix, 4)
    scale = want.norm()
    assert (formed(found) - best(want, 4)).norm() < (1e-5 if dense else 1e-12) * scale
    assert torch.allclose(found.s, torch.linalg.svdvals(want)[:4], rtol=1e-5 if dense else 1e-10)


def test_the_factored_path_forms_no_matrix() -> None:
    """A 60000 x 60000 float64 matrix would need 29 GB."""
    found = truncated(low_rank(60_000, 60_000, 6, seed=0), 4)
    assert found.u.shape == (60_000, 4)
    assert found.s[0] > found.s[3] > 0


seeds, sizes = st.integers(0, 10_000), st.integers(1, 12)


@settings(max_examples=40)
@given(sizes, sizes, st.integers(0, 12), st.integers(0, 14), st.integers(0, 12), st.booleans(), seeds)
def test_what_truncated_promises(
    rows: int, columns: int, live: int, inner: int, rank: int, dense: bool, seed: int
) -> None:
    """For any shape, any true rank including zero, and any requested rank."""
    rank, live = min(rank, rows, columns), min(live, inner, rows, columns)
    matrix = low_rank(rows, columns, inner, seed)
    matrix = LowRank(matrix.left * (torch.arange(inner) < live), matrix.right)
    want, scale = exactly(matrix), 1 + exactly(matrix).norm()
    found = truncated(want if dense else matrix, rank)
    assert (found.u.shape, found.s.shape, found.vt.shape) == ((rows, rank), (rank,), (rank, columns))
    assert (formed(found) - best(want, rank)).norm() < 1e-5 * scale
    assert torch.allclose(found.vt @ found.vt.T, torch.eye(rank, dtype=torch.float64), atol=1e-9)
    alive = found.s > 0
    assert int(alive.sum()) <= live
    assert torch.allclose(found.u.T @ found.u, torch.diag(alive.double()), atol=1e-9)
    assert (found.s.diff() <= 0).all()
    for b, a in (balanced(found), right_orthonormal(found)):
        assert (b @ a - formed(found)).norm() < 1e-9 * scale
        assert (a.norm(dim=1) > 0).all()


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(0, 5), seeds)
def test_tangent_is_what_a_change_of_the_factors_can_make(
    rows: int, columns: int, inner: int, live: int, seed: int
) -> None:
    """`tangent` is the least-squares fit by all X A + B Y, also if B has deficient rank.

    `reach` has one column for each entry of X and of Y.
    """
    made = low_rank(rows, columns, inner, seed)
    made = LowRank(made.left * (torch.arange(inner) < live), made.right)
    step = torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    b, a = made.left.double(), made.right.double()
    reach = torch.from_numpy(np.hstack([np.kron(np.eye(rows), a.T), np.kron(b, np.eye(columns))]))
    want = (reach @ (torch.linalg.pinv(reach, rtol=1e-8) @ step.flatten())).view(rows, columns)
    found = tangent(step, made)
    assert found.rank <= 2 * inner
    assert torch.allclose(found.dense(), want, atol=1e-6 * (1 + float(step.norm())))
    assert torch.allclose(tangent(found, made).dense(), found.dense(), atol=1e-9)


@settings(max_examples=20)
@given(st.integers(2, 10), st.integers(2, 10), seeds)
def test_signs_do_not_depend_on_the_path(rows: int, columns: int, seed: int) -> None:
    rank = min(rows, columns) // 2
    matrix = low_rank(rows, columns, rank, seed)
    one, two = truncated(matrix, rank), truncated(exactly(matrix), rank)
    assert torch.allclose(one.u, two.u, atol=1e-5)
    assert torch.allclose(one.vt, two.vt, atol=1e-5)
    assert (one.u.gather(0, one.u.abs().argmax(0)[None]) > 0).all()


def test_of_equally_large_entries_the_first_is_positive() -> None:
    column = torch.tensor([[-1.0], [1.0], [1.0 + 1e-9], [-1.0]], dtype=torch.float64)
    found = truncated(column @ torch.tensor([[2.0, 0.0, 0.0]], dtype=torch.float64), 1)
    assert found.u[0, 0] > 0
    assert torch.allclose(found.u[:, 0], torch.tensor([0.5, -0.5, -0.5, 0.5], dtype=torch.float64))
    assert found.vt[0, 0] == pytest.approx(-1.0)


def test_balanced_shares_the_size() -> None:
    b, a = balanced(truncated(low_rank(8, 6, 3, seed=1), 3))
    assert torch.allclose(b.T @ b, a @ a.T, atol=1e-10)


def test_rounding_noise_is_not_a_direction() -> None:
    """In a float32 matrix of true rank 2, the singular values from the third on are rounding errors and count as zero."""
    noisy = low_rank(50, 50, 2, seed=4).dense()
    assert int((truncated(noisy, 5).s > 0).sum()) == 2


def test_same_answer_twice_and_no_use_of_the_global_random_state() -> None:
    matrix = LowRank(low_rank(9, 7, 2, seed=5).left, low_rank(9, 7, 2, seed=6).right)
    state = torch.random.get_rng_state()
    one, two = truncated(matrix, 5), truncated(matrix, 5)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


def test_a_rank_the_matrix_cannot_have_is_refused() -> None:
    with refused(ValueError):
        truncated(torch.zeros(4, 6), 5)


@pytest.mark.parametrize("scale", [1.0, 1e-20, 0.0])
def test_recompressed_is_the_same_matrix(scale: float) -> None:
    """Also if the rank is below the inner size, and for the zero matrix."""
    generator = torch.Generator().manual_seed(3)
    left, right = torch.randn(20, 4, generator=generator), torch.randn(4, 15, generator=generator)
    product = LowRank(torch.cat([left, left], 1) * scale, torch.cat([right, 2 * right], 0))
    found = recompressed(product)
    assert (found.rank, found.dtype) == (8, torch.float32)
    want = left.double() @ right.double() * 3 * scale
    assert torch.allclose(found.dense().double(), want, rtol=1e-5, atol=1e-6 * scale)
    assert torch.equal(found.left, recompressed(product).left)


@every("inner", [20, 120, 200])
@every("dense", [False, True])
def test_large_matrices_are_not_decomposed_in_full(inner: int, dense: bool) -> None:
    """The best approximation within float32's rounding, for few factors, factors too many for a QR, and dense matrices."""
    made = low_rank(300, 320, inner, seed=inner)
    matrix = LowRank(made.left * 0.9 ** torch.arange(inner), made.right)
    want = exactly(matrix)
    given_ = want.float() if dense else matrix

    def never(*arguments: object, **named: object) -> None:
        raise AssertionError("decomposed in full")

    with pytest.MonkeyPatch.context() as patched:
        if dense or inner > 100:
            patched.setattr("secure_fed.tensors.low_rank._decomposed", never)
        found = truncated(given_, 4)
    assert (formed(found) - best(want, 4)).norm() < 1e-6 * want.norm()
    assert (found.u.gather(0, found.u.abs().argmax(0)[None]) > 0).all()
