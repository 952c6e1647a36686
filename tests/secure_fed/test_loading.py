"""What a configuration names is loaded: models from folders, their heads and precision, data, paths, and warnings."""

from __future__ import annotations

import copy
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from secure_fed.config import DataConfig, ModelConfig, RunConfig, with_absolute_paths
from secure_fed.errors import ConfigError, MethodError, ModelError
from secure_fed.federation import Federation
from secure_fed.learning.models import loading
from secure_fed.learning.models.devices import find_devices, idle_gpu
from secure_fed.learning.models.loading import head_of
from secure_fed.learning.models.locate import locate
from secure_fed.learning.problem import Problem, configured
from secure_fed.learning.tasks import build
from tests.cells import chosen
from tests.golden import refused

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


def parts(model: Path, data: Path, *more: str) -> Problem:
    return configured(RunConfig.load(None, [f"model.name={model}", f"data.train={data}", *more]))


CLIENTS = "federation.clients=4"


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


@pytest.mark.parametrize(
    ("family", "dtype"),
    chosen(
        itertools.product(FAMILIES, ["float32", "bfloat16"]),
        [("bert", "float32"), ("bert", "bfloat16"), ("llama", "bfloat16"), ("gpt2", "bfloat16")],
    ),
)
def test_every_family_trains_a_round_and_its_state_is_float32(
    family: str, dtype: str, tmp_path: Path, small_tokenizer: Any, small_data: Path
) -> None:
    federation = run(saved(tmp_path, family, small_tokenizer), small_data, f"model.dtype={dtype}")
    model, initial = federation.assembly.problem.model, federation.assembly.initial
    computed_in = {parameter.dtype for name, parameter in model.named_parameters() if ".lora_" not in name}
    assert computed_in == {getattr(torch, dtype)}
    if dtype == "bfloat16":
        assert model.config._attn_implementation == "eager"
    result = federation.run()
    record = result.records[0]
    assert math.isfinite(record["train_loss"] + record["loss"])
    assert not record["rejected"]
    before, after = (dict(state.tensors.dense().parts()) for state in (initial, result.state))
    assert {tensor.dtype for tensor in (*before.values(), *after.values())} == {torch.float32}
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert any(name.endswith("lora_B.default.weight") for name in moved)
    assert {name for name in moved if "lora" not in name} == set(federation.assembly.problem.head)
    head = [after[name] for name in federation.assembly.problem.head]
    assert any(not torch.equal(one, one.bfloat16().float()) for one in head), "computed and stored in float32"


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


def test_the_seed_alone_decides_a_new_head_by_the_cpus_generator(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(seed: int) -> None:
        raise AssertionError("a generator of another device was seeded")

    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    first = load(small_model, seed=4).model.classifier.weight
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(456)
    assert not torch.equal(load(small_model, seed=5).model.classifier.weight, first)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", other)
    monkeypatch.setattr(torch.mps, "manual_seed", other)
    with torch.device("meta"):  # as a user's default device
        assert torch.equal(load(small_model, seed=4).model.classifier.weight, first)


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


def without_padding(tokenizer: Any, **special: str) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, unk_token="[UNK]", **special
    )


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | values), encoding="utf-8")


def test_what_does_not_fit_together_is_refused(tmp_path: Path, small_tokenizer: Any) -> None:
    bert, llama = (saved(tmp_path / family, family, small_tokenizer) for family in ("bert", "llama"))
    with refused(ConfigError, "model.revision"):  # of a folder
        load(bert, revision="v2")
    tensors = load_file(bert / "model.safetensors")
    save_file({f"elsewhere.{name}": t for name, t in tensors.items()}, bert / "model.safetensors", {"format": "pt"})
    with refused(ModelError):
        load(bert)
    # LlamaForQuestionAnswering reads weights named `transformer.`, but Llama checkpoints name them `model.`.
    with refused(ModelError):
        loading.load(ModelConfig(name=str(llama)), build(DataConfig(task="question_answering")), (), 0)
    without_padding(small_tokenizer).save_pretrained(llama)
    with refused(ModelError):
        load(llama)
    larger = without_padding(small_tokenizer, eos_token="[SEP]")
    larger.add_special_tokens({"pad_token": "<more>"})
    larger.save_pretrained(llama)
    with refused(ModelError):  # a token without an embedding
        load(llama)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    model.resize_token_embeddings(len(larger) + 9)
    model.save_pretrained(llama)
    assert load(llama).model.get_input_embeddings().num_embeddings == len(larger) + 9


