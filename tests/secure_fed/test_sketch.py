"""Two sums of sketches against the mean formed in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from secure_fed.tensors import sketch
from secure_fed.tensors.tensors import LowRank
from tests.cells import chosen, every

torch.set_num_threads(1)


def changes(shape: tuple[int, int], rank: int, clients: int, seed: int = 0) -> list[LowRank]:
    generator = torch.Generator().manual_seed(seed)
    m, n = shape
    return [
        LowRank(torch.randn(m, rank, generator=generator), torch.randn(rank, n, generator=generator))
        for _ in range(clients)
    ]


def flat(rank: int, clients: int, shape: tuple[int, int]) -> list[LowRank]:
    """Changes whose mean has rank x clients singular values, all of them equal."""
    generator = torch.Generator().manual_seed(5)
    u, v = (torch.linalg.qr(torch.randn(side, rank * clients, generator=generator))[0] for side in shape)
    return [LowRank(u[:, k : k + rank], v[:, k : k + rank].T) for k in range(0, rank * clients, rank)]


def exact(found: list[LowRank]) -> Tensor:
    return torch.stack([one.left.double() @ one.right.double() for one in found]).mean(0)


def first(found: list[LowRank], columns: int, seed: int = 1) -> Tensor:
    return torch.stack([sketch.sketched(one, columns, seed) for one in found]).mean(0)


def both(found: list[LowRank], columns: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """(the mean as the two passes find it, the mean sketch of the first pass)."""
    seen = first(found, columns, seed)
    second = torch.stack([sketch.projected(one, sketch.basis(seen)) for one in found]).mean(0)
    product = sketch.lifted(sketch.basis(seen), second)
    return product.left @ product.right, seen


def squeezed(found: list[LowRank], columns: int, seed: int) -> float:
    """The smallest factor by which Omega scales a direction in the mean's row space: 1 if it shortens none."""
    _, values, rows = torch.linalg.svd(exact(found), full_matrices=False)
    rows = rows[values > 1e-6 * values[0]]
    directions = sketch.directions(rows.shape[1], columns, seed)[:, :columns]
    return float(torch.linalg.svdvals(rows @ directions)[-1] / directions[:, 0].norm())


def gram_schmidt(columns: Tensor) -> Tensor:
    """A basis by another algorithm: each column, orthogonalised twice against earlier ones; zero if it depends on them."""
    kept: list[Tensor] = []
    largest = 0.0
    for column in columns.double().T:
        rest = column.clone()
        for _ in range(2):
            for other in kept:
                rest = rest - (other @ rest) * other
        largest = max(largest, float(rest.norm()))
        kept.append(rest / rest.norm() if rest.norm() > 1e-6 * largest else torch.zeros_like(rest))
    return torch.stack(kept, 1)


# The directions.


def test_directions_are_a_function_of_their_arguments() -> None:
    torch.manual_seed(1)
    one = sketch.directions(30, 6, 7)
    random_state = torch.random.get_rng_state()
    torch.manual_seed(2)
    again = sketch.directions(30, 6, 7)
    assert torch.equal(one, again)
    assert one.shape == (30, 6 + sketch.CHECKS)
    assert not torch.equal(one, sketch.directions(30, 6, 8))
    torch.random.set_rng_state(random_state)


def test_the_first_columns_are_orthogonal_and_of_one_length_and_have_the_signs_that_were_drawn() -> None:
    """They are not the signs that a machine's QR happens to choose."""
    for seed in range(5):
        omega = sketch.directions(30, 6, seed)[:, :6]
        assert torch.allclose(omega.T @ omega, 30 / 10 * torch.eye(6, dtype=torch.float64), atol=1e-12)
        drawn = torch.randn(30, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))[:, :6]
        assert torch.allclose(omega, math.sqrt(3) * gram_schmidt(drawn), atol=1e-10)


def test_what_is_sent_first_is_as_long_as_the_change_on_average() -> None:
    """On average its squared norm is the change's, shared by its two parts in proportion to their columns."""
    (change,) = changes((12, 20), 3, 1)
    sent = torch.stack([sketch.sketched(change, 6, seed) for seed in range(200)])
    whole = change.square_norm()
    assert float(sent.square().sum((1, 2)).mean()) == pytest.approx(whole, rel=0.05)
    assert float(sent[:, :, :6].square().sum((1, 2)).mean()) == pytest.approx(whole * 0.6, rel=0.05)


