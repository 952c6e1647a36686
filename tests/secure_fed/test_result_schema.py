"""docs/result.schema.json describes every result.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from privacy.entropy import SeededEntropy
from tests.cells import chosen
from tests.secure_fed import toys
from tests.secure_fed.masked_edit import masked

RunFolder = Callable[..., Path]
PrivateEdit = Callable[..., Callable[[dict[str, Any]], None]]

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
    "attack": "loss",
    "unit": "example",
    "members": 400,
    "non_members": 380,
    "auc": 0.53,
    "auc_interval": [0.4, 0.66],
    "tpr_at_fpr": {
        "0.01": {"tpr": 0.02, "tpr_interval": [0, 0.1], "fpr": 0.01, "fpr_interval": [0, 0.02]},
        "0.001": None,
    },
    "why": "",
}


def test_the_schema_is_one_and_describes_every_key() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert all(described["description"] for described in SCHEMA["properties"].values())


def test_the_schema_accepts_a_result(run_folder: RunFolder) -> None:
    check(result_in(run_folder()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("surprise", 1),
        ("schema", 2),
        ("accuracy", 1.1),
        ("accuracy", "0.9"),
        ("epsilon", "none"),
        ("epsilon", 1.0),  # without a privacy unit
        ("delta", 1e-5),
        ("unit", "nobody"),
        ("rounds", 0),
        ("sampling_rate", 0),
        ("bytes_up", 1.5),
        ("label_names", "asthma"),
    ],
)
def test_the_schema_refuses_a_wrong_value(run_folder: RunFolder, key: str, value: object) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check({**result_in(run_folder()), key: value})


def test_the_schema_accepts_a_private_result(run_folder: RunFolder, private_edit: PrivateEdit) -> None:
    check(result_in(run_folder(edit=private_edit())))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("unit", "none"),
        ("privacy", None),
        ("epsilon", None),
        ("epsilon_participants", None),
        ("noise_multiplier", None),
        ("epsilon_cumulative", None),
        ("delta", 1.0),
        ("ended_early", False),
    ],
)
def test_the_schema_refuses_half_a_guarantee(
    run_folder: RunFolder, private_edit: PrivateEdit, key: str, value: object
) -> None:
    result = result_in(run_folder(edit=private_edit()))
    with pytest.raises(jsonschema.ValidationError):
        check({**result, key: value})


def test_the_schema_asks_for_every_term_of_a_guarantee(run_folder: RunFolder, private_edit: PrivateEdit) -> None:
    result = result_in(run_folder(edit=private_edit()))
    for term in result["privacy"]:
        shorter = {name: value for name, value in result["privacy"].items() if name != term}
        with pytest.raises(jsonschema.ValidationError, match=term):
            check({**result, "privacy": shorter})
    with pytest.raises(jsonschema.ValidationError, match="surprise"):
        check({**result, "privacy": {**result["privacy"], "surprise": 1}})


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


@pytest.mark.parametrize("settings", chosen(WRITTEN, [WRITTEN[place] for place in (0, 1, 4, 5, 8)]))
def test_the_schema_accepts_what_runs_write(settings: dict[str, Any], tmp_path: Path) -> None:
    toys.federation({**settings, "federation.rounds": 2}).run(tmp_path / "run")
    result = result_in(tmp_path / "run")
    check(result)
    assert result["unit"] == settings.get("privacy.unit", "none")
    assert (result["secure_aggregation"] is not None) == settings.get("secure_aggregation.enabled", False)


@pytest.mark.parametrize("part", ["secure_aggregation", "realised"])
def test_the_schema_asks_for_every_fact_of_masks_and_their_noise(run_folder: RunFolder, part: str) -> None:
    result = result_in(run_folder(edit=masked("distributed")))
    result["privacy"]["realised"] = {"survivors": 3, "noise_multiplier": 1.2, "epsilon": 2.6}
    check(result)
    holder = result["privacy"] if part == "realised" else result
    whole = holder[part]
    for changed in [{**whole, "surprise": 1}, *({n: v for n, v in whole.items() if n != name} for name in whole)]:
        holder[part] = changed
        with pytest.raises(jsonschema.ValidationError):
            check(result)


@pytest.mark.parametrize(
    ("name", "value"),
    [("bits", 16), ("clients", 2), ("failure", 1.5), ("survivors", 0), ("active", None), ("threshold", None)],
)
def test_the_schema_refuses_masks_that_no_run_has(run_folder: RunFolder, name: str, value: object) -> None:
    result = result_in(run_folder(edit=masked("nothing")))
    check(result)
    result["secure_aggregation"][name] = value
    with pytest.raises(jsonschema.ValidationError):
        check(result)


def test_the_schema_accepts_a_run_whose_noise_was_injected(tmp_path: Path) -> None:
    settings = {**CLIENT, "federation.cohort": 2}
    toys.federation(settings, entropy=SeededEntropy(0)).run(tmp_path / "run")
    result = result_in(tmp_path / "run")
    check(result)
    assert result["privacy"]["private"] is False
    assert result["privacy_statement"].startswith("NOT PRIVATE")


def test_the_schema_asks_for_every_key(run_folder: RunFolder) -> None:
    result = result_in(run_folder())
    for key in result:
        shorter = {name: value for name, value in result.items() if name != key}
        with pytest.raises(jsonschema.ValidationError, match=key):
            check(shorter)
