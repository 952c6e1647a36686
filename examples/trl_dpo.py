"""TRL's DPOTrainer as the local step: three clinics teach a decoder which of two answers they prefer.

    pip install 'secure-fed[trl]'
    python examples/trl_dpo.py

The function gets each client's examples as they were given, here prompts with two answers. Here the model is a small one of
random weights; yours is a name on the Hub or a folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the small model needs no hub

import tiny_decoder
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import DPOConfig, DPOTrainer

from secure_fed import Federation, RunConfig, heartbeat
from secure_fed.learning.data import notes

ROUNDS, STEPS = 3, 4
Pair = Mapping[str, str]  # "prompt", "chosen", "rejected"


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    rows = pairs(160)
    tiny_decoder.write(folder, [" ".join(pair.values()) for pair in rows])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder)  # the same in every round, and public

    def prefer(model: PreTrainedModel, examples: Sequence[Pair], round: int) -> float:
        """Train the model in place. Its LoRA matrices are there already, and are the parameters that have requires_grad."""
        trainer = DPOTrainer(
            model,
            ref_model=reference,
            args=DPOConfig(
                folder / "trainer",
                max_steps=STEPS,
                learning_rate=1e-2,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                bf16=False,
            ),
            train_dataset=Dataset.from_list(list(examples)),
            processing_class=tokenizer,
        )
        return trainer.train().training_loss

    def surprise(model: PreTrainedModel, pairs: Sequence[Pair], answer: str) -> Tensor:
        """(B,) minus the log-likelihoods of prompt and answer."""
        texts = [pair["prompt"] + pair[answer] for pair in pairs]
        batch = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        scores = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        return cross_entropy(scores[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none").sum(1)

    def metrics(model: PreTrainedModel, batches: Iterable[Sequence[Pair]]) -> dict[str, float]:
        right = [surprise(model, some, "chosen") < surprise(model, some, "rejected") for some in batches]
        return {"accuracy": float(torch.cat(right).float().mean())}

    federation = Federation(
        RunConfig.from_dict(
            {"method": {"name": "fedlora", "target_modules": "all-linear"}, "federation": {"rounds": ROUNDS}}
        ),
        model=AutoModelForCausalLM.from_pretrained(folder),
        train=[rows[:40], rows[40:80], rows[80:120]],
        test=rows[120:],
        collate=list,
        loss=lambda model, some: surprise(model, some, "chosen"),  # of membership inference; `prefer` trains
        metrics=metrics,
        local=prefer,
    )
    for record in federation.run().records:
        print(f"round {record['round']}: DPO loss {record['train_loss']:.3f}, accuracy {record['accuracy']:.2f}")


def pairs(count: int) -> list[dict[str, Any]]:
    """Notes with the answer that the clinics prefer, and another."""
    rows = notes.generate(count, seed=1, split="train")
    return [{"prompt": text, "chosen": " Please see a doctor.", "rejected": " Just wait a week."} for text in rows.text]


if __name__ == "__main__":
    with heartbeat():  # says on a terminal what it is doing
        main()
