"""Exported folders compute the same as the trained model, loaded by PEFT and transformers alone or by `load_adapter`."""

from __future__ import annotations

import copy
import errno
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, PeftModel
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForSequenceClassification,
)

from secure_fed import load_adapter
from secure_fed.config import RunConfig
from secure_fed.errors import MethodError, ModelError, UsageError
from secure_fed.export.export import Adapted, write_adapter, write_merged
from secure_fed.export.model_card import ModelCard
from secure_fed.export.peft_folder import fill
from secure_fed.learning.models.adapters.lora import LoraAdapter, LoraForm
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.objective import Objective
from secure_fed.methods import METHODS, build, card
from secure_fed.methods.method import LoraShaped, Method, State
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import small_models

ROUNDS = 3

# Options that make each method small, and let three rounds cover all its phases.
SMALL: dict[str, Any] = {
    **{"rank": 2, "alpha": 8.0, "switch_round": 1, "oversampling": 2},
    **{"final_rank": 1, "warmup_rounds": 0, "final_rounds": 1},
    **{"bottleneck": 8, "prompt_length": 3, "context_dim": 3, "hyper_dim": 4},
}


def config_of(name: str, **settings: Any) -> RunConfig:
    small = {key: value for key, value in SMALL.items() if key in card(name).options}
    return RunConfig.from_dict({"method": {"name": name, **small, **settings}, "federation": {"rounds": ROUNDS}})


LORA_SHAPED = [name for name in METHODS if isinstance(build(config_of(name)), LoraShaped)]
OTHERS = [name for name in METHODS if name not in LORA_SHAPED]
SELECTIVE = ("head", "bitfit", "fedft")  # train parameters that the base model has anyway

# LLaMA has no biases to train; the other three do not accept keys and values of a prefix.
NOWHERE = {("bitfit", "llama"), *(("prefix_tuning", other) for other in ("distilbert", "deberta", "deberta_v3"))}


def fitting(names: Iterable[str], architectures: Iterable[str]) -> list[tuple[str, str]]:
    """The pairs of a method and an architecture to which it can be applied."""
    return [pair for pair in itertools.product(names, architectures) if pair not in NOWHERE]


def train(method: Method, initial: Tensors, rounds: int = ROUNDS) -> State:
    """The state after a few rounds with one client, whose training adds random numbers."""
    state = State(initial)
    generator = torch.Generator().manual_seed(1)
    for _ in range(rounds):
        plan = method.plan(state)
        after = Tensors(
            (n, state.tensors.tensor(n) + 0.2 * torch.randn(state.tensors[n].shape, generator=generator))
            for n in plan.trainable
        )
        means: dict[str, Tensors] = {}
        for pass_name in plan.passes:
            means[pass_name] = method.contribute(pass_name, state.tensors, after, means)
        state = method.apply(state, means)
    return state


def adapted(config: RunConfig, model: nn.Module, head: list[str], base_model: str = "", **said: Any) -> Adapted:
    """Trains the model with random numbers, and returns the input of its export."""
    method = build(config)
    initial = method.prepare(model, head, seed=config.federation.seed)
    state = train(method, initial)
    with torch.no_grad():
        Objective(model, classification.loss, torch.device("cpu")).load(state.tensors)
    return Adapted(config, method, model, tuple(head), initial, state, ModelCard("test", base_model, **said))


def saved_base(model: nn.Module, folder: Path) -> str:
    """The base model alone, as on a hub: without the classifier."""
    base = getattr(model, model.base_model_prefix)  # type: ignore[arg-type]
    base.save_pretrained(folder)
    return str(folder)


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((left - right).abs().max() <= 1e-5 * right.abs().max())


def compare_with_peft(config: RunConfig, architecture: str, out: Path) -> PeftModel:
    """Returns PEFT's model of an export, after checking that its logits are those of the trained model."""
    model = small_models.make(architecture)
    untrained = small_models.logits(model)
    base_folder = saved_base(model, out / "base")
    exported = adapted(config, model, small_models.head_of(model), base_folder)
    want = small_models.logits(model)
    assert not equal(untrained, want)
    write_adapter(out / "out", exported)
    torch.manual_seed(9)
    base = AutoModelForSequenceClassification.from_pretrained(base_folder, num_labels=3)
    assert not equal(small_models.logits(base), want)
    loaded = PeftModel.from_pretrained(base, str(out / "out"))
    assert equal(small_models.logits(loaded), want)
    return loaded


