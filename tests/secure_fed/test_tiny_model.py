"""The weights of builtin/tiny as shipped: small, offline, with a vocabulary that can spell the notes."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from secure_fed.learning.data import notes
from secure_fed.learning.models.locate import BUILTIN

TINY = BUILTIN["builtin/tiny"]
pretrain = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "pretrain.py")))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("loading reached for the network"))


def test_the_folder_holds_what_is_needed_and_at_most_8_mb() -> None:
    names = {path.name for path in TINY.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"} <= names
    assert (TINY / "model.safetensors").stat().st_size <= 8_000_000
    made_by = f"python benchmarks/pretrain.py OUT --steps {pretrain.STEPS} --seed 0 --threads 1"
    assert made_by in (TINY / "README.md").read_text(encoding="utf-8")


def test_it_loads_for_classification_with_only_the_head_new() -> None:
    model, report = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=8, output_loading_info=True)
    assert {name.removeprefix("bert.").split(".")[0] for name in report["missing_keys"]} == {"pooler", "classifier"}
    batch = AutoTokenizer.from_pretrained(TINY)(
        ["Rash followed codeine.", "Codeine"], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        assert model(**batch).logits.shape == (2, 8)


def test_the_vocabulary_spells_private_notes_names_and_numbers_included() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    assert len(tokenizer) <= 1_500
    texts = list(notes.generate(600, seed=5, split="train").text)
    encoded = tokenizer(texts)["input_ids"]
    tokens = [token for ids in encoded for token in ids]
    assert tokens.count(tokenizer.unk_token_id) == 0
    assert max(map(len, encoded)) <= tokenizer.model_max_length == pretrain.MAX_POSITIONS
    words = sum(len(text.split()) for text in texts)
    assert len(tokens) < 2 * words  # most words are one token; the rest is punctuation, [CLS], [SEP] and names


def test_it_concludes_public_notes_it_has_not_read() -> None:
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(TINY).eval(), AutoTokenizer.from_pretrained(TINY)
    texts = list(notes.generate(60, seed=97, split="public").text)
    classes = pretrain.concluding(tokenizer)
    share = np.where(classes >= 0, 1.0, 0.0)
    batch = pretrain.masked(tokenizer(texts)["input_ids"], share, tokenizer.mask_token_id, np.random.default_rng(0))
    titles, within = pretrain.conclusions_right(model, batch, classes)
    assert titles > 0.9
    assert within > 0.9


@pytest.mark.nightly
def test_the_script_that_makes_it_gives_the_same_tensors_and_tokens_again() -> None:
    (first, tokens, _), (second, again, _) = (pretrain.pretrain(2, seed=1) for _ in range(2))
    assert tokens.get_vocab() == again.get_vocab()
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    other, _, _ = pretrain.pretrain(2, seed=2)
    assert not torch.equal(
        other.state_dict()["bert.encoder.layer.0.attention.self.query.weight"],
        first.state_dict()["bert.encoder.layer.0.attention.self.query.weight"],
    )
