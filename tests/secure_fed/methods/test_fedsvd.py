"""FedSVD: its round against an SVD of dense matrices, and the effect of the SVD under SGD and AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from secure_fed.config import MethodConfig
from secure_fed.learning.models.adapters.lora import pairs
from secure_fed.methods import build
from secure_fed.methods.ffa_lora import without_a
from secure_fed.methods.method import CHANGE, State
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.secure_fed import private_toys
from tests.secure_fed.methods.refactorised import (
    HEAD,
    RANK,
    best,
    close,
    federation,
    has_orthonormal_rows,
    noised,
    products,
    recorded,
    started,
    wide,
)
from tests.secure_fed.methods.rounds import means_of, trained

FEDSVD: dict[str, Any] = {"method.name": "fedsvd"}
METHOD = build(MethodConfig(name="fedsvd", rank=RANK, alpha=3.0))


def test_the_split_is_the_svd_with_all_size_in_b() -> None:
    state = started(METHOD)
    after = METHOD.apply(state, means_of(METHOD, state, [trained(METHOD, state, 1)])).tensors
    for pair in pairs(after):
        a, b = after.tensor(pair.a), after.tensor(pair.b).double()
        _, s, vt = torch.linalg.svd(b @ a.double())
        assert has_orthonormal_rows(a)
        assert torch.allclose(b.T @ b, torch.diag(s[:RANK] ** 2), atol=1e-5)
        assert torch.allclose((a.double() @ vt[:RANK].T).abs(), torch.eye(RANK, dtype=torch.float64), atol=1e-4)
        assert all(column[column.abs().argmax()] > 0 for column in b.T), "signs are fixed"
        assert not torch.allclose(a, state.tensors.tensor(pair.a), atol=1e-2)


@pytest.mark.parametrize("live", [0, 1])
def test_directions_that_nobody_used_stay_open(live: int) -> None:
    """From the start, where B is zero, A has r orthonormal rows, and keeps them where the product has a rank below r."""
    start = State(METHOD.prepare(wide(), HEAD, 3))
    assert all(has_orthonormal_rows(start.tensors.tensor(pair.a)) for pair in pairs(start.tensors))
    used = {pair.b: start.tensors.tensor(pair.b).clone() for pair in pairs(start.tensors)}
    assert not any(b.any() for b in used.values())
    for tensor in used.values():
        tensor[:, :live] = 1.0
    change = Tensors(used) | start.tensors.select(HEAD) * 0.0
    after = METHOD.apply(start, {CHANGE: change}).tensors
    for pair in pairs(after):
        assert has_orthonormal_rows(after.tensor(pair.a))
        assert (after.tensor(pair.b).norm(dim=0) > 0).tolist() == [True] * live + [False] * (RANK - live)


def test_b_and_the_head_are_sent_and_a_comes_down_anew() -> None:
    built = federation({**FEDSVD, "federation.rounds": 2})
    recording, initial = recorded(built), built.assembly.initial
    assert METHOD.plan(initial).trainable == tuple(without_a(initial.tensors))
    built.run()
    last, _ = recording.exchanges[-1]
    assert set(last.tensors) == set(initial.tensors)
    for pair in pairs(initial.tensors):
        assert has_orthonormal_rows(last.tensors.tensor(pair.a))
        assert not torch.equal(last.tensors.tensor(pair.a), initial.tensors.tensor(pair.a))


def test_noise_in_a_mean_is_left_in_it() -> None:
    state = started(METHOD)
    means, start = noised(means_of(METHOD, state, [trained(METHOD, state, 1)]), 0.05), state.tensors
    after = METHOD.apply(state, means, 0.05).tensors
    for pair in pairs(start):
        want = (start.tensor(pair.b) + means[CHANGE].tensor(pair.b)).double() @ start.tensor(pair.a).double()
        assert close({"": products(after)[pair.module]}, {"": best(want)})
        assert has_orthonormal_rows(after.tensor(pair.a))


@pytest.mark.parametrize("privacy", chosen([{}, {**private_toys.EXAMPLE, "privacy.clip_norm": 1.0}], [{}]))
def test_with_plain_sgd_it_takes_the_steps_of_ffa_lora(privacy: dict[str, Any]) -> None:
    """Neither SGD's steps nor clipping depend on the basis of A's row space. The noise is too small to matter."""
    quiet = {"privacy.noise_multiplier": 1e-3, "privacy.epsilon": None} if privacy else {}
    sgd = {
        "training.optimizer": "sgd",
        "training.lr": 0.5,
        "training.steps": 3,
        "federation.rounds": 1 if privacy else 2,
    }
    found, want = (
        federation({**sgd, **privacy, **quiet, "method.name": name}, 1).run() for name in ("fedsvd", "ffa_lora")
    )
    assert close(products(found.state.tensors), products(want.state.tensors), 0.02 if privacy else 1e-4)
    assert not close(products(found.state.tensors), {n: 0 * m for n, m in products(want.state.tensors).items()}, 0.5)


def test_adamw_sees_the_basis() -> None:
    """The counterpart of the test above, which would also pass if FedSVD simply were FFA-LoRA."""
    found, want = (federation({"method.name": name}).run() for name in ("fedsvd", "ffa_lora"))
    assert not close(products(found.state.tensors), products(want.state.tensors), 0.05)