@pytest.mark.parametrize("architecture", chosen(small_models.ARCHITECTURES, ["bert", "deberta_v3", "llama", "gpt2"]))
def test_peft_knows_every_architecture(architecture: str, tmp_path: Path) -> None:
    """With adapters in all layers, beside heads whose layers are called like layers of the base model ("dense")."""
    loaded = compare_with_peft(config_of("fedlora", target_modules="all-linear"), architecture, tmp_path)
    want = small_models.logits(loaded)
    assert torch.allclose(small_models.logits(loaded.merge_and_unload()), want, rtol=1e-3, atol=1e-4)


OF_RULES = [("bert", "federa", {"rule": rule}) for rule in ("fedlora", "ffa_lora", "rolora", "fra_lora")]
AT_THE_OTHER_SCALE = [("bert", name, {"rslora": True}) for name in LORA_SHAPED if "rslora" in card(name).options]
ALL_SHAPED = [(*pair, {}) for pair in itertools.product(["bert", "llama", "gpt2"], LORA_SHAPED)]
QUICK_SHAPED = [("bert", name, {}) for name in ("fedlora", "federa", "fedara", "fedsvd")]
QUICK_SHAPED += [("gpt2", "fra_lora", {}), OF_RULES[1], OF_RULES[3]]
QUICK_SHAPED += [one for one in AT_THE_OTHER_SCALE if one[1] in ("fra_lora", "fedara")]


@pytest.mark.parametrize(
    ("architecture", "name", "settings"), chosen([*ALL_SHAPED, *AT_THE_OTHER_SCALE, *OF_RULES], QUICK_SHAPED)
)
def test_peft_computes_the_same(architecture: str, name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    compare_with_peft(config_of(name, **settings), architecture, tmp_path)


def test_ranks_that_are_gone_are_not_exported(tmp_path: Path) -> None:
    """Three rounds of FedARA halve the ranks, so the folder holds matrices of several ranks."""
    compare_with_peft(config_of("fedara", rank=4, target_modules="all-linear"), "bert", tmp_path)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text(encoding="utf-8"))
    assert len(set(config["rank_pattern"].values()) - {4}) > 1


@every("rslora, ranks", [(False, {"0": 1, "inner.0": 2, "inner.1": 5}), (True, {"0": 1, "inner.1": 5}), (False, {})])
def test_ranks_of_their_own_keep_the_scale(
    rslora: bool, ranks: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Layers of ranks one, two and five, layers that have lost every rank, and names that end like other names."""
    model, head, out = nested(), ["head.weight"], tmp_path_factory.mktemp("ranks")
    method = LoraAdapter(2, 8.0, rslora=rslora, target_modules="all-linear")
    method.inject(model, head, 0)
    drawn = torch.Generator().manual_seed(3)
    factors = {
        name: (torch.randn(rank, 6, generator=drawn), torch.randn(6, rank, generator=drawn))
        for name, rank in ranks.items()
    }
    zero = torch.zeros(2, 6)
    start = LoraForm(method, dict.fromkeys(("0", "1", "inner.0", "inner.1"), (zero, zero.T)))
    fill(out, model, head, LoraForm(method, factors), start, "")
    loaded = PeftModel.from_pretrained(nested(), str(out)).merge_and_unload()
    scale = 8 / 2**0.5 if rslora else 4
    for name, before in nested().named_parameters():
        change = scale * factors[name[:-7]][1] @ factors[name[:-7]][0] if name[:-7] in factors else 0
        assert torch.allclose(loaded.get_parameter(name), before + change, atol=1e-5), name


def nested() -> nn.Module:
    """Layers called 0, 1, inner.0 and inner.1, whose names end alike, and a head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = [nn.Linear(6, 6, bias=False) for _ in range(5)]
    model = nn.ModuleDict({"0": made[0], "1": made[1], "inner": nn.ModuleList(made[2:4]), "head": made[4]})
    return model


@pytest.mark.parametrize(
    ("name", "architecture"),
    chosen(
        fitting(OTHERS, small_models.ARCHITECTURES),
        [*fitting(OTHERS, ["bert"]), *fitting(["prompt_tuning"], ["llama", "gpt2"])],
    ),
)
def test_load_adapter_computes_the_same(name: str, architecture: str, tmp_path: Path) -> None:
    model, base = small_models.make(architecture), small_models.make(architecture)
    head = small_models.head_of(model)
    with torch.no_grad():
        for parameter in head:  # a loaded base model has a random head too
            base.get_parameter(parameter).normal_()
    exported = adapted(config_of(name), model, head)
    want = small_models.logits(model)
    assert not equal(small_models.logits(base), want)
    write_adapter(tmp_path / "out", exported)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "adapter.safetensors",
        "secure_fed.json",
        "README.md",
    }
    loaded = load_adapter(tmp_path / "out", base)
    assert loaded is base
    assert not loaded.training
    assert equal(small_models.logits(loaded), want)


