"""Signals of other models: ReCaLL and neighbourhood scores, by their formulas and on a language model that memorised texts.

Shadows, trained by a configuration: compared with runs of it and with naive scores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks import lira, rmia
from attacks.any_model import shadows, signals
from attacks.any_model.signals import dropped
from attacks.any_model.subject import Subject, Tokens, _figures, opened
from attacks.options import Asked
from secure_fed import Federation, RunConfig
from secure_fed.config import DataConfig
from secure_fed.errors import DataError, UsageError
from secure_fed.learning.data import notes
from secure_fed.learning.models.locate import locate
from secure_fed.runs.membership import confidences
from tests.attacks import small_lm
from tests.attacks.refusals import Capsys, facts_of, refusals
from tests.attacks.test_any_model import written
from tests.attacks.test_lira import drawn
from tests.golden import refused

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


def command(folder: Path, *more: Any) -> list[str]:
    files = ("--members", folder / "members.jsonl", "--non-members", folder / "others.jsonl")
    return [
        *map(str, ("audit", "model", folder / "model", *files, "--task", "causal_lm", "--max-length", LENGTH, *more))
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


def test_texts_of_one_token_are_left_out(folder: Path, tmp_path: Path, capsys: Capsys) -> None:
    """Nothing of them is predicted, and a loss of 0 would rank them first."""
    more = written(tmp_path / "others.jsonl", [{"text": "7"}, *some(TEXTS, TEXTS), {"text": "8"}])
    scores = tmp_path / "scores.csv"
    found = facts_of(command(folder, "--non-members", str(more), "--scores", str(scores)), capsys)
    assert (found["members"], found["non_members"]) == (TEXTS, TEXTS)
    assert "Left out, since they have no token to predict: 0 members and 2 others." in found["sentences"]
    places = [line.split(",")[0] for line in scores.read_text().splitlines()[1 + TEXTS :]]
    assert places == [str(1 + row) for row in range(TEXTS)], scores.read_text()


def test_tokens_that_are_switched_off_have_no_share_in_a_mean() -> None:
    """Padded vocabularies have scores of minus infinity."""
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    _, mean, deviation = _figures(p.log(), torch.zeros(2, dtype=torch.long))
    logs = p[0, :3].log()
    average = float((p[0, :3] * logs).sum())
    assert mean.tolist() == pytest.approx([average, 0.0])
    assert deviation.tolist() == pytest.approx([float((p[0, :3] * (logs - average) ** 2).sum()) ** 0.5, 0.0])


def test_texts_learned_by_heart_are_found_by_both(folder: Path, capsys: Capsys) -> None:
    found = facts_of(command(folder, "--recall", folder / "unseen.jsonl", "--neighbours", "5"), capsys)
    areas = {one["signal"]: one["auc"] for one in found["signals"]}
    assert areas["neighbourhood"] > 0.9
    assert areas["ReCaLL"] > 0.9


def test_a_neighbour_has_one_other_word(folder: Path) -> None:
    """Swapped by a masked language model, or dropped."""
    swapped = signals._swapped(["The patient has a mild headache", "", "?!"], 4, "builtin/tiny")
    own = ["The", "patient", "has", "a", "mild", "headache"]
    assert len(set(swapped[0])) == 4
    for text in swapped[0]:
        assert sum(one != other for one, other in zip(text.split(), own, strict=True)) == 1
    assert swapped[1:] == [[""] * 4, ["?!"] * 4]
    found = dropped("one two three", 5)
    assert sorted(found[:3]) == [" two three", "one  three", "one two "]
    assert found[3:] == found[:2]
    assert dropped("word", 2) == ["word", "word"]


def test_what_does_not_fit_is_one_sentence(folder: Path, tmp_path: Path, capsys: Capsys) -> None:
    audited = subject(folder)
    with refused(DataError):
        signals.log_likelihoods_after(audited, folder / "others.jsonl")
    with refused(UsageError):
        signals.log_likelihoods_after(audited, written(tmp_path / "long.jsonl", [{"text": "word " * 400}]))
    calls = (
        ("--neighbours", "0"),
        ("--neighbour-model", "builtin/tiny"),
        ("--neighbours", "2", "--neighbour-model", folder / "model"),
        ("--max-length", "1"),
    )
    refusals("any_model_signals", (command(folder, *call) for call in calls), capsys)


# Shadows.

COUNT = 4
CONFIG = """
[model]
max_length = 24
[method]
name = "fedlora"
rank = 4
[federation]
clients = 1
rounds = 2
[training]
epochs = 10
batch_size = 12
lr = 1e-2
head_factor = 1  # with longer steps rounding grows until two runs of the same are unlike
"""


def labelled(start: int, count: int) -> list[dict[str, Any]]:
    """Notes from index `start` on, with random labels."""
    made, rng = notes.generate(400, seed=0, split="train"), np.random.default_rng(start)
    return [{"text": text, "label": f"kind {rng.integers(3)}"} for text in made.text[start : start + count]]


def of_files(config: RunConfig, train: Path) -> RunConfig:
    own = {("data", "train"): str(train), ("data", "test"): str(train), ("evaluation", "audit_fraction"): 0.0}
    return config.replace(own)


def run_in(place: Path, *settings: str) -> Path:
    """Members, others, a configuration, and the adapter that it trains on the members, with these settings."""
    written(place / "members.jsonl", labelled(0, TEXTS))
    written(place / "others.jsonl", labelled(TEXTS, TEXTS))
    (place / "config.toml").write_text(CONFIG)
    federation = Federation(of_files(RunConfig.load(place / "config.toml", list(settings)), place / "members.jsonl"))
    federation.export(federation.run().state, place / "adapter")
    return place


@pytest.fixture(scope="module")
def run_of_half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one short round."""
    return run_in(tmp_path_factory.mktemp("shadows"), "federation.rounds=1", "training.epochs=1")


