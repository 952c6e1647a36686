"""Answers of a chat model, by plain transformers: the base model, or a folder that `secure-fed export --merged` wrote.

python ask.py MODEL questions.jsonl answers.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

TOGETHER, WORDS = 16, 24  # questions in a batch, tokens of an answer at most


def main(model_name: str, questions: Path, answers: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype="float32").eval()
    rows = [json.loads(line)["messages"] for line in questions.read_text(encoding="utf-8").splitlines()]
    said: list[str] = []
    for start in range(0, len(rows), TOGETHER):
        asked = tokenizer.apply_chat_template(
            rows[start : start + TOGETHER],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        written = model.generate(**asked, **ends, max_new_tokens=WORDS, do_sample=False)
        said += tokenizer.batch_decode(written[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    answers.write_text("".join(json.dumps({"continuation": text}) + "\n" for text in said), encoding="utf-8")
    print(f"{model_name} answers {rows[0][-1]['content']!r}: {said[0]!r}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