def test_the_folder_is_a_standard_one(tmp_path: Path) -> None:
    model = small_models.make("bert")
    base_folder = saved_base(model, tmp_path / "base")
    said = {"label_names": ("a", "b | c", "d"), "facts": {"rounds": "3"}, "pad_token_id": 0}
    write_adapter(
        tmp_path / "out",
        adapted(config_of("ffa_lora"), model, small_models.head_of(model), base_folder, **said),
    )
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"adapter_config.json", "adapter_model.safetensors", "labels.json", "README.md"}
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"], config["r"], config["lora_alpha"]) == ("LORA", "SEQ_CLS", 2, 8.0)
    assert config["target_modules"] == ["query", "value"]
    assert config["modules_to_save"] == ["bert.pooler.dense", "classifier"]
    assert config["base_model_name_or_path"] == base_folder
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({}, {})
    readme = (tmp_path / "out" / "README.md").read_text()
    for fact in ("# test", f"base_model: '{base_folder}'", "| rounds | 3 |", r"a, b \| c, d", "pad_token_id=0"):
        assert fact in readme
    names = json.loads((tmp_path / "out" / "labels.json").read_text())
    assert names == ["a", "b | c", "d"]
    code = readme.split("```python\n")[1].split("```")[0].replace("path/to/this/folder", str(tmp_path / "out"))
    (by_names,) = [line.removeprefix("# or: ") for line in code.splitlines() if line.startswith("# or: ")]
    for line in (code, by_names):
        scope: dict[str, Any] = {
            "json": json,
            "AutoPeftModelForSequenceClassification": AutoPeftModelForSequenceClassification,
        }
        exec(line, scope)
        loaded = scope["model"].eval()
        assert equal(small_models.logits(loaded), small_models.logits(model))
        assert loaded.config.id2label == {0: "a", 1: "b | c", 2: "d"}
        assert loaded.config.label2id == {"a": 0, "b | c": 1, "d": 2}


@pytest.mark.parametrize("name", ["fra_lora", "prompt_tuning"])
def test_same_run_same_bytes(name: str, tmp_path: Path) -> None:
    contents = []
    for folder in ("one", "two"):
        model = small_models.make("bert")
        write_adapter(tmp_path / folder, adapted(config_of(name), model, small_models.head_of(model), "base"))
        contents.append({path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()})
    assert contents[0] == contents[1]


@pytest.mark.parametrize(
    ("name", "architecture"),
    chosen(
        fitting([*LORA_SHAPED, *SELECTIVE], ["bert", "llama", "gpt2"]),
        [*fitting(["fedara", "bitfit"], ["bert"]), *fitting(["fra_lora"], ["llama", "gpt2"])],
    ),
)
def test_merged_needs_nothing_of_ours(name: str, architecture: str, tmp_path: Path) -> None:
    model, base = small_models.make(architecture), small_models.make(architecture)
    said = {"label_names": ("a", "b", "c")}
    exported = adapted(config_of(name), model, small_models.head_of(model), "some/base", **said)
    want = small_models.logits(model)
    write_merged(tmp_path / "out", exported, base)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert equal(small_models.logits(loaded), want)
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert "merged into the base model" in (tmp_path / "out" / "README.md").read_text()
    AutoModel.from_pretrained(tmp_path / "out")


@every("name", [name for name in OTHERS if name not in SELECTIVE])
def test_what_cannot_be_merged_is_refused(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = small_models.make("bert")
    exported = adapted(config_of(name), model, small_models.head_of(model))
    folder = tmp_path_factory.mktemp("merged")
    with refused(MethodError):
        write_merged(folder / "out", exported, small_models.make("bert"))
    assert list(folder.iterdir()) == []


def numbered(layers: int = 14) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)))