@pytest.mark.parametrize(
    ("family", "positions"),
    chosen([("bert", 64), ("roberta", 63), ("distilbert", 64), ("gpt2", 64)], [("bert", 64), ("roberta", 63)]),
)
def test_the_longest_text_fits_and_a_longer_one_is_refused(
    family: str, positions: int, tmp_path: Path, small_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES[family][1], "n_positions" if family == "gpt2" else "max_position_embeddings", 64)
    loaded = load(saved(tmp_path, family, small_tokenizer), max_length=positions)
    longest = torch.full((1, positions), 7)
    assert loaded.model(longest).logits.shape == (1, 3)
    with pytest.raises((IndexError, RuntimeError)):
        loaded.model(torch.full((1, positions + 1), 7))
    with refused(ConfigError, "model.max_length"):
        load(tmp_path, max_length=positions + 1)


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}", encoding="utf-8")
    assert Path(locate("builtin/tiny")).name == "tiny"
    assert Path(locate("org/name")) == tmp_path / "org" / "name"
    assert locate("org/other") == "org/other"
    assert locate("bert-base-uncased") == "bert-base-uncased"
    with refused(ModelError):
        locate("some/where/else")


def test_a_run_says_that_it_leaves_a_gpu_idle(
    small_model: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = run(small_model, small_data)
    assert not any("model.device" in note for note in federation.notes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    assert "model.device is 'cpu', and Some GPU is not used; set model.device = 'auto' to use it" in federation.notes
    assert not idle_gpu("cuda:0")


def test_devices_that_there_are_and_others() -> None:
    assert find_devices("cpu") == [torch.device("cpu")]
    assert find_devices("auto")[0].type in ("cpu", "cuda", "mps")
    for names in ("cuda:99", "cpu,", "cpu, cpu:0", "cpu, meta"):
        with refused(ConfigError, "model.device", hide=r"here \(.*?\)"):
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
    with refused(ModelError, "model.trust_remote_code"):
        load(folder)
    assert type(load(folder, trust_remote_code=True).model).__name__ == "Shouting"


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


def test_auto_is_natural_where_the_data_say_whose_a_row_is(small_model: Path, small_data: Path) -> None:
    assert parts(small_model, small_data, "data.client=site").names == tuple(f"site-{number}" for number in range(6))
    assert parts(small_model, small_data, CLIENTS).names == tuple(f"client-{number}" for number in range(4))


def test_paths_hold_in_every_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "builtin" / "tiny").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("", encoding="utf-8")
    files = {("data", "train"): ["a.csv", "b.csv", "missing.csv"], ("data", "test"): "a.csv"}
    given = RunConfig().replace({("model", "name"): "model", **files})
    found = with_absolute_paths(given)
    assert found.model.name == str(tmp_path / "model")
    assert with_absolute_paths(RunConfig().replace({("data", "name"): "some/hub-id"})).data.name == "some/hub-id"
    assert with_absolute_paths(RunConfig().replace({("data", "name"): "model"})).data.name == str(tmp_path / "model")
    assert found.data.train == (str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), "missing.csv")
    assert found.data.test == str(tmp_path / "a.csv")
    assert with_absolute_paths(found) == found
    assert with_absolute_paths(RunConfig()) == RunConfig()  # built-in names stay, even if folders have these names


def test_a_tied_layer_is_named_by_both_its_names() -> None:
    model = nn.ModuleDict({"e": nn.Linear(4, 4), "o": nn.Linear(4, 4), "empty": nn.Dropout()})
    model["o"].weight = model["e"].weight
    assert head_of(model, (), ["e"]) == ("e.weight", "e.bias")
    for name in ("o", "empty"):
        with refused(MethodError, "method.modules_to_save"):
            head_of(model, (), [name])


def test_a_text_the_tokenizer_does_not_know_is_said(small_model: Path, small_tokenizer: Any, tmp_path: Path) -> None:
    """But not where the unknown token ends texts too, as with GPT-2's tokenizer, which knows every text."""
    rows = tmp_path / "rows.jsonl"
    strange = [{"text": "日本語 ключ", "label": index % 2} for index in range(8)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in strange), encoding="utf-8")
    warning = parts(small_model, rows, "data.partition=iid").warning
    assert "unknown to the tokenizer" in warning
    assert "set model.name" in warning
    shutil.copytree(small_model, tmp_path / "model")
    tokenizer = copy.deepcopy(small_tokenizer)
    tokenizer.eos_token = tokenizer.unk_token
    tokenizer.save_pretrained(tmp_path / "model")
    assert parts(tmp_path / "model", rows).warning == ""


def test_what_is_cut_and_what_trains_and_tests_is_said(small_model: Path, small_data: Path) -> None:
    file = small_data / "train.jsonl"
    assert parts(small_model, small_data, CLIENTS).warning == ""
    cut = parts(small_model, small_data, CLIENTS, "model.max_length=3").warning
    assert "100% of the training texts reach model.max_length = 3 and are cut there" in cut
    both = parts(small_model, file, CLIENTS, f"data.test={file}").warning
    assert f"data.test names {file}, which data.train names too" in both


def test_several_test_files_are_one_test_set(small_model: Path, small_data: Path) -> None:
    twice, once = (
        parts(small_model, small_data, CLIENTS, f"data.test={json.dumps([str(small_data)] * count)}")
        for count in (2, 1)
    )
    assert len(twice.test) == 2 * len(once.test)
