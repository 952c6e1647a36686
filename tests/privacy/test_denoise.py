"""Denoising at a known noise level: the formula against a search, and properties for any shape.

The leading singular vectors are compared with a full decomposition.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from privacy import denoise
from privacy.denoise import Triplets, denoised, leading, shrunk, visible
from privacy.errors import PlanError
from tests.cells import every

COUNT = 4
torch.set_num_threads(1)
FALLING = 2.0 ** -torch.arange(8, dtype=torch.float64)


def planted(shape: tuple[int, int], values: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix with these singular values in random directions, and standard normal noise."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (
        torch.linalg.qr(torch.randn(side, len(values), dtype=torch.float64, generator=generator))[0] for side in shape
    )
    return u * values @ v.T, torch.randn(shape, dtype=torch.float64, generator=generator)


def estimate(noised: Tensor, rank: int, noise_std: float, *, shrink: bool = True) -> Tensor:
    left, right = denoised(noised, rank, noise_std, shrink=shrink)
    return left @ right


def by_svd(noised: Tensor, rank: int, noise_std: float, *, shrink: bool) -> Tensor:
    """The same estimate from a full SVD."""
    u, s, vt = torch.linalg.svd(noised.double(), full_matrices=False)
    if shrink:
        s = shrunk(s, tuple(noised.shape), noise_std)  # type: ignore[arg-type]
    return u[:, :rank] * s[:rank] @ vt[:rank]


@every("size", [1.3, 3.0])
def test_no_other_size_for_the_direction_found_does_better(size: float) -> None:
    """For one planted direction, averaged over noises, the size with the least loss, found by trial, is the formula's."""
    shape, std = (500, 150), 0.03
    value = size * visible(shape, std)
    tried = torch.linspace(0, 2 * value, 201, dtype=torch.float64)
    losses, ours, kept = torch.zeros(201, dtype=torch.float64), [], []
    for seed in range(6):
        truth, noise = planted(shape, torch.tensor([value], dtype=torch.float64), seed)
        u, s, vt = torch.linalg.svd(truth + std * noise, full_matrices=False)
        overlap = float(u[:, 0] @ truth @ vt[0])
        losses += value**2 - 2 * tried * overlap + tried**2
        ours.append(float(shrunk(s[:1], shape, std)))
        kept.append(float(s[0]))
    best = float(tried[losses.argmin()])
    assert sum(ours) / 6 == pytest.approx(best, abs=0.07 * value)
    assert sum(kept) / 6 > best + 0.07 * value, "what truncation keeps is too large"


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 14),
    n=st.integers(1, 14),
    rank=st.integers(0, 14),
    std=st.sampled_from([0.0, 1e-6, 0.1, 0.5, 3.0]),
    shrink=st.booleans(),
    single=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_factors_are_those_of_a_full_svd(
    m: int, n: int, rank: int, std: float, shrink: bool, single: bool, seed: int
) -> None:
    rank = min(rank, m, n)
    noised = torch.randn(m, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    noised = noised.float() if single else noised
    kept = noised.clone()
    left, right = denoised(noised, rank, std, shrink=shrink)
    assert (left.shape, right.shape) == ((m, rank), (rank, n))
    assert left.dtype == right.dtype == torch.float64
    assert (left @ right - by_svd(noised, rank, std, shrink=shrink)).norm() < 1e-6 * (1 + noised.norm())
    assert torch.equal(noised, kept)


@every(("shape", "signal"), [((300, 300), 0.0), ((500, 120), 1.0), ((120, 500), 1e7)])
def test_squaring_loses_nothing_that_matters(shape: tuple[int, int], signal: float) -> None:
    """Includes noise alone (signal 0), and a first singular value of 1e7 with noise of standard deviation 0.01."""
    truth, noise = planted(shape, signal * FALLING)
    noised = truth + 0.01 * noise
    for shrink in (True, False):
        ours, exact = (f(noised, 8, 0.01, shrink=shrink) for f in (estimate, by_svd))
        assert (ours - exact).norm() <= 1e-8 * torch.linalg.matrix_norm(noised, 2)


def test_the_ends_of_noise_and_values() -> None:
    values = torch.tensor([3.0, 1.0, 0.0])
    assert torch.equal(shrunk(values, (5, 3), 0.0), values)
    assert torch.equal(shrunk(values[:0], (5, 3), 0.5), values[:0])
    assert shrunk(torch.tensor([1e30], dtype=torch.float64), (9, 4), 1e-290).item() == pytest.approx(1e30)
    for std in (0.0, 1.0):
        left, right = denoised(torch.zeros(6, 4), 2, std, shrink=True)
        assert not (left @ right).any()
        assert torch.cat([left.flatten(), right.flatten()]).isfinite().all()


@every(
    "ask",
    [
        *(lambda std=std: shrunk(torch.ones(1), (2, 2), std) for std in (-1.0, math.nan, math.inf)),
        *(lambda std=std: visible((2, 2), std) for std in (-1.0, math.nan, math.inf)),
        lambda: denoised(torch.zeros(4, 6), 5, 1.0, shrink=True),
    ],
)
def test_impossible_noise_and_ranks_are_refused(ask: Callable[[], object]) -> None:
    with pytest.raises(PlanError):
        ask()


@settings(max_examples=100, deadline=None)
@given(
    m=st.integers(1, 5000),
    n=st.integers(1, 5000),
    std=st.floats(1e-30, 1e10),
    start=st.floats(0, 10),
    step=st.floats(0, 5),
)
def test_what_shrinkage_promises(m: int, n: int, std: float, start: float, step: float) -> None:
    """The result lies between 0 and the value and grows with it: 0 up to the edge of the noise, and the formula above it."""
    edge = std * (math.sqrt(m) + math.sqrt(n))
    values = edge * torch.tensor([start, start + step], dtype=torch.float64)
    low, high = shrunk(values, (m, n), std).tolist()
    assert 0 <= low <= high <= float(values[1])
    assert low <= float(values[0])
    assert (low == 0) == (start <= 1) or abs(start - 1) < 1e-9
    unit, beta = std * math.sqrt(max(m, n)), min(m, n) / max(m, n)
    y = float(values[1]) / unit
    if start + step > 1.01:
        assert high == pytest.approx(unit * math.sqrt((y * y - beta - 1) ** 2 - 4 * beta) / y, rel=1e-6)


def found(matrix: Tensor, count: int = COUNT) -> Triplets | None:
    whole = matrix.double()
    m, n = whole.shape
    return leading(lambda x: whole @ x, lambda x: whole.T @ x, (m, n), count, whole.device)


def rotated(values: Tensor, rows: int = 300, columns: int = 280) -> Tensor:
    """A float32 matrix with these singular values, the rest zero."""
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(side, len(values), dtype=torch.float64, generator=generator) for side in (rows, columns))
    return (torch.linalg.qr(left).Q * values @ torch.linalg.qr(right).Q.T).float()


