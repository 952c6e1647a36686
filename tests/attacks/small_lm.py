"""A byte-pair tokenizer and a small GPT-2, made here, that memorise a few sentences in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

END = "<end>"


def tokenizer_of(texts: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    digits, letters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, BpeTrainer(vocab_size=400, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)


def untrained(tokenizer: Any, seed: int = 0) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    sizes = {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            **sizes,
            bos_token_id=0,
            eos_token_id=0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            attn_pdrop=0.0,
        )
    ).eval()


def learned(model: Any, tokenizer: Any, texts: Sequence[str], steps: int) -> Any:
    """The model after full batches of the texts' first 32 tokens."""
    read = [tokenizer(text)["input_ids"][:32] for text in texts]
    width = max(map(len, read))
    ids = torch.tensor([one + [0] * (width - len(one)) for one in read])
    labels = torch.tensor([one + [-100] * (width - len(one)) for one in read])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    return model.eval()


def saved(model: Any, tokenizer: Any, place: Path) -> Path:
    for part in (model, tokenizer):
        part.save_pretrained(place)
    return place
