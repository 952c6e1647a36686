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
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForSequenceClassification

import secure_fed
from privacy.ledger import Ledger
from secure_fed import Federation, load_adapter
from secure_fed.errors import ModelError
from secure_fed.export import trained
from secure_fed.methods import METHODS
from tests.cells import chosen
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


@pytest.mark.parametrize(
    "name",
    chosen(METHODS, ["fedlora", "fra_lora", "fedtt", "bitfit", "fedft", "prompt_tuning", "c2a", "adapter_houlsby"]),
)
def test_a_run_is_exported_and_loaded(name: str, small_model: Path, small_data: Path, tmp_path: Path) -> None:
    done = run(name, small_model, small_data, tmp_path / "run")
    done.export(tmp_path / "out")
    want = scores(done.model)
    readme = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert (tmp_path / "out" / "tokenizer.json").exists()
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
        with pytest.raises(ModelError, match=r"is a PEFT adapter: load it with PeftModel\.from_pretrained"):
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


def test_the_folder_names_no_path_of_the_data(exported: Path, small_data: Path) -> None:
    for file in exported.iterdir():
        assert str(small_data).encode() not in file.read_bytes()


def test_a_private_run_is_loaded_without_its_ledger(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    private = {"privacy.unit": "client", "privacy.epsilon": 50.0, "privacy.ledger": str(tmp_path / "ledger.sqlite")}
    Ledger.create(tmp_path / "ledger.sqlite", data_set="moods", epsilon=60.0, delta=1e-4)
    budget = {"privacy.data_set": "moods", "privacy.unit_name": "ward", "privacy.ledger_heads": str(tmp_path / "heads")}
    done = run("adapter_pfeiffer", small_model, small_data, tmp_path / "run", **private, **budget)
    done.export(tmp_path / "out")
    assert not re.search(rb"ledger|moods|ward", (tmp_path / "out" / "secure_fed.json").read_bytes())
    assert equal(scores(load_adapter(tmp_path / "out")), scores(done.model))


def test_a_model_in_bfloat16_is_loaded_in_it(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    done = run("adapter_pfeiffer", small_model, small_data, tmp_path / "run", **{"model.dtype": "bfloat16"})
    done.export(tmp_path / "out")
    assert torch.equal(scores(load_adapter(tmp_path / "out")), scores(done.model))
    with pytest.raises(ModelError, match="other weights, or weights of another type"):
        load_adapter(tmp_path / "out", AutoModelForSequenceClassification.from_pretrained(small_model))


def texts(seed: int, count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 40, (count, 7), generator=generator)
    return [{"input_ids": row.tolist(), "labels": number % 3} for number, row in enumerate(ids)]


@pytest.mark.parametrize("name", ["adapter_pfeiffer", *SELECTIVE])
def test_a_model_of_ones_own(name: str, tmp_path: Path) -> None:
    model, base = small_models.make("bert"), small_models.make("bert")
    settings = {"method.name": name, "method.modules_to_save": [], "method.rank": 8}
    federation = Federation(toys.config(settings), model=model, train=[texts(1, 9), texts(2, 12)], test=texts(3, 6))
    result = federation.run()
    out = federation.export(result.state, tmp_path / "out")
    want = small_models.logits(federation.load(result.state))
    assert equal(small_models.logits(load_adapter(out, base)), want)
    assert 'load_adapter("path/to/this/folder", base)' in (out / "README.md").read_text(encoding="utf-8")
    with pytest.raises(ModelError, match="only a program has: give it"):
        load_adapter(out)


def test_a_model_of_ones_own_that_is_published(small_model: Path, tmp_path: Path) -> None:
    """The loaded model keeps the labels of the model given in Python, which may have few positions."""
    labels = {0: "no", 1: "perhaps", 2: "yes"}
    model = AutoModelForSequenceClassification.from_pretrained(small_model, id2label=labels)
    settings = {"method.name": "adapter_pfeiffer", "method.modules_to_save": [], "method.rank": 8}
    federation = Federation(toys.config(settings), model=model, train=[texts(1, 9), texts(2, 12)], test=texts(3, 6))
    result = federation.run()
    out = federation.export(result.state, tmp_path / "out", base_model=str(small_model))
    loaded = load_adapter(out)
    assert equal(scores(loaded), scores(federation.load(result.state)))
    assert loaded.config.id2label == labels  # type: ignore[union-attr]


Edit = Callable[[dict[str, Any]], Any]
DAMAGES: list[tuple[Edit, str]] = [
    (lambda note: note.update(format=2), "is of format 2, and this version of secure-fed reads format 1"),
    (lambda note: note.pop("format"), "is of format None"),
    (lambda note: note.pop("head"), "is damaged"),
    (lambda note: note.update(settings=3), "is damaged"),
    (lambda note: note.update(rounds="many"), "is damaged"),
    (lambda note: note.update(task="divination"), "there is no task 'divination'"),
    (lambda note: note["settings"].update(other={"a": 1}), "is damaged, or of another version"),
    (lambda note: note["settings"]["method"].update(name="unheard_of"), "unheard_of"),
    (lambda note: note["settings"]["model"].update(dtype="int4"), "is damaged, or of another version"),
    (lambda note: note.update(base_model="/no/such/folder"), "no such folder"),
    (lambda note: note["head"].append("score.weight"), "a model with score.weight, which this Bert"),
    (lambda note: note.update(base_digest="0"), "trained beside other weights"),
    (lambda note: note["settings"]["method"].update(bottleneck=9), "of a model of other sizes"),
]


@pytest.mark.parametrize(("edit", "said"), DAMAGES)
def test_a_note_that_does_not_fit_is_refused(edit: Edit, said: str, exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "out")
    note = json.loads((tmp_path / "out" / "secure_fed.json").read_text(encoding="utf-8"))
    edit(note)
    (tmp_path / "out" / "secure_fed.json").write_text(json.dumps(note), encoding="utf-8")
    with pytest.raises(secure_fed.SecureFedError, match=said):
        load_adapter(tmp_path / "out")


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '"format"'])
def test_a_note_that_is_none_is_refused(text: str, exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "out")
    (tmp_path / "out" / "secure_fed.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=r"secure_fed\.json"):
        load_adapter(tmp_path / "out")


def test_torn_tensors_are_refused(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "out")
    file = tmp_path / "out" / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelError, match=r"adapter\.safetensors cannot be read"):
        load_adapter(tmp_path / "out")
    file.unlink()
    with pytest.raises(ModelError, match=r"adapter\.safetensors cannot be read"):
        load_adapter(tmp_path / "out")
    with pytest.raises(ModelError, match=r"has no secure_fed\.json: give the OUT_DIR"):
        load_adapter(tmp_path / "nothing")


def test_another_base_model_is_refused(exported: Path, small_model: Path, tmp_path: Path) -> None:
    """Three models: of the same sizes with other weights, of other sizes, and of another architecture."""
    shutil.copytree(small_model, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    name = next(name for name in weights if name.endswith("query.weight"))
    save_file(weights | {name: weights[name] + 1e-6}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    other = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="trained beside other weights"):
        load_adapter(exported, other)
    with pytest.raises(ModelError, match="of other sizes"):
        load_adapter(exported, small_models.make("bert"))
    with pytest.raises(ModelError, match=r"a model with bert\..*which this LlamaForSequenceClassification has not"):
        load_adapter(exported, small_models.make("llama"))
    with pytest.raises(ModelError, match="which this Toy has not"):
        load_adapter(exported, toys.model())
