"""FedASK and FedPower: their passes against subspace iteration with dense matrices, and the release of each pass.

FedSVD: its round against an SVD of dense matrices, and the effect of the SVD under SGD and AdamW.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from secure_fed.config import MethodConfig
from secure_fed.federation import Federation
from secure_fed.learning.models.adapters.lora import pairs
from secure_fed.methods import build
from secure_fed.methods.fedask import SKETCH
from secure_fed.methods.ffa_lora import without_a
from secure_fed.methods.method import CHANGE, State
from secure_fed.methods.subspace import Subspace, basis, start
from secure_fed.tensors import sketch
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.secure_fed import private_toys, toys
from tests.secure_fed.methods.refactorised import (
    GRADIENTS,
    HEAD,
    RANK,
    best,
    close,
    federation,
    has_orthonormal_rows,
    mean_products,
    noised,
    noised_round,
    products,
    recorded,
    resumes,
    started,
    turned,
    wide,
)
from tests.secure_fed.methods.rounds import means_of, trained

FEDASK: dict[str, Any] = {"method.name": "fedask", "method.oversampling": 2}
FEDPOWER: dict[str, Any] = {"method.name": "fedpower", "method.oversampling": 2}
MASKED = {"secure_aggregation.enabled": True}
KINDS = [("fedask", 1), *(("fedpower", iterations) for iterations in (1, 2, 3))]


def made(name: str, iterations: int = 1, oversampling: int = 2) -> Subspace:
    more = {"power_iterations": iterations} if name == "fedpower" else {}
    built = build(MethodConfig(name=name, rank=RANK, alpha=3.0, oversampling=oversampling, **more))
    assert isinstance(built, Subspace)
    return built


def omega(state: State, module: str, columns: int) -> Tensor:
    pair = next(pair for pair in pairs(state.tensors) if pair.module == module)
    a, b = state.tensors.tensor(pair.a), state.tensors.tensor(pair.b)
    return start(a.shape[1], columns, sketch.seed_of(f"{module}.delta", a, b))


def iterated(d: Tensor, q: Tensor, products: int) -> Tensor:
    """The approximation of D after that many products with D and D^T in turn, with orthonormalisation in between."""
    for number in range(products):
        q, _ = torch.linalg.qr((d.T if number % 2 else d) @ q)
    return q @ (q.T @ d) if products % 2 else d @ q @ q.T


@pytest.mark.parametrize(("name", "iterations"), KINDS)
def test_where_the_mean_fits_nothing_is_lost(name: str, iterations: int) -> None:
    """The mean change of n clients has rank 2 (n + 1) at most, so 8 columns are enough for three clients.

    FedASK splits the product in balance; FedPower gives A orthonormal rows.
    """
    method = made(name, iterations, oversampling=6)
    state = started(method)
    afters = [trained(method, state, seed) for seed in range(3)]
    after = method.apply(state, means_of(method, state, afters)).tensors
    assert close(products(after), {module: best(matrix) for module, matrix in mean_products(state, afters).items()})
    assert not close(products(after), products(state.tensors), 0.05)
    for pair in pairs(after):
        a, b = after.tensor(pair.a).double(), after.tensor(pair.b).double()
        values = torch.diag(torch.linalg.svdvals(b @ a)[:RANK])
        assert torch.allclose(b.T @ b, values if name == "fedask" else values**2, atol=1e-5)
        assert torch.allclose(a @ a.T, values, atol=1e-5) if name == "fedask" else has_orthonormal_rows(a)


@pytest.mark.parametrize(("name", "iterations"), [*KINDS, ("fedpower", 4)])
def test_where_it_does_not_it_is_subspace_iteration(name: str, iterations: int) -> None:
    """Four columns cannot hold the mean of five clients. FedASK's two passes are one iteration."""
    method = made(name, iterations)
    state = started(method)
    afters = [trained(method, state, seed, 0.4) for seed in range(5)]
    found = products(method.apply(state, means_of(method, state, afters)).tensors)
    exact, before, want = mean_products(state, afters), products(state.tensors), {}
    for module, matrix in exact.items():
        step = iterated(matrix - before[module], omega(state, module, 4), iterations)
        want[module] = best(before[module] + step)
    assert close(found, want)
    assert not close(found, {module: best(matrix) for module, matrix in exact.items()}, 1e-3)


