"""Property inference: the share of a client's texts that contain a word, guessed by a server from the client's update.

The server follows the protocol, knows what it sent, and reads single updates. It has the model that the client started from,
and public examples with and without the attribute. From these it simulates clients with chosen shares, trains them as the
client trains, and learns to predict the share from the update (Melis et al. 2019, section 4, classify updates; Ganju et al.
2018 classify models). The predictor is a ridge regression of the share on the update, so an update may have more numbers than
there are simulated clients. Its penalty is chosen on the simulated clients alone, leaving each out in turn. It detects only
linear effects: a property that moves updates equally in opposite directions stays hidden.

The guess without an update is the mean share of the simulated clients. An attack that is no closer to the truth has found
nothing. `audited` attacks a finished run: at most 60 of its clients, beside the share among test texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from attacks.adversary.case import Inapplicable, opened
from attacks.adversary.lying_server import LyingServer
from attacks.adversary.null import Floats
from attacks.options import Say
from secure_fed.errors import UsageError
from secure_fed.tensors.tensors import Layout

Update = Callable[[Sequence[Any]], Floats]  # (numbers,) the update of a client with these examples
ALPHA, MADE_UP, CLIENTS, FEWEST_CLIENTS, FEWEST_TEXTS = 0.05, 120, 60, 8, 20
PENALTIES = 10.0 ** np.arange(-4, 5)  # as multiples of the mean squared length of an update
SHUFFLES = 999


def audited(run_dir: Path, word: str, say: Say, seed: int = 0) -> dict[str, Any]:
    """The audit of a finished run: guesses of its clients' shares, beside the public share.

    Every client trains once more: from the final tensors, with the number and the learning rate of the last round.
    """
    target = opened(run_dir)
    server = LyingServer(target.assembly, target.final.round - 1, target.final.tensors)
    if server.assembly.masks is not None:
        raise Inapplicable(
            "the server of this run reads sums behind masks, and a share is guessed from a single update"
        )
    if server.assembly.problem.tokenizer is None:
        raise Inapplicable("the run was not trained on texts")
    problem, rng = target.assembly.problem, np.random.default_rng(seed)
    says = _says(problem.tokenizer, word)
    having, lacking = _divided(problem.test, says)
    if min(len(having), len(lacking)) < FEWEST_TEXTS:
        raise UsageError(
            f"{len(having)} of {len(problem.test)} test texts contain {word!r}: the server needs at least {FEWEST_TEXTS} "
            "texts with the word and as many without; choose another word, or give a larger data.test"
        )
    chosen = [int(i) for i in rng.permutation(server.clients)[:CLIENTS]]
    if len(chosen) < FEWEST_CLIENTS:
        raise UsageError(
            f"the run has {len(chosen)} clients: with fewer than {FEWEST_CLIENTS} no guess is better than luck"
        )
    say(f"training {MADE_UP} simulated clients of test texts")
    size = max(1, round(median(len(problem.train[i]) for i in chosen)))
    shadows, known = made_up(lambda own: _numbers(server, 0, own), having, lacking, MADE_UP, size, rng)
    say(f"reading the updates of {len(chosen)} clients")
    answers = np.stack([_numbers(server, client, None) for client in chosen])
    true = np.array([len(_divided(problem.train[i], says)[0]) / max(1, len(problem.train[i])) for i in chosen])
    public = len(having) / len(problem.test)
    return facts(run_dir, word, guessed(answers, shadows, known), true, public)


def facts(run_dir: Path, word: str, found: Shares, true: Floats, public: float) -> dict[str, Any]:
    """The figures with their verdict: "leak" if the guesses are closer to the truth than chance and than the public share.

    public: the share among the test texts, which is the guess without an update, the same for every client.
    """
    error, baseline, p_value = found.error(true), float(np.abs(public - true).mean()), found.p_value(true)
    leak = p_value < ALPHA and error < baseline
    said = f"{error:.3f} from the true share on average; the share among test texts, {public:.3f}, is {baseline:.3f} from it"
    first = (
        f"The server learns from an update how many of a client's texts contain {word!r}: its guesses are {said}."
        if leak
        else f"An update does not improve the server's guess of how many of a client's texts contain {word!r}: it is {said}."
    )
    second = f"Guesses exchanged among the clients would be as near with a probability of {p_value:.2g}."
    return {
        "schema": 1,
        "run": str(run_dir),
        "word": word,
        "clients": len(true),
        "true_mean": float(true.mean()),
        "public": public,
        "error": error,
        "baseline": baseline,
        "gain": 1 - error / baseline if baseline else 0.0,
        "p_value": p_value,
        "verdict": "leak" if leak else "nothing",
        "sentences": [first, second],
    }


def _numbers(server: LyingServer, client: int, examples: Sequence[Any] | None) -> Floats:
    """(numbers,) a client's update for an honest request."""
    answer = server.answer(client, server.honest, examples)
    return np.asarray(Layout.of(answer).flatten(answer, torch.float64).numpy())


