"""Which secrets does a training reveal? Plant some at random, train with any tool (here plain PyTorch), and rank them.

python examples/planted_secrets.py
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from secure_fed import heartbeat, locate
from secure_fed.commands.cli import main as secure_fed
from secure_fed.learning.data import notes

folder = Path(tempfile.mkdtemp())
with open(folder / "data.jsonl", "w") as file:
    for text in notes.generate(40, seed=1, split="train").text:
        file.write(json.dumps({"text": text}) + "\n")
planted = ["--canaries", "secrets", "--count", "20", "--digits", "2", "--template", "{name} has code {secret}"]
where = [str(folder / "data.jsonl"), "--task", "causal_lm", "--out", str(folder / "prepared")]
secure_fed(["audit", "prepare", *where, *planted])

tokenizer = AutoTokenizer.from_pretrained(locate("builtin/tiny"))
sizes = {"n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
torch.manual_seed(0)
model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
rows = [json.loads(line)["text"] for line in (folder / "prepared/train.jsonl").read_text().splitlines()]
with heartbeat():  # says on a terminal that it is at work
    for row in 20 * rows:
        ids = tokenizer(row, truncation=True, max_length=48, return_tensors="pt")["input_ids"]
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
model.save_pretrained(folder / "trained")
tokenizer.save_pretrained(folder / "trained")
secure_fed(["audit", "prepared", str(folder / "trained"), str(folder / "prepared"), "--exposure"])
