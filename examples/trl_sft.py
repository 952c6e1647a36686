"""TRL's SFTTrainer as the local step: four clinics fine-tune a decoder behind masks, and the adapter is written for PEFT.

    pip install 'secure-fed[trl]'
    python examples/trl_sft.py [FOLDER]

Here the model is a small one of random weights; yours is a name on the Hub or a folder.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the small model needs no hub

import tiny_decoder
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedModel
from trl import SFTConfig, SFTTrainer

from secure_fed import Federation, RunConfig, heartbeat
from secure_fed.learning.data import notes

CLINICS, ROUNDS, STEPS = 4, 3, 5
FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())


def fine_tune(model: PreTrainedModel, examples: Sequence[Any], round: int) -> float:
    """Train the model in place. Its LoRA matrices are there already, and are the parameters that have requires_grad."""
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            FOLDER / "trainer",
            max_steps=STEPS,
            per_device_train_batch_size=16,
            learning_rate=1e-2 / round,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_list(list(examples)),  # tokenised, with labels
        processing_class=AutoTokenizer.from_pretrained(FOLDER / "model"),
    )
    return trainer.train().training_loss


def write_clinics(clients: int, each: int) -> list[str]:
    """A file of notes and their wards for each clinic, and one for the test; the model is written beside them."""
    rows = notes.generate((clients + 1) * each, seed=1, split="train")
    lines = [
        json.dumps({"note": text + " Ward:", "ward": " " + rows.label_names[label]})
        for text, label in zip(rows.text, rows.label, strict=True)
    ]
    tiny_decoder.write(FOLDER / "model", [*rows.text, "Ward:", *rows.label_names])
    files = [FOLDER / f"clinic-{number}.jsonl" for number in range(clients)] + [FOLDER / "test.jsonl"]
    for number, file in enumerate(files):
        file.write_text("\n".join(lines[number * each : (number + 1) * each]) + "\n", encoding="utf-8")
    return list(map(str, files))


def main() -> None:
    *clinics, test = write_clinics(CLINICS, 64)
    config = RunConfig.from_dict(
        {
            "model": {"name": str(FOLDER / "model")},
            "data": {"task": "causal_lm", "train": clinics, "test": test, "text": "note", "text_b": "ward"},
            "method": {"name": "fedlora", "target_modules": "all-linear"},
            "federation": {"rounds": ROUNDS},
            "secure_aggregation": {"enabled": True},
        }
    )
    federation = Federation(config, local=fine_tune)
    result = federation.run(FOLDER / "run")
    for record in result.records:
        print(f"round {record['round']}: training loss {record['train_loss']:.3f}, test loss {record['loss']:.3f}")
    print(f"adapter for PEFT: {federation.export(result.state, FOLDER / 'adapter')}")


if __name__ == "__main__":
    with heartbeat():  # says on a terminal what it is doing
        main()
