"""Generated text, compared with transformers' own generation and with a loop over single prompts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from secure_fed import Federation, RunConfig
from secure_fed.errors import ConfigError
from secure_fed.export.generation import chooser, continued
from secure_fed.export.trained import Trained, load_run

PROMPTS = ["word1 word2", "word3", "calm wild word4 word5 word6", ""]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, gpt2: Path) -> dict[str, Trained]:
    """A trained run of one round for each of two methods."""
    folder = tmp_path_factory.mktemp("generation")
    (folder / "train.jsonl").write_text('{"text": "calm word1 wild word2"}\n' * 20)
    found = {}
    for name in ("fedlora", "prefix_tuning"):
        tables: dict[str, dict[str, Any]] = {
            "model": {"name": str(gpt2), "max_length": 16},
            "data": {"train": str(folder / "train.jsonl"), "task": "causal_lm"},
            "federation": {"clients": 2, "rounds": 1},
            "method": {"name": name},
            "training": {"lr": 0.05},
        }
        Federation(RunConfig.from_dict(tables)).run(folder / name)
        found[name] = load_run(folder / name)
    return found


def test_greedy_tokens_are_those_of_transformers(models: dict[str, Trained]) -> None:
    run = models["fedlora"]
    for prompt in PROMPTS[:3]:
        ids = torch.tensor([run.tokenizer(prompt)["input_ids"][:-1]])  # without the [SEP] that ends a text
        model: Any = run.model.eval()
        theirs = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert list(run.generate([prompt], 8)) == [run.tokenizer.decode(theirs, skip_special_tokens=True)]


@pytest.mark.parametrize("name", ["fedlora", "prefix_tuning"])
def test_prompts_do_not_depend_on_each_other_or_on_the_room_that_is_left(models: dict[str, Trained], name: str) -> None:
    run = models[name]
    together = list(run.generate(PROMPTS, 24))  # more than the 16 tokens that the model reads at a time
    assert together == [text for prompt in PROMPTS for text in run.generate([prompt], 24)]
    assert all(len(text.split()) <= 24 for text in together)
    assert any(len(text.split()) > 16 for text in together)


def test_the_end_token_ends_a_text(models: dict[str, Trained]) -> None:
    run = models["fedlora"]
    ends = run.tokenizer.convert_tokens_to_ids("word9")
    tokens = iter([4, ends, 5, 5, 5, 5])
    run.tokenizer.eos_token = "word9"
    try:
        found = list(continued(run.model, run.tokenizer, ["word1", "word2"], 16, 3, lambda scores: next(tokens), 2))
    finally:
        run.tokenizer.eos_token = None
    assert found == ["calm wild wild", ""]


def test_draws_follow_the_seed_and_the_temperature(models: dict[str, Trained]) -> None:
    run = models["fedlora"]
    first, again, other = (list(run.generate(PROMPTS, 8, temperature=2.0, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    cold = chooser(0.01, 0)
    assert all(cold(torch.tensor([0.0, 1.0, 0.5])) == 1 for _ in range(20))
    shares = torch.bincount(torch.tensor([draw(torch.tensor([0.0, 2.0])) for draw in [chooser(2.0, 0)] * 2000])) / 2000
    assert float(shares[1]) == pytest.approx(1 / (1 + math.exp(-1)), abs=0.04)


def test_a_classifier_writes_nothing(models: dict[str, Trained]) -> None:
    classifier = replace(models["fedlora"], config=RunConfig())
    with pytest.raises(ConfigError, match="only 'causal_lm' writes texts"):
        classifier.generate(["calm"])
