"""Folders with small language models, and rows written to files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from secure_fed import RunConfig

SCHEMA = json.loads((Path(__file__).resolve().parents[3] / "docs" / "result.schema.json").read_text(encoding="utf-8"))
Write = Callable[[str, Sequence[dict[str, Any]]], Path]


def _saved(folder: Path, model: Any, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Any) -> Path:
    """A folder with a language model of one layer and 16 hidden units."""
    shape: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 128}
    config = GPT2Config(vocab_size=len(small_tokenizer), **shape, bos_token_id=None, eos_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _saved(tmp_path_factory.mktemp("gpt2"), GPT2LMHeadModel(config), small_tokenizer)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Any) -> Path:
    """A small language model of another family, whose output layer is not tied to its embedding."""
    config = LlamaConfig(
        vocab_size=len(small_tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=128,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _saved(tmp_path_factory.mktemp("llama"), LlamaForCausalLM(config), small_tokenizer)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes rows to a JSON Lines file of the given name and returns its path."""

    def lines(name: str, rows: Sequence[dict[str, Any]]) -> Path:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return lines


def settings_of(usual: dict[str, Any], **changed: Any) -> RunConfig:
    """A configuration of `section.key` settings; `section__key=value` changes them."""
    chosen = {**usual, **{name.replace("__", "."): value for name, value in changed.items()}}
    return RunConfig().replace({tuple(name.split(".", 1)): value for name, value in chosen.items()})  # type: ignore[misc]


def lines_of(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def require_valid(run: Path) -> dict[str, Any]:
    """The result of a run directory, which keeps to the schema."""
    result: dict[str, Any] = json.loads((run / "result.json").read_text(encoding="utf-8"))
    jsonschema.validate(result, SCHEMA)
    return result
