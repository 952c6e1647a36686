"""Sketches under privacy: the release of each pass, its charge, and its sensitivity to one client."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from privacy.mechanisms import clip_factor
from secure_fed.learning.models.adapters.lora import pairs
from secure_fed.methods.fra_lora import SKETCH, FraLora
from secure_fed.methods.fra_then_ffa import FraThenFfa
from secure_fed.methods.method import CHANGE, State
from secure_fed.rounds.engine import run_round
from secure_fed.rounds.transport import Recording
from secure_fed.tensors import sketch
from secure_fed.tensors.low_rank import denoised, in_own_factors, tangent
from secure_fed.tensors.sums import PlainSum
from secure_fed.tensors.tensors import LowRank, Tensors
from tests.secure_fed import private_toys, toys
from tests.secure_fed.methods.test_fra_sketch import (
    HEAD,
    RANK,
    SKETCHED,
    close,
    federation,
    fra,
    mean_of,
    means_of,
    product,
    started,
    trained,
)
from tests.secure_fed.private_toys import NOISE


@pytest.mark.parametrize("noise", ["central", "local"])
def test_every_pass_is_charged(noise: str, tmp_path: Path) -> None:
    built = federation({**NOISE, **SKETCHED, "privacy.noise": noise})
    result = built.run(tmp_path / "run")
    said, charges = result.summary, private_toys.charges(private_toys.own_ledger(tmp_path / "run"))
    assert said["releases"] == 2 * said["rounds"] == 6
    if noise == "central":
        assert charges == [("", 1)] * 6
    else:
        assert sorted(charges) == sorted((f"client-{client}", 2) for client in range(3) for _ in range(3))
    assert result.state.tensors.is_finite()
    one_pass = federation({**NOISE, "method.name": "fra_lora", "privacy.noise": noise}).run().summary
    assert said["epsilon"] > one_pass["epsilon"]


@pytest.mark.parametrize("method", ["fra_lora", "fra_then_ffa"])
def test_a_target_is_kept(method: str) -> None:
    settings = {**SKETCHED, **private_toys.TARGET, "method.name": method}
    settings |= {"method.switch_round": 2} if method == "fra_then_ffa" else {}
    runs = [federation(settings, seed).run() for seed in (5, 5, 6)]
    assert all(result.summary["epsilon"] <= 8 for result in runs)
    assert [result.summary["releases"] for result in runs] == [6 if method == "fra_lora" else 5] * 3
    assert toys.same(runs[0].state.tensors, runs[1].state.tensors)
    assert not toys.same(runs[0].state.tensors, runs[2].state.tensors)


def test_noise_in_the_gradients_is_none_in_the_sums() -> None:
    """Under example privacy the noise is in the gradients: the two passes give the same mean as whole matrices."""
    settings = {**private_toys.EXAMPLE, "privacy.noise_multiplier": 1.0, "federation.rounds": 1}
    found, want = (federation({**settings, **own}, 3).run() for own in (SKETCHED, {"method.name": "fra_lora"}))
    assert close(found.state.tensors, want.state.tensors)
    assert found.summary["releases"] == want.summary["releases"]
    assert found.records[0]["sketch_residual"] < 1e-4


def test_means_are_noised_sums_in_the_space_of_the_sketch() -> None:
    """Each pass is clipped separately and has its own noise on every coordinate."""
    built, c = federation({**NOISE, **SKETCHED, "training.lr": 10.0}, 4), NOISE["privacy.clip_norm"]
    watched, recording, charged = private_toys.Watched(built.assembly.method), Recording(built.assembly.transport), []
    server = replace(
        built.assembly.server, method=watched, charge=lambda round_, pass_name: charged.append((round_, pass_name))
    )
    run_round(built.assembly.initial, server, recording, 10.0)
    (means, noise_std), exchanges = watched.seen[0], recording.exchanges
    assert charged == [(0, SKETCH), (0, CHANGE)]
    assert noise_std == pytest.approx(c / 3)
    for pass_name in (SKETCH, CHANGE):
        sent = [
            private_toys.dense(reply.contribution) for request, reply in exchanges if request.pass_name == pass_name
        ]
        for one in sent:
            assert math.sqrt(sum(float(tensor.square().sum()) for tensor in one.values())) == pytest.approx(c, rel=1e-5)
        total = {name: torch.stack([one[name] for one in sent]).sum(0) for name in sent[0]}
        noise = private_toys.noise(total, c, 4, "sum", 0, pass_name)
        for name, tensor in total.items():
            assert torch.allclose(means[pass_name].tensor(name).double(), (tensor + noise[name]) / 3, atol=1e-6)
    seen = {request.pass_name: request for request, _ in exchanges}
    assert seen[SKETCH].means == {}
    assert toys.same(seen[CHANGE].means[SKETCH], means[SKETCH]), "clients get what was released, and nothing else"


@pytest.mark.parametrize("rule", ["tangent", "shrink", "truncate", "none"])
def test_noise_is_taken_out_of_what_was_sent_second(rule: str) -> None:
    """The second pass (p x n) is denoised before multiplication by the basis, with "tangent" after it.

    The basis is computed from the noised first pass unchanged.
    """
    method, std = fra(denoise=rule), 0.02
    state = started(method)
    means = {
        name: mean + noise_like(mean, std, seed)
        for seed, (name, mean) in enumerate(means_of(method, state, [trained(state, 1, 0.5)]).items())
    }
    found = method.apply(state, means, std).tensors
    for pair in pairs(state.tensors):
        name = f"{pair.module}.delta"
        q, w = sketch.basis(means[SKETCH].tensor(name)), means[CHANGE].tensor(name).double()
        clean = w if rule in ("none", "tangent") else denoised(w, RANK, std, shrink=rule == "shrink")
        step = q @ (clean if isinstance(clean, Tensor) else clean.left @ clean.right)
        if rule == "tangent":
            step = tangent(step, LowRank(state.tensors.tensor(pair.b), state.tensors.tensor(pair.a))).dense()
        u, s, vt = torch.linalg.svd(product(state.tensors, pair) + step / method.adapter.scaling)
        want = u[:, :RANK] * s[:RANK] @ vt[:RANK]
        assert (product(found, pair) - want).norm() < 1e-5 * want.norm()
    assert 0 < method.reported(means, state)["sketch_residual"] < 1


def noise_like(tensors: Tensors, std: float, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return Tensors((n, std * torch.randn(tensors[n].shape, generator=generator)) for n in tensors)


def test_noise_alone_leaves_the_product() -> None:
    method = fra(denoise="shrink")
    state = started(method)
    zeros = {name: PlainSum(method.layout(state, name)).total() for name in (SKETCH, CHANGE)}
    means = {name: mean + noise_like(mean, 1.0, seed) for seed, (name, mean) in enumerate(zeros.items())}
    found = method.apply(state, means, 10.0).tensors
    for pair in pairs(state.tensors):
        assert torch.allclose(product(found, pair), product(state.tensors, pair), atol=1e-4)


def test_a_sketch_narrower_than_the_rank_can_be_denoised() -> None:
    method = FraLora(replace(fra().adapter, rank=4), sketch=2)
    state = started(method)
    means = means_of(method, state, [trained(state, 1)])
    assert method.apply(state, means, 0.01).tensors.is_finite()


@pytest.mark.parametrize("noise", ["central", "local"])
def test_a_private_run_with_everything_on(noise: str) -> None:
    settings = {**NOISE, **SKETCHED, "privacy.noise": noise, "method.personal": ["classifier"]}
    settings |= {"privacy.clip_quantile": 0.5, "federation.cohort": 2} if noise == "central" else {}
    built = federation(settings)
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    result = built.run()
    assert result.state.tensors.is_finite()
    assert {record["cohort"] for record in result.records} == {2 if noise == "central" else 3}
    if noise == "local":
        return
    (ups,) = {record["bytes_up"] for record in result.records}
    each = {request.pass_name: reply.contribution.wire_size for request, reply in recording.exchanges}
    assert ups == 2 * sum(each.values()), "expected bytes are those of two clients in both passes"


def test_an_empty_cohort_releases_noise_in_both_passes() -> None:
    built = federation({**NOISE, **SKETCHED, "method.denoise": "none"})
    watched = private_toys.Watched(built.assembly.method)
    server = replace(
        built.assembly.server,
        method=watched,
        sampler=private_toys.Nobody(3, 2 / 3),
        charge=lambda round_, pass_name: None,
    )
    after, _ = run_round(built.assembly.initial, server, built.assembly.transport, private_toys.LR)
    assert all(mean.norm() > 0 for mean in watched.seen[0][0].values())
    assert not close(after.tensors, built.assembly.initial.tensors)


# Sensitivity.


C = 0.5
SIZES = (1e-7, 1e-4, 1e-2, 0.3, 1.0, 30.0, 1e4)


def clipped(method: FraLora | FraThenFfa, state: State, pass_name: str, after: Tensors, means: Any) -> Tensors:
    """The clipped contribution that a client sends under client-level privacy."""
    contribution = in_own_factors(method.contribute(pass_name, state.tensors, after, means))
    return contribution * clip_factor(contribution.norm(), C)


def clipped_before(method: FraLora | FraThenFfa, state: State, pass_name: str, after: Tensors, means: Any) -> Tensors:
    """Broken: clips the change by its own norm, and not the sketch that is sent."""
    whole = in_own_factors(replace(method, sketch=None).contribute(CHANGE, state.tensors, after, {}))
    return method.contribute(pass_name, state.tensors, after, means) * clip_factor(whole.norm(), C)


def distances(pass_name: str, clip: Any) -> list[float]:
    """The distances between the sums with and without one more client, given the same means of earlier passes."""
    method = fra(columns=4)
    state = started(method)
    means = {SKETCH: mean_of(method, state, SKETCH, [trained(state, 9)], {})} if pass_name == CHANGE else {}
    found = []
    for seed, size in enumerate(SIZES):
        one_more = clip(method, state, pass_name, trained(state, seed, size), means)
        others = [clip(method, state, pass_name, trained(state, 50 + k, SIZES[k + 2]), means) for k in range(seed % 4)]
        without = {n: sum((o.tensor(n).double() for o in others), torch.zeros(m.shape)) for n, m in one_more.items()}
        moved = [float((without[n] + one_more.tensor(n).double() - without[n]).norm()) for n in one_more]
        found.append(math.hypot(*moved))
    return found


@pytest.mark.parametrize("pass_name", [SKETCH, CHANGE])
def test_one_client_moves_either_sum_by_no_more_than_the_clip_norm(pass_name: str) -> None:
    found = distances(pass_name, clipped)
    assert max(found) <= C
    assert max(found) == pytest.approx(C, rel=1e-5), "a large change is as large as it may be"
    assert found[0] < 1e-3 * C, "a small one is left alone"


def test_to_clip_the_change_and_not_its_sketch_is_caught() -> None:
    """D Omega can be longer than D, since Omega's columns only keep lengths on average; Q^T D, with Q a basis, cannot."""
    assert max(distances(SKETCH, clipped_before)) > 1.02 * C
    assert max(distances(CHANGE, clipped_before)) <= C


def test_the_clip_norm_of_one_pass_suits_the_other() -> None:
    """The first pass has the change's norm on average, the second at most (here exactly: one client's change fits)."""
    method = fra(columns=8)
    state = started(method)
    after = trained(state, 1)
    whole = replace(method, sketch=None).contribute(CHANGE, state.tensors, after, {}).without(HEAD).norm()
    means = {SKETCH: mean_of(method, state, SKETCH, [after], {})}
    assert method.contribute(SKETCH, state.tensors, after, {}).norm() == pytest.approx(whole, rel=0.25)
    assert method.contribute(CHANGE, state.tensors, after, means).without(HEAD).norm() == pytest.approx(whole, rel=1e-5)
