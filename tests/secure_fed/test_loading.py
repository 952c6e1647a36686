"""Models loaded from a folder: encoders and decoders, the parameters of the head, and the precision of computations."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from secure_fed.config import DataConfig, ModelConfig, RunConfig
from secure_fed.errors import ConfigError, ModelError
from secure_fed.federation import Federation
from secure_fed.learning.models import loading
from secure_fed.learning.models.devices import find_devices, idle_gpu
from secure_fed.learning.models.loading import head_names
from secure_fed.learning.models.locate import locate
from secure_fed.learning.tasks import build

LABELS = ("calm", "wild", "other")
SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
DISTILLED = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
# Pre-trained class, its shape, and the head that a classifier of the family has.
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "bert": ("BertForMaskedLM", SHAPE, ("bert.pooler.dense", "classifier")),
    "roberta": ("RobertaForMaskedLM", SHAPE, ("classifier.dense", "classifier.out_proj")),
    "distilbert": ("DistilBertForMaskedLM", DISTILLED, ("pre_classifier", "classifier")),
    "llama": ("LlamaForCausalLM", SHAPE | {"num_key_value_heads": 1}, ("score",)),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 1, "n_head": 2}, ("score",)),
}


def saved(folder: Path, family: str, tokenizer: Any) -> Path:
    """Saves a pre-trained model of the family, without a classifier, and its tokenizer in `folder`; returns `folder`."""
    name, shape, _ = FAMILIES[family]
    kind = getattr(transformers, name)
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        kind(kind.config_class(vocab_size=len(tokenizer), **special, **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path, labels: tuple[str, ...] = LABELS, seed: int = 0, **settings: Any) -> Any:
    return loading.load(ModelConfig(name=str(folder), **settings), build(DataConfig()), labels, seed)


def run(folder: Path, data: Path, *settings: str) -> Federation:
    files = [f"model.name={folder}", f"data.train={data / 'train.jsonl'}", f"data.test={data / 'test.jsonl'}"]
    return Federation(RunConfig.load(None, [*files, "federation.clients=3", "federation.rounds=1", *settings]))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_what_pre_training_has_not_made(family: str, tmp_path: Path, small_tokenizer: Any) -> None:
    folder = saved(tmp_path, family, small_tokenizer)
    loaded = load(folder)
    owners = dict.fromkeys(name.rpartition(".")[0] for name in loaded.head)
    assert tuple(owners) == FAMILIES[family][2]
    parameters = dict(loaded.model.named_parameters())
    assert set(loaded.head) <= set(parameters)
    kept = load_file(folder / "model.safetensors")
    for name in set(parameters) - set(loaded.head):
        stored = kept.get(name, kept.get(name.removeprefix(f"{loaded.model.base_model_prefix}.")))
        assert stored is not None, name
        assert torch.equal(parameters[name], stored), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_a_round(family: str, tmp_path: Path, small_tokenizer: Any, small_data: Path) -> None:
    federation = run(saved(tmp_path, family, small_tokenizer), small_data)
    result = federation.run()
    assert math.isfinite(result.records[0]["train_loss"])
    assert not any(record["rejected"] for record in result.records)
    moved = [
        name
        for name in federation.assembly.initial.tensors
        if not same(federation.assembly.initial, result.state, name)
    ]
    assert any(name.endswith("lora_B.default.weight") for name in moved)
    assert {name for name in moved if "lora" not in name} == set(federation.assembly.problem.head)


def same(before: Any, after: Any, name: str) -> bool:
    return torch.equal(before.tensors.tensor(name), after.tensors.tensor(name))


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_trains_a_round_and_the_state_stays_float32(
    family: str, tmp_path: Path, small_tokenizer: Any, small_data: Path
) -> None:
    federation = run(saved(tmp_path, family, small_tokenizer), small_data, "model.dtype=bfloat16")
    computed_in = {name: parameter.dtype for name, parameter in federation.assembly.problem.model.named_parameters()}
    assert {dtype for name, dtype in computed_in.items() if ".lora_" not in name} == {torch.bfloat16}
    assert federation.assembly.problem.model.config._attn_implementation == "eager"
    result = federation.run()
    record = result.records[0]
    assert math.isfinite(record["train_loss"])
    assert math.isfinite(record["loss"])
    assert record["rejected"] == []
    for state in (federation.assembly.initial, result.state):
        assert {state.tensors.tensor(name).dtype for name in state.tensors} == {torch.float32}
    # A change smaller than bfloat16 resolves survives, because it is computed and stored in float32.
    changed = [result.state.tensors.tensor(name) for name in federation.assembly.problem.head]
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in changed)


def test_a_head_of_another_size_is_made_new_and_is_head(tmp_path: Path, small_tokenizer: Any) -> None:
    two = load(saved(tmp_path / "pretrained", "bert", small_tokenizer), LABELS[:2])
    two.model.save_pretrained(tmp_path / "two")
    small_tokenizer.save_pretrained(tmp_path / "two")
    same_size, three = load(tmp_path / "two", LABELS[:2], seed=9), load(tmp_path / "two", seed=9)
    assert torch.equal(same_size.model.classifier.weight, two.model.classifier.weight)
    assert three.model.classifier.weight.shape == (3, 16)
    assert three.head == ("classifier.weight", "classifier.bias")
    assert torch.equal(three.model.bert.pooler.dense.weight, two.model.bert.pooler.dense.weight)
    assert three.model.config.id2label == dict(enumerate(LABELS))


def test_the_seed_alone_decides_a_new_head(small_model: Path) -> None:
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    first = load(small_model, seed=4).model.classifier.weight
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(456)
    assert torch.equal(load(small_model, seed=4).model.classifier.weight, first)
    assert not torch.equal(load(small_model, seed=5).model.classifier.weight, first)


def test_only_the_cpus_generator_is_used(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(seed: int) -> None:
        raise AssertionError("a generator of another device was seeded")

    usual = load(small_model, seed=4).model.classifier.weight
    monkeypatch.setattr(torch.cuda, "manual_seed_all", refused)
    monkeypatch.setattr(torch.mps, "manual_seed", refused)
    with torch.device("meta"):  # as a user's default device
        assert torch.equal(load(small_model, seed=4).model.classifier.weight, usual)


def test_a_missing_padding_token_is_the_end_token(tmp_path: Path, small_tokenizer: Any) -> None:
    folder = saved(tmp_path, "llama", without_padding(small_tokenizer, eos_token="[SEP]"))
    edit(folder / "config.json", pad_token_id=None)
    loaded = load(folder)
    assert loaded.tokenizer.pad_token == "[SEP]"
    assert loaded.model.config.pad_token_id == loaded.tokenizer.pad_token_id == 3


def test_the_model_takes_for_padding_what_the_tokenizer_pads_with(tmp_path: Path, small_tokenizer: Any) -> None:
    folder = saved(tmp_path, "llama", small_tokenizer)
    edit(folder / "config.json", pad_token_id=7)
    loaded = load(folder)
    loaded.model.eval()
    short, padded = torch.tensor([[2, 9, 3]]), torch.tensor([[2, 9, 3, 0, 0], [2, 9, 9, 9, 3]])
    alone = loaded.model(short).logits[0]
    among = loaded.model(padded, attention_mask=(padded != 0).long()).logits[0]
    assert torch.allclose(alone, among, atol=1e-6)


def test_neither_padding_nor_end_token_is_refused(tmp_path: Path, small_tokenizer: Any) -> None:
    folder = saved(tmp_path, "llama", without_padding(small_tokenizer))
    with pytest.raises(ModelError, match="neither a padding nor an end token"):
        load(folder)


def without_padding(tokenizer: Any, **special: str) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, unk_token="[UNK]", **special
    )


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | values), encoding="utf-8")


def test_weights_of_another_architecture_are_refused(tmp_path: Path, small_tokenizer: Any) -> None:
    folder = saved(tmp_path, "bert", small_tokenizer)
    tensors = load_file(folder / "model.safetensors")
    save_file({f"elsewhere.{name}": t for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="weights hold no part of a BertForSequenceClassification"):
        load(folder)


def test_weights_under_a_name_that_the_architecture_does_not_read_are_named(
    tmp_path: Path, small_tokenizer: Any
) -> None:
    """LlamaForQuestionAnswering reads weights named `transformer.`, but Llama checkpoints name them `model.`."""
    folder = saved(tmp_path, "llama", small_tokenizer)
    with pytest.raises(
        ModelError, match=r"under 'model\.', and transformers' LlamaForQuestionAnswering .* 'transformer\.'"
    ):
        loading.load(ModelConfig(name=str(folder)), build(DataConfig(task="question_answering")), (), 0)


def test_a_token_without_an_embedding_is_refused(tmp_path: Path, small_tokenizer: Any) -> None:
    folder = saved(tmp_path, "llama", small_tokenizer)
    rows = len(small_tokenizer)
    larger = without_padding(small_tokenizer, eos_token="[SEP]")
    larger.add_special_tokens({"pad_token": "<more>"})
    larger.save_pretrained(folder)
    with pytest.raises(
        ModelError, match=rf"'<more>' as token {rows}, .* below {rows}: .*resize_token_embeddings\({rows + 1}\)"
    ):
        load(folder)


def test_more_embeddings_than_tokens_are_fine(tmp_path: Path, small_tokenizer: Any) -> None:
    folder = saved(tmp_path, "llama", small_tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(small_tokenizer) + 9)
    model.save_pretrained(folder)
    assert load(folder).model.get_input_embeddings().num_embeddings == len(small_tokenizer) + 9


@pytest.mark.parametrize(("family", "positions"), [("bert", 64), ("roberta", 63), ("distilbert", 64), ("gpt2", 64)])
def test_the_longest_text_fits_and_a_longer_one_is_refused(
    family: str, positions: int, tmp_path: Path, small_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES[family][1], "n_positions" if family == "gpt2" else "max_position_embeddings", 64)
    loaded = load(saved(tmp_path, family, small_tokenizer), max_length=positions)
    longest = torch.full((1, positions), 7)
    assert loaded.model(longest).logits.shape == (1, 3)
    with pytest.raises((IndexError, RuntimeError)):
        loaded.model(torch.full((1, positions + 1), 7))
    with pytest.raises(ConfigError, match=rf"max_length is {positions + 1}, more than the {positions} positions"):
        load(tmp_path, max_length=positions + 1)


def test_a_module_of_ones_own_has_no_head_to_be_found() -> None:
    assert head_names(nn.Sequential(nn.Linear(2, 2))) == ()


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}", encoding="utf-8")
    assert Path(locate("builtin/tiny")).name == "tiny"
    assert Path(locate("org/name")) == tmp_path / "org" / "name"
    assert locate("org/other") == "org/other"
    assert locate("bert-base-uncased") == "bert-base-uncased"
    with pytest.raises(ModelError, match="no such folder"):
        locate("some/where/else")


def test_devices() -> None:
    assert find_devices("cpu") == [torch.device("cpu")]
    assert find_devices("auto")[0].type in ("cpu", "cuda", "mps")


def test_a_run_says_that_it_leaves_a_gpu_idle(
    small_model: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = run(small_model, small_data)
    assert not any("model.device" in note for note in federation.notes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    assert "model.device is 'cpu', and Some GPU is not used; set model.device = 'auto' to use it" in federation.notes
    assert not idle_gpu("cuda:0")


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ("cuda:99", "cannot be used here"),
        ("cpu,", "cannot be used here"),
        ("cpu, cpu:0", "names a device twice"),
        ("cpu, meta", r"of different kinds \(cpu, meta\)"),
    ],
)
def test_devices_that_cannot_be(names: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.device is '{names}'.*{why}"):
        find_devices(names)


@pytest.mark.gpu
def test_a_round_on_the_gpu(small_model: Path, small_data: Path) -> None:
    federation = run(small_model, small_data, "model.device=cuda", "model.dtype=bfloat16")
    result = federation.run()
    assert math.isfinite(result.records[0]["train_loss"])
    assert {result.state.tensors.tensor(name).device.type for name in result.state.tensors} == {"cpu"}


OWN_CODE = """
from transformers import BertConfig, BertForSequenceClassification

