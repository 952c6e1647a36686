"""Hugging Face's Trainer with a privacy guarantee: PEFT's LoRA on a small language model.

    python examples/hugging_face_trainer.py

`wrap` makes the Trainer's model, optimizer and loader private, and the Trainer trains as usual. It counts the batches of the
rehearsals, and logs no training loss, since that is an exact figure of private texts.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the built-in model needs no hub

from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from secure_fed import heartbeat, locate
from secure_fed.learning.data import notes
from secure_fed.private import Budget, wrap

EXAMPLES, EPOCHS = 2000, 3
PRIVATE = ("loss", "train_loss", "grad_norm")  # figures of the training texts


class Endless:
    """The batches of a loader, epoch after epoch. The Trainer stops after `max_steps`, and would leave out the end of an epoch
    that begins with a rehearsal.
    """

    def __init__(self, loader: Any) -> None:
        self.loader, self.dataset = loader, loader.dataset

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.loader


class PrivateTrainer(Trainer):
    """A Trainer whose training has a guarantee for each example of `train_dataset`."""

    def __init__(self, model: PeftModel, train_dataset: list[dict[str, Any]], budget: Budget, **named: Any) -> None:
        super().__init__(model, train_dataset=train_dataset, **named)
        size, collate = self.args.train_batch_size, self.data_collator
        loader = DataLoader(train_dataset, batch_size=size, shuffle=True, collate_fn=collate)  # type: ignore[arg-type, var-annotated]
        self.private = wrap(model, self.create_optimizer(), loader, budget)
        self.args.max_steps = self.private.loader.all_batches

    def get_train_dataloader(self) -> Any:
        return Endless(self.private.loader)

    def log(self, logs: dict[str, float], *given: Any, **named: Any) -> None:
        super().log({name: value for name, value in logs.items() if name not in PRIVATE}, *given, **named)


def main() -> None:
    train, test = notes.generate(EXAMPLES, seed=1, split="train"), notes.generate(200, seed=1, split="test")
    tokenizer = AutoTokenizer.from_pretrained(locate("builtin/tiny"))

    def rows(some: Any) -> list[dict[str, Any]]:
        return [
            {**tokenizer(text, truncation=True), "labels": label}
            for text, label in zip(some.text, some.label, strict=True)
        ]

    set_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(locate("builtin/tiny"), num_labels=len(train.label_names))
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value"]))
    with tempfile.TemporaryDirectory() as folder:
        trainer = PrivateTrainer(
            model=model,
            args=TrainingArguments(
                folder,
                per_device_train_batch_size=100,
                learning_rate=5e-3,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
            ),
            train_dataset=rows(train),
            eval_dataset=rows(test),
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()},
            budget=Budget(epsilon=8.0, delta=1e-5, epochs=EPOCHS),
        )
        trainer.train()
        right = trainer.evaluate()["eval_accuracy"]
    spent = trainer.private.spent()
    print(f"{spent.steps} of {spent.planned} steps, epsilon {spent.epsilon:.3f}, accuracy {right:.1%}")
    print(trainer.private.statement().text)


if __name__ == "__main__":
    with heartbeat():  # says on a terminal what it is doing
        main()
