"""Settings refused before any training, with an error that says what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from privacy.errors import PlanError
from secure_fed.commands import cli
from secure_fed.errors import ConfigError
from tests.cells import chosen, every
from tests.secure_fed import toys
from tests.secure_fed.masked.wide_toys import CLIENT, CLIPPED, DISTRIBUTED, HIDDEN, MASKED, PRIVACY, SKETCH, federation

S = "secure_aggregation."


@every(
    ("settings", "sentence"),
    [
        (
            {**CLIPPED, "privacy.noise": "distributed"},
            r"'distributed' .*set secure_aggregation\.enabled = true, or privacy",
        ),
        (
            {**CLIPPED, **MASKED, "privacy.hidden_cohort": True},
            r"hidden_cohort = True has no effect.*noise = 'distributed'",
        ),
        ({**MASKED, "privacy.hidden_cohort": True}, r"hidden_cohort = True has no effect.*unit = 'client'"),
        ({**DISTRIBUTED, "federation.sampling": "poisson"}, r"sampling = 'poisson' is refused.*hidden_cohort = true"),
        ({**HIDDEN, "federation.sampling": "fixed"}, r"sampling = 'fixed' contradicts privacy\.hidden_cohort"),
        ({**DISTRIBUTED, "privacy.clip_quantile": 0.5}, r"clip_quantile = 0\.5 has no effect.*noise = 'central'"),
        ({**DISTRIBUTED, "privacy.unit": "example"}, r"privacy\.noise = 'distributed' has no effect.*unit = 'client'"),
        ({**CLIPPED, **MASKED, f"{S}range": 4.0}, r"range = 4\.0 has no effect.*no clip norm"),
        ({**MASKED, f"{S}most_examples": 10}, r"most_examples = 10 has no effect.*weighting = 'examples'"),
        *(
            ({f"{S}{name}": value}, rf"secure_aggregation\.{name} = .* has no effect.*enabled = true")
            for name, value in (
                *(("corrupt", 0.2), ("dropout", 0.2), ("active", True), ("neighbours", 4), ("threshold", 3)),
                *(("bits", 64), ("range", 4.0), ("most_examples", 10)),
            )
        ),
        ({**MASKED, f"{S}corrupt": 0.5}, r"corrupt is 0\.5, but it must be below 0\.5"),
        ({**MASKED, f"{S}dropout": -0.1}, r"dropout is -0\.1, but it must be at least 0"),
        ({**MASKED, f"{S}bits": 48}, r"bits is 48, but it must be one of 32, 64"),
        ({**MASKED, f"{S}range": 0.0}, r"range is 0\.0, but it must be at least"),
    ],
)
def test_settings_that_contradict_or_do_nothing(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        toys.config(settings)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("privacy", ["nothing", "central", "distributed", "local", "example"])
@pytest.mark.parametrize("cohort", [1, 2])
def test_a_sum_over_two_hides_nobody(privacy: str, cohort: int) -> None:
    with pytest.raises(ConfigError, match=r"3 clients at least.*raise federation\.cohort") as caught:
        federation({**MASKED, **PRIVACY[privacy], "federation.cohort": cohort})
    assert caught.value.exit_code == 2


def test_a_federation_of_two_has_no_masks() -> None:
    for settings in (MASKED, {**HIDDEN, "federation.cohort": 1}):
        with pytest.raises(ConfigError, match=r"3 clients at least"):
            federation(settings, sizes=(5, 6))


@pytest.mark.parametrize("privacy", ["nothing", "central", "distributed", "hidden"])
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({f"{S}corrupt": 0.4, f"{S}dropout": 0.45}, r"lower corrupt or dropout"),
        ({f"{S}corrupt": 0.3, f"{S}dropout": 0.3, f"{S}active": True}, r"lower dropout to at most|lower both"),
        ({f"{S}neighbours": 3}, r"even|neighbours"),
        ({f"{S}neighbours": 2, f"{S}corrupt": 0.2}, r"raise neighbours|neighbours"),
        ({f"{S}threshold": 10}, r"threshold"),
        ({f"{S}threshold": 2, f"{S}corrupt": 0.3}, r"threshold"),
    ],
)
def test_what_no_graph_is_safe_for_is_refused_before_the_first_round(
    settings: dict[str, Any], sentence: str, privacy: str
) -> None:
    with pytest.raises((ConfigError, PlanError), match=sentence) as caught:
        federation({**MASKED, **{**PRIVACY[privacy], "federation.cohort": 7}, **settings}, sizes=[3] * 7)
    assert caught.value.exit_code == 2
    assert "secure_aggregation" in str(caught.value)


def test_words_too_coarse_for_the_clip_norm_are_refused_before_anything_is_charged(tmp_path: Path) -> None:
    for way in ({}, SKETCH):
        with pytest.raises(ConfigError, match=r"secure_aggregation\.bits = 64") as caught:
            federation({**MASKED, **CLIENT, **way, "privacy.clip_norm": 1e-9}).run(tmp_path / "run")
        assert caught.value.exit_code == 2
        assert not (tmp_path / "run").exists()
    federation({**MASKED, **CLIENT, "privacy.clip_norm": 1e-9, f"{S}bits": 64}).run(tmp_path / "run")


def test_noise_that_no_word_holds_is_refused_before_the_first_round() -> None:
    masks = federation({**DISTRIBUTED, "privacy.noise_multiplier": 1e4}).assembly.masks
    assert masks is not None
    masks.require_precise([1000], 0.1, 1, 4.0)
    with pytest.raises(Exception, match=r"does not fit integers of 32 bits.*64 bits") as caught:
        masks.require_precise([10**12], 0.1, 1, 4.0)
    assert isinstance(caught.value, (ConfigError, PlanError))
    assert caught.value.exit_code == 2


def test_the_smallest_federation_that_there_can_be_works() -> None:
    for active in (False, True):
        built = federation({**MASKED, f"{S}active": active}, sizes=(3, 4, 5))
        assert built.run().summary["secure_aggregation"]["clients"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("size", chosen([0, 1, 2, 3, 5, 9], [0, 2]))
def test_no_round_fails_for_the_size_of_a_secret_cohort(size: int) -> None:
    """For all of the settings that are accepted at the start."""
    from privacy.sampling_and_turns import Poisson

    class Chosen(Poisson):
        def draw(self, uniform: Any, round_: int = 0) -> list[int]:
            return list(range(size))

    from dataclasses import replace

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
    result = federation({**settings, "federation.rounds": 10}, sizes=[3] * 9).run()
    assert len({record["cohort"] for record in result.records}) > 2
    assert result.state.tensors.is_finite()


@pytest.mark.parametrize(
    "settings",
    [
        {"federation.cohort": "2"},
        {f"{S}corrupt": "0.45", f"{S}dropout": "0.45", "federation.cohort": "7"},
        {f"{S}threshold": "9", "federation.cohort": "8"},
    ],
    ids=str,
)
def test_the_command_line_refuses_with_two_and_writes_nothing(
    settings: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = {"data.examples": "60", "data.test_examples": "20", "federation.clients": "10", f"{S}enabled": "true"}
    sets = [word for name, value in {**usual, **settings}.items() for word in ("--set", f"{name}={value}")]
    assert cli.main(["train", *sets, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("secure-fed: ")
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