def test_omega_keeps_lengths_on_average_and_a_basis_never_lengthens() -> None:
    matrix = torch.randn(9, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first = start(40, 5, 3)
    assert torch.allclose(first.T @ first, torch.eye(5, dtype=torch.float64) * 8, atol=1e-9)
    squares = [float((matrix @ start(40, 5, seed)).square().sum()) for seed in range(400)]
    assert sum(squares) / 400 == pytest.approx(float(matrix.square().sum()), rel=0.03)
    q = basis((matrix @ first).float())
    assert torch.allclose(q.T @ q, torch.eye(5, dtype=torch.float64), atol=1e-9)
    assert (q.T @ matrix).norm() < matrix.norm()


def test_products_alternate_and_fit_small_matrices() -> None:
    for method, passes in ((made("fedask"), (SKETCH,)), (made("fedpower", 3), ("power-0", "power-1", "power-2"))):
        state = started(method)
        assert method.plan(state).passes == (*passes, CHANGE)
        shapes = [dict(method.layout(state, name).entries) for name in (*passes, CHANGE)]
        sides = [48 if number % 2 == 0 else 40 for number in range(len(shapes))]
        assert [shape["query.delta"] for shape in shapes] == [(side, 4) for side in sides]
        assert [shape["value.delta"] for shape in shapes] == [(88 - side, 4) for side in sides]
        assert [set(HEAD) <= set(shape) for shape in shapes] == [False] * len(passes) + [True]
    small = made("fedask", 1, 8).layout(toys.federation({"method.name": "fedask"}).assembly.initial, SKETCH)
    assert dict(small.entries) == {"query.delta": (8, 6), "value.delta": (8, 8)}


@pytest.mark.parametrize("oversampling", [0, 3])
def test_b_alone_is_exact_and_keeps_the_rows_of_a(oversampling: int) -> None:
    fedask = replace(made("fedask", 1, oversampling), b_alone=True)
    state = started(fedask)
    assert fedask.plan(state).trainable == tuple(without_a(state.tensors))
    assert set(fedask.plan(state).down) == set(state.tensors)
    afters = [trained(fedask, state, seed) for seed in range(6)]
    after = fedask.apply(state, means_of(fedask, state, afters)).tensors
    assert close(products(after), mean_products(state, afters))
    for pair in pairs(after):
        rows, _ = torch.linalg.qr(state.tensors.tensor(pair.a).double().T)
        a = after.tensor(pair.a).double()
        assert (a - a @ rows @ rows.T).norm() < 1e-5 * a.norm()
        assert not torch.allclose(a.float(), state.tensors.tensor(pair.a), atol=1e-2)


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_no_pass_with_a_basis_sends_more_than_the_change(iterations: int) -> None:
    """A change within the clip norm is not clipped in a pass with a basis either."""
    power = made("fedpower", iterations)
    state = started(power)
    means, old = noised(means_of(power, state, [trained(power, state, 9)]), 0.3), products(state.tensors)
    for seed in range(3):
        after = trained(power, state, seed).without(HEAD) | state.tensors.select(HEAD)
        new = products(state.tensors | after)
        whole = power.adapter.scaling * sum(float((new[n] - old[n]).square().sum()) for n in new) ** 0.5
        for name in power.plan(state).passes[1:]:
            assert power.contribute(name, state.tensors, after, means).norm() <= whole * (1 + 1e-5)
        assert power.contribute("power-0", state.tensors, after, {}).norm() == pytest.approx(whole, rel=0.7)


@pytest.mark.parametrize(("name", "iterations"), [("fedask", 1), ("fedpower", 2)])
def test_noise_turns_the_basis_and_is_left_in_the_last_product(name: str, iterations: int) -> None:
    method = made(name, iterations)
    state = started(method)
    means = noised(means_of(method, state, [trained(method, state, 1)]), 0.05)
    found, passes = products(method.apply(state, means, 0.05).tensors), method.plan(state).passes
    for module, before in products(state.tensors).items():
        y, w = (means[which].tensor(f"{module}.delta").double() for which in passes[-2:])
        step = turned(y) @ w.T if iterations == 1 else w @ turned(y).T
        assert close({"": found[module]}, {"": best(before + step / method.adapter.scaling)})


def test_the_next_pass_uses_the_noised_mean() -> None:
    """Each pass has its own noise on every coordinate; clients multiply by a basis of the released, noised mean."""
    built = federation({**private_toys.NOISE, **FEDPOWER, "privacy.clip_norm": 50.0}, 4)
    means, exchanges = noised_round(built, 4, 50.0)
    sent = {name: [reply.contribution for _, reply in own] for name, own in exchanges.items()}
    q0, q1 = (basis(means[name].tensor("query.delta")) for name in ("power-0", "power-1"))
    for second, last in zip(sent["power-1"], sent[CHANGE], strict=True):  # (D^T q0)^T q1 = q0^T (D q1)
        left = second.tensor("query.delta").double().T @ q1
        assert torch.allclose(left, q0.T @ last.tensor("query.delta").double(), atol=1e-5)


@pytest.mark.parametrize(("noise", "iterations"), [("local", 3), ("distributed", 1)])
def test_every_pass_is_charged_wherever_the_noise_is(noise: str, iterations: int, tmp_path: Path) -> None:
    """Each client's ledger for local noise; the server's for a sum. For central noise the contract of all methods has it."""
    settings = {**private_toys.NOISE, **FEDPOWER, "privacy.noise": noise, "method.power_iterations": iterations}
    built = federation({**settings, **(MASKED if noise == "distributed" else {}), "federation.rounds": 2})
    result = built.run(tmp_path / "run")
    charges = private_toys.charges(private_toys.own_ledger(tmp_path / "run"))
    passes = iterations + 1
    assert result.summary["releases"] == 2 * passes
    if noise == "local":
        assert sorted(charges) == sorted((f"client-{client}", passes) for client in range(3) for _ in range(2))
    else:
        assert charges == [("", 1)] * (2 * passes)
    assert result.state.tensors.is_finite()


def test_fedask_trains_b_alone_where_gradients_are_noised() -> None:
    """One noised step is released. The sums carry no noise, so the next product is exactly the clients' mean."""

    def trains_a(built: Federation) -> bool:
        return any(".lora_A." in name for name in built.assembly.method.plan(built.assembly.initial).trainable)

    for usual in ({**FEDASK}, {**FEDASK, **private_toys.NOISE}, {**FEDPOWER, **GRADIENTS}):
        assert trains_a(federation(usual))
    built = federation({**FEDASK, **GRADIENTS, "federation.rounds": 1}, 3)
    assert not trains_a(built)
    recording, result = recorded(built), built.run()
    assert result.summary["releases"] == 1
    sketches = [reply.contribution for request, reply in recording.exchanges if request.pass_name == SKETCH]
    for module, product in products(result.state.tensors).items():
        mean = torch.stack([one.tensor(f"{module}.delta") for one in sketches]).mean(0).double()
        scale = built.config.method.alpha / RANK
        assert torch.allclose(scale * product @ omega(built.assembly.initial, module, 4), mean, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "privacy", "last"),
    chosen(
        [(FEDASK, {}, 4), (FEDASK, GRADIENTS, 5), (FEDPOWER, private_toys.NOISE, 5), (FEDPOWER, GRADIENTS, 7)],
        [(FEDPOWER, private_toys.NOISE, 5)],
    ),
)
def test_a_run_killed_within_a_round_ends_in_the_same_bits(
    method: dict[str, Any], privacy: dict[str, Any], last: int, tmp_path: Path
) -> None:
    """Killed in the second pass of the second round; under example privacy between rounds, as retraining would be charged."""
    resumes(lambda: federation({**method, **privacy}, 4), last, tmp_path / "run")


# FedSVD.


FEDSVD: dict[str, Any] = {"method.name": "fedsvd"}
METHOD = build(MethodConfig(name="fedsvd", rank=RANK, alpha=3.0))


def test_the_split_is_the_svd_with_all_size_in_b() -> None:
    state = started(METHOD)
    plan = METHOD.plan(state)
    assert plan.trainable == tuple(without_a(state.tensors))
    assert set(plan.down) == set(state.tensors), "A comes down anew"
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
