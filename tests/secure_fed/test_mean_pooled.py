"""A head that reads the mean over tokens: its scores, its trainable parameters, and loading of the exported model."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import AutoPeftModel
from torch import nn

from attacks.any_model.shadows import require_fits
from attacks.any_model.subject import opened
from attacks.options import Asked
from secure_fed import Federation, MeanPooledForSequenceClassification, RunConfig, load_run
from secure_fed.config import DataConfig, ModelConfig
from secure_fed.errors import ConfigError, ModelError
from secure_fed.learning.models import loading
from secure_fed.learning.models.mean_pooled import MeanPooledConfig
from secure_fed.learning.problem import configured
from secure_fed.learning.tasks import build
from secure_fed.methods import METHODS
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed.example_gradients import together
from tests.secure_fed.test_loading import FAMILIES, saved
from tests.secure_fed.test_per_example import adapted, check, texts, without_dropout

LABELS = ("calm", "wild", "other")
IDS = torch.tensor([[2, 4, 6, 7, 3], [2, 5, 3, 0, 0]])  # the second text is padded


def load(folder: Path, seed: int = 0, **settings: Any) -> loading.Loaded:
    return loading.load(ModelConfig(name=str(folder), pooling="mean", **settings), build(DataConfig()), LABELS, seed)


@torch.no_grad()
def scores(model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=IDS, attention_mask=(IDS != 0).long()).logits
    return found


@pytest.mark.parametrize("family", chosen(FAMILIES, ["bert", "roberta", "llama"]))
def test_the_scores_are_a_linear_layer_on_the_mean(family: str, tmp_path: Path, small_tokenizer: Any) -> None:
    """Expected: transformers' base model on each text by itself, with the mean formed in a loop over its tokens."""
    folder = saved(tmp_path, family, small_tokenizer)
    loaded = load(folder)
    assert loaded.head == ("classifier.weight", "classifier.bias")
    base = transformers.AutoModel.from_pretrained(folder).eval()
    layer = loaded.model.get_submodule("classifier")
    for row, got in zip(IDS, scores(loaded.model), strict=True):
        text = row[row != 0]
        with torch.no_grad():
            states = base(input_ids=text.unsqueeze(0)).last_hidden_state[0]
            want = layer(sum(state for state in states) / len(text))
        assert torch.allclose(got, want, atol=1e-5)


def test_the_head_is_drawn_from_the_seed_alone(small_model: Path) -> None:
    first, again, other = (load(small_model, seed).model for seed in (0, 0, 1))
    heads = [model.get_parameter("classifier.weight") for model in (first, again, other)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert not [name for name, _ in first.named_parameters() if "pooler" in name], "nothing would read it"


def config(model: Path, data: Path, *settings: str) -> RunConfig:
    files = [f"model.name={model}", f"data.train={data / 'train.jsonl'}", f"data.test={data / 'test.jsonl'}"]
    small = ["model.max_length=32", "federation.clients=3", "federation.rounds=1", "training.lr=0.02"]
    return RunConfig.load(None, [*files, *small, *settings])


def trained(model: Path, data: Path, out: Path, *settings: str) -> Any:
    Federation(config(model, data, "model.pooling=mean", *settings)).run(out)
    return load_run(out)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, small_model: Path, small_data: Path) -> Any:
    return trained(small_model, small_data, tmp_path_factory.mktemp("pooled") / "run", "method.name=fedlora")