def test_a_seed_tells_names_and_tensors_apart() -> None:
    a, b = torch.ones(2, 3), torch.zeros(4)
    near = a.clone()
    near[0, 0] += 1e-7
    seeds = [
        sketch.seed_of(name, *tensors) for name, *tensors in (("x", a, b), ("y", a, b), ("x", near, b), ("x", b, a))
    ]
    assert len(set(seeds)) == 4
    assert seeds[0] == sketch.seed_of("x", a.clone(), b.clone())
    assert all(0 <= seed < 2**63 for seed in seeds)


# The mean.


@settings(max_examples=30, deadline=None)
@given(
    m=st.integers(12, 40),
    n=st.integers(12, 40),
    rank=st.integers(1, 3),
    clients=st.integers(1, 4),
    seed=st.integers(0, 10_000),
)
def test_a_mean_that_fits_is_found_up_to_rounding(m: int, n: int, rank: int, clients: int, seed: int) -> None:
    """Rounding grows by 1 / `squeezed`, which is seldom large: the bound stays tight."""
    found = changes((m, n), rank, clients, seed)
    made, seen = both(found, columns=12, seed=seed)
    allowed = 4e-6 / squeezed(found, 12, seed)
    assert (made - exact(found)).norm() < allowed * exact(found).norm()
    assert sketch.residual([seen]) < allowed


@every("apart", [1e-2, 1e-4, 1e-6, 1e-7, 1e-8, 0.0])
def test_directions_that_look_alike_cost_nothing_else(apart: float) -> None:
    """The mean maps the first two directions to nearly the same, so the second is dropped. Nothing else is lost."""
    first_two = sketch.directions(30, 12, 1)[:, :2].T
    unseen = (first_two[1] - first_two[0]) / (first_two[1] - first_two[0]).norm()
    (one,) = changes((40, 30), 3, 1)
    right = one.right.double()
    change = LowRank(one.left, (right - (1 - apart) * torch.outer(right @ unseen, unseen)).float())
    made, seen = both([change], columns=12)
    assert squeezed([change], 12, 1) > 0.1
    assert (made - exact([change])).norm() < 1e-5 * exact([change]).norm()
    assert sketch.residual([seen]) < 1e-5


def test_what_is_a_small_part_of_the_rest_or_left_of_changes_that_nearly_cancel_is_found_too() -> None:
    one, small = changes((40, 30), 1, 2)
    for found in ([one, small * 1e-5], [one, LowRank(one.left * -1.0, one.right) + small * 1e-3]):
        made, _ = both(found, columns=8)
        assert (made - exact(found)).norm() < 1e-6 * math.sqrt(one.square_norm())


def test_one_column_too_few_is_seen() -> None:
    found = changes((40, 30), 3, 4)
    made, seen = both(found, columns=11)
    assert (made - exact(found)).norm() > 1e-2 * exact(found).norm()
    assert sketch.residual([seen]) > 1e-2


def test_changes_that_cancel_leave_nothing() -> None:
    """Each change is long, and lies in no basis that their mean, zero, gives."""
    (one,) = changes((40, 30), 3, 1)
    made, seen = both([one, one * -1.0], columns=8)
    assert not seen.any()
    assert not sketch.basis(seen).any()
    assert not made.any()
    assert sketch.residual([seen]) == sketch.residual([]) == 0.0


def test_of_a_mean_that_does_not_fit_the_best_of_those_columns_is_nearly_found() -> None:
    """Ten clients of rank 8, with equal singular values, in 16 columns: any choice loses 64 of 80 directions."""
    found = flat(8, 10, (120, 100))
    made, _ = both(found, columns=16)
    lost = float((made - exact(found)).norm() / exact(found).norm())
    assert lost == pytest.approx(math.sqrt(64 / 80), abs=0.01)


@pytest.mark.parametrize("columns", chosen([16, 40, 72], [16]))
def test_the_residual_is_about_the_true_one(columns: int) -> None:
    """The extra columns of one matrix estimate it roughly; the squared estimate is right on average."""
    found = flat(8, 10, (120, 100))
    truth, guessed = [], []
    for seed in range(20):
        made, seen = both(found, columns, seed)
        truth.append(float((made - exact(found)).norm() / exact(found).norm()))
        guessed.append(sketch.residual([seen]))
        assert guessed[-1] == pytest.approx(truth[-1], rel=0.35)
    assert sum(value**2 for value in guessed) == pytest.approx(sum(value**2 for value in truth), rel=0.06)