STEPS = torch.arange(280, dtype=torch.float64)
SPECTRA = {
    "with equal ones": torch.cat([torch.ones(COUNT, dtype=torch.float64), 0.5 * 0.9 ** STEPS[COUNT:]]),
    "falling slowly": 0.97**STEPS,
    "falling fast": 0.3**STEPS,
    "like 1 / i": 1 / (1 + STEPS),
    "of rank 20": torch.linspace(3, 1, 20, dtype=torch.float64),
    "of rank 2": torch.tensor([2.0, 1.0], dtype=torch.float64),
    "above noise": torch.cat([torch.tensor([9.0, 5.0, 4.0, 3.0], dtype=torch.float64), 1 - STEPS[4:] / 300]),
    "with one far below the first": torch.cat(
        [torch.tensor([1.0, 1e-2, 1e-3, 1e-4], dtype=torch.float64), 1e-5 * 0.9**STEPS]
    ),
}


@every(
    ("spectrum", "scale", "upright"),
    [(name, *((1.0, True), (1e-12, False))[at % 2]) for at, name in enumerate(SPECTRA)],
)
def test_what_is_returned_keeps_the_guarantee(spectrum: str, scale: float, upright: bool) -> None:
    """It is the best approximation, and measured again keeps the guarantee, also where two values almost coincide."""
    matrix = rotated(SPECTRA[spectrum][:280]) * scale
    matrix = matrix if upright else matrix.T
    triplets = found(matrix)
    assert triplets is not None
    u, s, vt = triplets
    one, whole = torch.eye(COUNT, dtype=torch.float64), matrix.double()
    assert max((u.T @ u - one).abs().max(), (vt @ vt.T - one).abs().max()) < 1e-10
    assert (whole @ vt.T - u * s).norm(dim=0).max() <= 1e-12 * s[0]
    assert (whole.T @ u - vt.T * s).norm(dim=0).max() <= 2.0**-23 * s[0]
    left, values, right = torch.linalg.svd(whole, full_matrices=False)
    assert (s - values[:COUNT]).abs().max() <= 1e-7 * values[0]
    best = left[:, :COUNT] * values[:COUNT] @ right[:COUNT]
    assert (u * s @ vt - best).norm() <= 1e-6 * best.norm()


def test_noise_alone_is_left_to_a_full_decomposition() -> None:
    """At this size the values lie too close together to find the vectors in half the dimensions."""
    assert found(torch.randn(256, 256, generator=torch.Generator().manual_seed(0))) is None


def test_a_result_that_fails_its_check_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        denoise, "_good", lambda inner, rest, count: torch.eye(len(inner), dtype=torch.float64)[:, :count]
    )
    assert found(rotated(SPECTRA["falling slowly"])) is None


def test_small_matrices_and_large_ranks_are_not_tried() -> None:
    def asked(x: Tensor) -> Tensor:
        raise AssertionError("a product was formed")

    cpu = torch.device("cpu")
    for shape, count in (((255, 900), 4), ((300, 300), 150), ((300, 300), 60)):
        assert leading(asked, asked, shape, count, cpu) is None


def test_zero_has_zero_values_and_the_global_random_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    triplets = found(torch.zeros(300, 280))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert triplets is not None
    assert not triplets[1].any()
