"""FRA-LoRA with sketches: against FRA-LoRA with whole matrices, in runs, under privacy, and the bytes sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from privacy.mechanisms import clip_factor
from secure_fed.config import MethodConfig, PrivacyConfig, RunConfig
from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.lora import pairs
from secure_fed.methods import build
from secure_fed.methods.fra_lora import SKETCH, FraLora
from secure_fed.methods.fra_then_ffa import FraThenFfa
from secure_fed.methods.method import CHANGE
from secure_fed.tensors import sketch
from secure_fed.tensors.low_rank import denoised, in_own_factors, tangent
from secure_fed.tensors.tensors import LowRank, Tensors
from tests.cells import chosen
from tests.golden import refused
from tests.secure_fed import private_toys, toys
from tests.secure_fed.methods.refactorised import (
    GRADIENTS,
    HEAD,
    RANK,
    agree,
    best,
    federation,
    has_orthonormal_rows,
    noised,
    noised_round,
    products,
    recorded,
    resumes,
    started,
    wide,
)
from tests.secure_fed.methods.rounds import means_of, trained
from tests.secure_fed.private_toys import NOISE

SKETCHED = {"method.name": "fra_lora", "method.transport_form": "sketch"}


def fra(name: str = "fra_lora", columns: int | None = None, **settings: Any) -> FraLora | FraThenFfa:
    own = MethodConfig(name=name, rank=RANK, alpha=3.0, transport_form="sketch", sketch=columns, **settings)
    method = build(RunConfig(method=own, privacy=PrivacyConfig(unit="client", epsilon=8.0)))
    assert isinstance(method, FraLora | FraThenFfa)
    return method


# Against whole matrices.


@pytest.mark.parametrize("name", ["fra_lora", "fra_then_ffa"])
def test_where_the_mean_fits_nothing_is_lost(name: str) -> None:
    """Three clients at rank 2, from a product of rank 2, need 2 (3 + 1) = 8 columns: the default."""
    method = fra(name)
    whole, state = replace(method, sketch=None), started(method, 1.0)
    afters = [trained(method, state, seed) for seed in range(3)]
    found = method.apply(state, means_of(method, state, afters))
    want = whole.apply(state, means_of(whole, state, afters))
    assert method.sketch == 8
    assert found.round == want.round == 1
    assert agree(found.tensors, want.tensors)
    assert not agree(found.tensors, state.tensors, 1e-2)
    assert method.reported(means_of(method, state, afters), found)["sketch_residual"] < 1e-5


def test_the_report_reads_nothing_but_sketches() -> None:
    method = fra()
    state = started(method)
    means = means_of(method, state, [trained(method, state, 1)])
    counted = {SKETCH: means[SKETCH] | {"clip.shorter": torch.tensor(0.1)}, CHANGE: means[CHANGE]}
    assert method.reported(counted, state) == method.reported(means, state)
    assert method.reported({CHANGE: means[CHANGE]}, state) == {}
    assert replace(method, sketch=None).reported({CHANGE: means[CHANGE]}, state) == {}
    zeros = means_of(method, state, [state.tensors])
    assert method.reported(zeros, state) == {"sketch_residual": 0.0}
    assert agree(method.apply(state, zeros).tensors, state.tensors, 1e-6)


def test_layouts_are_smaller_than_whole_matrices() -> None:
    method, whole = fra(), FraLora(fra().adapter)
    state = started(method)
    assert method.plan(state).passes == (SKETCH, CHANGE)
    shapes = dict(method.layout(state, SKETCH).entries), dict(method.layout(state, CHANGE).entries)
    assert shapes[0] == {"query.delta": (48, 12), "value.delta": (40, 12)}
    assert shapes[1] == {"query.delta": (8, 40), "value.delta": (8, 48), HEAD[0]: (3, 40), HEAD[1]: (3,)}
    masked = sum(method.layout(state, pass_name).size for pass_name in (SKETCH, CHANGE))
    assert masked < 0.5 * whole.layout(state, CHANGE).size


def test_everybody_has_the_same_directions_and_every_matrix_and_round_others() -> None:
    method = fra(columns=3)
    state = started(method)
    one, two = (trained(method, state, seed) for seed in (1, 2))
    both = method.contribute(SKETCH, state.tensors, one, {}) + method.contribute(SKETCH, state.tensors, two, {})
    for pair in pairs(state.tensors):
        old, *new = (products(tensors)[pair.module] for tensors in (state.tensors, one, two))
        want, found = 1.5 * (new[0] + new[1] - 2 * old), both.tensor(f"{pair.module}.delta").double()
        for tensors, same in ((state.tensors, True), (one, False)):
            seed = sketch.seed_of(f"{pair.module}.delta", tensors.tensor(pair.a), tensors.tensor(pair.b))
            sent = want @ sketch.directions(want.shape[1], 3, seed)
            assert torch.allclose(found, sent, atol=1e-4 if same else 1e-1) is same


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 8)
        self.classifier = nn.Linear(8, 3)


def test_a_sketch_that_saves_nothing_is_refused() -> None:
    """The advice is the most columns, or to leave the matrix out of `method.target_modules` if it has no room for any."""
    assert {sketch.most_columns(sides) for sides in ((48, 40), (40, 48))} == {19}
    fra(columns=19).prepare(wide(), HEAD, 0)
    uneven = wide()
    uneven.value = nn.Linear(48, 20)
    for method, model in (
        (fra(columns=20), wide()),
        (fra(), toys.model()),
        (fra(columns=13), uneven),
        (fra(target_modules=("query",)), Narrow()),
    ):
        with refused(MethodError):
            method.prepare(model, HEAD, 0)


# Rounds of a federation.


ALIKE: list[dict[str, Any]] = [
    {"federation.weighting": "examples", "federation.server_lr": 0.3},
    {"secure_aggregation.enabled": True},
    {"method.personal": ["classifier"]},
    GRADIENTS,
]


@pytest.mark.parametrize("settings", chosen(ALIKE, ALIKE[:2]))
def test_a_run_by_sketches_that_fit_is_the_run_by_whole_matrices(settings: dict[str, Any]) -> None:
    """Behind masks up to the rounding to fixed point. Noise in the gradients is none in the sums."""
    usual = {**settings, "federation.rounds": 1 if settings is GRADIENTS else 2}
    found, want = (federation({**usual, **own}, 3).run() for own in (SKETCHED, {"method.name": "fra_lora"}))
    initial = federation(SKETCHED).assembly.initial.tensors
    assert agree(found.state.tensors, want.state.tensors, 1e-3 if "secure_aggregation.enabled" in settings else 1e-4)
    assert not agree(want.state.tensors, initial, 1e-2)
    stays = [torch.equal(found.state.tensors.tensor(name), initial.tensor(name)) for name in HEAD]
    assert stays == ["method.personal" in settings] * 2
    assert found.summary["releases"] == (1 if settings is GRADIENTS else 2) * want.summary["releases"]
    if "secure_aggregation.enabled" in settings:
        assert found.summary["bytes_up"] < 0.6 * want.summary["bytes_up"]
    for record, other in zip(found.records, want.records, strict=True):
        assert record["sketch_residual"] < 1e-4
        assert "sketch_residual" not in other


SWITCHING = {**SKETCHED, "method.name": "fra_then_ffa", "method.switch_round": 2, "federation.rounds": 4}


def test_it_switches_to_one_pass_with_ffa() -> None:
    built = federation(SWITCHING)
    recording = recorded(built)
    found, whole = built.run(), federation({**SWITCHING, "method.transport_form": "dense"}).run()
    passes = [(request.round, request.pass_name) for request, _ in recording.exchanges]
    assert list(dict.fromkeys(passes)) == [(0, SKETCH), (0, CHANGE), (1, SKETCH), (1, CHANGE), (2, CHANGE), (3, CHANGE)]
    assert agree(found.state.tensors, whole.state.tensors, 1e-4)
    assert ["sketch_residual" in record for record in found.records] == [True, True, False, False]
    assert all(has_orthonormal_rows(found.state.tensors.tensor(pair.a)) for pair in pairs(found.state.tensors))


def test_a_run_killed_within_a_round_ends_in_the_same_bits(tmp_path: Path) -> None:
    """In the second pass of the second round."""
    resumes(lambda: federation({**SWITCHING, "method.switch_round": 3}), 4, tmp_path / "run")


# Privacy.


def test_a_target_is_kept_over_rounds_of_two_passes_and_of_one() -> None:
    settings = {**SKETCHED, **private_toys.TARGET, "method.name": "fra_then_ffa", "method.switch_round": 2}
    result = federation(settings, 5).run()
    assert 0 < result.summary["epsilon"] <= 8
    assert result.summary["releases"] == 5


def test_means_are_noised_sums_in_the_space_of_the_sketch() -> None:
    """Each pass is clipped separately and has its own noise on every coordinate."""
    built, c = federation({**NOISE, **SKETCHED, "training.lr": 10.0}, 4), NOISE["privacy.clip_norm"]
    means, exchanges = noised_round(built, 4, c)
    for _, reply in exchanges[SKETCH] + exchanges[CHANGE]:
        assert Tensors(private_toys.dense(reply.contribution)).norm() == pytest.approx(c, rel=1e-5)
    assert exchanges[SKETCH][0][0].means == {}
    assert toys.same(exchanges[CHANGE][0][0].means[SKETCH], means[SKETCH]), "clients get what was released, and no more"


@pytest.mark.parametrize("rule", ["tangent", "shrink", "truncate", "none"])
def test_noise_is_taken_out_of_what_was_sent_second(rule: str) -> None:
    """The second pass (p x n) is denoised before multiplication by the basis, with "tangent" after it.

    The basis is computed from the noised first pass unchanged.
    """
    method, std = fra(denoise=rule), 0.02
    state = started(method, 1.0)
    means = noised(means_of(method, state, [trained(method, state, 1, 0.5)]), std)
    found = products(method.apply(state, means, std).tensors)
    for pair in pairs(state.tensors):
        name = f"{pair.module}.delta"
        q, w = sketch.basis(means[SKETCH].tensor(name)), means[CHANGE].tensor(name).double()
        clean = w if rule in ("none", "tangent") else denoised(w, RANK, std, shrink=rule == "shrink")
        step = q @ (clean if isinstance(clean, Tensor) else clean.left @ clean.right)
        if rule == "tangent":
            step = tangent(step, LowRank(state.tensors.tensor(pair.b), state.tensors.tensor(pair.a))).dense()
        want = best(products(state.tensors)[pair.module] + step / method.adapter.scaling)
        assert (found[pair.module] - want).norm() < 1e-5 * want.norm()
    assert 0 < method.reported(means, state)["sketch_residual"] < 1


@pytest.mark.nightly
def test_a_private_run_with_everything_on() -> None:
    """Expected bytes are those of two clients in both passes."""
    more = {"method.personal": ["classifier"], "privacy.clip_quantile": 0.5, "federation.cohort": 2}
    built = federation({**NOISE, **SKETCHED, **more})
    recording, result = recorded(built), built.run()
    assert result.state.tensors.is_finite()
    (ups,) = {record["bytes_up"] for record in result.records}
    each = {request.pass_name: reply.contribution.wire_size for request, reply in recording.exchanges}
    assert ups == 2 * sum(each.values())


def test_to_clip_the_change_and_not_its_sketch_would_be_caught() -> None:
    """D Omega can be longer than D, since Omega's columns only keep lengths on average; Q^T D, with Q a basis, cannot.

    Clipped as it is sent, neither is longer than the clip norm: `test_sensitivity.py`.
    """
    method, c = fra(columns=4), 0.5
    state = started(method, 1.0)
    means, longest = {SKETCH: means_of(method, state, [trained(method, state, 9)])[SKETCH]}, {SKETCH: 0.0, CHANGE: 0.0}
    for seed in range(12):
        after = trained(method, state, seed, 30.0)
        whole = in_own_factors(replace(method, sketch=None).contribute(CHANGE, state.tensors, after, {}))
        for name in longest:
            sent = method.contribute(name, state.tensors, after, means) * clip_factor(whole.norm(), c)
            longest[name] = max(longest[name], sent.norm())
    assert longest[SKETCH] > 1.02 * c
    assert longest[CHANGE] <= c * (1 + 1e-6)
