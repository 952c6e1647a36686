"""Property inference from a client's update: closer to the true share than the guess without the update, or no finding.

`secure-fed audit share RUN_DIR WORD`: a finding if updates reveal the share, none for an unrelated word.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks.inference.share import PENALTIES, Shares, _left_out, facts, guessed, made_up
from secure_fed.commands.cli import main
from secure_fed.config import RunConfig
from secure_fed.federation import Federation

FEATURES, SIZE = 12, 20
Example = tuple[Any, float]


def examples(count: int, having: bool, rng: np.random.Generator) -> list[Example]:
    """The attribute moves features of an example, and says nothing of its label, which is 1 for four in five."""
    features = rng.normal(size=(count, FEATURES)) + having * np.r_[np.full(4, 1.2), np.zeros(FEATURES - 4)]
    return [(row, float(label)) for row, label in zip(features, rng.random(count) < 0.8, strict=True)]


def trained(own: Sequence[Example]) -> Any:
    """(numbers,) the change of a network with one hidden layer by some steps on a client's examples."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    inputs = torch.tensor(np.stack([row for row, _ in own]), dtype=torch.float32)
    labels = torch.tensor([[label] for _, label in own])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(inputs), labels).backward()
        optimizer.step()
    return (torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before).double().numpy()


@pytest.fixture(scope="module")
def attacked() -> tuple[Any, Any, Any, Any]:
    """Updates and shares of simulated clients, and of 40 real ones with their own examples."""
    rng = np.random.default_rng(0)
    shadows = made_up(trained, examples(300, True, rng), examples(300, False, rng), 150, SIZE, rng)
    real = made_up(trained, examples(300, True, rng), examples(300, False, rng), 40, SIZE, rng)
    return (*shadows, *real)


def test_an_update_tells_the_share(attacked: tuple[Any, Any, Any, Any]) -> None:
    shadows, shares, updates, true = attacked
    found = guessed(updates, shadows, shares)
    assert found.error(true) < 0.75 * found.baseline(true)
    assert found.p_value(true) < 0.01
    assert found.without == pytest.approx(shares.mean())
    assert ((found.guessed >= 0) & (found.guessed <= 1)).all()


def test_noise_tells_nothing(attacked: tuple[Any, Any, Any, Any]) -> None:
    """Noise of ten times an update's length: the guess goes back to the mean, and is no worse than it by much."""
    shadows, shares, updates, true = attacked
    rng, length = np.random.default_rng(1), np.linalg.norm(shadows, axis=1).mean()
    noised = [one + rng.normal(size=one.shape) * length for one in (shadows, updates)]
    found = guessed(noised[1], noised[0], shares)
    assert found.error(true) > 0.9 * found.baseline(true)
    assert found.error(true) < 1.2 * found.baseline(true)
    assert found.p_value(true) > 0.01


@pytest.mark.nightly
def test_false_alarms_are_as_rare_as_said() -> None:
    rng = np.random.default_rng(0)
    alarms = sum(Shares(rng.random(12), 0.5).p_value(rng.random(12), seed) < 0.05 for seed in range(200))
    assert alarms <= 200 * 0.05 + 3 * (200 * 0.05) ** 0.5


def test_leaving_one_out_is_done_by_hand_too() -> None:
    rng = np.random.default_rng(0)
    rows, shares = rng.normal(size=(9, 4)), rng.normal(size=9)
    kernel = rows @ rows.T
    errors = []
    for out in range(9):
        rest = np.delete(np.arange(9), out)
        weights = np.linalg.solve(kernel[np.ix_(rest, rest)] + 0.3 * np.eye(8), shares[rest])
        errors.append((kernel[out, rest] @ weights - shares[out]) ** 2)
    assert _left_out(kernel, shares, 0.3) == pytest.approx(float(np.mean(errors)))
    assert len(PENALTIES) == 9


