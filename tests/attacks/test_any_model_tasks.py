"""An audit of a model for every kind of task: texts memorised by a small model are distinguished from others."""

from __future__ import annotations

import json
import shutil
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
KINDS = ("kind 0", "kind 1", "kind 2")
LABELS = {"pairs": KINDS, "multi_label": KINDS, "tokens": ("O", "B-organ", "I-organ", "B-drug", "I-drug")}
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
    data, labels = DataConfig(train="x", task=task, text_b=second), LABELS.get(kind, ())
    subject = opened(Asked(str(tmp_path / "model"), *files, data, labels=labels))
    learned(subject)
    subject.model.save_pretrained(tmp_path / "model")
    asked = ["--members", str(files[0]), "--non-members", str(files[1]), "--task", task]
    asked += ["--text-b", second] if second else []
    asked += ["--labels", ",".join(labels)] if labels else []
    assert main(["audit", "model", str(tmp_path / "model"), *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "leak", found["sentences"]
    assert found["signals"][0]["auc"] > 0.8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained models with and without names for their outputs, and rows."""
    import transformers

    tmp = tmp_path_factory.mktemp("tasks")
    tags = {
        "id2label": dict(enumerate(LABELS["tokens"])),
        "label2id": {tag: at for at, tag in enumerate(LABELS["tokens"])},
    }
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        "named": ("tokens", tags),
        "unnamed": ("tokens", {"num_labels": 5}),
        "of-three": ("tokens", {"num_labels": 3}),
        "answers": ("question_answering", {}),
    }
    for name, (kind, own) in settings.items():
        torch.manual_seed(0)
        made = getattr(transformers, HEADS[kind][0]).from_pretrained(locate("builtin/tiny"), **own)
        made.save_pretrained(tmp / name)
        transformers.AutoTokenizer.from_pretrained(locate("builtin/tiny")).save_pretrained(tmp / name)
    for kind in ("tokens", "question_answering"):
        for name, some in (("members", rows(kind)[:TEXTS]), ("others", rows(kind)[TEXTS:])):
            written(tmp / f"{kind}-{name}.jsonl", some)
    return tmp


def written(place: Path, some: list[dict[str, Any]]) -> Path:
    place.write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    return place


def audit(folder: Path, model: str, task: str, *more: str) -> list[str]:
    files = ["--members", str(folder / f"{task}-members.jsonl"), "--non-members", str(folder / f"{task}-others.jsonl")]
    return ["audit", "model", str(folder / model), "--task", task, *files, *more]


def test_tags_without_names_ask_for_labels(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(audit(folder, "unnamed", "tokens", "--fail-above", "auc=0.9")) == 2
    said = capsys.readouterr().err
    assert "the texts have the class 'B-drug', and MODEL" in said
    assert "has no names for its outputs: name all of its classes in the model's order with --labels" in said
    assert main(audit(folder, "named", "tokens", "--labels", "O,B-drug,I-drug,B-organ,I-organ")) == 2
    assert "the model names its outputs in the order 'O, B-organ, I-organ, B-drug, I-drug'" in capsys.readouterr().err


def test_a_model_may_lack_tags_that_never_occur(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their order is the given one, in which a loss by hand is the same."""
    names = ("O", "B-organ", "B-drug")
    files = folder / "tokens-members.jsonl", folder / "tokens-others.jsonl"
    subject = opened(Asked(str(folder / "of-three"), *files, DataConfig(train="x", task="tokens"), labels=names))
    item, tags = subject.texts.examples[0], rows("tokens")[0]["tags"]
    with torch.no_grad():
        scores = subject.model(input_ids=torch.tensor(item["input_ids"])[None].long()).logits[0].log_softmax(1)
    firsts = [place for place, label in enumerate(item["labels"]) if label >= 0]
    by_hand = -np.mean([float(scores[place, names.index(tag)]) for place, tag in zip(firsts, tags, strict=True)])
    assert subject.losses()[0] == pytest.approx(by_hand, rel=1e-4)


def test_questions_are_read_as_the_options_say(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = [{**row, "answers": {"text": [], "answer_start": []}} for row in rows("question_answering")[:TEXTS]]
    some = ("--members", str(written(tmp_path / "none.jsonl", none)), "--json")
    for more, said in (
        (some, "set --unanswerable where questions may have none, or remove the row"),
        (("--max-length", "40"), "--stride is 32, but with --max-length 40 a window"),
        (("--max-length", "40"), "lower --stride or raise --max-length"),
        (("--max-length", "0"), "--max-length is 0; it must be at least 1"),
        (("--stride", "-1"), "--stride is -1; it must be at least 0"),
        (("--reference", str(tmp_path / "gone")), "--reference is"),
        (("--label-scale", "2"), "--label-scale is for --task regression, and the task is question_answering"),
    ):
        assert main(audit(folder, "answers", "question_answering", *more)) == 2, more
        told = capsys.readouterr().err
        assert said in told, told
        assert "data." not in told
        assert "model." not in told
    assert main(audit(folder, "answers", "question_answering", *some, "--unanswerable")) == 0
    assert json.loads(capsys.readouterr().out)["members"] > 0
    assert main(audit(folder, "answers", "question_answering", "--max-length", "40", "--stride", "8")) == 0
    assert main(audit(folder, "named", "tokens", "--stride", "8")) == 2
    assert "--stride is for --task question_answering, and the task is tokens" in capsys.readouterr().err


def test_errors_of_a_reference_name_its_option(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short"
    shutil.copytree(folder / "answers", short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    for reference, said in (
        (short, "--max-length is 128, more than the 64 positions"),
        (tmp_path / "broken", "--reference is '"),
    ):
        assert main(audit(folder, "answers", "question_answering", "--reference", str(reference))) == 2
        told = capsys.readouterr().err
        assert said in told, told
        assert "model." not in told


def test_a_training_on_questions_can_be_prepared(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = str(folder / "question_answering-members.jsonl"), str(tmp_path / "out")
    assert main(["audit", "prepare", data, "--out", out, "--task", "question_answering", "--count", "20"]) == 0
    prepared = ["audit", "prepared", str(folder / "answers"), out]
    capsys.readouterr()
    assert main([*prepared, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["candidates"] == 20
    assert told["task"] == "extractive question answering"
    assert main([*prepared, "--max-length", "40"]) == 2
    assert "--stride is 32, but with --max-length 40" in capsys.readouterr().err
    assert main([*prepared, "--max-length", "40", "--stride", "8"]) == 0
    labels = ["--task", "question_answering", "--canaries", "labels"]
    assert main(["audit", "prepare", data, "--out", str(tmp_path / "two"), *labels]) == 2
    assert "--canaries labels is for --task classification" in capsys.readouterr().err


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