class ShoutingConfig(BertConfig):
    model_type = "shouting"

class Shouting(BertForSequenceClassification):
    config_class = ShoutingConfig
"""


def test_code_of_a_model_runs_only_where_the_setting_says_so_and_nobody_is_asked(
    tmp_path: Path, small_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *given: pytest.fail("somebody was asked"))
    folder = saved(tmp_path / "model", "bert", small_tokenizer)
    (folder / "shouting.py").write_text(OWN_CODE, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    classes = {"AutoConfig": "ShoutingConfig", "AutoModelForSequenceClassification": "Shouting"}
    config |= {"model_type": "shouting", "auto_map": {auto: f"shouting.{name}" for auto, name in classes.items()}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError) as refused:
        load(folder)
    assert refused.value.setting == "model.trust_remote_code"
    assert type(load(folder, trust_remote_code=True).model).__name__ == "Shouting"


def test_a_folder_has_no_revision(tmp_path: Path, small_tokenizer: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        load(saved(tmp_path, "bert", small_tokenizer), revision="v2")
    assert refused.value.setting == "model.revision"


def test_a_hub_models_parts_are_all_loaded_in_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(place: str, **settings: Any) -> Any:
        asked.append((place, settings.get("revision"), settings["trust_remote_code"]))
        raise OSError("offline")

    for kind in ("AutoTokenizer", "AutoModelForSequenceClassification"):
        monkeypatch.setattr(f"transformers.{kind}.from_pretrained", noted)
    monkeypatch.setattr("secure_fed.learning.data.hub.commit", lambda *asked: "")
    with pytest.raises(ModelError):
        load(Path("somebody/model"), revision="v2")
    assert asked == [("somebody/model", "v2", False)]
