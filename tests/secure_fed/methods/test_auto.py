"""`method.name = "auto"` and `model.pooling = "auto"` choose by the run, say why, and are chosen once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from secure_fed import Federation, RunConfig
from secure_fed.methods import METHODS, build
from secure_fed.methods.auto import as_begun, decided
from tests.secure_fed import toys

PRIVATE = {"privacy.unit": "client", "privacy.epsilon": 8.0}
MASKS = {"secure_aggregation.enabled": True}
CHAT = {"data.task": "chat", "data.train": "chats.jsonl"}


def changed(settings: dict[str, Any]) -> RunConfig:
    return RunConfig().replace({tuple(name.split(".")): value for name, value in settings.items()})  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "method", "rule"),
    [
        ({}, "fra_lora", "fedlora"),
        (MASKS, "fedlora", "fedlora"),
        (CHAT, "fedlora", "fedlora"),
        ({"federation.aggregate": "median"}, "fedlora", "fedlora"),
        ({"federation.server_optimizer": "adam"}, "fedlora", "fedlora"),
        (PRIVATE, "federa", "ffa_lora"),
        ({**PRIVATE, **MASKS}, "federa", "ffa_lora"),
        ({**PRIVATE, **CHAT, "privacy.unit": "example"}, "federa", "ffa_lora"),
        ({**PRIVATE, "method.rule": "fra_lora"}, "federa", "fra_lora"),
        ({**PRIVATE, "model.device_map": "auto"}, "ffa_lora", "fedlora"),
        ({**MASKS, "method.name": "c2a"}, "c2a", "fedlora"),
    ],
)
def test_the_method_follows_from_unit_masks_and_task(settings: dict[str, Any], method: str, rule: str) -> None:
    run, said = decided(changed(settings))
    assert (run.method.name, run.method.rule) == (method, rule)
    assert build(run).card.name == method
    assert len(said) == ("method.name" not in settings)
    assert decided(run) == (run, [])


def test_auto_is_no_method_of_its_own() -> None:
    assert "auto" not in METHODS
    assert build(RunConfig()).card.name == "fra_lora"


@pytest.mark.parametrize("folder", [True, False])
def test_a_sentence_encoder_gets_the_mean(folder: bool, small_model: Path, tmp_path: Path) -> None:
    """By its sentence-transformers configuration; another model keeps its own pooling, and so does whoever asks for it."""
    model = tmp_path / "encoder"
    model.symlink_to(small_model) if not folder else _copied(small_model, model)
    run, said = decided(changed({"model.name": str(model)}))
    assert (run.model.pooling, len(said)) == (("mean", 2) if folder else ("model", 1))
    assert decided(changed({"model.name": str(model), "model.pooling": "model"}))[0].model.pooling == "model"
    assert (
        decided(changed({"model.name": str(model), "data.task": "causal_lm", "data.train": "x"}))[0].model.pooling
        == "auto"
    )


def _copied(model: Path, to: Path) -> None:
    (to / "1_Pooling").mkdir(parents=True)
    for file in model.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    (to / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))


def test_a_run_stores_what_was_chosen_and_resumes_with_it(tmp_path: Path) -> None:
    federation = toys.federation({"method.name": "auto", "federation.rounds": 1})
    assert any("'fra_lora'" in note for note in federation.notes)
    federation.run(tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["method"]["name"] == "fra_lora"
    toys.federation({"method.name": "fra_lora", "federation.rounds": 1}).run(tmp_path / "run", resume=True)


def test_a_resumed_run_chooses_nothing_anew() -> None:
    """What the begun run chose stands, also where this version would choose otherwise; what is set stands too."""
    begun = changed({"method.name": "federa", "method.rule": "rolora", "model.pooling": "mean"})
    assert as_begun(RunConfig(), begun) == begun
    assert as_begun(changed({"method.name": "head", "model.pooling": "model"}), begun).method.name == "head"


def test_a_network_of_ones_own_learns_with_nothing_set() -> None:
    """Three separable classes, which a rate for pre-trained weights left at 35 %."""
    generator = torch.Generator().manual_seed(0)
    places = torch.tensor([[2.0, 0.0], [-2.0, 1.0], [0.0, -2.0]])

    def some(count: int) -> TensorDataset:
        classes = torch.randint(0, 3, (count,), generator=generator)
        return TensorDataset(places[classes] + 0.5 * torch.randn(count, 2, generator=generator), classes)

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def metrics(model: nn.Module, batches: Any) -> dict[str, float]:
        return {"accuracy": float(torch.cat([(model(x).argmax(1) == y).float() for x, y in batches]).mean())}

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
    federation = Federation(model=model, train=[some(80) for _ in range(3)], test=some(100), loss=loss, metrics=metrics)
    result = federation.run()
    assert (result.summary["method"], federation.notes[-1].count("fedft")) == ("fedft", 1)
    assert result.summary["accuracy"] > 0.9
