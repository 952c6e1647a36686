"""From files to an adapter that PEFT loads: each clinic is one JSON Lines file.

    python examples/own_files.py [FOLDER]

Here the files contain the built-in notes; your files need a text and a label on each line.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the built-in model needs no hub

import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from secure_fed import Federation, RunConfig, heartbeat, load_run
from secure_fed.learning.data import notes


def write_clinics(folder: Path) -> list[Path]:
    """One file for each clinic, from the built-in generator."""
    rows = notes.generate(1500, seed=1, split="train")
    files: dict[str, list[str]] = {}
    for text, label, site in zip(rows.text, rows.label, rows.client or (), strict=True):
        files.setdefault(site, []).append(json.dumps({"text": text, "label": rows.label_names[label]}))
    paths = []
    for site, lines in sorted(files.items())[:12]:
        paths.append(folder / f"{site.replace(' ', '-')}.jsonl")
        paths[-1].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    clinics = write_clinics(folder)
    config = RunConfig.from_dict(
        {
            "data": {"train": [str(path) for path in clinics]},
            "federation": {"cohort": 6, "rounds": 4},
            "method": {"name": "ffa_lora"},
        }
    )
    result = Federation(config).run(folder / "run")
    print(f"{len(clinics)} clinics, accuracy {result.summary['accuracy']:.3f}")

    adapter = load_run(folder / "run").export(folder / "adapter")
    base = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    labels = result.summary["label_names"]
    model = PeftModel.from_pretrained(
        AutoModelForSequenceClassification.from_pretrained(base, num_labels=len(labels)), adapter
    )
    tokenizer = AutoTokenizer.from_pretrained(base)
    with torch.no_grad():
        scores = model(**tokenizer("Cough is mild today, severe last week. Query: cough.", return_tensors="pt")).logits[
            0
        ]
    print("PEFT says:", labels[int(scores.argmax())])


if __name__ == "__main__":
    with heartbeat():  # says on a terminal what it is doing
        main()
