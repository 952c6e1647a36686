"""Attribute inference, compared with guesses without a model and with records outside the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attacks.inference.attribute import ALPHA, _sentences, _verdict, advantage, guesses, prior, without_model
from secure_fed.commands.cli import main
from secure_fed.learning.data import notes
from tests.attacks.small_lm import learned, saved, tokenizer_of, untrained
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
    groups = {"members": records(30, 0), "others": records(30, 1)}
    for name, some in groups.items():
        (tmp / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    tokenizer = tokenizer_of([row["text"] for some in groups.values() for row in some])
    saved(untrained(tokenizer), tokenizer, tmp / "fresh")
    saved(
        learned(untrained(tokenizer), tokenizer, [row["text"] for row in groups["members"]], 120),
        tokenizer,
        tmp / "tuned",
    )
    return tmp


def audit(place: Path, model: str, *more: str) -> list[str]:
    texts = ["--members", str(place / "members.jsonl"), "--non-members", str(place / "others.jsonl")]
    return ["audit", "model", str(place / model), *texts, "--task", "causal_lm", "--attribute", "town", *more]


def test_a_town_that_was_learned_by_heart_is_given_away(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(audit(place, "tuned", "--json", "--fail-above", "advantage=0.2")) == 4
    facts = json.loads(capsys.readouterr().out)
    model, words, most = facts["guesses"]
    assert facts["verdict"] == "leak", facts
    assert model["members"] > 0.9
    assert model["others"] < 0.65
    assert abs(words["advantage"]) < 0.35
    assert words["others"] < 0.7, "the town itself is not among the words"
    assert most["by"] == "the most frequent value"
    assert main(audit(place, "fresh")) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "nothing found" in shown
    assert "Without any model, words alone" in shown


def test_a_pipeline_learns_by_the_exit_status_that_the_audit_cannot_tell(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of members another word tells the town as well, and of every third of the others it does not."""
    arguments = audit(place, "fresh")
    for option, seed, lying in (("--members", 0, 0), ("--non-members", 1, 3)):
        told = [
            {**row, "text": f"{'elsewhere' if lying and not number % lying else row['town'][::-1]} {row['text']}"}
            for number, row in enumerate(records(30, seed))
        ]
        (tmp_path / f"{seed}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
        arguments[arguments.index(option) + 1] = str(tmp_path / f"{seed}.jsonl")
    assert main(arguments) == 0
    assert "CANNOT TELL" in capsys.readouterr().out
    assert main([*arguments, "--fail-above", "advantage=1"]) == 5
    assert "--fail-above cannot be judged" in capsys.readouterr().err


def test_what_does_not_fit_is_one_sentence(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_town = [{"text": f"number {at} lives in Cork."} for at in range(12)]
    hidden = tmp_path / "hidden.jsonl"
    hidden.write_text("".join(json.dumps({**row, "town": "Derry"}) + "\n" for row in records(12, 0)))
    astray = tmp_path / "astray.jsonl"
    astray.write_text(
        "".join(json.dumps({**row, "town": ("Cork", "Derry")[at == 2]}) + "\n" for at, row in enumerate(one_town))
    )
    for arguments, said in (
        (audit(place, "fresh", "--fail-above", "auc=1"), "with --attribute give advantage="),
        (audit(place, "fresh", "--attribute", "text"), "an attribute to guess must have from 2 to 50"),
        (audit(place, "fresh", "--attribute", "city"), "has no column 'city'"),
        (
            audit(place, "fresh", "--task", "tokens"),
            "--task is tokens, and --attribute changes a text as a whole",
        ),
        (audit(place, "fresh", "--task", "question_answering"), "it is for classification, multi_label"),
        (
            audit(place, "fresh", "--members", str(hidden)),
            "the text of row 1 of --members does not contain its town, 'Derry'",
        ),
        (
            audit(place, "fresh", "--non-members", str(astray)),
            "the text of row 3 of --non-members does not contain its town, 'Derry', and so it cannot be replaced: remove",
        ),
        (
            audit(place, "fresh", "--labels", "a,b"),
            "--labels is 'a,b', but the task causal_lm has no classes: leave it out",
        ),
        (
            audit(place, "fresh", "--max-length", "3"),
            "in 60 of 60 texts, such as row 1 of --members, the town lies beyond the 3 tokens that are read: raise --max-l",
        ),
        (audit(place, "fresh", "--scores", "x"), "--scores has no effect beside --attribute: leave it out"),
        (audit(place, "fresh", "--label-centre", "0"), "--label-centre has no effect beside --attribute"),
    ):
        chosen = [*arguments, "--attribute", "town"] if "--attribute" not in arguments else arguments
        assert main(chosen) == 2, arguments
        told = capsys.readouterr().err
        assert said in told, told
