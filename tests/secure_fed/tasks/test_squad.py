"""SQuAD's scores, compared with values worked out by hand and with a naive count."""

from __future__ import annotations

import numpy as np
import pytest

from secure_fed.learning.tasks import question_answering
from tests.cells import every


@every(
    ("guess", "answers", "exact", "f1"),
    [
        ("The Cat!", ["cat"], 1, 1),
        ("a cat sat", ["the cat"], 0, 2 / 3),
        ("an apple a day", ["apple day", "x"], 1, 1),
        ("dog", ["cat", "big dog"], 0, 2 / 3),
        ("", ["the"], 1, 1),
        ("", ["cat"], 0, 0),
        ("cat cat", ["cat"], 0, 2 / 3),
        ("theory", ["the ory"], 0, 0),
        ("U.S.", ["us"], 1, 1),
    ],
)
def test_squad_by_hand(guess: str, answers: list[str], exact: float, f1: float) -> None:
    assert question_answering.exact(guess, answers) == exact
    assert question_answering.best_f1(guess, answers) == pytest.approx(f1)


@pytest.mark.parametrize("seed", range(3))
def test_squad_against_a_naive_count(seed: int) -> None:
    generator = np.random.default_rng(seed)
    vocabulary = ["The", "cat,", "sat", "a", "Dog", "dog."]

    def words(text: str) -> list[str]:
        plain = "".join(letter for letter in text.lower() if letter.isalnum() or letter == " ")
        return [word for word in plain.split() if word not in ("a", "an", "the")]

    for _ in range(50):
        guess, answer = (" ".join(generator.choice(vocabulary, size=generator.integers(1, 6))) for _ in range(2))
        ours, theirs = words(guess), words(answer)
        left, common = list(theirs), 0
        for word in ours:
            if word in left:
                left.remove(word)
                common += 1
        precision, recall = common / len(ours) if ours else 0, common / len(theirs) if theirs else 0
        f1 = 2 * precision * recall / (precision + recall) if common else float(ours == theirs)
        assert question_answering.best_f1(guess, [answer]) == pytest.approx(f1), (guess, answer)
        assert question_answering.exact(guess, [answer]) == float(ours == theirs)
