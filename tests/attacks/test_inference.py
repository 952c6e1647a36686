"""Attributes of records, and shares of clients, inferred: compared with guesses without a model or an update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks.inference.attribute import ALPHA, _sentences, _verdict, advantage, guesses, prior, without_model
from attacks.inference.share import PENALTIES, _left_out, guessed, made_up
from secure_fed.commands.cli import main
from secure_fed.config import RunConfig
from secure_fed.federation import Federation
from secure_fed.learning.data import notes
from tests.attacks.refusals import Capsys, facts_of, refusals, shown_by
from tests.attacks.small_lm import learned, saved, tokenizer_of, untrained
from tests.attacks.test_any_model import written
from tests.cells import every

TOWNS = ("Aachen", "Bergen", "Cork")


def records(count: int, seed: int) -> list[dict[str, Any]]:
    """Sentences whose town can only be known by memorisation."""
    rng, made = np.random.default_rng(seed), []
    for text in notes.generate(count, seed=seed, split="train").text:
        town = TOWNS[rng.integers(3)]
        made.append({"text": f"{' '.join(text.split()[:6])} lives in {town}.", "town": town})
    return made


def test_a_guess_weighs_likelihood_and_prior() -> None:
    shares = prior(np.array([2, 2, 2, 2, 2, 2, 1]), 3)
    assert shares == pytest.approx(np.array([1, 2, 7]) / 10)
    losses = np.array([[1.0, 1.0, 1.0], [1.0, 1.0, 3.0], [1.0, 5.0, 9.0]])
    assert guesses(losses, shares).tolist() == [2, 1, 0]


def test_an_advantage_is_of_members_over_others() -> None:
    right = np.r_[np.ones(30, bool), np.zeros(10, bool), np.ones(10, bool), np.zeros(30, bool)]
    members = np.arange(80) < 40
    found = advantage(right, members)
    assert (found.members, found.others, found.advantage) == (0.75, 0.25, 0.5)
    assert found.p_value < 1e-4
    assert advantage(right, ~members).p_value > 0.99


def test_files_with_other_shares_of_a_value_are_no_leak() -> None:
    """A model that guesses by the shares alone is right for more members, where the members' file has more of that value."""
    members, rng = np.arange(200) < 100, np.random.default_rng(0)
    usual = np.where(members, rng.random(200) < 0.9, rng.random(200) < 0.6)
    same, chance = advantage(usual, members), advantage(np.tile([True, False], 100), members)
    assert same.p_value < ALPHA < chance.p_value
    rows = {"the model": same, "words alone": chance, "the most frequent value": same}
    assert _verdict(rows) == "void"
    assert "differ by the shares of the values of town" in _sentences("town", rows)[0]
    assert _verdict({**rows, "the most frequent value": chance}) == "leak"


@every("size", [20, 60])
def test_members_that_are_like_others_are_a_leak_as_rarely_as_said(size: int) -> None:
    rng, members = np.random.default_rng(0), np.arange(2 * size) < size
    alarms = sum(advantage(rng.random(2 * size) < 0.4, members).p_value < 0.05 for _ in range(400))
    assert alarms <= 400 * 0.05 + 3 * (400 * 0.05) ** 0.5


def test_words_tell_what_they_tell_of_members_too() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(2, size=120)
    texts = [f"{'warm' if one else 'cold'} day number {rng.integers(50)}" for one in values]
    assert (without_model(texts, values, np.arange(120) < 60) == values).mean() > 0.95
    nothing = without_model([f"day {one}" for one in rng.integers(50, size=120)], values, np.arange(120) < 60)
    assert (nothing == values).mean() < 0.7


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("attribute")
    groups = [records(30, seed) for seed in range(2)]
    for name, some in zip(("members", "others"), groups, strict=True):
        written(tmp / f"{name}.jsonl", some)
    tokenizer = tokenizer_of([row["text"] for some in groups for row in some])
    saved(untrained(tokenizer), tokenizer, tmp / "fresh")
    saved(learned(untrained(tokenizer), tokenizer, [row["text"] for row in groups[0]], 80), tokenizer, tmp / "tuned")
    return tmp


def audit(place: Path, model: str, *more: Any) -> list[str]:
    texts = ("--members", place / "members.jsonl", "--non-members", place / "others.jsonl", "--task", "causal_lm")
    return [*map(str, ("audit", "model", place / model, *texts, "--attribute", "town", *more))]


