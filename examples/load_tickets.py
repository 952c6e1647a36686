"""Load an exported adapter with PEFT and Transformers alone.

python examples/load_tickets.py ADAPTER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from peft import AutoPeftModelForSequenceClassification
from transformers import AutoTokenizer, pipeline

folder = sys.argv[1]
names = json.loads((Path(folder) / "labels.json").read_text(encoding="utf-8"))
model = AutoPeftModelForSequenceClassification.from_pretrained(
    folder, num_labels=len(names), id2label=dict(enumerate(names))
)
tokenizer = AutoTokenizer.from_pretrained(folder)
classify = pipeline("text-classification", model=model, tokenizer=tokenizer)
print(classify("a transfer is late once again"))
