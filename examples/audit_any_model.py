"""Does an adapter trained with plain Transformers and PEFT reveal its training texts? Ten seconds.

The labels are random, so the adapter can only memorise them. The audit detects this, and writes an HTML page.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from secure_fed import heartbeat, locate
from secure_fed.commands.cli import main as secure_fed
from secure_fed.learning.data import notes

torch.manual_seed(0)
folder, base, labels = Path(tempfile.mkdtemp()), locate("builtin/tiny"), torch.randint(3, (100,))
texts = list(notes.generate(100, seed=1, split="train").text)
for name, rows in (("members", range(50)), ("others", range(50, 100))):
    lines = [json.dumps({"text": texts[row], "label": f"kind {labels[row]}"}) for row in rows]
    (folder / f"{name}.jsonl").write_text("\n".join(lines))

model: Any = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
trained = ["pooler", "classifier"]  # the base has no weights for these
lora = LoraConfig(task_type="SEQ_CLS", r=16, target_modules=["query", "value"], modules_to_save=trained)
model = get_peft_model(model, lora)
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
tokenizer = AutoTokenizer.from_pretrained(base)
batch = tokenizer(texts[:50], padding=True, truncation=True, max_length=32, return_tensors="pt")
with heartbeat():  # says on a terminal that it is at work
    for _ in range(40):
        optimizer.zero_grad()
        model(**batch, labels=labels[:50]).loss.backward()
        optimizer.step()
model.save_pretrained(folder / "adapter")

# The head's outputs have no names, so the audit must be told which class each output is.
named = ["--labels", "kind 0,kind 1,kind 2"]
files = f"--members {folder}/members.jsonl --non-members {folder}/others.jsonl --out {folder}/audit"
secure_fed(f"audit model {base} --adapter {folder}/adapter --max-length 32 {files}".split() + named)