def test_a_town_that_was_learned_by_heart_is_given_away(place: Path, capsys: Capsys) -> None:
    facts = facts_of(audit(place, "tuned", "--fail-above", "advantage=0.2"), capsys, 4)
    model, words, most = facts["guesses"]
    assert facts["verdict"] == "leak", facts
    assert model["members"] > 0.9
    assert model["others"] < 0.65
    assert abs(words["advantage"]) < 0.35
    assert words["others"] < 0.7, "the town itself is not among the words"
    assert most["by"] == "the most frequent value"
    shown = shown_by(audit(place, "fresh"), capsys)
    assert "nothing found" in shown
    assert "Without any model, words alone" in shown


def test_a_pipeline_learns_that_the_audit_cannot_tell(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    """Of members another word tells the town as well, and of every third of the others it does not."""
    files: list[Any] = []
    for option, seed, lying in (("--members", 0, 0), ("--non-members", 1, 3)):
        told = [
            {**row, "text": f"{'elsewhere' if lying and not number % lying else row['town'][::-1]} {row['text']}"}
            for number, row in enumerate(records(30, seed))
        ]
        files += [option, written(tmp_path / f"{seed}.jsonl", told)]
    assert main(audit(place, "fresh", *files, "--fail-above", "advantage=1")) == 5
    shown, said = capsys.readouterr()
    assert "CANNOT TELL" in shown
    assert "--fail-above cannot be judged" in said


def test_what_does_not_fit_is_one_sentence(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    astray = [{"text": f"number {at} lives in Cork.", "town": "Derry" if at == 2 else "Cork"} for at in range(12)]
    hidden = written(tmp_path / "hidden.jsonl", [{**row, "town": "Derry"} for row in records(12, 0)])
    calls = (
        ("--fail-above", "auc=1"),
        ("--attribute", "text"),
        ("--attribute", "city"),
        ("--task", "tokens"),
        ("--task", "question_answering"),
        ("--members", hidden),
        ("--non-members", written(tmp_path / "astray.jsonl", astray)),
        ("--labels", "a,b"),
        ("--max-length", "3"),
        ("--scores", "x"),
        ("--label-centre", "0"),
    )
    refusals("attribute", (audit(place, "fresh", *call) for call in calls), capsys)


# The share of a client's texts that contain a word.


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
        ill, who = rng.random() < share, "mother" if rng.random() < 1 / 3 else "old"
        text = f"patient has {'fever' if ill else 'cough'} since {number} days {who}"
        made.append({"text": text, "label": "b" if ill else "a", "client": f"site-{client}"})
    return made


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp, rng = tmp_path_factory.mktemp("share"), np.random.default_rng(0)
    train = [row for i in range(CLIENTS) for row in rows(i, i / (CLIENTS - 1), EACH, rng)]
    for name, some in (("train", train), ("test", rows(0, 0.5, 160, rng))):
        written(tmp / f"{name}.jsonl", some)
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
def test_a_word_that_goes_with_the_label_is_read_from_answers(run_dir: Path, capsys: Capsys) -> None:
    share = ["audit", "share", run_dir]
    found = facts_of([*share, "fever", "--fail-above", "gain=0.3"], capsys, 4, "is above --fail-above gain=0.3")
    assert found["verdict"] == "leak", found
    assert found["error"] < 0.5 * found["baseline"]
    assert found["p_value"] < 0.01
    assert found["clients"] == CLIENTS
    assert "nothing found" in shown_by([*share, "mother"], capsys)


def test_what_gives_no_share_is_one_sentence(run_dir: Path, tmp_path: Path, capsys: Capsys) -> None:
    masked = {
        "data": {"examples": 12, "test_examples": 4},
        "federation": {"clients": 3, "cohort": 3, "rounds": 1},
        "method": {"name": "head"},
        "training": {"steps": 1},
        "secure_aggregation": {"enabled": True},
        "evaluation": {"audit_fraction": 0.0},
    }
    Federation(RunConfig.from_dict(masked)).run(tmp_path / "masked")
    calls = ([run_dir, "zebra"], [run_dir, ""], [run_dir, "fever", "--fail-above", "auc=1"], [tmp_path / "masked", "a"])
    refusals("share", (["audit", "share", *call] for call in calls), capsys)
