"""What docs/serving.md relies on: exported chat runs keep the template and stop at the end of a turn, and folders have the
documented formats of vLLM and llama.cpp."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from secure_fed import Federation, RunConfig
from secure_fed.export import trained
from tests.cells import chosen
from tests.secure_fed import small_causal

OTHER = small_causal.TEMPLATE.replace("<|over|>", "<eos>")  # with the tokenizer's own end token
TEMPLATES = {  # of the base model's tokenizer; data.chat_template; the token that ends a turn
    "own": (small_causal.TEMPLATE, "", "<|over|>"),
    "given": (OTHER, small_causal.TEMPLATE, "<|over|>"),
    "given, with the usual end": (small_causal.TEMPLATE, OTHER, "<eos>"),
    "ChatML": ("", "", "<eos>"),
}


Folders = tuple[Path, Path, Path, str, str]


@pytest.fixture(scope="module", params=chosen(TEMPLATES, ["given, with the usual end"]))
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The base model, the adapter and the merged model of a chat run; its template, and the token that ends a turn."""
    own, given, end = TEMPLATES[request.param]
    folder = tmp_path_factory.mktemp("served")
    base = small_causal.make(folder / "base", own)
    turns = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    (folder / "train.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 16)
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": str(base), "max_length": 24},
        "data": {"train": str(folder / "train.jsonl"), "task": "chat", "chat_template": given},
        "federation": {"clients": 2, "rounds": 1},
        "method": {"name": "fedlora", "rank": 8},
        "training": {"lr": 0.1, "steps": 40},
    }
    Federation(RunConfig.from_dict(tables)).run(folder / "run")
    run = trained.load_run(folder / "run")
    template = str(run.tokenizer.chat_template)
    assert template == (given or own or template)
    return base, run.export(folder / "adapter"), run.export(folder / "merged", merged=True), template, end


def test_exports_keep_the_template_and_the_rest_of_the_tokenizer(folders: Folders) -> None:
    base, adapter, merged, template, _ = folders
    how_loaded = {"is_local": None, "local_files_only": None}  # which transformers notes
    theirs = json.loads((base / "tokenizer_config.json").read_text())
    for folder in (adapter, merged):
        assert AutoTokenizer.from_pretrained(folder).chat_template == template
        assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
        ours = json.loads((folder / "tokenizer_config.json").read_text())
        assert ours | how_loaded == theirs | how_loaded


def test_the_merged_folder_answers_a_chat_in_plain_transformers_and_stops(
    folders: Folders,
) -> None:
    base, adapter, merged, _, end = folders
    tokenizer: Any = AutoTokenizer.from_pretrained(merged)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "w1 w2"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model: Any = AutoModelForCausalLM.from_pretrained(merged)
    written = model.generate(**asked, max_new_tokens=6, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert len(written) < 6
    assert tokenizer.convert_ids_to_tokens(written)[-1] == end
    stops = GenerationConfig.from_pretrained(merged).eos_token_id
    assert stops == (1 if end == "<eos>" else [1, tokenizer.convert_tokens_to_ids(end)])
    wrapped: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    stop = tokenizer.convert_tokens_to_ids(end)
    again = wrapped.generate(**asked, max_new_tokens=6, do_sample=False, eos_token_id=stop)
    assert torch.equal(again[0, asked["input_ids"].shape[1] :], written)


def test_the_adapter_has_the_format_that_vllm_documents(folders: Folders) -> None:
    base, adapter, _, _, _ = folders
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert (config["r"], config["modules_to_save"], config["use_dora"], config["bias"]) == (8, None, False, "none")
    model = AutoModelForCausalLM.from_pretrained(base)
    tensors = safetensors.torch.load_file(adapter / "adapter_model.safetensors")
    adapted = set()
    for name, tensor in tensors.items():
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
        assert found is not None
        model.get_submodule(found[1])
        adapted.add(found[1].rpartition(".")[2])
        assert tensor.shape[0 if found[2] == "A" else 1] == 8
    assert adapted == set(config["target_modules"])
    assert not list(adapter.glob("*.bin"))


def test_the_merged_folder_has_the_files_that_servers_and_converters_read(
    folders: Folders,
) -> None:
    base, _, merged, template, _ = folders
    names = {path.name for path in merged.iterdir()}
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert needed | {"chat_template.jinja"} <= names
    assert (merged / "chat_template.jinja").read_text() == template
    assert json.loads((merged / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    ours, theirs = (safetensors.torch.load_file(folder / "model.safetensors") for folder in (merged, base))
    assert {name: tensor.shape for name, tensor in ours.items()} == {name: one.shape for name, one in theirs.items()}
