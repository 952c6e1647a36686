"""A language model of one layer whose tokenizer has a token for each word, tokens for turns of a chat, and no template."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<eos>", "<|user|>", "<|assistant|>", "<|over|>"]
TEMPLATE = (  # every turn ends in <|over|>, which is not the tokenizer's end token
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|over|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make(folder: Path, template: str = "") -> Path:
    """Write the model and its tokenizer, which puts no special tokens around a text, into the folder."""
    words = [*SPECIAL, "<unk>", *(f"w{number}" for number in range(30))]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    tokenizer.chat_template = template or None
    shape = {"vocab_size": len(words), "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=1)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
