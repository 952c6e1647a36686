"""A decoder of two layers with a tokenizer of its own: it stands in for your model in the examples of TRL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def write(folder: Path, texts: Sequence[str]) -> None:
    """Write a decoder of random weights to the folder, with a tokenizer that is trained on the texts."""
    pieces = Tokenizer(models.BPE(unk_token="<unk>"))
    pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    learned = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<pad>", "<eos>"], show_progress=False)
    pieces.train_from_iterator(texts, learned)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **shape, **special))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
