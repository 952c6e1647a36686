"""A head that starts from descriptions of the classes: its scores are cosines, and each class needs one description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from secure_fed import Federation, RunConfig, load_run
from secure_fed.config import DataConfig, ModelConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.models import loading
from secure_fed.learning.models.described import in_order, rows
from secure_fed.learning.tasks import build

NAMES = ("calm", "wild", "other")
DESCRIBED = ("wild=a wild sea, full of storms", "calm=quiet", "other=neither of the two, or no sea")


def load(folder: Path, *descriptions: str) -> loading.Loaded:
    config = ModelConfig(name=str(folder), pooling="mean", max_length=32, descriptions=descriptions)
    return loading.load(config, build(DataConfig()), NAMES, seed=0)


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
    assert (means @ rows(means).T).argmax(1).tolist() == list(range(8))
    as_long_as_read = means - means.mean(0)
    assert (means @ as_long_as_read.T).argmax(1).tolist() != list(range(8)), (
        "the longest would be named for other texts"
    )


def test_descriptions_are_found_by_the_names_of_classes() -> None:
    assert in_order(DESCRIBED, NAMES) == ["quiet", "a wild sea, full of storms", "neither of the two, or no sea"]
    assert in_order(["1 = x = y", "0=z"], ["0", "1"]) == ["z", "x = y"]


@pytest.mark.parametrize(
    ("descriptions", "said"),
    [
        (["calm=a", "wild=b"], "has none for other; give one for each class"),
        ([*DESCRIBED, "sea=c"], "has 'sea=c'; give one 'class=description' for each class: calm, wild, other"),
        ([*DESCRIBED, "calm=again"], "has 'calm=again'; give one"),
        (["calm=", "wild=b", "other=c"], "has 'calm='; give one"),
        (["quiet", "a storm", "neither"], "has 'quiet'; give one"),
    ],
)
def test_every_class_needs_one_description(descriptions: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.descriptions {said}"):
        in_order(descriptions, NAMES)


def test_they_need_a_head_that_reads_the_mean() -> None:
    with pytest.raises(ConfigError, match=r"model\.descriptions .* needs .*model\.pooling = 'mean'"):
        RunConfig.load(None, ['model.descriptions=["0=a", "1=b"]'])


def test_a_run_starts_from_them_and_its_export_needs_none(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    """With a learning rate next to zero the exported model still has the head that was made of the descriptions."""
    files = [f"model.name={small_model}", f"data.train={small_data / 'train.jsonl'}", "training.lr=1e-12"]
    rest = ["model.pooling=mean", "model.max_length=32", "federation.clients=3", "federation.rounds=1"]
    names = Federation(RunConfig.load(None, [*files, *rest])).run(tmp_path / "other").summary["label_names"]
    told = RunConfig.load(None, [*files, *rest]).replace(
        {("model", "descriptions"): tuple(f"{name}={name} and nothing else" for name in names)}
    )
    Federation(told).run(tmp_path / "run")
    head = load_run(tmp_path / "run").model.get_parameter("classifier.weight")
    want = loading.load(told.model, build(told.data), names, seed=0).model.get_parameter("classifier.weight")
    other = load_run(tmp_path / "other").model.get_parameter("classifier.weight")
    assert torch.allclose(head, want, atol=1e-6)
    assert not torch.allclose(head, other, atol=1e-2)
