"""The counts of `secure-fed methods` equal the parameters that methods add, train and send in real rounds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from secure_fed.config import DataConfig, ModelConfig, RunConfig
from secure_fed.errors import ConfigError, ModelError
from secure_fed.learning import tasks
from secure_fed.learning.models import loading
from secure_fed.learning.models.loading import load
from secure_fed.learning.tasks import TASKS
from secure_fed.methods import METHODS, build, card, counted
from secure_fed.methods.catalogue import catalogue
from secure_fed.methods.method import State
from secure_fed.report.terminal import show_methods
from secure_fed.tensors.tensors import Tensors
from tests.golden import golden, refused

LLAMA_7B = {
    **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096},
}
DECODER = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
DEBERTA = {
    **{"model_type": "deberta-v2", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "vocab_size": 40, "relative_attention": True, "pooler_hidden_size": 16},
}


def described(folder: Path, config: dict[str, Any]) -> str:
    """The path of a model folder that contains only a configuration."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leave these methods alone in the catalogue: counting all of them takes most of a second for each model."""
    monkeypatch.setattr("secure_fed.methods.catalogue.METHODS", {name: METHODS[name] for name in names})


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in rows}


def really(name: str, model: Path) -> dict[str, int]:
    """A row's counts measured in a real round: a model with weights, contributions, and serialised tensors."""
    config = RunConfig.from_dict({"method": {"name": name}, "model": {"max_length": 2}})
    loaded = load(ModelConfig(name=str(model), max_length=2), tasks.build(DataConfig()), ("no", "yes"), seed=0)
    method = build(config)
    state = State(method.prepare(loaded.model, loaded.head, seed=0))
    plan = method.plan(state)
    after = Tensors((n, state.tensors.tensor(n) + 0.1) for n in plan.trainable)
    means: dict[str, Tensors] = {}
    for pass_name in plan.passes:
        means[pass_name] = method.contribute(pass_name, state.tensors, after, means)
    up = sum(len(sent.to_bytes()) for sent in means.values())
    down = len(state.tensors.select(plan.down).to_bytes())
    trainable = sum(state.tensors.tensor(n).numel() for n in plan.trainable)
    return {"trainable": trainable, "bytes_up": up, "bytes_down": down, "bytes_per_round": up + down}


@pytest.mark.nightly
def test_counts_are_those_of_a_round_that_is_done(small_model: Path) -> None:
    rows = by_name(catalogue(str(small_model)))
    assert list(rows) == list(METHODS)
    for name, row in rows.items():
        counted = really(name, small_model)
        assert {key: row[key] for key in counted} == counted, name
        assert row["not_applicable"] is None


def test_a_row_says_what_the_card_says() -> None:
    for name, row in by_name(counted.rows("builtin/tiny", [], counted.usual_classes("builtin/tiny"))).items():
        assert (row["paper"], row["travels"], row["mean_exact"]) == (
            card(name).paper,
            card(name).travels,
            card(name).mean_exact,
        )
        assert (row["units"], row["refusals"]) == (["none", *card(name).units], dict(card(name).refusals))


def test_the_kept_rows_are_those_of_the_catalogue() -> None:
    usual = counted.rows("builtin/tiny", [], counted.usual_classes("builtin/tiny"))
    assert usual == json.loads(counted.KEPT.read_text(encoding="utf-8")), "names of methods are missing"
    made = json.loads(json.dumps(catalogue("builtin/tiny", (), counted.usual_classes("builtin/tiny"))))
    assert usual == made, "run python -m secure_fed.methods.counted"


