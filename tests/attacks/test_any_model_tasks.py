"""An audit of a model for every kind of task: texts memorised by a small model are distinguished from others.

Labels of a regression are read on the scale that the model learned.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks.any_model.subject import opened
from attacks.options import Asked
from secure_fed import RunConfig, load_run
from secure_fed.commands.cli import main
from secure_fed.config import DataConfig
from secure_fed.errors import ModelError
from secure_fed.federation import Federation
from secure_fed.learning.data import notes
from secure_fed.learning.models.locate import locate
from tests.attacks.refusals import Capsys, facts_of, refusals
from tests.attacks.test_any_model import written
from tests.golden import refused

TEXTS, STEPS = 30, 40
HALVES = {"members": slice(TEXTS), "others": slice(TEXTS, None)}
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
def test_texts_learned_by_heart_are_found(kind: str, tmp_path: Path, capsys: Capsys) -> None:
    files = [written(tmp_path / f"{name}.jsonl", rows(kind)[part]) for name, part in HALVES.items()]
    model = saved(tmp_path / "model", kind)
    second, labels = "other" if kind == "pairs" else "", LABELS.get(kind, ())
    data = DataConfig(train="x", task="classification" if kind == "pairs" else kind, text_b=second)
    subject = opened(Asked(str(model), *files, data, labels=labels))
    learned(subject)
    subject.model.save_pretrained(model)
    asked = ["--members", str(files[0]), "--non-members", str(files[1]), "--task", data.task]
    asked += ["--text-b", second] if second else []
    asked += ["--labels", ",".join(labels)] if labels else []
    found = facts_of(["audit", "model", str(model), *asked], capsys)
    assert found["verdict"] == "leak", found["sentences"]
    assert found["signals"][0]["auc"] > 0.8


def saved(place: Path, kind: str, **own: Any) -> Path:
    """The built-in model with a new head for this task."""
    import transformers

    torch.manual_seed(0)
    auto, outputs = HEADS[kind]
    sizes = own or ({} if outputs is None else {"num_labels": outputs})
    getattr(transformers, auto).from_pretrained(locate("builtin/tiny"), **sizes).save_pretrained(place)
    transformers.AutoTokenizer.from_pretrained(locate("builtin/tiny")).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained models with and without names for their outputs, and rows."""
    tmp = tmp_path_factory.mktemp("tasks")
    tags = LABELS["tokens"]
    saved(tmp / "named", "tokens", id2label=dict(enumerate(tags)), label2id={tag: at for at, tag in enumerate(tags)})
    saved(tmp / "unnamed", "tokens")
    saved(tmp / "of-three", "tokens", num_labels=3)
    saved(tmp / "answers", "question_answering")
    for kind in ("tokens", "question_answering"):
        for name, part in HALVES.items():
            written(tmp / f"{kind}-{name}.jsonl", rows(kind)[part])
    return tmp


def audit(folder: Path, model: str, task: str, *more: Any) -> list[str]:
    files = "--members", folder / f"{task}-members.jsonl", "--non-members", folder / f"{task}-others.jsonl"
    return [*map(str, ("audit", "model", folder / model, "--task", task, *files, *more))]


def test_a_model_may_lack_tags_that_never_occur(folder: Path, capsys: Capsys) -> None:
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


