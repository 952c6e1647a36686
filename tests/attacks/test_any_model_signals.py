"""ReCaLL and neighbourhood scores: by their formulas, and on language models that memorised texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks.any_model import signals
from attacks.any_model.signals import dropped
from attacks.any_model.subject import Asked, Subject, Tokens, _moments, opened
from secure_fed.commands.cli import main
from secure_fed.config import DataConfig
from secure_fed.errors import DataError, UsageError
from secure_fed.learning.data import notes
from tests.attacks import small_lm
from tests.attacks.test_any_model import written

TEXTS, LENGTH = 16, 24


def some(start: int, count: int) -> list[dict[str, Any]]:
    return [{"text": text} for text in notes.generate(400, seed=0, split="train").text[start : start + count]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Members, others, unseen texts, and a language model that memorised the members."""
    tmp = tmp_path_factory.mktemp("heart")
    for name, start in (("members", 0), ("others", TEXTS), ("unseen", 2 * TEXTS)):
        written(tmp / f"{name}.jsonl", some(start, TEXTS))
    tokenizer = small_lm.tokenizer_of([row["text"] for row in some(0, 3 * TEXTS)])
    model = small_lm.learned(small_lm.untrained(tokenizer), tokenizer, [row["text"] for row in some(0, TEXTS)], 60)
    small_lm.saved(model, tokenizer, tmp / "model")
    return tmp


def subject(folder: Path) -> Subject:
    files = folder / "members.jsonl", folder / "others.jsonl"
    return opened(Asked(str(folder / "model"), *files, DataConfig(train="x", task="causal_lm"), max_length=LENGTH))


def command(folder: Path, *more: str) -> list[str]:
    files = ["--members", str(folder / "members.jsonl"), "--non-members", str(folder / "others.jsonl")]
    return [
        "audit",
        "model",
        str(folder / "model"),
        *files,
        "--task",
        "causal_lm",
        "--max-length",
        str(LENGTH),
        *more,
    ]


def test_a_text_behind_a_prefix_is_scored_by_the_same_tokens(folder: Path) -> None:
    """Compared with a plain loop over single texts."""
    audited = subject(folder)
    found = signals.log_likelihoods_after(audited, folder / "unseen.jsonl")
    tokenizer, model = audited.tokenizer, audited.model
    cut = [tokenizer(row["text"])["input_ids"] for row in some(2 * TEXTS, TEXTS)]
    room, prefix = 128 - LENGTH, list[int]()
    for ids in cut[:12]:
        prefix += ids if len(prefix) + len(ids) <= room else []
    assert len(prefix) > 40
    for row, text in enumerate(audited.texts.plain):
        ids = tokenizer(text)["input_ids"][:LENGTH]
        log = model(input_ids=torch.tensor([[*prefix, *ids]])).logits[0].log_softmax(1).detach()
        expected = sum(float(log[len(prefix) + at - 1, ids[at]]) for at in range(1, len(ids)))
        assert found[row] == pytest.approx(expected, rel=1e-4)
    assert (signals.log_likelihoods_after(audited, folder / "unseen.jsonl") == found).all()


def test_the_ratio_and_the_difference_are_their_papers_formulas() -> None:
    texts = [Tokens(np.array(said), np.zeros(len(said)), np.ones(len(said))) for said in ([-1.0, -3.0], [-2.0], [])]
    assert signals.recall(texts, np.array([-6.0, -1.0, 0.0])).tolist() == [1.5, 0.5, 0.0]
    own, near = np.array([1.0, 2.0]), [np.array([3.0, 2.0]), np.array([2.0, 1.0])]
    assert signals.neighbourhood(own, near).tolist() == [1.5, -0.5]


def test_texts_of_one_token_are_left_out(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of them is predicted, and a loss of 0 would rank them first."""
    more = written(tmp_path / "others.jsonl", [{"text": "7"}, *some(TEXTS, TEXTS), {"text": "8"}])
    scores = tmp_path / "scores.csv"
    assert main(command(folder, "--json", "--non-members", str(more), "--scores", str(scores))) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["members"], found["non_members"]) == (TEXTS, TEXTS)
    assert "Left out, since they have no token to predict: 0 members and 2 others." in found["sentences"]
    places = [line.split(",")[0] for line in scores.read_text().splitlines()[1 + TEXTS :]]
    assert places == [str(1 + row) for row in range(TEXTS)], scores.read_text()
    assert main(command(folder, "--max-length", "1")) == 2
    assert "no text has a token to predict among its first 1" in capsys.readouterr().err


def test_tokens_that_are_switched_off_have_no_share_in_a_mean() -> None:
    """Padded vocabularies have scores of minus infinity."""
    p = torch.tensor([[[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]]], dtype=torch.float64)
    mean, square = _moments(p.log())
    logs = p[0, 0, :3].log()
    assert mean[0].tolist() == pytest.approx([float((p[0, 0, :3] * logs).sum()), 0.0])
    assert square[0].tolist() == pytest.approx([float((p[0, 0, :3] * logs**2).sum()), 0.0])


def test_texts_learned_by_heart_are_found_by_both(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, "--recall", str(folder / "unseen.jsonl"), "--neighbours", "5", "--json")) == 0
    areas = {one["signal"]: one["auc"] for one in json.loads(capsys.readouterr().out)["signals"]}
    assert areas["neighbourhood"] > 0.9
    assert areas["ReCaLL"] > 0.9


def test_a_masked_language_model_swaps_one_word(folder: Path) -> None:
    swapped = signals._swapped(["The patient has a mild headache", "", "?!"], 4, "builtin/tiny")
    own = ["The", "patient", "has", "a", "mild", "headache"]
    assert len(set(swapped[0])) == 4
    for text in swapped[0]:
        words = text.split()
        assert len(words) == len(own)
        assert sum(one != other for one, other in zip(words, own, strict=True)) == 1
    assert swapped[1:] == [[""] * 4, ["?!"] * 4]


def test_a_dropped_word_is_another_each_time() -> None:
    found = dropped("one two three", 3)
    assert sorted(found) == [" two three", "one  three", "one two "]
    assert dropped("one two three", 5)[3:] == found[:2]
    assert dropped("word", 2) == ["word", "word"]


def test_what_does_not_fit_is_one_sentence(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audited = subject(folder)
    with pytest.raises(DataError, match="has 16 texts of --members or --non-members"):
        signals.log_likelihoods_after(audited, folder / "others.jsonl")
    long = written(tmp_path / "long.jsonl", [{"text": "word " * 400}])
    with pytest.raises(UsageError, match="no text of --recall fits in front of a text: the model reads 128 tokens"):
        signals.log_likelihoods_after(audited, long)
    for more, said in (
        (("--neighbours", "0"), "--neighbours is 0: give a number"),
        (("--neighbour-model", "builtin/tiny"), "give their number with --neighbours"),
        (("--neighbours", "2", "--neighbour-model", str(folder / "model")), "is no masked language model"),
    ):
        assert main(command(folder, *more)) == 2
        assert said in capsys.readouterr().err
