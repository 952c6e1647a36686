"""The audit of a share: the share of a client's texts that contain a word, guessed by a server from the client's update.

The server follows the protocol, knows what it sent, and reads single updates. It simulates clients with test texts, trains them
as the run's clients train, and learns from their updates (`share`). Then it guesses the shares of at most 60 clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from attacks.adversary.active import LyingServer
from attacks.adversary.case import Inapplicable
from attacks.adversary.null import Floats
from attacks.adversary.target import opened
from attacks.inference.share import Shares, guessed, made_up
from secure_fed.errors import UsageError
from secure_fed.tensors.layout import Layout

ALPHA, MADE_UP, CLIENTS, FEWEST_CLIENTS, FEWEST_TEXTS = 0.05, 120, 60, 8, 20
Say = Callable[[str], None]


def audited(run_dir: Path, word: str, say: Say, seed: int = 0) -> dict[str, Any]:
    """The audit of a finished run: guesses of its clients' shares, beside the public share.

    Every client trains once more: from the final tensors, with the number and the learning rate of the last round.
    """
    target = opened(run_dir)
    server = _server(LyingServer(target.assembly, target.final.round - 1, target.final.tensors))
    problem, rng = target.assembly.problem, np.random.default_rng(seed)
    having, lacking = _divided(problem.test, _says(problem.tokenizer, word))
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
    true = np.array([_share(problem.train[i], _says(problem.tokenizer, word)) for i in chosen])
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


def _server(server: LyingServer) -> LyingServer:
    if server.assembly.masks is not None:
        raise Inapplicable(
            "the server of this run reads sums behind masks, and a share is guessed from a single update"
        )
    if server.assembly.problem.tokenizer is None:
        raise Inapplicable("the run was not trained on texts")
    return server


def _numbers(server: LyingServer, client: int, examples: Sequence[Any] | None) -> Floats:
    """(numbers,) a client's update for an honest request."""
    answer = server.answer(client, server.honest, examples)
    flat: Floats = Layout.of(answer).flatten(answer, torch.float64).numpy()
    return flat


def _says(tokenizer: Any, word: str) -> Callable[[Any], bool]:
    """A predicate on examples: whether the word's tokens occur in sequence."""
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    if not ids or tokenizer.unk_token_id in ids:
        raise UsageError(f"--share is {word!r}, which the model's tokenizer does not know; choose another word")
    return lambda example: _within(ids, list(example["input_ids"]))


def _within(ids: Sequence[int], tokens: Sequence[int]) -> bool:
    return any(tokens[at : at + len(ids)] == list(ids) for at in range(len(tokens) - len(ids) + 1))


def _divided(examples: Sequence[Any], says: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    """The examples that contain the word, and the examples that do not."""
    all_of_them = [examples[i] for i in range(len(examples))]
    return [one for one in all_of_them if says(one)], [one for one in all_of_them if not says(one)]


def _share(examples: Sequence[Any], says: Callable[[Any], bool]) -> float:
    return len(_divided(examples, says)[0]) / max(1, len(examples))
