"""Audits of phantoms: they flag broken noise under every kind of neighbours, and never correct noise."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from attacks.adversary.case import Settings, Target
from attacks.audit import audited
from privacy.distributed import DistributedGaussian
from privacy.entropy import SeededEntropy
from privacy.mechanisms import Gaussian
from secure_fed.federation import Federation
from secure_fed.runs.membership import kept_scores
from secure_fed.runs.recording import Recorded
from tests.attacks import canaried
from tests.cells import chosen
from tests.secure_fed import toys

MASKED = {
    "secure_aggregation.enabled": True,
    "secure_aggregation.bits": 64,
    "secure_aggregation.corrupt": 0.0,
    "secure_aggregation.dropout": 0.0,
}
PLACES: dict[str, dict[str, Any]] = {
    "central": {},
    "fixed": {"federation.sampling": "fixed"},
    "local": {"privacy.noise": "local", "privacy.participations": 3},
    "distributed": {"privacy.noise": "distributed", **MASKED},
    "example": {**canaried.EXAMPLES, "privacy.unit": "example"},
}


def ran(
    place: str, *, noise: bool, phantoms: int | None = 120, z: float = 10.0, clients: int = 6, **more: Any
) -> tuple[Federation, Target]:
    """A run in which every client takes part in each of three rounds, and the target for its audit."""
    usual: dict[str, Any] = {
        **canaried.CLIENTS,
        "federation.cohort": clients,
        "privacy.noise_multiplier": z,
        **PLACES[place],
    }
    settings = usual | {"evaluation.phantoms": phantoms, **more}
    for name in ("evaluation.audit_fraction", "evaluation.canaries"):
        del settings[name]
    sizes = [40] * 3 if place == "example" else [2] * clients
    states = canaried.States()
    built = Federation(
        toys.config(settings),
        model=canaried.wide(),
        train=[canaried.examples(client + 1, size) for client, size in enumerate(sizes)],
        test=canaried.examples(999, 20),
        entropy=SeededEntropy(0),
        callbacks=[states],
    )
    silent = patch.object(DistributedGaussian, "encoded", DistributedGaussian.silent)
    with (
        nullcontext() if noise else patch.object(Gaussian, "noised", canaried._clean),
        nullcontext() if noise else silent,
    ):
        result = built.run()
    summary = {**result.summary, "privacy": {**result.summary["privacy"], "private": True}}  # noise came from a seed
    recorded = Recorded({0: built.assembly.initial.tensors, **states.kept}, lr=dict.fromkeys(range(3), 0.05))
    return built, Target(built.assembly, result.state, recorded, summary)


@pytest.mark.parametrize("place", chosen(PLACES, ["central"]))
def test_a_run_without_its_noise_contradicts_its_guarantee_whoever_should_have_added_it(place: str) -> None:
    federation, target = ran(place, noise=False)
    audit = audited(target, ["canary_cosine"], Settings(references=0))
    cell = next(one for one in audit["cells"] if one["vantage"] == "fellow_client")
    assert audit["audited_of"] == "phantoms"
    assert cell["epsilon_accounted"] is not None
    assert cell["epsilon_lower"] > cell["epsilon_accounted"]
    assert target.result["membership"]["auc"] > 0.95
    found = kept_scores(target.final, federation.assembly.audit_pool)
    assert found[federation.assembly.audit_pool.members].mean() > found[~federation.assembly.audit_pool.members].mean()


@pytest.mark.parametrize("place", chosen(PLACES, ["central"]))
def test_right_noise_is_not_flagged(place: str) -> None:
    _, target = ran(place, noise=True)
    audit = audited(target, ["canary_cosine", "one_run", "loss"], Settings(references=0))
    cells = [one for one in audit["cells"] if one["applicable"] and one["epsilon_accounted"] is not None]
    assert cells
    assert all((one["epsilon_lower"] or 0.0) <= one["epsilon_accounted"] for one in cells)
    assert target.result["membership"]["auc"] < 0.95
    whys = [one["why"] for one in audit["cells"] if one["attack"] == "loss" and one["vantage"] == "fellow_client"]
    assert any("nobody's data" in why for why in whys)
    assert "no texts" in audit["baseline"]["why"]


@pytest.mark.parametrize("noise", [True, False])
def test_the_audit_of_a_private_run_of_a_hundred_clients_says_something(noise: bool) -> None:
    """With the phantoms that such a run has by default."""
    federation, target = ran("central", noise=noise, phantoms=None, clients=100)
    audit = audited(target, ["canary_cosine"], Settings(references=0))
    assert audit["members"] + audit["non_members"] == federation.assembly.protection.phantoms.phantoms == 100
    assert target.result["membership"]["auc"] is not None
    assert audit["verdict"]["level"] == ("none_found" if noise else "violation")


@pytest.mark.nightly
@pytest.mark.parametrize("place", chosen(["central", "example"], ["central"]))
def test_under_right_noise_those_who_are_no_members_follow_the_known_law(place: str) -> None:
    """The scores of phantoms that do not pull are sums of coordinates of uniform points on a sphere: normal, of a known
    variance.
    """
    federation, target = ran(place, noise=True, phantoms=200, z=50.0)
    audit = audited(target, ["canary_cosine"], Settings(references=0))
    cell = next(one for one in audit["cells"] if one["vantage"] == "fellow_client")
    assert cell["measured"]["null_p_value"] > 1e-3
    scores = kept_scores(target.final, federation.assembly.audit_pool)[~federation.assembly.audit_pool.members]
    if place == "example":  # three rounds, of variance one each
        assert abs(float(np.mean(scores))) < 5 * np.sqrt(3 / len(scores))
        assert float(np.std(scores)) == pytest.approx(np.sqrt(3), rel=0.25)