def test_made_up_clients_have_the_shares_that_are_said() -> None:
    rng = np.random.default_rng(0)
    updates, shares = made_up(lambda own: np.array([sum(own)]), [1], [0], 200, 10, rng)
    assert updates[:, 0] / 10 == pytest.approx(shares)
    assert set(shares) == {count / 10 for count in range(11)}


CLIENTS, EACH = 16, 12


def rows(client: int, share: float, count: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Texts with label "b" say fever, those with label "a" cough; mother is said by every third, whatever the label."""
    made = []
    for number in range(count):
        ill = rng.random() < share
        words = [
            "patient has",
            "fever" if ill else "cough",
            f"since {number} days",
            "mother" if rng.random() < 1 / 3 else "old",
        ]
        made.append({"text": " ".join(words), "label": "b" if ill else "a", "client": f"site-{client}"})
    return made


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp, rng = tmp_path_factory.mktemp("share"), np.random.default_rng(0)
    train = [row for i in range(CLIENTS) for row in rows(i, i / (CLIENTS - 1), EACH, rng)]
    for name, some in (("train", train), ("test", rows(0, 0.5, 160, rng))):
        (tmp / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    settings = {
        "data": {"train": str(tmp / "train.jsonl"), "test": str(tmp / "test.jsonl"), "client": "client"},
        "federation": {"rounds": 2, "cohort": 8},
        "model": {"max_length": 16},
        "method": {"name": "head"},
        "training": {"batch_size": 4},
        "evaluation": {"audit_fraction": 0.0},
    }
    Federation(RunConfig.from_dict(settings)).run(tmp / "run")
    return tmp / "run"


@pytest.mark.nightly
def test_a_word_that_goes_with_the_label_is_read_from_answers(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "share", str(run_dir), "fever", "--json", "--fail-above", "gain=0.3"]) == 4
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert found["verdict"] == "leak", found
    assert found["error"] < 0.5 * found["baseline"]
    assert found["p_value"] < 0.01
    assert found["clients"] == CLIENTS
    assert "is above --fail-above gain=0.3" in told.err
    assert main(["audit", "share", str(run_dir), "mother"]) == 0
    assert "nothing found" in capsys.readouterr().out


@pytest.mark.nightly
def test_guesses_that_luck_explains_are_no_leak() -> None:
    """Shuffled guesses over 200 audits; and exact ones, which are one."""
    rng, leaks = np.random.default_rng(0), 0
    for _ in range(200):
        true = rng.random(20)
        leaks += facts(Path("run"), "word", Shares(rng.permutation(true), 0.5), true, 0.5)["verdict"] == "leak"
    assert leaks <= 200 * 0.05 + 3 * (200 * 0.05) ** 0.5
    true = rng.random(20)
    assert facts(Path("run"), "word", Shares(true, 0.5), true, 0.5)["verdict"] == "leak"
    worse = facts(Path("run"), "word", Shares(0.5 + 4 * (true - 0.5), 0.5), true, 0.5)
    assert worse["verdict"] == "nothing", "in the right order, and further away than the share that is public"


def test_what_does_not_fit_is_one_sentence(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    masked = {
        "data": {"examples": 200, "test_examples": 60},
        "federation": {"clients": 8, "cohort": 4, "rounds": 1},
        "secure_aggregation": {"enabled": True},
        "evaluation": {"audit_fraction": 0.0},
    }
    Federation(RunConfig.from_dict(masked)).run(tmp_path / "masked")
    for arguments, said in (
        (["audit", "share", str(run_dir), "zebra"], "0 of 160 test texts contain 'zebra'"),
        (["audit", "share", str(run_dir), ""], "WORD is ''"),
        (["audit", "share", str(run_dir), "fever", "--fail-above", "auc=1"], "give gain="),
        (["audit", "share", str(tmp_path / "masked"), "patient"], "reads sums behind masks"),
    ):
        assert main(arguments) == 2, arguments
        told = capsys.readouterr().err
        assert said in told, told
