"""Does pre-training matter on `builtin/notes`?   python benchmarks/pretraining_matters.py [--json]

Every row learns from the same pooled training notes and is scored on the same test notes; a share `LABEL_NOISE` of these has
wrong labels on purpose:
- logistic regression on TF-IDF words, and on words and pairs of neighbouring words;
- `builtin/tiny`, fine-tuned by LoRA (rank 8 on query and value) with its pooler and classifier;
- the same encoder from random initialisation, fine-tuned in the same way;
- the same with every weight trained, because a frozen random encoder is a weak baseline.
Needs the `bench` extra (scikit-learn). About two minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from secure_fed.learning.data import notes
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.models.locate import BUILTIN

TINY = BUILTIN["builtin/tiny"]
BATCH = 16
RATE = 2e-3  # for LoRA; a random encoder with all weights trains better at half this rate


def bag_of_words(train: Rows, test: Rows, longest: int) -> float:
    """Accuracy of logistic regression on TF-IDF of runs of up to `longest` words."""
    counts = TfidfVectorizer(ngram_range=(1, longest), min_df=2)
    model = LogisticRegression(C=2.0, max_iter=500).fit(counts.fit_transform(train.text), train.label)
    return float(model.score(counts.transform(test.text), test.label))


def encoder(*, pretrained: bool, lora: bool, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if pretrained:
        model = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=len(notes.LABELS))
    else:
        config = AutoConfig.from_pretrained(TINY, num_labels=len(notes.LABELS))
        model = AutoModelForSequenceClassification.from_config(config)
    if not lora:
        return model
    adapter = LoraConfig(
        task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"],
        modules_to_save=["pooler", "classifier"],
    )  # fmt: skip
    return get_peft_model(model, adapter)


def batches(rows: Rows, order: np.ndarray, size: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    encoded = tokenizer(list(rows.text))["input_ids"]
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        inputs = tokenizer.pad({"input_ids": [encoded[k] for k in chosen]}, return_tensors="pt")
        yield dict(inputs), torch.tensor([rows.label[k] for k in chosen])


def fine_tuned(model: nn.Module, train: Rows, test: Rows, *, rate: float, epochs: int, name: str) -> float:
    """Test accuracy after AdamW with a linearly falling rate."""
    rng = np.random.default_rng(0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    total = epochs * -(-len(train) // BATCH)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
    order = np.concatenate([rng.permutation(len(train)) for _ in range(epochs)])
    model.train()
    for step, (inputs, labels) in enumerate(batches(train, order, BATCH), start=1):
        loss = nn.functional.cross_entropy(model(**inputs).logits, labels)
        loss.backward()
        optimizer.step()
        falling.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == total:
            print(f"{name}: step {step}/{total}, loss {loss.item():.2f}", file=sys.stderr)
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(**inputs).logits.argmax(-1) == labels).sum())
            for inputs, labels in batches(test, np.arange(len(test)), 100)
        )
    return right / len(test)


def compare(examples: int, tests: int, epochs: int, seed: int) -> dict[str, float]:
    train = notes.generate(examples, seed=seed, split="train")
    test = notes.generate(tests, seed=seed, split="test")
    accuracy = {
        "words, logistic regression": bag_of_words(train, test, 1),
        "words and pairs, logistic regression": bag_of_words(train, test, 2),
    }
    for name, pretrained, lora, rate in (
        ("builtin/tiny, LoRA", True, True, RATE),
        ("random initialisation, LoRA", False, True, RATE),
        ("random initialisation, all weights", False, False, RATE / 2),
    ):
        model = encoder(pretrained=pretrained, lora=lora, seed=seed)
        accuracy[name] = fine_tuned(model, train, test, rate=rate, epochs=epochs, name=name)
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--test-examples", type=int, default=2_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    began = time.perf_counter()
    accuracy = compare(asked.examples, asked.test_examples, asked.epochs, asked.seed)
    best = accuracy["builtin/tiny, LoRA"]
    margins = {name: best - other for name, other in accuracy.items() if name != "builtin/tiny, LoRA"}
    if asked.json:
        facts = {"accuracy": accuracy, "margin": margins, "examples": asked.examples, "epochs": asked.epochs}
        print(json.dumps({**facts, "label_noise": notes.LABEL_NOISE, "seconds": time.perf_counter() - began}))
        return
    print(
        f"{asked.examples} pooled notes, {asked.epochs} epoch(s); the best possible is near {1 - notes.LABEL_NOISE:.0%}"
    )
    print(f"{'':40}{'accuracy':>10}{'margin':>10}")
    for name, value in accuracy.items():
        print(f"{name:40}{value:>10.1%}" + (f"{100 * margins[name]:>+10.1f}" if name in margins else ""))


if __name__ == "__main__":
    main()
