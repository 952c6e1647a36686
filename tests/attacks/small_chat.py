"""Conversations, and a small GPT-2 whose tokenizer has a chat template of its own with a system turn by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from secure_fed.config import DataConfig
from secure_fed.learning import tasks
from secure_fed.learning.data.chats import Chat
from secure_fed.learning.data.rows import Rows
from tests.attacks.small_lm import tokenizer_of

SYSTEM = "You are a helpful assistant who answers briefly."
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n" + SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_WORDS = [
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "haven",
    "islet",
    "jetty",
    "knoll",
    "larch",
    "maple",
]


def chats(count: int, seed: int = 0, words: int = 8) -> list[Chat]:
    """Questions of random words, and answers of random words, which can only be memorised."""
    rng = np.random.default_rng(seed)
    said = [" ".join(_WORDS[index] for index in rng.integers(len(_WORDS), size=words)) for _ in range(2 * count)]
    return [(("user", question), ("assistant", answer)) for question, answer in zip(said[::2], said[1::2], strict=True)]


def row(chat: Chat) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": said} for role, said in chat]}


def tokenizer_of_chats() -> Any:
    made = tokenizer_of([SYSTEM, " ".join(_WORDS), "system user assistant", "What is the code of is 0123456789."])
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.add_tokens(["<|im_end|>"])  # the template alone makes it a control token
    made.chat_template = TEMPLATE
    return made


def memorised(model: Any, tokenizer: Any, some: Sequence[Chat], steps: int, *, whole: bool = False) -> Any:
    """The model after steps on all conversations at once: on the assistant's turns, or with `whole` on every token."""
    task = tasks.build(DataConfig(task="chat"))
    encoded = task.encode(tokenizer, Rows(tuple(some), (None,) * len(some), ()), 128)
    batch: Any = task.collate(tokenizer)([encoded[index] for index in range(len(encoded))])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100) if whole else batch["labels"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
    return model.eval()
