"""Base models that are divided over devices, host memory and the disk: every method as without it, and every way in and out."""

from __future__ import annotations

import gc
import importlib.util
import stat
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
)

from privacy.entropy import SeededEntropy
from secure_fed.commands.cli import main
from secure_fed.config import DataConfig, ModelConfig, RunConfig
from secure_fed.deployment import charter, home
from secure_fed.errors import ConfigError, MethodError, ModelError
from secure_fed.export.adapter_folder import load_adapter
from secure_fed.federation import Federation
from secure_fed.learning.generation import generated, keeps_cache
from secure_fed.learning.models import devices, loading
from secure_fed.learning.models.dropout_and_checkpointing import is_checkpointing
from secure_fed.learning.tasks import build
from secure_fed.methods import METHODS, card
from secure_fed.private import Budget, wrap
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import small_llama, small_models

pytest.importorskip("accelerate")

MAPS: dict[str, dict[str, Any]] = {
    "one device": {"device_map": "auto"},
    "memory and disk": {"device_map": "auto", "max_memory": ["cpu=60KB"]},
    "disk": {"device_map": "sequential", "max_memory": ["cpu=1KB"]},
}
MODELS = ("llama", "bert")
CELLS = [
    (name, unit, model, place)
    for name in METHODS
    for unit in ("none", "client")
    for model in MODELS
    for place in MAPS
    if name != "fedft" and (unit == "none" or unit in card(name).units)
    if (name, model)
    not in (("bitfit", "llama"), ("head", "llama"), ("c2a", "llama"))  # no biases, no head, no classifier
]
QUICK = [
    ("fedlora", "none", "bert", "memory and disk"),
    ("prompt_tuning", "none", "llama", "disk"),
    ("fedara", "none", "bert", "one device"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Any) -> Path:
    """A small Llama, whose output layer is its embedding, a BERT and a DeBERTa without a classifier; and texts."""
    place = tmp_path_factory.mktemp("divided")
    small_llama.save(place / "llama", small_tokenizer, hidden_size=32, intermediate_size=64, tie_word_embeddings=True)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"pad_token_id": 0, "vocab_size": len(small_tokenizer)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        BertForMaskedLM(BertConfig(**shape)).save_pretrained(place / "bert")
        attention = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
        DebertaV2ForMaskedLM(DebertaV2Config(**shape, **attention)).save_pretrained(place / "deberta")
    for name in ("bert", "deberta"):
        small_tokenizer.save_pretrained(place / name)
    small_llama.write_texts(place, small_tokenizer)
    return place


def tables(
    folder: Path, place: str = "", method: str = "fedlora", unit: str = "none", model: str = "llama", **more: Any
) -> dict[str, Any]:
    made = small_llama.tables(folder, model, method, unit, "causal_lm" if model == "llama" else "classification")
    made["model"] |= MAPS[place] if place else {}
    return {section: made.get(section, {}) | more.get(section, {}) for section in {**made, **more}}


def settings(folder: Path, *given: str, **named: Any) -> RunConfig:
    return RunConfig.from_dict(tables(folder, *given, **named))


def loaded(folder: Path, place: str = "", model: str = "llama", **more: Any) -> Any:
    config = ModelConfig(name=str(folder / model), max_length=16, **(MAPS[place] if place else {}), **more)
    task = build(DataConfig(task="causal_lm" if model == "llama" else "classification", train="x"))
    return loading.load(config, task, ("calm", "wild", "other"), 0).model


def scores(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(4, 14).view(1, -1)).logits
    return found


def away(model: nn.Module) -> set[str]:
    return {name for name, one in model.named_parameters() if one.is_meta}


def require_close(found: Tensors, expected: Tensors) -> None:
    for name in expected:
        torch.testing.assert_close(found.tensor(name), expected.tensor(name), rtol=1e-5, atol=1e-5)


def divided_by_hand(folder: Path) -> Any:
    memory: Any = {"cpu": "40KB"}
    return AutoModelForCausalLM.from_pretrained(folder / "llama", device_map="auto", max_memory=memory)


@pytest.mark.parametrize(("name", "unit", "model", "place"), chosen(CELLS, QUICK))
def test_a_method_ends_as_on_one_device(name: str, unit: str, model: str, place: str, folder: Path) -> None:
    whole, divided = (
        Federation(settings(folder, where, name, unit, model), entropy=SeededEntropy(1)) for where in ("", place)
    )
    assert divided.assembly.base_digest == whole.assembly.base_digest
    offloaded = away(divided.assembly.problem.model)
    assert len(offloaded) > 10 or place == "one device"
    expected, found = (one.run() for one in (whole, divided))
    require_close(found.state.tensors, expected.state.tensors)
    assert away(divided.assembly.problem.model) == offloaded  # nothing was left behind on the device
    assert found.records[-1]["loss"] == pytest.approx(expected.records[-1]["loss"], abs=1e-5)


def test_a_pass_holds_the_weights_of_one_block_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training too, since checkpointing is on without being asked for; without it, all of them."""
    alive: list[Any] = []
    most, read = [0], devices._read

    def counted(*given: Any) -> Any:
        found = read(*given)
        alive.append(weakref.ref(found))
        most[0] = max(most[0], sum(one().numel() for one in alive if one() is not None))
        return found

    monkeypatch.setattr(devices, "_read", counted)

    def held(checkpointing: bool | str) -> int:
        federation = Federation(
            settings(folder, "disk", training={"checkpointing": checkpointing}, federation={"rounds": 1})
        )
        model = federation.assembly.problem.model
        assert is_checkpointing(model) == (checkpointing == "auto")
        alive.clear()
        most[0] = 0
        federation.run()
        assert not [one for one in alive if one() is not None]
        return most[0]

    block = sum(one.numel() for one in loaded(folder).model.layers[0].parameters())
    table = loaded(folder).lm_head.weight.numel()
    assert held("auto") <= block + table
    assert held(False) > 2.5 * block  # all but the norms' weights


@pytest.mark.parametrize("place", chosen(["memory and disk", "disk"], ["disk"]))
def test_weights_that_no_file_can_lend_are_in_a_private_folder_until_the_model_is_gone(
    place: str, folder: Path, tmp_path: Path, small_tokenizer: Any
) -> None:
    """A file of pickled weights cannot be read in parts."""
    expected = scores(whole := loaded(folder))
    whole.config.save_pretrained(tmp_path / "llama")
    torch.save(whole.state_dict(), tmp_path / "llama" / "pytorch_model.bin")
    small_tokenizer.save_pretrained(tmp_path / "llama")
    model = loaded(tmp_path, place)
    held = Path(model._offload_folder.name)
    assert len(list(held.iterdir())) > 10
    assert stat.S_IMODE(held.stat().st_mode) == 0o700
    assert torch.equal(scores(model), expected)
    del model
    gc.collect()
    assert not held.exists()


def test_it_is_predicted_and_exported_as_an_adapter_and_merged(folder: Path, tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    federation = Federation(
        settings(folder, "memory and disk", "federa", training={"lr": 0.05}, federation={"rounds": 1})
    )
    result = federation.run(run)
    expected = scores(federation.load(result.state))
    assert main(["predict", str(run), str(folder / "test.jsonl"), "--max-new-tokens", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert main(["export", str(run), str(tmp_path / "adapter")]) == 0
    on_base = PeftModel.from_pretrained(loaded(folder), str(tmp_path / "adapter"))
    torch.testing.assert_close(scores(on_base), expected, rtol=1e-3, atol=1e-5)
    assert main(["export", str(run), str(tmp_path / "merged"), "--merged"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(scores(merged), expected, rtol=1e-3, atol=1e-5)


def test_an_adapter_of_our_own_format_loads_on_a_whole_model_and_on_a_divided_one(folder: Path, tmp_path: Path) -> None:
    federation = Federation(settings(folder, "disk", "ia3", training={"lr": 0.05}, federation={"rounds": 1}))
    result = federation.run(tmp_path / "run")
    expected = scores(federation.load(result.state))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapter")]) == 0
    assert "device_map" not in (tmp_path / "adapter" / "secure_fed.json").read_text(encoding="utf-8")
    whole = load_adapter(tmp_path / "adapter")
    assert not devices.is_divided(whole)
    divided = load_adapter(tmp_path / "adapter", divided_by_hand(folder))
    for model in (whole, divided):
        torch.testing.assert_close(scores(model), expected, rtol=1e-5, atol=1e-6)


def given(folder: Path, model: nn.Module, *changes: tuple[tuple[str, str], Any], method: str = "fedlora") -> Federation:
    """A federation over a Llama that is given in Python."""
    own = {
        section: table for section, table in tables(folder, method=method).items() if section not in ("model", "data")
    }
    by_name = Federation(settings(folder))
    problem, task = by_name.assembly.problem, build(by_name.config.data)
    parts: dict[str, Any] = {"train": [list(one) for one in problem.train], "test": list(problem.test)}
    parts |= {"collate": problem.collate, "loss": task.loss(()), "metrics": task.metrics(())}
    return Federation(RunConfig.from_dict(own).replace(dict(changes)), model=model, **parts)


def test_a_model_that_is_given_divided_trains_as_one_that_is_not(folder: Path) -> None:
    divided = divided_by_hand(folder)
    assert away(divided)
    expected, found = (given(folder, model) for model in (loaded(folder), divided))
    assert is_checkpointing(divided)
    assert found.assembly.base_digest == expected.assembly.base_digest
    require_close(found.run().state.tensors, expected.run().state.tensors)


POOLED = ("model", "pooling")


def test_a_mean_pooled_classifier_is_divided_too(folder: Path) -> None:
    whole, divided = (
        Federation(settings(folder, place, "head", model="bert", federation={"rounds": 1}).replace({POOLED: "mean"}))
        for place in ("", "disk")
    )
    assert away(divided.assembly.problem.model)
    expected, found = (one.run().state.tensors for one in (whole, divided))
    assert found.to_bytes() == expected.to_bytes()


@every(
    ("setting", "changes"),
    [
        ("model.device_map", {"unit": "example"}),
        ("model.device_map", {"method": "fedft"}),
        ("model.device", {"model": {"device": "auto"}}),
        ("model.max_memory", {"model": {"max_memory": ["cpu=much"]}}),
        ("model.max_memory", {"model": {"max_memory": ["cpu=1GiB"], "device_map": ""}}),
        ("model.device_map", {"model": {"device_map": "everywhere"}}),
    ],
)
def test_settings_that_contradict_a_map_are_refused_before_anything_is_loaded(
    setting: str, changes: dict[str, Any], folder: Path
) -> None:
    own = {name: value for name, value in changes.items() if name != "model"}
    made = tables(folder, "one device", **own)
    made["model"] |= changes.get("model", {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secure_fed.learning.problem.load", None)
        with refused(ConfigError, setting):
            Federation(RunConfig.from_dict(made))


def test_without_accelerate_it_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "secure_fed.learning.models.locate.find_spec", lambda name: find(name) if name != "accelerate" else None
    )
    with refused(ConfigError, "model.device_map"):
        loaded(folder, "one device")


def test_a_model_that_reads_weights_of_a_layer_without_calling_it_is_refused(folder: Path) -> None:
    loaded(folder, "one device", "deberta")
    with refused(ModelError, "model.device_map"):
        loaded(folder, "disk", "deberta")


def test_quantised_layers_are_not_offloaded(folder: Path) -> None:
    pytest.importorskip("bitsandbytes")
    whole, divided = (loaded(folder, place, quantization="4bit") for place in ("", "one device"))
    assert torch.equal(scores(whole), scores(divided))
    with pytest.raises(ModelError):
        loaded(folder, "disk", quantization="4bit")


def test_a_model_that_is_given_divided_meets_the_same_refusals(folder: Path) -> None:
    private = [(("privacy", name), value) for name, value in small_llama.UNITS["example"].items()]
    with refused(ConfigError, "privacy.unit"):
        given(folder, divided_by_hand(folder), *private, (("evaluation", "dummies"), 0))
    with refused(ConfigError, "model.device"):
        given(folder, divided_by_hand(folder), (("model", "device"), "auto"))
    with refused(MethodError, "method.name"):
        given(folder, divided_by_hand(folder), method="fedft")
    model = divided_by_hand(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused(ModelError):
        wrap(model, optimizer, DataLoader([{"x": 1}] * 8, 4), Budget(8.0, 1e-3, steps=1))  # type: ignore[arg-type, list-item]


def test_a_charter_divides_nobodys_model() -> None:
    mapped = {("model", "device_map"): "auto", ("model", "max_memory"): ("cpu=1GiB",)}
    assert "model.device_map" in charter.local_fault(RunConfig().replace(mapped))
    assert not charter.local_fault(RunConfig().replace(mapped | charter.neutral()))
    here = home.settings_of_model(home.NodeSection(device_map="auto", max_memory=("cpu=1GiB",)))
    assert RunConfig().replace(here).model.memory == {"cpu": "1GiB"}


def test_parameters_without_values_are_the_meta_devices_alone() -> None:
    with torch.device("meta"):
        model = small_models.llama()
    assert not devices.is_divided(model)
    assert all(value.is_meta for value in devices.Values(model).values())


@pytest.mark.parametrize("place", chosen(MAPS, ["disk"]))
def test_a_divided_model_writes_with_a_cache_what_the_whole_one_writes(place: str, folder: Path) -> None:
    prompts = [[5, 9, 11, 6], [7], [12, 8]]
    whole, divided = loaded(folder), loaded(folder, place)
    assert keeps_cache(divided)
    assert generated(divided, prompts, 5) == generated(whole, prompts, 5)