def with_shadows(run_of_half: Path, *more: str) -> list[str]:
    files = ["--members", str(run_of_half / "members.jsonl"), "--non-members", str(run_of_half / "others.jsonl")]
    model = ["model", "builtin/tiny", "--adapter", str(run_of_half / "adapter")]
    return ["audit", *model, *files, "--shadows", str(COUNT), "--config", str(run_of_half / "config.toml"), *more]


def asked(run_of_half: Path, config: RunConfig) -> Asked:
    files = run_of_half / "members.jsonl", run_of_half / "others.jsonl"
    return Asked(
        "builtin/tiny", *files, config.data, run_of_half / "adapter", max_length=24, shadows=COUNT, config=config
    )


@pytest.mark.nightly
def test_a_shadow_is_a_run_of_the_configuration_on_its_half(run_of_half: Path, tmp_path: Path) -> None:
    whole = ["training.batch_size=48", "training.epochs=5"]  # a step on all texts, whatever their order
    config = RunConfig.load(run_of_half / "config.toml", whole)
    made = shadows.made(asked(run_of_half, config), config, COUNT)
    assert made.inside.shape == made.phi.shape == (COUNT, 2 * TEXTS)
    assert (made.inside.sum(axis=0) == COUNT // 2).all()
    texts = [*labelled(0, TEXTS), *labelled(TEXTS, TEXTS)]
    everything = written(tmp_path / "all.jsonl", texts)
    half = written(tmp_path / "half.jsonl", [one for one, there in zip(texts, made.inside[1], strict=True) if there])
    run = Federation(of_files(config, half))
    model = run.load(run.run().state)
    problem = Federation(of_files(config, everything)).assembly.problem
    device = next(model.parameters()).device
    phi = confidences(model, problem.test, problem.collate, problem.confidence, 64, device)
    assert phi == pytest.approx(made.phi[1], abs=2e-3)
    assert np.abs(phi - made.phi[0]).max() > 0.1, "another half, another model"


def test_equal_texts_share_their_coins(run_of_half: Path, tmp_path: Path) -> None:
    twice = labelled(0, TEXTS)
    twice[5] = twice[3]
    others = [*labelled(TEXTS, TEXTS - 1), twice[3]]
    config = RunConfig.load(run_of_half / "config.toml", ["training.epochs=1", "federation.rounds=1"])
    files = written(tmp_path / "a.jsonl", twice), written(tmp_path / "b.jsonl", others)
    both = Asked("builtin/tiny", *files, config.data, run_of_half / "adapter")
    made = shadows.made(both, config, COUNT)
    assert (made.inside[:, 3] == made.inside[:, 5]).all()
    assert (made.inside[:, 3] == made.inside[:, -1]).all()
    audited = shadows._rows(both, config, ((0, 5), (1,)))
    assert [row["text"] for row in audited] == [twice[0]["text"], twice[5]["text"], others[1]["text"]]


def test_the_scores_are_those_of_a_naive_computation() -> None:
    phi, reference_phi, inside, _ = drawn(8, 30, 1.0)
    found = shadows.scored(phi, shadows.Shadows(inside, reference_phi))
    p, references = 1 / (1 + np.exp(-phi)), 1 / (1 + np.exp(-reference_phi))
    assert (found["LiRA"] == lira.online(phi, reference_phi, inside)).all()
    ratio = []
    for text in range(30):
        of_ins, of_outs = (references[chosen, text] for chosen in (inside[:, text], ~inside[:, text]))
        ratio.append(p[text] / ((of_ins.mean() + of_outs.mean()) / 2))
    for text in range(30):
        assert found["RMIA"][text] == pytest.approx(sum(ratio[text] / z > rmia.GAMMA for z in ratio) / 30)


@pytest.mark.nightly
def test_a_model_that_learned_by_heart_is_found_by_its_shadows(tmp_path: Path, capsys: Capsys) -> None:
    found = facts_of(with_shadows(run_in(tmp_path)), capsys, said="shadow models: 8 of 8 rounds")
    assert found["shadows"] == COUNT
    areas = {one["signal"]: one["auc"] for one in found["signals"]}
    assert set(areas) == {"loss", "LiRA", "RMIA"}
    assert min(areas.values()) > 0.7, areas


def test_a_configuration_that_does_not_fit_is_refused(run_of_half: Path, tmp_path: Path, capsys: Capsys) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(locate("builtin/tiny"), num_hidden_layers=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "smaller")

    def changed(name: str, old: str, new: str) -> list[str]:
        (tmp_path / name).write_text(CONFIG.replace(old, new))
        return [*usual, "--config", str(tmp_path / name)]

    usual = with_shadows(run_of_half)
    merged = [one for one in usual if one not in ("--adapter", str(run_of_half / "adapter"))]
    calls = (
        changed("rank", "rank = 4", "rank = 8"),
        changed("model", "[model]", "[model]\nname = 'elsewhere'"),
        merged,
        [str(tmp_path / "smaller") if one == "builtin/tiny" else one for one in merged],
        [*usual, "--shadows", "2"],
        [*usual, "--label", "label"],
        [*usual, "--max-length", "9"],
        usual[:-2],
        changed("key", "clients = 1", "clients = 1\n[method.no]\na=1"),
        changed("personal", "rank = 4", "rank = 4\npersonal = ['classifier.*']"),
    )
    refusals("any_model_shadows", calls, capsys)
