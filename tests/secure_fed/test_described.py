"""A head that starts from descriptions of the classes: its scores are cosines, and each class needs one description."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel
from torch import Tensor

from secure_fed import Federation, MeanPooledForSequenceClassification, RunConfig, load_run
from secure_fed.config import DataConfig, ModelConfig
from secure_fed.errors import ConfigError
from secure_fed.learning import tasks
from secure_fed.learning.models import loading
from secure_fed.learning.models.loading import description_rows, descriptions_in_order
from tests.cells import chosen, every
from tests.golden import refused

IDS = torch.tensor([[2, 4, 6, 7, 3], [2, 5, 3, 0, 0]])  # the second text is padded
NAMES = ("calm", "wild", "other")
DESCRIBED = ("wild=a wild sea, full of storms", "calm=quiet", "other=neither of the two, or no sea")


def load(folder: Path, *descriptions: str) -> loading.Loaded:
    config = ModelConfig(name=str(folder), pooling="mean", max_length=32, descriptions=descriptions)
    return loading.load(config, tasks.build(DataConfig()), NAMES, seed=0)


def read(folder: Path, text: str) -> np.ndarray[Any, Any]:
    """The mean over the tokens of one text, by transformers' base model, formed in a loop."""
    tokenizer, base = (auto.from_pretrained(folder) for auto in (transformers.AutoTokenizer, transformers.AutoModel))
    with torch.no_grad():
        states = base.eval()(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()
    return np.asarray(sum(states) / len(states))


def test_a_text_scores_by_its_cosines_with_the_descriptions(small_model: Path) -> None:
    """Expected: cosines of single texts, in numpy. Scores may differ from them by what is common to all classes."""
    loaded, text = load(small_model, *DESCRIBED), "a wild storm"
    means = {name: read(small_model, told) for name, _, told in (one.partition("=") for one in DESCRIBED)}
    mean = read(small_model, text)
    cosines = np.array([mean @ means[name] / np.linalg.norm(mean) / np.linalg.norm(means[name]) for name in NAMES])
    longest = np.linalg.norm(mean) / np.mean([np.linalg.norm(each) for each in means.values()])
    with torch.no_grad():
        got = loaded.model(**loaded.tokenizer(text, return_tensors="pt")).logits[0].numpy()
    assert np.ptp(cosines) > 1e-3
    np.testing.assert_allclose(got - got.mean(), 20 * longest * (cosines - cosines.mean()), atol=1e-3)
    assert loaded.head == ("classifier.weight", "classifier.bias"), "it trains like a random one"


def test_every_description_scores_highest_for_its_own_class_whatever_its_length() -> None:
    means = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, 3, 8).unsqueeze(1)
    assert (means @ description_rows(means).T).argmax(1).tolist() == list(range(8))
    as_long_as_read = means - means.mean(0)
    assert (means @ as_long_as_read.T).argmax(1).tolist() != list(range(8)), (
        "the longest would be named for other texts"
    )


def test_descriptions_are_found_by_the_names_of_classes() -> None:
    found = descriptions_in_order(DESCRIBED, NAMES)
    assert found == ["quiet", "a wild sea, full of storms", "neither of the two, or no sea"]
    assert descriptions_in_order(["1 = x = y", "0=z"], ["0", "1"]) == ["z", "x = y"]
    assert descriptions_in_order(["Jose\u0301=x"], ["Jos\u00e9"]) == ["x"], "as names in the data are read"


@every(
    "descriptions",
    [
        ["calm=a", "wild=b"],
        [*DESCRIBED, "sea=c"],
        [*DESCRIBED, "calm=again"],
        ["calm=", "wild=b", "other=c"],
        ["quiet", "a storm", "neither"],
    ],
)
def test_every_class_needs_one_description(descriptions: list[str]) -> None:
    with refused(ConfigError, "model.descriptions"):
        descriptions_in_order(descriptions, NAMES)


@every("override", ['model.descriptions=["0=a", "1=b"]', "model.train_head=false"])
def test_they_need_a_head_that_reads_the_mean_and_a_fixed_head_needs_them(override: str) -> None:
    with refused(ConfigError, override.partition("=")[0]):
        RunConfig.load(None, [override])


def settings(model: Path, data: Path, *more: str) -> RunConfig:
    files = [f"model.name={model}", f"data.train={data / 'train.jsonl'}", f"data.test={data / 'test.jsonl'}"]
    small = ["model.pooling=mean", "model.max_length=32", "federation.clients=3", "federation.rounds=1"]
    told = tuple(f"{name}={name} and nothing else" for name in ("calm", "wild"))
    return RunConfig.load(None, [*files, *small]).replace({("model", "descriptions"): told}).override(more)


def head_of(config: RunConfig, names: Sequence[str]) -> Tensor:
    return loading.load(config.model, tasks.build(config.data), names, seed=0).model.get_parameter("classifier.weight")


def test_a_run_trains_the_head_from_them(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    """The head moves no further than the steps reach, and a head that is drawn from the seed is far away."""
    config = settings(small_model, small_data, "training.lr=1e-6")
    names = Federation(config).run(tmp_path / "run").summary["label_names"]
    head = load_run(tmp_path / "run").model.get_parameter("classifier.weight")
    moved = (head - head_of(config, names)).abs().max()
    assert 0 < moved < 1e-3
    drawn = config.replace({("model", "descriptions"): ()})
    assert (head - head_of(drawn, names)).abs().max() > 10 * moved


@pytest.mark.parametrize("unit", chosen(["none", "example"], ["none"]))
def test_a_fixed_head_stays_and_is_exported(unit: str, small_model: Path, small_data: Path, tmp_path: Path) -> None:
    """Neither clients nor server hold a tensor of it; PEFT and transformers, and a resumed run, get it all the same."""
    private = [] if unit == "none" else ["privacy.unit=example", "privacy.epsilon=8", "evaluation.audit_fraction=0"]
    fixed = ["model.train_head=false", "method.name=federa", "method.rule=ffa_lora", "training.lr=0.02"]
    config = settings(small_model, small_data, *fixed, *private)
    result = Federation(config).run(tmp_path / "run")
    assert result.state.tensors.keys()
    assert not [name for name in result.state.tensors if "classifier" in name]
    if not private:
        Federation(config.override(["federation.rounds=2"])).run(tmp_path / "run", resume=True)
    done = load_run(tmp_path / "run")
    want = head_of(config, done.label_names)
    assert torch.equal(done.model.get_parameter("classifier.weight"), want)
    scores = outputs(done.model)
    base = MeanPooledForSequenceClassification.from_pretrained(small_model, num_labels=len(done.label_names))
    assert torch.allclose(outputs(PeftModel.from_pretrained(base, done.export(tmp_path / "peft"))), scores, atol=1e-5)
    merged = done.export(tmp_path / "merged", merged=True)
    assert torch.allclose(outputs(MeanPooledForSequenceClassification.from_pretrained(merged)), scores, atol=1e-5)


@torch.no_grad()
def outputs(model: Any) -> Tensor:
    found: Tensor = model.eval()(input_ids=IDS, attention_mask=(IDS != 0).long()).logits
    return found


@every("method", ["head", "bitfit", "fedft"])
def test_a_fixed_head_needs_a_lora_adapter(method: str, small_model: Path, small_data: Path) -> None:
    config = settings(small_model, small_data, "model.train_head=false", f"method.name={method}")
    with refused(ConfigError, "model.train_head"):
        Federation(config).run()
