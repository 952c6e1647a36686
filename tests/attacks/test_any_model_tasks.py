"""An audit of a model for every kind of task: texts memorised by a small model are distinguished from others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks.any_model.subject import Asked, opened
from secure_fed.commands.cli import main
from secure_fed.config import DataConfig
from secure_fed.learning.data import notes
from secure_fed.learning.models.locate import locate

TEXTS, STEPS = 30, 40
HEADS = {
    "pairs": ("AutoModelForSequenceClassification", 3),
    "multi_label": ("AutoModelForSequenceClassification", 3),
    "regression": ("AutoModelForSequenceClassification", 1),
    "tokens": ("AutoModelForTokenClassification", 5),
    "question_answering": ("AutoModelForQuestionAnswering", None),
}


def rows(kind: str) -> list[dict[str, Any]]:
    """Rows with labels that are independent of the texts."""
    rng, found = np.random.default_rng(0), []
    for text in notes.generate(2 * TEXTS, seed=1, split="train").text:
        words = text.split()[:12]
        short, at = " ".join(words), int(rng.integers(len(words) - 1))
        answer = {"text": [words[at]], "answer_start": [len(" ".join(words[:at])) + (at > 0)]}
        found.append(
            {
                "pairs": {"text": short, "other": words[0], "label": f"kind {rng.integers(3)}"},
                "multi_label": {"text": short, "label": [f"kind {one}" for one in range(3) if rng.random() < 0.5]},
                "regression": {"text": short, "label": float(rng.normal())},
                "tokens": {"tokens": words, "tags": [("O", "B-drug", "B-organ")[rng.integers(3)] for _ in words]},
                "question_answering": {"question": "What is said?", "context": short, "answers": answer},
            }[kind]
        )
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("kind", HEADS)
def test_texts_learned_by_heart_are_found(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    made, (auto, outputs) = rows(kind), HEADS[kind]
    for name, some in (("members", made[:TEXTS]), ("others", made[TEXTS:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    torch.manual_seed(0)
    sizes = {} if outputs is None else {"num_labels": outputs}
    model = getattr(transformers, auto).from_pretrained(locate("builtin/tiny"), **sizes)
    transformers.AutoTokenizer.from_pretrained(locate("builtin/tiny")).save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    task = "classification" if kind == "pairs" else kind
    files = tmp_path / "members.jsonl", tmp_path / "others.jsonl"
    second = "other" if kind == "pairs" else ""
    subject = opened(Asked(str(tmp_path / "model"), *files, DataConfig(train="x", task=task, text_b=second)))
    learned(subject)
    subject.model.save_pretrained(tmp_path / "model")
    asked = ["--members", str(files[0]), "--non-members", str(files[1]), "--task", task]
    asked += ["--text-b", second] if second else []
    assert main(["audit", "--model", str(tmp_path / "model"), *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "leak", found["sentences"]
    assert found["signals"][0]["auc"] > 0.8


def learned(subject: Any) -> None:
    """A model trained plainly on the members, all in one batch."""
    loss, optimizer = (
        subject.task.loss(subject.texts.rows.label_names),
        torch.optim.AdamW(subject.model.parameters(), 2e-3),
    )
    batch = subject.task.collate(subject.tokenizer)([subject.texts.examples[row] for row in range(TEXTS)])
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(subject.model, batch).mean().backward()
        optimizer.step()
