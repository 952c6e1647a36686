"""Settings refused before any training, with an error that says what to change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privacy.errors import PlanError
from privacy.sampling_and_turns import Poisson
from secure_fed.errors import ConfigError
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import toys
from tests.secure_fed.masked.wide_toys import (
    CLIENT,
    CLIPPED,
    DISTRIBUTED,
    HIDDEN,
    MASKED,
    PRIVACY,
    SKETCH,
    federation,
    one_round,
)

S = "secure_aggregation."


@every(
    ("settings", "setting"),
    [
        ({**CLIPPED, "privacy.noise": "distributed"}, f"{S}enabled"),
        ({**CLIPPED, **MASKED, "privacy.hidden_cohort": True}, "privacy.hidden_cohort"),
        ({**DISTRIBUTED, "federation.sampling": "poisson"}, "federation.sampling"),
        ({**HIDDEN, "federation.sampling": "fixed"}, "federation.sampling"),
        ({**DISTRIBUTED, "privacy.clip_quantile": 0.5}, "privacy.clip_quantile"),
        ({**DISTRIBUTED, "privacy.unit": "example"}, "privacy.noise"),
        ({**CLIPPED, **MASKED, f"{S}range": 4.0}, f"{S}range"),
        ({**MASKED, f"{S}most_examples": 10}, f"{S}most_examples"),
        ({**MASKED, f"{S}corrupt": 0.5}, f"{S}corrupt"),
        ({**MASKED, f"{S}dropout": -0.1}, f"{S}dropout"),
        ({**MASKED, f"{S}bits": 48}, f"{S}bits"),
        ({**MASKED, f"{S}range": 0.0}, f"{S}range"),
    ],
)
def test_settings_that_contradict_or_do_nothing(settings: dict[str, Any], setting: str) -> None:
    with refused(ConfigError, setting):
        toys.config(settings)


@every("privacy", ["nothing", "central", "distributed", "local", "example"])
def test_a_sum_over_two_hides_nobody(privacy: str) -> None:
    for cohort in (1, 2):
        with refused(ConfigError, "federation.cohort"):
            federation({**MASKED, **PRIVACY[privacy], "federation.cohort": cohort})


def test_a_federation_of_two_has_no_masks() -> None:
    for settings in (MASKED, {**HIDDEN, "federation.cohort": 1}):
        with refused(ConfigError, "federation.cohort"):
            federation(settings, sizes=(5, 6))


@every("privacy", ["nothing", "central", "distributed", "hidden"])
@every(
    "settings",
    [
        {f"{S}corrupt": 0.4, f"{S}dropout": 0.45},
        {f"{S}corrupt": 0.3, f"{S}dropout": 0.3, f"{S}active": True},
        {f"{S}neighbours": 3},
        {f"{S}neighbours": 2, f"{S}corrupt": 0.2},
        {f"{S}threshold": 10},
        {f"{S}threshold": 2, f"{S}corrupt": 0.3},
    ],
)
def test_what_no_graph_is_safe_for_is_refused_before_the_first_round(settings: dict[str, Any], privacy: str) -> None:
    with refused(ConfigError, "secure_aggregation.corrupt"):
        federation({**MASKED, **{**PRIVACY[privacy], "federation.cohort": 7}, **settings}, sizes=[3] * 7)


def test_words_too_coarse_for_the_clip_norm_are_refused_before_anything_is_charged(tmp_path: Path) -> None:
    for way in ({}, SKETCH):
        with refused(ConfigError, "secure_aggregation.bits"):
            federation({**MASKED, **CLIENT, **way, "privacy.clip_norm": 1e-9}).run(tmp_path / "run")
        assert not (tmp_path / "run").exists()
    assert federation({**MASKED, **CLIENT, "privacy.clip_norm": 1e-9, f"{S}bits": 64}).assembly.masks


def test_noise_that_no_word_holds_is_refused_before_the_first_round() -> None:
    masks = federation({**DISTRIBUTED, "privacy.noise_multiplier": 1e4}).assembly.masks
    assert masks is not None
    masks.require_precise([1000], 0.1, 1, 4.0)
    with refused(PlanError):
        masks.require_precise([10**12], 0.1, 1, 4.0)


def test_the_smallest_federation_that_there_can_be_works() -> None:
    for active in (False, True):
        seen = one_round(federation({**MASKED, f"{S}active": active}, sizes=(3, 4, 5)))
        assert seen.record["masked"]["survivors"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("size", chosen([0, 1, 2, 3, 5, 9], [0, 2]))
def test_no_round_fails_for_the_size_of_a_secret_cohort(size: int) -> None:
    """For all of the settings that are accepted at the start."""

    class Chosen(Poisson):
        def draw(self, uniform: Any, round_: int = 0) -> list[int]:
            return list(range(size))

    accepted = 0
    for settings in (
        {},
        {f"{S}threshold": 3},
        {f"{S}neighbours": 2, f"{S}corrupt": 0.0},
        {f"{S}corrupt": 0.34, f"{S}dropout": 0.34},
        {f"{S}active": True, f"{S}corrupt": 0.2, f"{S}dropout": 0.2},
        {"privacy.clip_norm": 5.5e-6},
        {"privacy.clip_norm": 3.5e-6},
    ):
        try:
            built = federation({**MASKED, **CLIPPED, "federation.cohort": 4, **settings}, sizes=[3] * 9)
        except ConfigError:
            continue
        accepted += 1
        built.assembly = replace(built.assembly, server=replace(built.assembly.server, sampler=Chosen(9, 4 / 9)))
        records = built.run().records
        assert [record["cohort"] for record in records] == [4, 4, 4]
        assert len({(record["bytes_up"], record["bytes_down"]) for record in records}) == 1
    assert accepted >= 2


@pytest.mark.parametrize("privacy", chosen(["nothing", "local", "example"], ["local"]))
def test_cohorts_by_coins_that_are_no_secret_may_have_any_size(privacy: str) -> None:
    settings = {**MASKED, **PRIVACY[privacy], "federation.sampling": "poisson", "federation.cohort": 4}
    result = federation({**settings, "federation.rounds": 4}, sizes=[3] * 9).run()
    assert len({record["cohort"] for record in result.records}) > 1
    assert result.state.tensors.is_finite()
