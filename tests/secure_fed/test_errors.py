"""A `ConfigError` has its setting, value and limit as attributes."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

from secure_fed.errors import ConfigError
from tests.secure_fed import private_toys, toys

ROOT = Path(__file__).resolve().parents[2] / "secure_fed"
ROOMS = ("rounds", "runs", "export", "federation.py")


def files() -> list[Path]:
    return [file for room in ROOMS for file in ([ROOT / room] if room.endswith(".py") else (ROOT / room).rglob("*.py"))]


def test_every_one_raised_here_has_its_setting() -> None:
    """Each is raised as `ConfigError(..., setting=...)` or as `ConfigError(...).about(setting, value, limit)`."""
    bare, all_ = [], 0
    for file in files():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        about = {id(node.func.value) for node in ast.walk(tree) if _is_about(node)}  # type: ignore[attr-defined]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ConfigError":
                all_ += 1
                if id(node) not in about and "setting" not in {one.arg for one in node.keywords}:
                    bare.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not bare
    assert all_ > 20


def _is_about(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "about"


@pytest.mark.parametrize(
    ("settings", "setting", "value", "limit"),
    [
        ({"evaluation.record": "models"}, "evaluation.record", "models", "a run directory"),
        ({"federation.cohort": 4}, "federation.cohort", 4, "at most 3"),
        ({**private_toys.TARGET, "privacy.delta": 0.5}, "privacy.delta", 0.5, "below 0.33"),
        ({"evaluation.target_accuracy": 0.9}, "evaluation.target_accuracy", 0.9, "metrics with 'accuracy'"),
    ],
)
def test_it_survives_pickling(settings: dict[str, object], setting: str, value: object, limit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        toys.federation(settings, metrics=lambda model, batches: {"loss": 1.0}).run()
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.setting, error.value, error.limit) == (setting, value, limit)
    assert str(error) == str(caught.value)
