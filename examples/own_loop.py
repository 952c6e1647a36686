"""Your own training loop with a privacy guarantee: PEFT's LoRA on a small language model, and a plain PyTorch loop.

    python examples/own_loop.py

Three lines differ from the loop without privacy: `wrap`, the loader in the loop, and the statement at its end.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the built-in model needs no hub

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from secure_fed import heartbeat, locate
from secure_fed.learning.data import notes
from secure_fed.private import Budget, wrap

EXAMPLES, EPOCHS = 2000, 3


def main() -> None:
    train, test = notes.generate(EXAMPLES, seed=1, split="train"), notes.generate(200, seed=1, split="test")
    tokenizer = AutoTokenizer.from_pretrained(locate("builtin/tiny"))

    def collate(rows: list[tuple[str, int]]) -> tuple[Any, torch.Tensor]:
        texts, labels = zip(*rows, strict=True)
        return tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt"), torch.tensor(labels)

    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(locate("builtin/tiny"), num_labels=len(train.label_names))
    adapter = LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value"])
    model = get_peft_model(base, adapter)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=5e-3)
    rows = list(zip(train.text, train.label, strict=True))
    loader = DataLoader(rows, batch_size=100, collate_fn=collate)  # type: ignore[arg-type]

    private = wrap(model, optimizer, loader, Budget(epsilon=8.0, delta=1e-5, epochs=EPOCHS))

    model.train()
    for _ in range(EPOCHS):
        for texts, labels in private.loader:
            optimizer.zero_grad()
            cross_entropy(model(**texts).logits, labels).backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        texts, labels = collate(list(zip(test.text, test.label, strict=True)))
        right = (model(**texts).logits.argmax(1) == labels).float().mean()
    spent = private.spent()
    print(f"{spent.steps} steps, epsilon {spent.epsilon:.3f}, accuracy {right:.1%}")
    print(private.statement().text)


if __name__ == "__main__":
    with heartbeat():  # says on a terminal what it is doing
        main()