def decoder(folder: Path, tokenizer: Any, **shape: int) -> Path:
    """A folder with a Llama of one layer, whose output layer is its own."""
    config = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, tie_word_embeddings=False, **(DECODER | shape))
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("task", TASKS)
def test_what_a_task_trains_is_counted(
    task: str, small_model: Path, small_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many numbers as the model of a run of the task has for the method, with its head or without any."""
    only(monkeypatch, "fedft", "head", "fedlora", "prefix_tuning")
    built = tasks.build(DataConfig(task=task))
    model = decoder(tmp_path / "llama", small_tokenizer) if built.keeps_head else small_model
    classes = counted.classes_of(str(model), task, 3 if task in counted.WITH_CLASSES else None)
    labels = [str(label) for label in range(classes or 0)]
    for name, row in by_name(counted.rows(str(model), [], classes, task)).items():
        loaded = load(ModelConfig(name=str(model), max_length=2), built, labels, seed=0)
        own = RunConfig.from_dict({"method": {"name": name}, "model": {"max_length": 2}})
        if name == "head" and built.keeps_head:
            assert row["trainable"] is None
            assert "no head" in row["not_applicable"]
            continue
        assert row["trainable"] == build(own).prepare(loaded.model, loaded.head, seed=0).numel, name
    assert row["head_factor"] == 1.0 or loaded.head


def test_a_language_model_is_counted_without_its_weights(
    small_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names in its checkpoint are read, and no number; a folder with a configuration alone counts the same."""
    only(monkeypatch, "fedft", "head", "federa", "fedlora")
    made: list[Any] = []
    real = loading._pretrained
    monkeypatch.setattr(loading, "_pretrained", lambda *given, **named: made.append(real(*given, **named)) or made[-1])
    model = decoder(tmp_path / "llama", small_tokenizer)
    rows = catalogue(str(model), [], None, "causal_lm")
    assert {one.device.type for found, _ in made for one in found.parameters()} == {"meta"}
    (tmp_path / "bare").mkdir()
    shutil.copy(model / "config.json", tmp_path / "bare")
    assert catalogue(str(tmp_path / "bare"), [], None, "causal_lm") == rows
    linear, rank = (2 * 16 * 16, 2 * 16 * 8, 3 * 16 * 24), RunConfig().method.rank
    whole = by_name(catalogue(str(model), ["method.target_modules=all-linear"], None, "causal_lm"))
    assert by_name(rows)["federa"]["lr"] == pytest.approx(by_name(rows)["fedlora"]["lr"] / 3)
    assert by_name(rows)["fedft"]["trainable"] == 2 * 46 * 16 + sum(linear) + 3 * 16
    assert whole["fedlora"]["trainable"] == rank * (2 * 2 * 16 + 2 * (16 + 8) + 3 * (16 + 24))


def test_quantised_models_have_the_shapes_that_they_compute_with(
    small_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the setting, without bitsandbytes, and stored; only a method that trains the stored weights has no place."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    shape = {"hidden_size": 64, "intermediate_size": 128}
    whole = decoder(tmp_path / "whole", small_tokenizer, **shape)
    four: Any = BitsAndBytesConfig(load_in_4bit=True)  # type: ignore[no-untyped-call]
    AutoModelForCausalLM.from_pretrained(whole, quantization_config=four, device_map={"": "cpu"}).save_pretrained(
        tmp_path / "four"
    )
    only(monkeypatch, "fedft", "fedlora", "adapter_houlsby", "fra_lora")
    usual = by_name(catalogue(str(whole), [], None, "causal_lm"))
    monkeypatch.setattr("secure_fed.learning.models.locate.find_spec", lambda name: None)
    asked = by_name(catalogue(str(whole), ["model.quantization=4bit"], None, "causal_lm"))
    for found in (asked, by_name(catalogue(str(tmp_path / "four"), [], None, "causal_lm"))):
        row = found.pop("fedft")
        assert (row["trainable"], usual["fedft"]["trainable"] > 0) == (None, True)
        assert "4bit" in row["not_applicable"]
        assert found == {name: row for name, row in usual.items() if name != "fedft"}


def test_no_weights_are_needed_and_heads_and_trained_modules_are_counted(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "fedft", "fedlora")
    (tmp_path / "bare").mkdir()
    shutil.copy(small_model / "config.json", tmp_path / "bare")
    usual = catalogue(str(tmp_path / "bare"))
    assert usual == catalogue(str(small_model))
    pooled = catalogue(str(tmp_path / "bare"), ["model.pooling=mean"])
    assert pooled == catalogue(str(small_model), ["model.pooling=mean"])
    more = catalogue(str(small_model), ["method.modules_to_save=word_embeddings"])
    five = counted.rows(str(small_model), [], 5)
    counts = [by_name(rows)["fedlora"]["trainable"] for rows in (usual, pooled, more, five)]
    assert [counts[0] - counts[1], counts[2] - counts[0], counts[3] - counts[0]] == [
        16 * 16 + 16,  # BERT's pooler, which pre-training left out
        46 * 16,
        3 * (16 + 1),
    ]
    assert by_name(more)["fedft"] == by_name(usual)["fedft"]


@pytest.mark.parametrize(
    ("task", "more", "setting"),
    [
        ("classification", ("training.lr=0.1",), "training.lr"),
        ("classification", ("method.name=fedlora",), "method.name"),
        ("tokens", ("model.pooling=mean",), "model.pooling"),
    ],
)
def test_settings_that_change_no_count_are_refused(
    task: str, more: tuple[str, ...], setting: str, small_model: Path
) -> None:
    with refused(ConfigError, setting):
        catalogue(str(small_model), more, None, task)


def test_models_and_classes_that_a_task_cannot_have_are_refused(small_model: Path, tmp_path: Path) -> None:
    with refused(ModelError, "model.name", hide=r"\S*small-model\S*"):
        catalogue(str(small_model), [], None, "causal_lm")
    with refused(ModelError, worded=False):
        catalogue(described(tmp_path / "model", {"model_type": "abacus"}))
    for task, classes in (("classification", 1), ("regression", 3)):
        with refused(ConfigError, "--classes"):
            counted.classes_of(str(small_model), task, classes)


@pytest.mark.parametrize(
    ("config", "name"), [({**LLAMA_7B, **DECODER, "num_attention_heads": 2}, "bitfit"), (DEBERTA, "prefix_tuning")]
)
def test_a_method_that_has_no_place_in_the_model(
    config: dict[str, Any],
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only(monkeypatch, "fedft", "bitfit", "prefix_tuning", "fedtt")
    found = catalogue(described(tmp_path / "model", config))
    rows = by_name(found)
    row = rows.pop(name)
    assert [row[key] for key in ("trainable", "bytes_per_round", "bytes_up", "bytes_down")] == [None] * 4
    assert all(other["not_applicable"] is None and other["trainable"] > 0 for other in rows.values())
    monkeypatch.setenv("COLUMNS", "100")
    show_methods("this", 2, found)
    printed = capsys.readouterr().out
    golden(f"methods/without_{name}.txt", printed)
    assert all(len(line) <= 100 for line in printed.splitlines())


def test_a_setting_counts_for_the_methods_that_read_it(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("fedft", "bitfit", "fedlora", "fedara", "fedtt", "c2a")
    only(monkeypatch, *names)
    usual, small = by_name(catalogue(str(small_model))), by_name(catalogue(str(small_model), ["method.rank=4"]))
    head = 16 * 16 + 16 + 16 * 2 + 2
    assert usual["fedlora"]["trainable"] - head == 2 * (small["fedlora"]["trainable"] - head) > 0
    for name in names:
        reads = "rank" in card(name).options
        assert (small[name] == usual[name]) is not reads, name


@pytest.mark.nightly
def test_the_passes_of_a_sketch_are_counted(small_model: Path) -> None:
    rows = by_name(catalogue(str(small_model), ["method.rank=1", "method.transport_form=sketch", "method.sketch=2"]))
    whole = by_name(catalogue(str(small_model), ["method.rank=1"]))
    assert rows["fra_lora"]["bytes_up"] != whole["fra_lora"]["bytes_up"]
    assert rows["fedlora"] == whole["fedlora"]
    assert "has no effect with method.rule" in rows["federa"]["not_applicable"]
