"""Shadows trained by a configuration, compared with runs of it and with naive scores; and unsuitable configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from attacks import rmia
from attacks.any_model import shadows
from attacks.any_model.subject import Asked
from secure_fed import Federation, RunConfig
from secure_fed.commands.cli import main
from secure_fed.learning.data import notes
from secure_fed.runs.membership import confidences
from tests.attacks.test_any_model import written
from tests.attacks.test_lira import drawn, naive_pooled

TEXTS, COUNT = 24, 4
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


def some(start: int, count: int) -> list[dict[str, Any]]:
    """Notes from index `start` on, with random labels."""
    made, rng = notes.generate(400, seed=0, split="train"), np.random.default_rng(start)
    return [{"text": text, "label": f"kind {rng.integers(3)}"} for text in made.text[start : start + count]]


def of_files(config: RunConfig, train: Path) -> RunConfig:
    own = {("data", "train"): str(train), ("data", "test"): str(train), ("evaluation", "audit_fraction"): 0.0}
    return config.replace(own)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Members, others, a configuration, and the adapter that it trains on the members."""
    tmp = tmp_path_factory.mktemp("shadows")
    written(tmp / "members.jsonl", some(0, TEXTS))
    written(tmp / "others.jsonl", some(TEXTS, TEXTS))
    (tmp / "config.toml").write_text(CONFIG)
    federation = Federation(of_files(RunConfig.load(tmp / "config.toml"), tmp / "members.jsonl"))
    result = federation.run()
    federation.export(result.state, tmp / "adapter")
    return tmp


def command(folder: Path, *more: str) -> list[str]:
    files = ["--members", str(folder / "members.jsonl"), "--non-members", str(folder / "others.jsonl")]
    model = ["model", "builtin/tiny", "--adapter", str(folder / "adapter")]
    return ["audit", *model, *files, "--shadows", str(COUNT), "--config", str(folder / "config.toml"), *more]


def asked(folder: Path, config: RunConfig) -> Asked:
    files = folder / "members.jsonl", folder / "others.jsonl"
    return Asked("builtin/tiny", *files, config.data, folder / "adapter", max_length=24, shadows=COUNT, config=config)