def test_the_residual_is_of_all_matrices_together() -> None:
    """A long matrix that fits beside a short one that does not."""
    fits, does_not = changes((40, 30), 2, 2), flat(8, 3, (40, 30))
    fits = [one * 10.0 for one in fits]
    short, long_ = first(does_not, 8), first(fits, 8)
    alone = sketch.residual([short])
    assert alone > 0.5
    share = float(short[:, 8:].norm() / torch.cat([short[:, 8:], long_[:, 8:]]).norm())
    assert sketch.residual([short, long_]) == pytest.approx(alone * share, rel=1e-6)


def test_of_noise_alone_the_residual_is_what_lies_outside_the_basis() -> None:
    noise = torch.randn(400, 10 + sketch.CHECKS, generator=torch.Generator().manual_seed(0))
    assert sketch.residual([noise]) == pytest.approx(math.sqrt(1 - 10 / 400), abs=0.01)


# The basis.


@pytest.mark.parametrize("clients", [1, 2, 4])
def test_the_basis_is_what_another_algorithm_finds(clients: int) -> None:
    """Columns beyond the mean's rank are zero and signs are fixed, so that every machine finds the same basis."""
    for mean in (
        changes((40, 30), 3, clients),
        flat(3, clients, (40, 30)),
    ):  # equal singular values leave no choice either
        seen = first(mean, 12)
        found, want = sketch.basis(seen), gram_schmidt(seen[:, :12])
        assert (found - want).abs().max() < 1e-9
        alive = found.norm(dim=0) > 0
        assert int(alive.sum()) == 3 * clients
        assert torch.allclose(found.T @ found, torch.diag(alive.double()), atol=1e-12)
        assert torch.equal(found, sketch.basis(seen.clone()))


def test_the_size_of_the_sketch_is_nothing_to_the_basis() -> None:
    """A server learning rate, for example, scales the sketch and changes its rounding."""
    found = changes((40, 30), 3, 4)
    seen = first(found, 12)
    made = [sketch.basis(seen * factor) @ sketch.basis(seen).T @ exact(found) * factor for factor in (0.3, 1e-9, 7e8)]
    for factor, one in zip((0.3, 1e-9, 7e8), made, strict=True):
        assert (one / factor - exact(found)).norm() < 1e-5 * exact(found).norm()


def test_factors_that_cancel_are_multiplied_exactly() -> None:
    """(B R)(R^T A) is B A, so the change is float32 rounding. The sketch must be that change's, not its halves' rounding."""
    generator = torch.Generator().manual_seed(0)
    b, a, r = (torch.randn(shape, generator=generator) for shape in ((40, 4), (4, 30), (4, 4)))
    r, _ = torch.linalg.qr(r)
    b_i, a_i = b @ r, r.T @ a
    change = LowRank(torch.cat([b_i - b, b], 1), torch.cat([a_i, a_i - a], 0))
    want = (change.left.double() @ change.right.double()) @ sketch.directions(30, 6, 1)
    assert (sketch.sketched(change, 6, 1) - want).norm() < 1e-6 * want.norm()
    assert (change.dense() - change.left.double() @ change.right.double()).norm() > 1e-2 * want.norm()


NARROW = [(4, 4), (300, 4), (2, 2), (1, 1), (900, 2)]


@every("shape", [(192, 192), (768, 192), (192, 768), (40, 17), (17, 40), (9, 9), (8, 6), (5, 900), *NARROW])
def test_the_most_columns_are_the_most(shape: tuple[int, int]) -> None:
    most = sketch.most_columns(shape)
    smaller = [p for p in range(1, max(shape)) if sketch.size(shape, p) < shape[0] * shape[1]]
    assert most == max(smaller, default=0)
    assert shape not in NARROW or most == 0
    if most:
        (change,) = changes(shape, 2, 1)
        seen = sketch.sketched(change, most, 1)
        assert seen.numel() + sketch.projected(change, sketch.basis(seen)).numel() == sketch.size(shape, most)