@pytest.fixture(scope="module")
def whole(done: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = done.export(tmp_path_factory.mktemp("whole") / "model", merged=True)
    return folder


def test_peft_loads_what_is_written(done: Any, tmp_path: Path) -> None:
    """By the lines of the exported README, and by PEFT's class for any adapter."""
    folder = done.export(tmp_path / "out")
    assert torch.allclose(scores(shown(folder)), scores(done.model), atol=1e-5)
    known: dict[str, Any] = {"num_labels": len(done.label_names), "import_allowlist": ["secure_fed"]}
    assert torch.allclose(scores(AutoPeftModel.from_pretrained(folder, **known)), scores(done.model), atol=1e-5)


@pytest.mark.parametrize("method", chosen([name for name in METHODS if name != "fedlora"], ["prompt_tuning"]))
def test_every_method_trains_it_and_others_load_what_it_writes(
    method: str, small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    done = trained(small_model, small_data, tmp_path / "run", f"method.name={method}")
    want = scores(done.model)
    assert torch.allclose(scores(shown(done.export(tmp_path / "out"))), want, atol=1e-5)


def readme_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def code_in(folder: Path) -> str:
    return readme_of(folder).split("```python\n")[1].split("```")[0].replace("path/to/this/folder", str(folder))


def shown(folder: Path) -> nn.Module:
    """The model that the code in the folder's README makes."""
    scope: dict[str, Any] = {}
    exec(code_in(folder), scope)
    model: nn.Module = scope["model"]
    return model


@pytest.mark.nightly
def test_the_whole_model_is_loaded_where_there_is_no_secure_fed(
    small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(small_model, tmp_path / "secret place" / "model")
    done = trained(moved, small_data, tmp_path / "run")
    folder = done.export(tmp_path / "whole", merged=True)
    want = scores(done.model)
    assert "secret place" not in (folder / "config.json").read_text(encoding="utf-8")
    lines = [
        "import sys, json, torch",
        "sys.modules['secure_fed'] = None  # importing it is an error",
        code_in(folder),
        f"ids = torch.tensor({IDS.tolist()})",
        "with torch.no_grad():",
        "    print(json.dumps(model(input_ids=ids, attention_mask=(ids != 0).long()).logits.tolist()))",
    ]
    found = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert torch.allclose(torch.tensor(json.loads(found.stdout.splitlines()[-1])), want, atol=1e-5)
    assert torch.allclose(scores(shown(folder)), want, atol=1e-5), "nor with it"


@pytest.mark.parametrize("pooling", chosen(["mean", "model"], ["model"]))
def test_a_model_that_was_written_goes_on_with_its_head(
    pooling: str, done: Any, whole: Path, small_data: Path, tmp_path: Path
) -> None:
    again = loading.load(ModelConfig(name=str(whole), pooling=pooling), build(DataConfig()), done.label_names, seed=3)
    assert torch.allclose(scores(again.model), scores(done.model), atol=1e-5)
    assert again.head == ("classifier.weight", "classifier.bias")
    later = trained(whole, small_data, tmp_path / "later", f"model.pooling={pooling}")
    for merged in (False, True):
        out = later.export(tmp_path / f"out-{merged}", merged=merged)
        assert torch.allclose(scores(shown(out)), scores(later.model), atol=1e-5)
        assert "| the head reads | the mean over tokens |" in readme_of(out)


@pytest.mark.parametrize("method", chosen(["fedlora", "ia3"], ["ia3"]))
def test_a_classifier_given_in_python_is_exported_as_what_it_is(method: str, small_model: Path, tmp_path: Path) -> None:
    model = MeanPooledForSequenceClassification.from_pretrained(small_model, num_labels=3)
    own = RunConfig.from_dict({"method": {"name": method}, "federation": {"rounds": 1}, "training": {"lr": 0.05}})
    federation = Federation(own, model=model, train=[texts(8), texts(8)], test=texts(4))
    state = federation.run().state
    federation.export(state, tmp_path / "out", base_model=str(small_model))
    assert torch.allclose(scores(shown(tmp_path / "out")), scores(federation.assembly.problem.model), atol=1e-5)


def test_the_gradients_of_single_examples_are_right(small_model: Path) -> None:
    model = without_dropout(load(small_model).model)
    assert check(model, adapted(model), texts()) is together


def test_its_numbers_may_be_halved(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    """A folder is loaded in the requested dtype, whatever dtype it was saved in."""
    done = trained(small_model, small_data, tmp_path / "run", "model.dtype=bfloat16")
    assert {parameter.dtype for parameter in done.model.parameters()} >= {torch.bfloat16}
    folder = done.export(tmp_path / "whole", merged=True)
    shown(folder)
    for dtype in (torch.float32, torch.bfloat16):
        found = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype)
        assert {parameter.dtype for parameter in found.parameters()} == {dtype}
        assert torch.allclose(scores(found).float(), scores(done.model).float(), atol=0.02)
    of_halves = MeanPooledConfig(transformers.AutoConfig.from_pretrained(small_model, dtype="bfloat16"))
    made = MeanPooledForSequenceClassification(of_halves)
    assert {parameter.dtype for parameter in made.parameters()} == {torch.float32}, "in torch's own, as any module"


def test_it_is_loaded_as_models_of_transformers_are(small_model: Path) -> None:
    """`from_pretrained` takes settings of configuration and base model; the model evaluates and names its base for PEFT.

    It gives a loss where labels are given, and a tuple where one is asked for.
    """
    given = {"id2label": {0: "calm", 1: "wild", 2: "other"}, "attn_implementation": "eager", "dtype": "bfloat16"}
    model = MeanPooledForSequenceClassification.from_pretrained(small_model, **given)
    assert model.config.id2label == given["id2label"]
    assert model.encoder.config._attn_implementation == "eager"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(module.training for module in model.modules())
    assert model.name_or_path == str(small_model)
    config = transformers.AutoConfig.from_pretrained(small_model, num_labels=5)
    whole = MeanPooledForSequenceClassification.from_pretrained(small_model, config=config)
    assert whole.config.num_labels == 5
    found = whole(input_ids=IDS, attention_mask=(IDS != 0).long(), labels=torch.tensor([2, 0]))
    assert torch.allclose(found.loss, nn.functional.cross_entropy(found.logits, torch.tensor([2, 0])))
    assert torch.equal(whole(input_ids=IDS, attention_mask=(IDS != 0).long(), return_dict=False)[0], found.logits)


def test_the_second_text_of_a_pair_is_told_from_the_first(small_model: Path) -> None:
    """`forward` names `token_type_ids`, since transformers' Trainer drops columns that `forward` does not name."""
    model = load(small_model).model.eval()
    kinds = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]])
    assert "token_type_ids" in inspect.signature(model.forward).parameters
    with torch.no_grad():
        found = model(input_ids=IDS, attention_mask=(IDS != 0).long(), token_type_ids=kinds).logits
    assert not torch.allclose(found, scores(model), atol=1e-5)


