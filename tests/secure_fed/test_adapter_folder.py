"""A run's export, loaded again: by `load_adapter` in one call, or by PEFT; and the folders that are refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForSequenceClassification

import secure_fed
from privacy.ledger import Ledger
from secure_fed import Federation, load_adapter
from secure_fed.errors import ModelError
from secure_fed.export import trained
from secure_fed.methods import METHODS
from secure_fed.methods.method import State
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import small_models, toys
from tests.secure_fed.test_export import OTHERS, SELECTIVE, config_of, equal

RUN = {
    **{"federation.clients": 4, "federation.cohort": 2, "federation.rounds": 2, "federation.seed": 5},
    **{"training.lr": 0.02, "model.max_length": 16},
}


def run(name: str, model: Path | str, data: Path, out: Path, **settings: Any) -> trained.Trained:
    """Trains two rounds with the method, and reads the finished run back."""
    files = {"model.name": str(model), "data.train": str(data / "train.jsonl"), "data.test": str(data / "test.jsonl")}
    chosen = {**files, **RUN, **settings}
    config = config_of(name).replace({tuple(key.split(".", 1)): value for key, value in chosen.items()})  # type: ignore[misc]
    Federation(config).run(out)
    return trained.load_run(out)


@torch.no_grad()
def scores(model: nn.Module) -> torch.Tensor:
    ids = torch.randint(4, 44, (5, 7), generator=torch.Generator().manual_seed(0))
    out: torch.Tensor = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return out


@pytest.mark.parametrize("name", chosen(METHODS, ["fra_lora", "bitfit"]))
def test_a_run_is_exported_and_loaded(name: str, small_model: Path, small_data: Path, tmp_path: Path) -> None:
    done = run(name, small_model, small_data, tmp_path / "run")
    done.export(tmp_path / "out")
    want = scores(done.model)
    readme = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert not any(str(small_data).encode() in file.read_bytes() for file in (tmp_path / "out").iterdir())
    if name in OTHERS:
        assert "library_name: secure-fed" in readme
        code = readme.split("```python\n")[1].split("```")[0]
        scope: dict[str, Any] = {}
        exec(code.replace("path/to/this/folder", str(tmp_path / "out")), scope)
        loaded = scope["model"]
        assert loaded.config.id2label == {0: "calm", 1: "wild"}
    else:
        assert "library_name: peft" in readme
        base = AutoModelForSequenceClassification.from_pretrained(small_model)
        loaded = PeftModel.from_pretrained(base, str(tmp_path / "out"))
        with refused(ModelError, worded=name == "fra_lora"):
            load_adapter(tmp_path / "out")
    assert equal(scores(loaded), want)
    if name not in OTHERS or name in SELECTIVE:
        done.export(tmp_path / "whole", merged=True)
        assert equal(scores(AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole")), want)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, small_model: Path, small_data: Path) -> Path:
    """The folder of an exported adapter, trained on the small model."""
    folder = tmp_path_factory.mktemp("exported")
    return run("adapter_pfeiffer", small_model, small_data, folder / "run").export(folder / "out")


def test_a_private_run_in_bfloat16_is_loaded_in_it_and_without_its_ledger(
    small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    private: dict[str, Any] = {"privacy.unit": "client", "privacy.epsilon": 50.0, "evaluation.dummies": 0}
    Ledger.create(tmp_path / "ledger.sqlite", data_set="moods", epsilon=60.0, delta=1e-4)
    private |= {"privacy.ledger": str(tmp_path / "ledger.sqlite"), "model.dtype": "bfloat16"}
    budget = {"privacy.data_set": "moods", "privacy.unit_name": "ward", "privacy.ledger_heads": str(tmp_path / "heads")}
    done = run("adapter_pfeiffer", small_model, small_data, tmp_path / "run", **private, **budget)
    done.export(tmp_path / "out")
    assert not re.search(rb"ledger|moods|ward", (tmp_path / "out" / "secure_fed.json").read_bytes())
    assert torch.equal(scores(load_adapter(tmp_path / "out")), scores(done.model))
    with refused(ModelError):  # in float32
        load_adapter(tmp_path / "out", AutoModelForSequenceClassification.from_pretrained(small_model))


def texts(seed: int, count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 40, (count, 7), generator=generator)
    return [{"input_ids": row.tolist(), "labels": number % 3} for number, row in enumerate(ids)]


def of_ones_own(name: str, model: nn.Module) -> tuple[Federation, State]:
    """A federation over a model that is given in Python, and the state at its end."""
    settings = {"method.name": name, "method.modules_to_save": [], "method.rank": 8}
    federation = Federation(toys.config(settings), model=model, train=[texts(1, 9), texts(2, 12)], test=texts(3, 6))
    return federation, federation.run().state


@every("name", ["adapter_pfeiffer", *SELECTIVE])
def test_a_model_of_ones_own(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    federation, state = of_ones_own(name, small_models.make("bert"))
    out = federation.export(state, tmp_path_factory.mktemp("own") / "out")
    want = small_models.logits(federation.load(state))
    assert equal(small_models.logits(load_adapter(out, small_models.make("bert"))), want)
    assert 'load_adapter("path/to/this/folder", base)' in (out / "README.md").read_text(encoding="utf-8")
    with refused(ModelError):
        load_adapter(out)


def test_a_model_of_ones_own_that_is_published(small_model: Path, tmp_path: Path) -> None:
    """The loaded model keeps the labels of the model given in Python, which may have few positions."""
    labels = {0: "no", 1: "perhaps", 2: "yes"}
    model = AutoModelForSequenceClassification.from_pretrained(small_model, id2label=labels)
    federation, state = of_ones_own("adapter_pfeiffer", model)
    loaded = load_adapter(federation.export(state, tmp_path / "out", base_model=str(small_model)))
    assert equal(scores(loaded), scores(federation.load(state)))
    assert loaded.config.id2label == labels  # type: ignore[union-attr]


Edit = Callable[[dict[str, Any]], Any]
DAMAGES: list[Edit | str] = [
    lambda note: note.update(format=2),
    lambda note: note.pop("format"),
    lambda note: note.pop("head"),
    lambda note: note.update(settings=3),
    lambda note: note.update(rounds="many"),
    lambda note: note.update(task="divination"),
    lambda note: note["settings"].update(other={"a": 1}),
    lambda note: note["settings"]["method"].update(name="unheard_of"),
    lambda note: note["settings"]["model"].update(dtype="int4"),
    lambda note: note.update(base_model="/no/such/folder"),
    lambda note: note["head"].append("score.weight"),
    lambda note: note.update(base_digest="0"),
    lambda note: note["settings"]["method"].update(bottleneck=9),
    *("", "[]", "{", "null", '"format"'),
]


WORDS = r" \((?!TMP).*\)|read: .*?(?=;)"  # of Python and of libraries


@pytest.fixture
def copied(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "out"))


@every("damage", DAMAGES)
def test_a_note_that_does_not_fit_is_refused(damage: Edit | str, exported: Path, copied: Path) -> None:
    note = json.loads((exported / "secure_fed.json").read_text(encoding="utf-8"))
    if not isinstance(damage, str):
        damage(note)
    text = damage if isinstance(damage, str) else json.dumps(note)
    (copied / "secure_fed.json").write_text(text, encoding="utf-8")
    with refused(secure_fed.SecureFedError, hide=WORDS):
        load_adapter(copied)


def test_torn_tensors_are_refused(copied: Path, tmp_path: Path) -> None:
    file = copied / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with refused(ModelError, hide=WORDS):
        load_adapter(copied)
    file.unlink()
    with refused(ModelError, hide=WORDS):
        load_adapter(copied)
    with refused(ModelError):
        load_adapter(tmp_path / "nothing")
