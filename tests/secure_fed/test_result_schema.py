"""docs/result.schema.json says what result.json is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

RunFolder = Callable[..., Path]

ROOT = Path(__file__).resolve().parents[2]


def schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs" / "result.schema.json").read_text(encoding="utf-8"))
    return found


def result_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found


def test_the_schema_is_one_and_describes_every_key() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    assert all(described["description"] for described in schema()["properties"].values())


def test_the_schema_accepts_a_result(run_folder: RunFolder) -> None:
    jsonschema.validate(result_in(run_folder()), schema(), cls=jsonschema.Draft202012Validator)


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
        jsonschema.validate({**result_in(run_folder()), key: value}, schema())


def test_the_schema_accepts_a_private_result(run_folder: RunFolder) -> None:
    private = {
        "unit": "client",
        "epsilon": 3.2,
        "epsilon_participants": 4.1,
        "delta": 1e-5,
        "noise_multiplier": 1.1,
    }
    jsonschema.validate({**result_in(run_folder()), **private}, schema())


def test_the_schema_asks_for_every_key(run_folder: RunFolder) -> None:
    result = result_in(run_folder())
    for key in result:
        shorter = {name: value for name, value in result.items() if name != key}
        with pytest.raises(jsonschema.ValidationError, match=key):
            jsonschema.validate(shorter, schema())
