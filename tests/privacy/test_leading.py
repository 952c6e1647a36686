"""The leading singular vectors against a full decomposition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from privacy import denoise as module
from privacy.denoise import Triplets, leading
from tests.cells import every

torch.set_num_threads(1)

COUNT = 4


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


@every("spectrum", list(SPECTRA))
@every(("scale", "upright"), [(1.0, True), (1e-12, False)])
def test_the_best_approximation_is_found(spectrum: str, scale: float, upright: bool) -> None:
    matrix = rotated(SPECTRA[spectrum][:280]) * scale
    matrix = matrix if upright else matrix.T
    triplets = found(matrix)
    assert triplets is not None
    u, s, vt = triplets
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    assert (s - values[:COUNT]).abs().max() <= 1e-7 * values[0]
    best = left[:, :COUNT] * values[:COUNT] @ right[:COUNT]
    assert (u * s @ vt - best).norm() <= 1e-6 * best.norm()


@every("spectrum", list(SPECTRA))
def test_what_is_returned_keeps_the_guarantee(spectrum: str) -> None:
    """Measured again on the result, also where two values are so close that their vectors are not determined."""
    matrix = rotated(SPECTRA[spectrum][:280])
    triplets = found(matrix)
    assert triplets is not None
    u, s, vt = triplets
    one = torch.eye(COUNT, dtype=torch.float64)
    assert (u.T @ u - one).abs().max() < 1e-10
    assert (vt @ vt.T - one).abs().max() < 1e-10
    assert (matrix.double() @ vt.T - u * s).norm(dim=0).max() <= 1e-12 * s[0]
    assert (matrix.double().T @ u - vt.T * s).norm(dim=0).max() <= 2.0**-23 * s[0]


def test_equal_values_are_all_found() -> None:
    """COUNT equal values stand beside smaller ones; iteration from a single start vector would find one of them."""
    matrix = rotated(torch.cat([torch.ones(COUNT, dtype=torch.float64), 0.5 * 0.9 ** STEPS[COUNT:]]))
    triplets = found(matrix)
    assert triplets is not None
    assert torch.allclose(triplets[1], torch.ones(COUNT, dtype=torch.float64), atol=1e-6)


def test_noise_alone_is_left_to_a_full_decomposition() -> None:
    """At this size the values lie too close together to find the vectors in half the dimensions."""
    assert found(torch.randn(256, 256, generator=torch.Generator().manual_seed(0))) is None


def test_a_result_that_fails_its_check_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "_good", lambda inner, rest, count: torch.eye(len(inner), dtype=torch.float64)[:, :count]
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
