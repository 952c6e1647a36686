"""Exported folders compute what the trained model does, in the hands of PEFT and transformers alone."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, PeftModel
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification

from secure_fed.adapters.lora import LoraAdapter
from secure_fed.config import MethodConfig
from secure_fed.errors import ModelError, UsageError
from secure_fed.export import write_adapter, write_merged
from secure_fed.methods import METHODS, build
from secure_fed.methods.method import CHANGE, Method, State
from secure_fed.model_card import ModelCard
from secure_fed.tensors import Tensors
from tests.secure_fed import small_models


def train(method: Method, model: nn.Module, head: list[str], rounds: int = 3) -> None:
    """A few rounds of a federation of one whose training is chance, loaded into the model."""
    state = State(method.prepare(model, head, seed=0))
    generator = torch.Generator().manual_seed(1)
    for _ in range(rounds):
        after = Tensors(
            (n, state.tensors.tensor(n) + 0.2 * torch.randn(state.tensors[n].shape, generator=generator))
            for n in method.plan(state).trainable
        )
        state = method.apply(state, {CHANGE: method.contribute(CHANGE, state.tensors, after, {})})
    with torch.no_grad():
        for name in state.tensors:
            model.get_parameter(name).copy_(state.tensors.tensor(name))


def method_of(name: str, target_modules: tuple[str, ...] | str = "") -> Method:
    switch = {"switch_round": 2} if name == "fra_then_ffa" else {}
    return build(MethodConfig(name=name, rank=2, alpha=8.0, target_modules=target_modules, **switch))  # type: ignore[arg-type]


def saved_base(model: nn.Module, folder: Path) -> str:
    """The base model alone, as on a hub: without the classifier."""
    base = getattr(model, model.base_model_prefix)  # type: ignore[arg-type]
    base.save_pretrained(folder)
    return str(folder)


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((left - right).abs().max() <= 1e-5 * right.abs().max())


@pytest.mark.parametrize("architecture", small_models.ARCHITECTURES)
@pytest.mark.parametrize("name", METHODS)
def test_peft_computes_the_same(architecture: str, name: str, tmp_path: Path) -> None:
    model = small_models.make(architecture)
    untrained = small_models.logits(model)
    base_folder = saved_base(model, tmp_path / "base")
    head = small_models.head_of(model)
    method = method_of(name)
    train(method, model, head)
    want = small_models.logits(model)
    assert not equal(untrained, want)

    card = ModelCard("test", base_folder, ("a", "b", "c"))
    write_adapter(tmp_path / "out", model, head, adapter=method.adapter, card=card)
    torch.manual_seed(9)
    base = AutoModelForSequenceClassification.from_pretrained(base_folder, num_labels=3)
    assert not equal(small_models.logits(base), want)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "out"))
    assert equal(small_models.logits(loaded), want)
    assert equal(small_models.logits(loaded.merge_and_unload()), want)


@pytest.mark.parametrize("architecture", small_models.ARCHITECTURES)
def test_targets_among_the_heads_namesakes(architecture: str, tmp_path: Path) -> None:
    """all-linear with heads that hold layers called like the base model's ("dense")."""
    model = small_models.make(architecture)
    base_folder = saved_base(model, tmp_path / "base")
    head = small_models.head_of(model)
    method = method_of("fedlora", "all-linear")
    train(method, model, head)
    want = small_models.logits(model)
    write_adapter(tmp_path / "out", model, head, adapter=method.adapter, card=ModelCard("test", base_folder))
    base = AutoModelForSequenceClassification.from_pretrained(base_folder, num_labels=3)
    assert equal(small_models.logits(PeftModel.from_pretrained(base, str(tmp_path / "out"))), want)


def test_the_folder_is_a_standard_one(tmp_path: Path) -> None:
    model = small_models.make("bert")
    base_folder = saved_base(model, tmp_path / "base")
    head = small_models.head_of(model)
    method = method_of("ffa_lora")
    train(method, model, head)
    card = ModelCard("A title", base_folder, ("a", "b | c", "d"), {"rounds": "3"}, pad_token_id=0)
    write_adapter(tmp_path / "out", model, head, adapter=method.adapter, card=card)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"], config["r"], config["lora_alpha"]) == ("LORA", "SEQ_CLS", 2, 8.0)
    assert config["target_modules"] == ["query", "value"]
    assert config["modules_to_save"] == ["bert.pooler.dense", "classifier"]
    assert config["base_model_name_or_path"] == base_folder
    readme = (tmp_path / "out" / "README.md").read_text()
    for fact in ("# A title", f"base_model: '{base_folder}'", "| rounds | 3 |", r"a, b \| c, d", "pad_token_id=0"):
        assert fact in readme
    loaded = AutoPeftModelForSequenceClassification.from_pretrained(str(tmp_path / "out"), num_labels=3)
    assert equal(small_models.logits(loaded), small_models.logits(model))