def _says(tokenizer: Any, word: str) -> Callable[[Any], bool]:
    """A predicate on examples: whether the word's tokens occur in sequence."""
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    if not ids or tokenizer.unk_token_id in ids:
        raise UsageError(f"WORD is {word!r}, which the model's tokenizer does not know; choose another word")

    def says(example: Any) -> bool:
        tokens = list(example["input_ids"])
        return any(tokens[at : at + len(ids)] == list(ids) for at in range(len(tokens) - len(ids) + 1))

    return says


def _divided(examples: Sequence[Any], says: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    """The examples that contain the word, and the examples that do not."""
    all_of_them = [examples[i] for i in range(len(examples))]
    return [one for one in all_of_them if says(one)], [one for one in all_of_them if not says(one)]


@dataclass(frozen=True)
class Shares:
    """guessed: (clients,) shares, from 0 to 1. without: the guess without an update, the same for every client."""

    guessed: Floats
    without: float

    def error(self, true: Floats) -> float:
        """The mean distance from the truth."""
        return float(np.abs(self.guessed - true).mean())

    def baseline(self, true: Floats) -> float:
        return float(np.abs(self.without - true).mean())

    def p_value(self, true: Floats, seed: int = 0) -> float:
        """The probability of so small an error under a random permutation of the guesses over clients, by sampling."""
        rng, found = np.random.default_rng(seed), self.error(true)
        shuffled = [np.abs(rng.permutation(self.guessed) - true).mean() for _ in range(SHUFFLES)]
        return float((1 + sum(one <= found + 1e-12 for one in shuffled)) / (1 + SHUFFLES))


def made_up(
    update: Update, having: Sequence[Any], lacking: Sequence[Any], clients: int, size: int, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Updates (clients, numbers) of simulated clients with `size` public examples, and their shares, uniform from 0 to 1."""
    updates, shares = [], []
    for _ in range(clients):
        count = int(rng.integers(size + 1))
        chosen = [having[i] for i in rng.integers(len(having), size=count)]
        chosen += [lacking[i] for i in rng.integers(len(lacking), size=size - count)]
        updates.append(update([chosen[i] for i in rng.permutation(size)]))
        shares.append(count / size)
    return np.stack(updates), np.array(shares)


def guessed(updates: Floats, shadows: Floats, shares: Floats) -> Shares:
    """Each client's share from its update (clients, numbers), learned on simulated clients (shadows, numbers) with `shares`."""
    centre, mean = shadows.mean(0), float(shares.mean())
    own, theirs = shadows - centre, updates - centre
    kernel = own @ own.T
    scale = float(np.trace(kernel)) / len(own) or 1.0
    best = min(PENALTIES * scale, key=lambda penalty: _left_out(kernel, shares - mean, penalty))
    weights = np.linalg.solve(kernel + best * np.eye(len(own)), shares - mean)
    return Shares(np.clip(mean + theirs @ own.T @ weights, 0.0, 1.0), mean)


def _left_out(kernel: Floats, shares: Floats, penalty: float) -> float:
    """The mean squared error for a simulated client of the regression on all others."""
    inverse = np.linalg.inv(kernel + penalty * np.eye(len(kernel)))
    return float(np.mean(np.square(inverse @ shares / np.diag(inverse))))