def test_it_is_for_tasks_with_one_answer_a_text() -> None:
    with refused(ConfigError, "model.pooling"):
        RunConfig.from_dict({"model": {"pooling": "mean"}, "data": {"task": "tokens", "train": "x.jsonl"}})


def test_an_encoder_with_a_decoder_is_refused(tmp_path: Path, small_tokenizer: Any) -> None:
    shape = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=len(small_tokenizer), **shape)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    small_tokenizer.save_pretrained(tmp_path)
    with refused(ModelError):
        load(tmp_path)


@pytest.fixture(scope="module")
def encoder(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(small_model, tmp_path_factory.mktemp("encoder") / "model")
    (folder / "1_Pooling").mkdir()
    return folder


@every(
    ("noted", "told"),
    [
        (None, False),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, True),
        ({"pooling_mode": "mean"}, True),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, False),
        ({"pooling_mode": "cls"}, False),
        ([], False),
    ],
)
def test_who_takes_a_sentence_encoder_is_told(noted: object, told: bool, encoder: Path, small_data: Path) -> None:
    """sentence-transformers writes the pooling into a folder in an older and a newer format."""
    if noted is not None:
        (encoder / "1_Pooling" / "config.json").write_text(json.dumps(noted), encoding="utf-8")
    asked = [(), ("model.pooling=mean",)][: 1 + told]  # and who does so already is not told
    warnings = [configured(config(encoder, small_data, *more)).warning for more in asked]
    assert ["set model.pooling = 'mean'" in warning for warning in warnings] == [told, False][: len(asked)]


def test_an_audit_knows_which_head_an_adapter_was_trained_with(
    done: Any, small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    """If the model had none of the adapter's names, PEFT would continue with new layers, and the audit would find no leak."""
    folder, texts_of = done.export(tmp_path / "out"), small_data / "train.jsonl"
    asked = Asked(str(small_model), texts_of, None, DataConfig(train=str(texts_of)), adapter=folder, max_length=32)
    assert torch.allclose(scores(opened(asked).model), scores(done.model), atol=1e-5)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_mapping": None}), encoding="utf-8")
    with refused(ModelError, hide=r"\(Found.*\)"):
        opened(asked)


def test_a_model_of_transformers_that_reads_the_mean_is_left_alone(
    small_data: Path, small_tokenizer: Any, tmp_path: Path
) -> None:
    shape: dict[str, Any] = dict(FAMILIES["bert"][1])
    shape |= {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
    modern = transformers.ModernBertConfig(vocab_size=len(small_tokenizer), classifier_pooling="mean", **shape)
    transformers.ModernBertModel(modern).save_pretrained(tmp_path / "model")
    small_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "1_Pooling").mkdir()
    (tmp_path / "model" / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}', encoding="utf-8")
    assert "model.pooling" not in configured(config(tmp_path / "model", small_data)).warning


def test_shadows_have_the_head_of_the_audited_model(
    done: Any, whole: Path, small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    texts_of = small_data / "train.jsonl"
    of_adapter = Asked(str(small_model), texts_of, None, DataConfig(), adapter=done.export(tmp_path / "out"))
    for asked in (of_adapter, Asked(str(whole), texts_of, None, DataConfig())):
        require_fits(RunConfig.from_dict({"model": {"name": str(small_model), "pooling": "mean"}}), asked, 4)
        with refused(ConfigError, "model.pooling"):
            require_fits(RunConfig.from_dict({"model": {"name": str(small_model)}}), asked, 4)