def test_the_use_shown_in_the_readme_works(tmp_path: Path) -> None:
    model = small_models.make("llama")
    base_folder = saved_base(model, tmp_path / "base")
    method = method_of("fra_lora")
    head = small_models.head_of(model)
    train(method, model, head)
    card = ModelCard("t", base_folder, ("no", "maybe", "yes"), pad_token_id=0)
    write_adapter(tmp_path / "out", model, head, adapter=method.adapter, card=card)
    code = (tmp_path / "out" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    scope: dict[str, nn.Module] = {}
    exec(code.replace("path/to/this/folder", str(tmp_path / "out")), scope)
    assert equal(small_models.logits(scope["model"]), small_models.logits(model))
    assert scope["model"].config.id2label[1] == "maybe"  # type: ignore[union-attr, index]


def test_same_run_same_bytes(tmp_path: Path) -> None:
    contents = []
    for name in ("one", "two"):
        model = small_models.make("bert")
        head = small_models.head_of(model)
        method = method_of("fra_lora", ("value", "query", "key"))
        train(method, model, head)
        write_adapter(tmp_path / name, model, head, adapter=method.adapter, card=ModelCard("t", "base"))
        contents.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert contents[0] == contents[1]


@pytest.mark.parametrize("architecture", ["bert", "llama", "gpt2"])
def test_merged_needs_no_peft(architecture: str, tmp_path: Path) -> None:
    model = small_models.make(architecture)
    method = method_of("fra_lora")
    train(method, model, small_models.head_of(model))
    want = small_models.logits(model)
    write_merged(tmp_path / "out", model, card=ModelCard("t", "some/base", ("a", "b", "c")))
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert equal(small_models.logits(loaded), want)
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert "merged into the base model" in (tmp_path / "out" / "README.md").read_text()
    AutoModel.from_pretrained(tmp_path / "out")


def numbered(layers: int = 14) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)))


@pytest.mark.parametrize("head_layer", [13, 3])
def test_a_plain_module(head_layer: int, tmp_path: Path) -> None:
    """Names that end alike ("3" and "13") are told apart, which PEFT's modules_to_save cannot do."""
    model, head = numbered(), [f"{head_layer}.weight", f"{head_layer}.bias"]
    method = method_of("fedlora", "all-linear")
    train(method, model, head)
    write_adapter(tmp_path / "out", model, head, adapter=method.adapter, card=ModelCard("t", "Sequential"))
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == (["13"] if head_layer == 13 else None)
    loaded = PeftModel.from_pretrained(numbered(), str(tmp_path / "out"))
    x = torch.randn(4, 6)
    assert equal(loaded.eval()(x), model.eval()(x))
    with pytest.raises(ModelError, match="Sequential has no save_pretrained"):
        write_merged(tmp_path / "merged", model, card=ModelCard("t", "Sequential"))


def test_a_head_with_buffers_and_a_parameter_at_the_root(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.value = nn.Linear(5, 5), nn.Linear(5, 5)
            self.norm, self.scale = nn.BatchNorm1d(5), nn.Parameter(torch.ones(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.norm(self.value(self.query(x))) * self.scale
            return out

    for head in (["norm.weight", "norm.bias"], ["norm.weight", "norm.bias", "scale"]):
        torch.manual_seed(0)
        model = Net()
        method = method_of("ffa_lora")
        train(method, model, head)
        out = tmp_path / str(len(head))
        x = torch.randn(8, 5)
        model.train()(x)  # moves the running statistics
        write_adapter(out, model, head, adapter=method.adapter, card=ModelCard("t", "Net"))
        torch.manual_seed(0)
        loaded = PeftModel.from_pretrained(Net(), str(out))
        if len(head) == 2:
            assert equal(loaded.eval()(x), model.eval()(x))
        else:
            assert torch.equal(loaded.base_model.model.scale, model.scale)


def small_export(out: Path) -> None:
    model = numbered(2)
    LoraAdapter(2, target_modules=("0",)).inject(model, ["1.weight"], 0)
    adapter = LoraAdapter(2, target_modules=("0",))
    write_adapter(out, model, ["1.weight"], adapter=adapter, card=ModelCard("t", "Sequential"))


def test_a_folder_in_use_is_refused_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    with pytest.raises(UsageError, match="out exists and is not an empty folder"):
        small_export(out)
    with pytest.raises(UsageError, match=r"mine\.txt exists and is not an empty folder"):
        small_export(out / "mine.txt")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]
    (out / "mine.txt").unlink()
    small_export(out)
    assert (out / "adapter_config.json").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UsageError, match=r"cannot export to .*out: No space left on device"):
        small_export(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_no_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot export to"):
        small_export(tmp_path / "file" / "out")
