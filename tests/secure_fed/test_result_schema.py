"""docs/result.schema.json describes every result.json, and the report tells of every run that writes one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from privacy.entropy import SeededEntropy
from tests.cells import chosen
from tests.secure_fed import toys
from tests.secure_fed.conftest import make_private
from tests.secure_fed.masked_edit import masked
from tests.secure_fed.pages import Edit, RunFolder, changed, told

pytestmark = pytest.mark.usefixtures("never_drawn")

ROOT = Path(__file__).resolve().parents[2]
CLIENT = {"privacy.unit": "client", "privacy.noise_multiplier": 1.0}
MASKED = {"secure_aggregation.enabled": True, **CLIENT}
SCHEMA: dict[str, Any] = json.loads((ROOT / "docs" / "result.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def check(result: dict[str, Any]) -> None:
    """Validates `result` as `jsonschema.validate` does, which also checks the schema at every call."""
    error = jsonschema.exceptions.best_match(VALIDATOR.iter_errors(result))
    if error is not None:
        raise error


def result_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found | {"membership": found["membership"] or MEMBERSHIP}


MEMBERSHIP = {
    **{"attack": "loss", "unit": "example", "members": 400, "non_members": 380},
    **{"auc": 0.53, "auc_interval": [0.4, 0.66], "why": ""},
    "tpr_at_fpr": {
        "0.01": {"tpr": 0.02, "tpr_interval": [0, 0.1], "fpr": 0.01, "fpr_interval": [0, 0.02]},
        "0.001": None,
    },
}


def test_the_schema_is_one_and_describes_every_key() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert all(described["description"] for described in SCHEMA["properties"].values())


REALISED = {"result.privacy.realised": {"survivors": 3, "noise_multiplier": 1.2, "epsilon": 2.6}}
WRONG: dict[str, tuple[Edit, str, dict[str, list[Any]]]] = {  # the part of the result, and wrong values of its entries
    "open": (
        changed({}),
        "",
        {
            **{"surprise": [1], "schema": [2], "accuracy": [1.1, "0.9"], "unit": ["nobody"], "rounds": [0]},
            **{"epsilon": ["none", 1.0], "delta": [1e-5]},  # without a privacy unit
            **{"sampling_rate": [0], "bytes_up": [1.5], "label_names": ["asthma"]},
        },
    ),
    "private": (
        make_private,
        "",
        {
            **{"unit": ["none"], "privacy": [None], "epsilon": [None], "epsilon_participants": [None], "delta": [1.0]},
            **{"noise_multiplier": [None], "epsilon_cumulative": [None], "ended_early": [False]},
        },
    ),
    "guarantee": (make_private, "privacy", {"surprise": [1]}),
    "realised": (changed(REALISED, masked("distributed")), "privacy.realised", {"surprise": [1]}),
    "masks": (
        masked("nothing"),
        "secure_aggregation",
        {
            **{"surprise": [1], "bits": [16], "clients": [2], "failure": [1.5], "survivors": [0]},
            **{"active": [None], "threshold": [None]},
        },
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_schema_accepts_a_result_and_no_wrong_or_missing_value(run_folder: RunFolder, name: str) -> None:
    edit, part, wrong = WRONG[name]
    result = result_in(run_folder(edit=edit))
    check(result)
    at = result
    for step in part.split(".") if part else []:
        at = at[step]
    cases = [{**at, key: value} for key, values in wrong.items() for value in values]
    cases += [{key: value for key, value in at.items() if key != lacked} for lacked in at]
    for case in cases:
        at.clear()
        at.update(case)
        with pytest.raises(jsonschema.ValidationError):
            check(result)


WRITTEN: list[dict[str, Any]] = [
    {},
    {**CLIENT, "federation.cohort": 2},
    {**CLIENT, "privacy.noise": "local"},
    {**CLIENT, "federation.sampling": "fixed"},
    {**CLIENT, "privacy.unit": "example", "federation.cohort": 2},
    {"secure_aggregation.enabled": True},
    {**MASKED, "federation.cohort": 3},
    {**MASKED, "privacy.noise": "distributed", "secure_aggregation.active": True},
    {**MASKED, "privacy.noise": "distributed", "privacy.hidden_cohort": True, "federation.cohort": 2},
    {**MASKED, "privacy.noise": "local"},
    {**MASKED, "privacy.unit": "example"},
]


@pytest.mark.parametrize("settings", chosen(WRITTEN, [WRITTEN[place] for place in (0, 4, 5, 8)]))
def test_what_runs_write_has_the_schema_and_is_reported_finished_and_unfinished(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    toys.federation({**settings, "federation.rounds": 2}).run(tmp_path / "run")
    result = result_in(tmp_path / "run")
    check(result)
    unit, masks = settings.get("privacy.unit", "none"), settings.get("secure_aggregation.enabled", False)
    assert result["unit"] == unit
    assert (result["secure_aggregation"] is not None) == masks
    for finished in (True, False):
        text = told(tmp_path / "run")
        assert "NOT" not in text.split("Every setting")[0]
        assert ("Its cost" in text) is masks
        assert ("Its parameters" in text) is (masks and finished)
        if unit != "none":
            assert ("This run is (" if finished else "is planned to be (") in text
            assert f"Protected: {result['privacy']['unit']}." in text
        (tmp_path / "run" / "result.json").unlink(missing_ok=True)


def test_a_run_whose_noise_was_injected_is_told_as_not_private(tmp_path: Path) -> None:
    settings = {**CLIENT, "federation.cohort": 2, "federation.rounds": 2}
    toys.federation(settings, entropy=SeededEntropy(0)).run(tmp_path / "run")
    result = result_in(tmp_path / "run")
    check(result)
    assert result["privacy"]["private"] is False
    assert result["privacy_statement"].startswith("NOT PRIVATE")
    assert "This run is NOT PRIVATE" in told(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    assert "This run is NOT PRIVATE" in told(tmp_path / "run")
