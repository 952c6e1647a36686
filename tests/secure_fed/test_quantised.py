"""Base models in 4 and 8 bits: every way in and out, their units, and what they refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from secure_fed.commands.cli import main
from secure_fed.config import DataConfig, ModelConfig, RunConfig
from secure_fed.errors import ConfigError, ModelError
from secure_fed.federation import Federation
from secure_fed.learning.generation import generated, keeps_cache
from secure_fed.learning.models import loading, quantised
from secure_fed.learning.models.architecture import couples_examples
from secure_fed.learning.tasks import build
from secure_fed.methods import METHODS, card
from secure_fed.tensors.tensors import Layout
from tests.cells import chosen
from tests.contracts.runs import OPTIONS
from tests.golden import refused
from tests.secure_fed import toys

pytest.importorskip("bitsandbytes")

UNITS: dict[str, dict[str, Any]] = {
    "none": {},
    "client": {"privacy": {"unit": "client", "noise_multiplier": 0.5, "clip_norm": 0.5, "delta": 1e-3}},
    "example": {"privacy": {"unit": "example", "noise_multiplier": 0.5, "clip_norm": 0.5, "delta": 1e-3}},
}
ON_WHOLE_MODELS = ("fedft", "bitfit", "head", "c2a")  # weights, biases and heads train, or classifiers alone are read
CELLS = [
    (name, unit, bits)
    for name in METHODS
    for unit in UNITS
    for bits in ("4bit", "8bit")
    if name not in ON_WHOLE_MODELS and (unit == "none" or unit in card(name).units)
]
QUICK = [("fedlora", "none", "4bit"), ("fra_lora", "example", "8bit")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Any) -> Path:
    """A small Llama with its tokenizer, and texts."""
    place = tmp_path_factory.mktemp("quantised")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = LlamaConfig(vocab_size=len(small_tokenizer), num_key_value_heads=2, **shape, **special)
        LlamaForCausalLM(config).save_pretrained(place / "model")
    small_tokenizer.save_pretrained(place / "model")
    words = [word for word in small_tokenizer.get_vocab() if word.isalpha()]
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("test", 6)):
        rows = [{"text": " ".join(rng.choice(words, 4 + number % 6))} for number in range(count)]
        (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return place


def settings(folder: Path, bits: str, method: str = "fedlora", unit: str = "none", **more: Any) -> RunConfig:
    read = {
        name: value for name, value in {"rank": 2, **OPTIONS.get(method, {})}.items() if name in card(method).options
    }
    tables: dict[str, Any] = {
        "model": {"name": str(folder / "model"), "max_length": 16, "quantization": bits},
        "data": {"task": "causal_lm"} | {split: str(folder / f"{split}.jsonl") for split in ("train", "test")},
        "federation": {"clients": 3, "cohort": 3, "rounds": 2},
        "method": {"name": method, **read},
        "training": {"steps": 1, "batch_size": 4} | ({"microbatch": 3} if unit == "example" else {}),
        "evaluation": {"audit_fraction": 0.0} | ({} if unit == "none" else {"dummies": 0}),
        **UNITS[unit],
    }
    return RunConfig.from_dict({section: table | more.get(section, {}) for section, table in tables.items()})


def loaded(folder: Path, bits: str) -> Any:
    config = ModelConfig(name=str(folder / "model"), max_length=16, quantization=bits)
    return loading.load(config, build(DataConfig(task="causal_lm", train="x")), (), 0).model


def scores(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(4, 14).view(1, -1)).logits
    return found


@pytest.mark.parametrize(("name", "unit", "bits"), chosen(CELLS, QUICK))
def test_a_method_trains_beside_quantised_layers(name: str, unit: str, bits: str, folder: Path) -> None:
    federation = Federation(settings(folder, bits, name, unit))
    layers = quantised.layers(federation.assembly.problem.model)
    stored = {name: one.get_parameter("weight").clone() for name, one in layers.items()}
    assert len(stored) == 14
    result = federation.run()
    assert np.isfinite([record["loss"] for record in result.records]).all()
    assert result.records[0]["rejected"] == []
    before, after = federation.assembly.initial.tensors, result.state.tensors
    assert Layout.of(before) != Layout.of(after) or not toys.same(before, after)
    assert all(torch.equal(one.get_parameter("weight"), stored[name]) for name, one in layers.items())


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_the_start_from_singular_vectors_leaves_the_outputs_as_they_are(bits: str, folder: Path) -> None:
    plain = scores(loaded(folder, bits))
    federation = Federation(settings(folder, bits, "federa"))
    started = federation.assembly.objective.load(federation.assembly.initial.tensors)
    torch.testing.assert_close(scores(started), plain, rtol=1e-3, atol=1e-4)
    assert all(pair.any() for name, pair in federation.assembly.initial.tensors.parts().items() if "lora_B" in name)


def test_a_model_given_as_an_object_gives_what_its_folder_gives(folder: Path) -> None:
    config = settings(folder, "4bit")
    by_name, chosen = Federation(config), ("federation", "method", "training", "evaluation")
    problem, task, usual = by_name.assembly.problem, build(config.data), RunConfig().to_dict()
    own = {
        (section, name): value
        for section in chosen
        for name, value in config.to_dict()[section].items()
        if value != usual[section][name]
    }
    given = Federation(
        RunConfig().replace(own),
        model=loaded(folder, "4bit"),
        train=[list(own) for own in problem.train],
        test=list(problem.test),
        collate=problem.collate,
        loss=task.loss(()),
        metrics=task.metrics(()),
    )
    assert given.assembly.base_digest == by_name.assembly.base_digest
    assert toys.same(given.run().state.tensors, by_name.run().state.tensors)


@pytest.mark.parametrize("method", chosen(["fedlora", "federa"], ["federa"]))
def test_it_is_predicted_and_exported_as_an_adapter_and_merged(
    method: str, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    federation = Federation(settings(folder, "4bit", method, training={"lr": 0.05}))
    result = federation.run(run)
    expected = scores(federation.load(result.state))
    assert main(["predict", str(run), str(folder / "test.jsonl"), "--max-new-tokens", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert main(["export", str(run), str(tmp_path / "adapter")]) == 0
    on_base = PeftModel.from_pretrained(loaded(folder, "4bit"), str(tmp_path / "adapter"))
    torch.testing.assert_close(scores(on_base), expected, rtol=1e-3, atol=1e-4)
    assert main(["export", str(run), str(tmp_path / "merged"), "--merged"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not quantised.layers(merged)
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text(encoding="utf-8"))
    torch.testing.assert_close(scores(merged), expected, rtol=1e-3, atol=1e-4)


def test_the_digest_of_the_base_covers_scales(folder: Path) -> None:
    model = loaded(folder, "4bit")
    before = loading.digest_of(model, ())
    assert before == loading.digest_of(loaded(folder, "4bit"), ())
    weight: Any = next(iter(quantised.layers(model).values())).get_parameter("weight")
    weight.quant_state.absmax += 1
    assert loading.digest_of(model, ()) != before


def test_outliers_of_8_bits_move_the_rows_beside_them_so_each_example_has_its_own_pass(folder: Path) -> None:
    model = loaded(folder, "8bit")
    layer: Any = next(iter(quantised.layers(model).values()))
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    usual = layer(x)[0]
    x[1, 0, 3] = 50.0
    assert not torch.equal(layer(x)[0], usual)
    assert couples_examples(model)
    for one in quantised.layers(model).values():
        one.state.threshold = 0.0  # type: ignore[union-attr]
    usual = layer(x)[0]
    x[1, 0, 3] = 0.0
    assert torch.equal(layer(x)[0], usual)
    assert not couples_examples(model)
    assert not couples_examples(loaded(folder, "4bit"))


def test_what_cannot_be_quantised_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(ConfigError, "model.quantization"):
        Federation(settings(folder, "4bit", "fedft"))
    with refused(ConfigError, "model.device"):
        Federation(settings(folder, "4bit", model={"device": "cpu, cpu"}))
    monkeypatch.setattr(quantised, "layers", lambda model: {})
    with refused(ModelError, "model.quantization"):
        loaded(folder, "4bit")
    monkeypatch.setattr("secure_fed.learning.models.locate.find_spec", lambda name: None)
    with refused(ConfigError, "model.quantization"):
        loaded(folder, "4bit")


def test_a_quantised_model_writes_with_a_cache_what_it_writes_without(folder: Path) -> None:
    model, prompts = loaded(folder, "8bit").eval(), [[5, 9, 11, 6], [7], [12, 8]]
    assert keeps_cache(model)
    ids = torch.tensor([prompts[0]])
    with torch.no_grad():
        for _ in range(3):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert generated(model, prompts, 3)[0] == ids[0, 4:].tolist()


@pytest.mark.nightly
def test_a_run_in_4_bits_is_audited(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Federation(settings(folder, "4bit", evaluation={"audit_fraction": 0.5})).run(tmp_path / "run")
    assert main(["audit", str(tmp_path / "run"), "--attack", "loss", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["text"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list mapped files")
def test_the_file_of_the_full_weights_is_not_kept_mapped(folder: Path, tmp_path: Path) -> None:
    # A copy of its own: the models of earlier tests may still wait for the garbage collector.
    shutil.copytree(folder / "model", tmp_path / "model")
    kept = loaded(tmp_path, "4bit")
    assert quantised.layers(kept)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