@pytest.mark.nightly
def test_a_shadow_is_a_run_of_the_configuration_on_its_half(folder: Path, tmp_path: Path) -> None:
    whole = ["training.batch_size=48", "training.epochs=5"]  # a step on all texts, whatever their order
    config = RunConfig.load(folder / "config.toml", whole)
    made = shadows.made(asked(folder, config), config, COUNT)
    assert made.inside.shape == made.phi.shape == (COUNT, 2 * TEXTS)
    assert (made.inside.sum(axis=0) == COUNT // 2).all()
    texts = [*some(0, TEXTS), *some(TEXTS, TEXTS)]
    everything = written(tmp_path / "all.jsonl", texts)
    half = written(tmp_path / "half.jsonl", [one for one, there in zip(texts, made.inside[1], strict=True) if there])
    run = Federation(of_files(config, half))
    model = run.load(run.run().state)
    problem = Federation(of_files(config, everything)).assembly.problem
    device = next(model.parameters()).device
    phi = confidences(model, problem.test, problem.collate, problem.confidence, 64, device)
    assert phi == pytest.approx(made.phi[1], abs=2e-3)
    assert np.abs(phi - made.phi[0]).max() > 0.1, "another half, another model"


def test_equal_texts_share_their_coins(folder: Path, tmp_path: Path) -> None:
    twice = some(0, TEXTS)
    twice[5] = twice[3]
    others = [*some(TEXTS, TEXTS - 1), twice[3]]
    config = RunConfig.load(folder / "config.toml", ["training.epochs=1", "federation.rounds=1"])
    files = written(tmp_path / "a.jsonl", twice), written(tmp_path / "b.jsonl", others)
    both = Asked("builtin/tiny", *files, config.data, folder / "adapter")
    made = shadows.made(both, config, COUNT)
    assert (made.inside[:, 3] == made.inside[:, 5]).all()
    assert (made.inside[:, 3] == made.inside[:, -1]).all()
    audited = shadows._rows(both, config, ((0, 5), (1,)))
    assert [row["text"] for row in audited] == [twice[0]["text"], twice[5]["text"], others[1]["text"]]


def test_the_scores_are_those_of_a_naive_computation() -> None:
    phi, reference_phi, inside, _ = drawn(8, 30, 1.0)
    found = shadows.scored(phi, shadows.Shadows(inside, reference_phi))
    s_in, s_out = (naive_pooled(reference_phi, chosen) ** 0.5 for chosen in (inside, ~inside))
    p, references = 1 / (1 + np.exp(-phi)), 1 / (1 + np.exp(-reference_phi))
    ratio = []
    for text in range(30):
        ins, outs = (reference_phi[chosen, text] for chosen in (inside[:, text], ~inside[:, text]))
        expected = stats.norm.logpdf(phi[text], ins.mean(), s_in) - stats.norm.logpdf(phi[text], outs.mean(), s_out)
        assert found["LiRA"][text] == pytest.approx(expected, rel=1e-9, abs=1e-9)
        of_ins, of_outs = (references[chosen, text] for chosen in (inside[:, text], ~inside[:, text]))
        ratio.append(p[text] / ((of_ins.mean() + of_outs.mean()) / 2))
    for text in range(30):
        assert found["RMIA"][text] == pytest.approx(sum(ratio[text] / z > rmia.GAMMA for z in ratio) / 30)


@pytest.mark.nightly
def test_a_model_that_learned_by_heart_is_found_by_its_shadows(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(folder, "--json")) == 0
    told, said = capsys.readouterr()
    found = json.loads(told)
    assert found["shadows"] == COUNT
    areas = {one["signal"]: one["auc"] for one in found["signals"]}
    assert set(areas) == {"loss", "LiRA", "RMIA"}
    assert min(areas.values()) > 0.7, areas
    assert "shadow models: 8 of 8 rounds" in said


def test_a_configuration_that_does_not_fit_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from secure_fed.learning.models.locate import locate

    config = AutoConfig.from_pretrained(locate("builtin/tiny"), num_hidden_layers=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "smaller")

    def changed(old: str, new: str) -> str:
        file = tmp_path / f"{len(new)}-{hash(new)}.toml"
        file.write_text(CONFIG.replace(old, new))
        return str(file)

    usual = command(folder)
    merged = [one for one in usual if one not in ("--adapter", str(folder / "adapter"))]
    smaller = [str(tmp_path / "smaller") if one == "builtin/tiny" else one for one in merged]
    for arguments, said in (
        ([*usual, "--config", changed("rank = 4", "rank = 8")], "has rank 4: set method.rank = 4"),
        (
            [*usual, "--config", changed("[model]", "[model]\nname = 'elsewhere'")],
            "the audited adapter is on builtin/tiny",
        ),
        (merged, "is the audited model itself, and has seen the members"),
        (smaller, "with num_hidden_layers = 3, and"),
        ([*usual, "--shadows", "2"], "--shadows is 2: at least 4"),
        ([*usual, "--label", "label"], "--label has no place beside --config"),
        ([*usual, "--max-length", "9"], "--max-length has no place beside --config"),
        (usual[:-2], "--shadows N and --config CONFIG.toml go together"),
        ([*usual, "--config", changed("clients = 1", "clients = 1\n[method.no]\na=1")], "method"),
        ([*usual, "--config", changed("rank = 4", "rank = 4\npersonal = ['classifier.*']")], "no complete model"),
    ):
        assert main(arguments) == 2, arguments
        told = capsys.readouterr().err
        assert said in told, told
        assert "Traceback" not in told
