"""The table of methods, the settings that reach each method, and those that are refused.

`method.name = "auto"` and `model.pooling = "auto"` choose by the run, say why, and are chosen once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from secure_fed.config import MethodConfig, RunConfig
from secure_fed.errors import ConfigError, MethodError
from secure_fed.federation import Federation
from secure_fed.learning.models.adapters.lora import LoraAdapter
from secure_fed.learning.models.adapters.triplet import TripletAdapter
from secure_fed.methods import METHODS, build, cards
from secure_fed.methods.auto import as_begun, decided
from secure_fed.methods.fedara import Budget
from secure_fed.methods.ffa_lora import FfaLora
from tests.golden import refused
from tests.secure_fed import toys

CLIENT = {"privacy.unit": "client", "privacy.noise_multiplier": 1.0}
MASKED = {"secure_aggregation.enabled": True}


def test_cards_bear_the_names_of_the_table() -> None:
    assert [card.name for card in cards()] == list(METHODS)
    assert {card.name for card in cards() if not card.mean_exact} == {
        *(
            "compacter",
            "fedlora",
            "federa",
            "svd_adaptation",
            "fedara",
            "fedtt",
            "fedtt_plus",
            "c2a",
            "fedask",
            "fedpower",
        )
    }


ARA = {"method.rank": 4, "method.warmup_rounds": 1, "method.final_rounds": 1, "federation.rounds": 7}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("fra-lora", {}, "method.name"),
    ("zzz", {}, "method.name"),
    # Settings that the method does not read.
    ("fedlora", {"method.freeze_init": "gaussian"}, "method.freeze_init"),
    ("fedlora", {**CLIENT, "method.denoise": "none"}, "method.denoise"),
    ("ffa_lora", {"method.switch_round": 3}, "method.switch_round"),
    ("ffa_lora", {"method.transport_form": "sketch"}, "method.transport_form"),
    ("fra_lora", {"method.double_rank": True}, "method.double_rank"),
    ("fra_lora", {"method.oversampling": 3}, "method.oversampling"),
    ("fedask", {"method.power_iterations": 3}, "method.power_iterations"),
    ("federa", {"method.alpha": 8.0}, "method.alpha"),
    ("prompt_tuning", {"method.rank": 4}, "method.rank"),
    # Values and combinations.
    ("fedpower", {"method.power_iterations": 0}, "method.power_iterations"),
    ("fra_lora", {"method.sketch": 3}, "method.sketch"),
    (
        "fra_lora",
        {"method.transport_form": "sketch", "federation.server_optimizer": "adam"},
        "federation.server_optimizer",
    ),
    ("federa", {"method.rule": "ffa_lora", "method.freeze_init": "gaussian"}, "method.freeze_init"),
    ("federa", {"method.rule": "fedlora", **CLIENT, "method.denoise": "none"}, "method.denoise"),
    ("federa", {"method.rule": "rolora", "method.transport_form": "sketch"}, "method.transport_form"),
    ("federa", {"method.rule": "rolora", "federation.server_optimizer": "adam"}, "federation.server_optimizer"),
    (
        "federa",
        {"method.rule": "fra_lora", **CLIENT, "federation.server_optimizer": "adam", "method.denoise": "shrink"},
        "federation.server_optimizer",
    ),
    ("fedara", {**ARA, "federation.rounds": 2}, "method.warmup_rounds"),
    ("fedara", {**ARA, "method.final_rank": 5}, "method.final_rank"),
    ("fedara", {**ARA, "method.masks": "votes", **CLIENT}, "method.masks"),
    ("fedara", {**ARA, "federation.server_lr": 0.5}, "federation.server_lr"),
    ("fedara", {**ARA, "method.vote_threshold": 0.25, "method.masks": "global"}, "method.vote_threshold"),
    ("fedara", {**ARA, "method.vote_threshold": 0.25, **CLIENT}, "method.vote_threshold"),
    ("fedara", {**ARA, **MASKED, "secure_aggregation.range": 0.5}, "secure_aggregation.range"),
]


@pytest.mark.parametrize(
    ("name", "more", "setting"), REFUSED, ids=[f"{name}-{setting}" for name, _, setting in REFUSED]
)
def test_what_does_not_go_together_is_refused(name: str, more: dict[str, Any], setting: str) -> None:
    usual = {"method.rank": 8, "method.modules_to_save": []} if name == "prompt_tuning" else {}
    with refused(ConfigError, setting):
        build(toys.config({"method.name": name, **usual, **more}))


@pytest.mark.parametrize(
    ("name", "personal"),
    [("fedask", "query.lora_B*"), ("fedsvd", "query.lora_A*"), ("fedsvd", "*lora_B*"), ("fedara", "query.triplet.E")],
)
def test_tensors_that_the_server_rewrites_are_no_clients_own(name: str, personal: str) -> None:
    with refused(MethodError):
        toys.federation({"method.name": name, "method.personal": [personal]})


def made(name: str, **more: Any) -> Any:
    return build(toys.config({"method.name": name, **more}))


def test_settings_reach_the_methods() -> None:
    method = build(MethodConfig(name="fedlora", rank=4, alpha=2.0, rslora=True, dropout=0.1, target_modules=("key",)))
    assert method.adapter == LoraAdapter(4, 2.0, True, 0.1, ("key",))
    ffa = build(MethodConfig(name="ffa_lora", freeze_init="gaussian"))
    assert ffa == FfaLora(LoraAdapter(), freeze_init="gaussian")
    assert made("svd_adaptation", **{"method.rslora": True}).adapter == TripletAdapter(LoraAdapter(2, 16.0, True))
    prompt = build(MethodConfig(name="prompt_tuning", prompt_length=7))
    assert prompt.adapter.length == 7  # type: ignore[attr-defined]
    prefix: Any = build(RunConfig().replace({("method", "name"): "prefix_tuning", ("model", "max_length"): 50}))
    assert prefix.adapter.max_length == 50
    contexts = [build(MethodConfig(name="c2a", context=context)).adapter for context in ("text", "batch")]
    assert [context.of_batch for context in contexts] == [False, True]  # type: ignore[attr-defined]
    assert (made("fedask", **{"method.oversampling": 5}).columns, len(made("fedpower").passes)) == (7, 3)
    power = made("fedpower", **{"method.oversampling": 7, "method.power_iterations": 5})
    assert (power.columns, len(power.passes)) == (9, 6)
    sketched = {"method.rule": "fra_lora", "method.transport_form": "sketch", "method.sketch": 5, **CLIENT}
    fra = made("federa", **sketched, **{"method.denoise": "truncate", "method.dropout": 0.25})
    assert (fra.sketch, fra.denoise, fra.adapter.dropout) == (5, "truncate", 0.25)
    assert made("fra_lora", **{"method.transport_form": "sketch"}).sketch == 4 * 2, "four times the rank"
    both = made("fra_then_ffa", **CLIENT, **{"method.denoise": "none", "method.switch_round": 1})
    assert (both.denoise, both.switch_round) == ("none", 1)
    momentum = {"federation.server_optimizer": "momentum"}
    for rule in ("fedlora", "ffa_lora", "fra_lora"):
        assert made("federa", **{"method.rule": rule}, **momentum).card.memoryless == ""


def test_settings_reach_fedara() -> None:
    method = made("fedara", **ARA, **{"method.final_rank": 2, "method.rslora": True, "method.vote_threshold": 0.25})
    assert method.adapter == TripletAdapter(LoraAdapter(4, 16.0, True))
    assert method.budget == Budget(first=4, last=2, warmup=1, final=1, rounds=7)
    assert method.threshold == 0.25
    assert made("fedara", **ARA, **CLIENT).threshold is None
    assert made("fedara", **ARA, **{"privacy.unit": "example", "privacy.noise_multiplier": 1.0}).threshold == 0.5
    assert made("fedara", **ARA, **{"method.masks": "global", "federation.server_lr": 0.5}).threshold is None
    ranks = (1, 4, 5, 8, 9)
    assert [made("fedara", **{**ARA, "method.rank": rank}).budget.last for rank in ranks] == [1, 1, 2, 2, 3]
    for rounds, phases in (
        (1, (0, 0)),
        (2, (0, 0)),
        (4, (1, 1)),
        (7, (1, 2)),
        (8, (2, 5)),
        (20, (2, 5)),
        (100, (2, 5)),
    ):
        budget = made("fedara", **{"federation.rounds": rounds}).budget
        assert (budget.warmup, budget.final) == phases
        assert budget.ranks(rounds, 3) == 3 * budget.last


# What is chosen by the run.


PRIVATE = {"privacy.unit": "client", "privacy.epsilon": 8.0}
CHAT = {"data.task": "chat", "data.train": "chats.jsonl"}


def changed(settings: dict[str, Any]) -> RunConfig:
    return RunConfig().replace({tuple(name.split(".")): value for name, value in settings.items()})  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "method", "rule"),
    [
        ({}, "fra_lora", "fedlora"),
        (MASKED, "fedlora", "fedlora"),
        (CHAT, "fedlora", "fedlora"),
        ({"federation.aggregate": "median"}, "fedlora", "fedlora"),
        ({"federation.server_optimizer": "adam"}, "fedlora", "fedlora"),
        (PRIVATE, "federa", "ffa_lora"),
        ({**PRIVATE, **MASKED}, "federa", "ffa_lora"),
        ({**PRIVATE, **CHAT, "privacy.unit": "example"}, "federa", "ffa_lora"),
        ({**PRIVATE, "method.rule": "fra_lora"}, "federa", "fra_lora"),
        ({**PRIVATE, "model.device_map": "auto"}, "ffa_lora", "fedlora"),
        ({**MASKED, "method.name": "c2a"}, "c2a", "fedlora"),
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
    """By its sentence-transformers configuration; another model keeps its own pooling, and so does whoever asks for it.

    Under a guarantee its classification layer trains alone, unless a setting asks for an adapter.
    """
    model = tmp_path / "encoder"
    model.symlink_to(small_model) if not folder else _copied(small_model, model)
    run, said = decided(changed({"model.name": str(model)}))
    assert (run.model.pooling, len(said)) == (("mean", 2) if folder else ("model", 1))
    assert decided(changed({"model.name": str(model), "model.pooling": "model"}))[0].model.pooling == "model"
    assert (
        decided(changed({"model.name": str(model), "data.task": "causal_lm", "data.train": "x"}))[0].model.pooling
        == "auto"
    )
    private = {**PRIVATE, "model.name": str(model)}
    assert decided(changed(private))[0].method.name == ("head" if folder else "federa")
    for asked in (
        {"method.rank": 4},
        {"model.pooling": "model"},
        {"model.train_head": False, "model.descriptions": "x", "model.pooling": "mean"},
    ):
        assert decided(changed(private | asked))[0].method.name == "federa"


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
