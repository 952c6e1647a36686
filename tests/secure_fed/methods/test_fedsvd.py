"""FedSVD: its round against an SVD of dense matrices, and the effect of the SVD under SGD and AdamW."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from secure_fed.config import MethodConfig
from secure_fed.errors import ConfigError, MethodError
from secure_fed.learning.models.adapters.lora import pairs
from secure_fed.methods import build
from secure_fed.methods.fedsvd import FedSvd
from secure_fed.methods.ffa_lora import without_a
from secure_fed.methods.method import CHANGE, State
from secure_fed.rounds.transport import Recording
from secure_fed.tensors.tensors import Layout, Tensors
from tests.cells import chosen
from tests.secure_fed import private_toys, toys
from tests.secure_fed.methods.refactorised import (
    HEAD,
    best,
    close,
    has_orthonormal_rows,
    mean_products,
    means_of,
    noised,
    products,
    resumes,
    started,
    trained,
    wide,
)
from tests.secure_fed.methods.test_fra_sketch import RANK, federation

FEDSVD: dict[str, Any] = {"method.name": "fedsvd"}
SGD: dict[str, Any] = {"training.optimizer": "sgd", "training.lr": 0.5, "training.steps": 3}
GRADIENTS = {**private_toys.EXAMPLE, "privacy.noise_multiplier": 1.0}


def method() -> FedSvd:
    built = build(MethodConfig(name="fedsvd", rank=RANK, alpha=3.0))
    assert isinstance(built, FedSvd)
    return built


def test_the_next_product_is_the_mean_of_the_clients_products() -> None:
    fedsvd = method()
    state = started(fedsvd)
    afters = [trained(fedsvd, state, seed) for seed in range(4)]
    after = fedsvd.apply(state, means_of(fedsvd, state, afters))
    assert after.round == 1
    assert close(products(after.tensors), mean_products(state, afters))
    assert not close(products(after.tensors), products(state.tensors), 0.05)
    want = sum((one.select(HEAD) for one in afters[1:]), afters[0].select(HEAD)) * 0.25
    assert (after.tensors.select(HEAD) - want).norm() < 1e-6


def test_the_split_is_the_svd_with_all_size_in_b() -> None:
    fedsvd = method()
    state = started(fedsvd)
    after = fedsvd.apply(state, means_of(fedsvd, state, [trained(fedsvd, state, 1)])).tensors
    for pair in pairs(after):
        a, b = after.tensor(pair.a), after.tensor(pair.b).double()
        _, s, vt = torch.linalg.svd(b @ a.double())
        assert has_orthonormal_rows(a)
        assert torch.allclose(b.T @ b, torch.diag(s[:RANK] ** 2), atol=1e-5)
        assert torch.allclose((a.double() @ vt[:RANK].T).abs(), torch.eye(RANK, dtype=torch.float64), atol=1e-4)
        assert all(column[column.abs().argmax()] > 0 for column in b.T), "signs are fixed"
        assert not torch.allclose(a, state.tensors.tensor(pair.a), atol=1e-2)


def test_a_is_orthonormal_from_the_start_and_b_zero() -> None:
    tensors = method().prepare(wide(), HEAD, 3)
    assert all(has_orthonormal_rows(tensors.tensor(pair.a)) for pair in pairs(tensors))
    assert all(tensors.tensor(pair.b).norm() == 0 for pair in pairs(tensors))


@pytest.mark.parametrize("live", [0, 1])
def test_directions_that_nobody_used_stay_open(live: int) -> None:
    """If the product has rank below r, A still has r orthonormal rows, and B is zero in the unused columns."""
    fedsvd = method()
    start = State(fedsvd.prepare(wide(), HEAD, 3))
    used = {pair.b: start.tensors.tensor(pair.b).clone() for pair in pairs(start.tensors)}
    for tensor in used.values():
        tensor[:, :live] = 1.0
    change = Tensors(used) | start.tensors.select(HEAD) * 0.0
    after = fedsvd.apply(start, {CHANGE: change}).tensors
    for pair in pairs(after):
        assert has_orthonormal_rows(after.tensor(pair.a))
        assert (after.tensor(pair.b).norm(dim=0) > 0).tolist() == [True] * live + [False] * (RANK - live)


def test_what_travels() -> None:
    fedsvd = method()
    state = started(fedsvd)
    plan = fedsvd.plan(state)
    assert set(plan.down) == set(state.tensors)
    assert plan.trainable == tuple(without_a(state.tensors))
    sent = fedsvd.contribute(CHANGE, state.tensors, trained(fedsvd, state, 1), {})
    assert Layout.of(sent) == fedsvd.layout(state, CHANGE) == Layout.of(without_a(state.tensors))
    built = federation(FEDSVD)
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    result = built.run()
    (last, _), last_state = recording.exchanges[-1], result.state.tensors
    for pair in pairs(last_state):
        assert pair.a in last.tensors
        assert has_orthonormal_rows(last.tensors.tensor(pair.a))
        assert not torch.equal(last.tensors.tensor(pair.a), built.assembly.initial.tensors.tensor(pair.a))


def test_noise_in_a_mean_is_left_in_it() -> None:
    fedsvd = method()
    state = started(fedsvd)
    means = noised(means_of(fedsvd, state, [trained(fedsvd, state, 1)]), 0.05)
    found = products(fedsvd.apply(state, means, 0.05).tensors)
    start = state.tensors
    for pair in pairs(start):
        want = (start.tensor(pair.b) + means[CHANGE].tensor(pair.b)).double() @ start.tensor(pair.a).double()
        assert close({"": found[pair.module]}, {"": best(want, RANK)})


@pytest.mark.parametrize("privacy", [{}, {**private_toys.EXAMPLE, "privacy.clip_norm": 1.0}], ids=["open", "example"])
def test_with_plain_sgd_it_takes_the_steps_of_ffa_lora(privacy: dict[str, Any]) -> None:
    """Neither SGD's steps nor clipping depend on the basis of A's row space. The noise is too small to matter."""
    quiet = {"privacy.noise_multiplier": 1e-3, "privacy.epsilon": None} if privacy else {}
    settings = {**SGD, **privacy, **quiet}
    found, want = (federation({**settings, "method.name": name}, 1).run() for name in ("fedsvd", "ffa_lora"))
    loose = 0.02 if privacy else 1e-4
    assert close(products(found.state.tensors), products(want.state.tensors), loose)
    assert not close(products(found.state.tensors), {n: 0 * m for n, m in products(want.state.tensors).items()}, 0.5)


def test_adamw_sees_the_basis() -> None:
    """The counterpart of the test above, which would also pass if FedSVD simply were FFA-LoRA."""
    found, want = (federation({"method.name": name}).run() for name in ("fedsvd", "ffa_lora"))
    assert not close(products(found.state.tensors), products(want.state.tensors), 0.05)


def test_behind_masks_it_is_the_same_run() -> None:
    found, want = (federation({**FEDSVD, "secure_aggregation.enabled": on}).run() for on in (True, False))
    assert close(products(found.state.tensors), products(want.state.tensors), 1e-3)


@pytest.mark.parametrize("noise", ["central", "local"])
def test_a_private_round_is_one_release(noise: str, tmp_path: Path) -> None:
    built = federation({**private_toys.NOISE, **FEDSVD, "privacy.noise": noise})
    result = built.run(tmp_path / "run")
    assert result.summary["releases"] == 3
    assert private_toys.charged(tmp_path / "run") == (3 if noise == "central" else 9)
    assert result.state.tensors.is_finite()
    assert all(has_orthonormal_rows(result.state.tensors.tensor(p.a)) for p in pairs(result.state.tensors))


@pytest.mark.parametrize("privacy", chosen([{}, private_toys.NOISE, GRADIENTS], [GRADIENTS]))
def test_a_run_that_is_resumed_ends_in_the_same_bits(privacy: dict[str, Any], tmp_path: Path) -> None:
    resumes(lambda: federation({**FEDSVD, **privacy}, 4), 3, tmp_path / "run")


def test_it_learns() -> None:
    settings = {**FEDSVD, "training.steps": 4, "training.lr": 0.01, "federation.rounds": 6}
    losses = [record["train_loss"] for record in federation(settings).run().records]
    assert losses[-1] < 0.8 * losses[0]


def test_refusals() -> None:
    for optimizer in ("momentum", "adam"):
        with pytest.raises(ConfigError, match=rf"server_optimizer = '{optimizer}'.*basis"):
            toys.federation({**FEDSVD, "federation.server_optimizer": optimizer})
    with pytest.raises(ConfigError, match=r"method\.freeze_init = 'gaussian' has no effect"):
        build(MethodConfig(name="fedsvd", freeze_init="gaussian"))
    with pytest.raises(MethodError, match=r"method\.personal"):
        federation({**FEDSVD, "method.personal": ["query.lora_A*"]})
    with pytest.raises(MethodError, match=r"'\*lora_B\*', but the server of fedsvd rewrites query\.lora_B.*the head"):
        federation({**FEDSVD, "method.personal": ["*lora_B*"]})


def test_as_lora_gives_the_products() -> None:
    fedsvd = method()
    state = started(fedsvd)
    after = fedsvd.apply(state, means_of(fedsvd, state, [trained(fedsvd, state, 1)])).tensors
    form = fedsvd.as_lora(state.tensors, after)
    assert form.adapter.scaling == 1.5
    assert close({m: b.double() @ a.double() for m, (a, b) in form.factors.items()}, products(after))
