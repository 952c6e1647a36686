"""An audit of a regression model reads labels on the scale that the model learned."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks.any_model.subject import Asked, opened
from secure_fed import RunConfig, load_run
from secure_fed.commands.cli import main
from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, ModelError
from secure_fed.federation import Federation
from secure_fed.learning.data import notes
from secure_fed.learning.models.locate import locate
from tests.cells import every

TEXTS, CENTRE, SCALE = 24, 110.0, 10.0
SETTINGS = (
    "data.task=regression",
    f"data.label_centre={CENTRE}",
    f"data.label_scale={SCALE}",
    "federation.clients=2",
    "federation.cohort=2",
    "federation.rounds=1",
    "evaluation.audit_fraction=0",
)


def rows() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    made = notes.generate(2 * TEXTS, seed=1, split="train").text
    return [{"text": " ".join(text.split()[:12]), "label": float(rng.choice([100, 110, 120]))} for text in made]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, its exports, and the same whole model without the scale of its labels."""
    tmp = tmp_path_factory.mktemp("regression")
    for name, some in (("members", rows()[:TEXTS]), ("others", rows()[TEXTS:])):
        (tmp / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    files = f"data.train={tmp / 'members.jsonl'}", f"data.test={tmp / 'others.jsonl'}"
    Federation(RunConfig.load(None, [*files, *SETTINGS])).run(tmp / "run")
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
        outputs = [float(model(**tokenizer(row["text"], return_tensors="pt")).logits) for row in rows()]
    return np.array([(out - (row["label"] - centre) / scale) ** 2 for out, row in zip(outputs, rows(), strict=True)])


def test_losses_are_on_the_scale_that_the_export_states(place: Path) -> None:
    right = by_hand(place, CENTRE, SCALE)
    for model in ("whole", "adapter"):
        subject = opened(asked(place, model))
        assert np.allclose(subject.losses(), right, rtol=1e-3, atol=1e-5), model
        assert subject.notes == ("The model's outputs were compared with (label - 110.0) / 10.0.",)
    given = opened(asked(place, "silent", label_centre=CENTRE, label_scale=SCALE))
    assert np.allclose(given.losses(), right, rtol=1e-3, atol=1e-5)
    raw = opened(asked(place, "silent"))
    assert np.allclose(raw.losses(), by_hand(place, 0, 1), rtol=1e-3)
    assert raw.notes[0].startswith("The labels were taken as they are, since neither the model nor an option states")


def test_an_audit_says_how_labels_were_read(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["--members", str(place / "members.jsonl"), "--non-members", str(place / "others.jsonl")]
    audit = ["audit", "model", "--task", "regression", *texts, "--json"]
    for more, said in (
        (["whole"], "(label - 110.0) / 10.0"),
        (["whole", "--label-scale", "10"], "(label - 110.0) / 10.0"),
        (["silent"], "give --label-centre and --label-scale, or a leak goes unnoticed"),
        (["silent", "--label-centre", "110", "--label-scale", "10"], "(label - 110.0) / 10.0"),
        (["silent", "--label-centre", "0"], "(label - 0.0) / 1.0"),
    ):
        assert main([*audit, str(place / more[0]), *more[1:]]) == 0
        assert said in json.loads(capsys.readouterr().out)["sentences"][-1]
    for more, said in (
        (["whole", "--label-scale", "9"], "give a label centre of 110.0 and a scale of 9.0, and the config.json of"),
        (["silent", "--label-scale", "0"], "--label-scale is 0.0; it must be a number above 0"),
        (["silent", "--label-centre", "nan"], "--label-centre is nan; it must be a finite number"),
        (
            ["silent", "--reference", str(place / "whole")],
            "learned with a label centre of 110.0 and a scale of 10.0, and",
        ),
    ):
        assert main([*audit, str(place / more[0]), *more[1:]]) == 2
        assert said in capsys.readouterr().err


def test_a_prepared_audit_reads_the_scale_too(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["audit", "prepare", str(place / "members.jsonl"), "--out", str(tmp_path / "out"), "--task", "regression"]
    assert main(data) == 0
    capsys.readouterr()
    prepared, out = ["audit", "prepared", "--json"], str(tmp_path / "out")
    assert main([*prepared, str(place / "whole"), out]) == 0
    assert "(label - 110.0) / 10.0" in json.loads(capsys.readouterr().out)["sentences"][-1]
    assert main([*prepared, str(place / "silent"), out, "--label-centre", "110"]) == 0
    assert "(label - 110.0) / 1.0" in json.loads(capsys.readouterr().out)["sentences"][-1]


def test_a_contradiction_of_the_adapters_file_is_refused(place: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"label_scale.json states 110.0 and 10.0: give these two, or correct that file"
    ):
        opened(asked(place, "adapter", label_centre=1.0))


@every(
    "damage",
    [
        "{",
        "[]",
        '{"label_centre": 1}',
        '{"label_centre": 1, "label_scale": 0}',
        '{"label_centre": "1", "label_scale": 2}',
    ],
)
def test_a_damaged_file_is_one_sentence(damage: str, place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    adapter = tmp_path_factory.mktemp("damaged") / "adapter"
    shutil.copytree(place / "adapter", adapter)
    (adapter / "label_scale.json").write_text(damage)
    files = place / "members.jsonl", place / "others.jsonl"
    with pytest.raises(ModelError, match=r"label_scale.json .*: export the run again"):
        opened(Asked("builtin/tiny", *files, DataConfig(train="x", task="regression"), adapter=adapter))


def test_a_run_predicts_and_its_exports_load(place: Path) -> None:
    """The file beside the weights, and the two keys of config.json, are in nobody's way."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, pipeline

    texts = [row["text"] for row in rows()[:4]]
    values = [one["value"] for one in load_run(place / "run").predict(texts)]
    whole = pipeline("text-classification", model=str(place / "whole"), function_to_apply="none")
    assert [CENTRE + SCALE * one["score"] for one in whole(texts)] == pytest.approx(values, abs=1e-3)
    base = AutoModelForSequenceClassification.from_pretrained(
        locate("builtin/tiny"), num_labels=1, problem_type="regression"
    )
    tuned: Any = PeftModel.from_pretrained(base, str(place / "adapter")).eval()
    read = whole.tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        assert (CENTRE + SCALE * tuned(**read).logits[:, 0]).tolist() == pytest.approx(values, abs=1e-3)
    assert json.loads((place / "adapter" / "label_scale.json").read_text()) == {
        "label_centre": 110.0,
        "label_scale": 10.0,
    }