def test_questions_and_tags_are_read_as_the_options_say(folder: Path, tmp_path: Path, capsys: Capsys) -> None:
    """A refusal names options, also those of a reference, and no settings."""
    none = [{**row, "answers": {"text": [], "answer_start": []}} for row in rows("question_answering")[:TEXTS]]
    some = ("--members", written(tmp_path / "none.jsonl", none))
    short = shutil.copytree(folder / "answers", tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    of_answers = (
        some,
        ("--max-length", "40"),
        ("--max-length", "0"),
        ("--stride", "-1"),
        ("--label-scale", "2"),
        *(("--reference", tmp_path / name) for name in ("gone", "short", "broken")),
    )
    calls = [audit(folder, "answers", "question_answering", *more) for more in of_answers]
    calls += [
        audit(folder, "named", "tokens", "--stride", "8"),
        audit(folder, "unnamed", "tokens", "--fail-above", "auc=0.9"),
        audit(folder, "named", "tokens", "--labels", "O,B-drug,I-drug,B-organ,I-organ"),
    ]
    refusals("any_model_tasks", calls, capsys, hide=r"(?<=cannot be loaded )\(.*?\)(?=; give)")
    assert facts_of(audit(folder, "answers", "question_answering", *some, "--unanswerable"), capsys)["members"] > 0


def test_a_training_on_questions_can_be_prepared(folder: Path, tmp_path: Path, capsys: Capsys) -> None:
    prepare = ["audit", "prepare", str(folder / "question_answering-members.jsonl"), "--task", "question_answering"]
    assert main([*prepare, "--out", str(tmp_path / "out"), "--count", "20"]) == 0
    prepared = ["audit", "prepared", str(folder / "answers"), str(tmp_path / "out"), "--max-length", "40"]
    told = facts_of([*prepared, "--stride", "8"], capsys)
    assert told["candidates"] == 20
    assert told["task"] == "extractive question answering"
    calls = (prepared, [*prepare, "--out", str(tmp_path / "two"), "--canaries", "labels"])
    refusals("any_model_prepared", calls, capsys)


def learned(subject: Any) -> None:
    """A model trained plainly on the members, all in one batch."""
    loss = subject.task.loss(subject.texts.rows.label_names)
    optimizer = torch.optim.AdamW(subject.model.parameters(), 2e-3)
    batch = subject.task.collate(subject.tokenizer)([subject.texts.examples[row] for row in range(TEXTS)])
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(subject.model, batch).mean().backward()
        optimizer.step()


# The scale of a regression's labels.

CENTRE, SCALE = 110.0, 10.0
SETTINGS = (
    *("data.task=regression", f"data.label_centre={CENTRE}", f"data.label_scale={SCALE}", "federation.rounds=1"),
    *("federation.clients=2", "federation.cohort=2", "evaluation.audit_fraction=0"),
)


def numbered() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [{"text": row["text"], "label": float(rng.choice([100, 110, 120]))} for row in rows("regression")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, its exports, and the same whole model without the scale of its labels."""
    tmp = tmp_path_factory.mktemp("regression")
    files = [written(tmp / f"{name}.jsonl", numbered()[part]) for name, part in HALVES.items()]
    Federation(RunConfig.load(None, [f"data.train={files[0]}", f"data.test={files[1]}", *SETTINGS])).run(tmp / "run")
    run = load_run(tmp / "run")
    run.export(tmp / "adapter")
    load_run(tmp / "run").export(tmp / "whole", merged=True)
    shutil.copytree(tmp / "whole", tmp / "silent")
    config = json.loads((tmp / "silent" / "config.json").read_text())
    assert (config.pop("label_centre"), config.pop("label_scale")) == (CENTRE, SCALE)
    (tmp / "silent" / "config.json").write_text(json.dumps(config))
    return tmp


def asked(place: Path, model: str = "whole", **data: Any) -> Asked:
    files = place / "members.jsonl", place / "others.jsonl"
    settings = DataConfig(train="x", task="regression", **data)
    if model == "adapter":
        return Asked("builtin/tiny", *files, settings, adapter=place / "adapter")
    return Asked(str(place / model), *files, settings)


def by_hand(place: Path, centre: float, scale: float) -> Any:
    """(texts,) squared errors of the exported model, by plain Transformers."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model: Any = AutoModelForSequenceClassification.from_pretrained(place / "whole").eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(place / "whole")
    with torch.no_grad():
        outputs = [float(model(**tokenizer(row["text"], return_tensors="pt")).logits) for row in numbered()]
    return np.array(
        [(out - (row["label"] - centre) / scale) ** 2 for out, row in zip(outputs, numbered(), strict=True)]
    )


def test_losses_are_on_the_scale_that_the_export_states(place: Path) -> None:
    right = by_hand(place, CENTRE, SCALE)
    given = asked(place, "silent", label_centre=CENTRE, label_scale=SCALE)
    for subject in map(opened, (asked(place, "whole"), asked(place, "adapter"), given)):
        assert np.allclose(subject.losses(), right, rtol=1e-3, atol=1e-5)
        assert subject.notes == ("The model's outputs were compared with (label - 110.0) / 10.0.",)
    raw = opened(asked(place, "silent"))
    assert np.allclose(raw.losses(), by_hand(place, 0, 1), rtol=1e-3)
    assert raw.notes[0].startswith("The labels were taken as they are, since neither the model nor an option states")


def test_an_audit_says_how_labels_were_read(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    texts = ["--members", str(place / "members.jsonl"), "--non-members", str(place / "others.jsonl")]
    audit, out = ["audit", "model", "--task", "regression", *texts], str(tmp_path / "out")
    prepare = ["audit", "prepare", str(place / "members.jsonl"), "--out", out, "--task", "regression"]
    assert main(prepare) == 0
    prepared = ["audit", "prepared"]
    for call, said in (
        ([*audit, place / "whole", "--label-scale", "10"], "(label - 110.0) / 10.0"),
        ([*audit, place / "silent"], "give --label-centre and --label-scale, or a leak goes unnoticed"),
        ([*audit, place / "silent", "--label-centre", "0"], "(label - 0.0) / 1.0"),
        ([*prepared, place / "silent", out, "--label-centre", "110"], "(label - 110.0) / 1.0"),
    ):
        assert said in facts_of(call, capsys)["sentences"][-1]
    calls = (
        [place / "whole", "--label-scale", "9"],
        [place / "silent", "--label-scale", "0"],
        [place / "silent", "--label-centre", "nan"],
        [place / "silent", "--reference", place / "whole"],
        ["builtin/tiny", "--adapter", place / "adapter", "--label-centre", "1"],
    )
    refusals("any_model_scale", ([*audit, *call] for call in calls), capsys)


DAMAGE = (
    "{",
    "[]",
    '{"label_centre": 1}',
    '{"label_centre": 1, "label_scale": 0}',
    '{"label_centre": "1", "label_scale": 2}',
)


def test_a_damaged_file_is_one_sentence(place: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(place / "adapter", tmp_path / "adapter")
    files = place / "members.jsonl", place / "others.jsonl"
    for damage in DAMAGE:
        (adapter / "label_scale.json").write_text(damage)
        with refused(ModelError):
            opened(Asked("builtin/tiny", *files, DataConfig(train="x", task="regression"), adapter=adapter))