@pytest.mark.parametrize("head_layer", [13, 3])
def test_a_plain_module(head_layer: int, tmp_path: Path) -> None:
    """Names that end alike ("3" and "13") are distinguished, which PEFT's modules_to_save cannot do."""
    model, head = numbered(), [f"{head_layer}.weight", f"{head_layer}.bias"]
    exported = adapted(config_of("fedlora", target_modules="all-linear"), model, head)
    write_adapter(tmp_path / "out", exported)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == (["13"] if head_layer == 13 else None)
    loaded = PeftModel.from_pretrained(numbered(), str(tmp_path / "out"))
    x = torch.randn(4, 6)
    assert equal(loaded.eval()(x), model.eval()(x))
    with refused(ModelError):
        write_merged(tmp_path / "merged", exported, numbered())


def tied(architecture: str) -> tuple[nn.Module, str, dict[str, torch.Tensor]]:
    """A model, the name of its shared embedding, and inputs: GPT-2 ties its output layer to it, T5 its encoder and decoder."""
    torch.manual_seed(0)
    ids = torch.arange(4, 12).view(1, 8)
    if architecture == "gpt2":
        gpt2 = GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16)
        return GPT2LMHeadModel(gpt2).eval(), "transformer.wte.weight", {"input_ids": ids}
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    t5 = T5Config(vocab_size=40, **shape, num_labels=3, pad_token_id=0, eos_token_id=11, decoder_start_token_id=0)
    return T5ForSequenceClassification(t5).eval(), "transformer.shared.weight", {"input_ids": ids}


@pytest.mark.parametrize(("architecture", "targets"), [("gpt2", ["c_attn"]), ("t5", ["q", "v"])])
def test_a_trained_module_whose_weight_is_another_modules_too(
    architecture: str, targets: list[str], tmp_path: Path
) -> None:
    """PEFT would train a copy of the weight, and the other module would keep the old weight."""
    model, shared, inputs = tied(architecture)
    base = copy.deepcopy(model)
    head = [shared, *(name for name, _ in model.named_parameters() if "classification_head" in name)]
    exported = adapted(config_of("fedlora", target_modules=targets), model, head)
    write_adapter(tmp_path / "out", exported)
    with torch.no_grad():
        want = model.eval()(**inputs).logits
        assert not equal(base(**inputs).logits, want)
        loaded = PeftModel.from_pretrained(base, str(tmp_path / "out")).eval()
        assert torch.equal(loaded(**inputs).logits, want)


def test_a_head_with_buffers_and_a_parameter_at_the_root(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.value = nn.Linear(5, 5), nn.Linear(5, 5)
            self.norm, self.scale = nn.BatchNorm1d(5), nn.Parameter(torch.ones(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.norm(self.value(self.query(x))) * self.scale
            return out

    config = config_of("ffa_lora")
    method = build(config)
    for head in (("norm.weight", "norm.bias"), ("norm.weight", "norm.bias", "scale")):
        torch.manual_seed(0)
        model = Net()
        initial = method.prepare(model, head, seed=0)
        state = train(method, initial)
        with torch.no_grad():
            for name in state.tensors:
                model.get_parameter(name).copy_(state.tensors.tensor(name))
        out = tmp_path / str(len(head))
        x = torch.randn(8, 5)
        model.train()(x)  # moves the running statistics
        write_adapter(out, Adapted(config, method, model, head, initial, state, ModelCard("t", "")))
        torch.manual_seed(0)
        loaded = PeftModel.from_pretrained(Net(), str(out))
        if len(head) == 2:
            assert equal(loaded.eval()(x), model.eval()(x))
        else:
            assert torch.equal(loaded.base_model.model.scale, model.scale)


def small_export(out: Path) -> None:
    write_adapter(out, adapted(config_of("fedlora", target_modules=("0",)), numbered(2), ["1.weight"]))


def test_a_folder_in_use_and_a_place_that_is_none_are_refused_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    for place in (out, out / "mine.txt", out / "mine.txt" / "below"):
        with refused(UsageError):
            small_export(place)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]
    (out / "mine.txt").unlink()
    small_export(out)
    assert (out / "adapter_config.json").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with refused(UsageError):
        small_export(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
