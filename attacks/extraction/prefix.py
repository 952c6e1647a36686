"""Extraction by prefix: a model continues the beginning of a text, and its continuation is compared with the rest.

A text counts as extracted if the most likely continuation of k of its tokens is the next l, verbatim (Carlini et al. 2023,
Quantifying Memorization, section 3), or nearly so (`similarity`). A continuation sampled at temperature 1 is the rest verbatim
with the model's probability p of the rest, and at least one of n samples is with probability 1 - (1 - p)^n (Hayes et al. 2024,
section 3). These numbers are exact without any sampling.

The model reads the special tokens that its tokenizer puts before a text, as in its training; k does not count them. Of a
conversation neither k nor l counts the tokens of the chat template, which are the same for all: they are given, and nothing is
compared there (`conversations`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attacks.adversary.null import Floats
from attacks.any_model.likelihood import require_numbers
from attacks.extraction.likelihood import log_likelihoods
from attacks.extraction.similarity import NEAR, similarity
from secure_fed.learning.data.encode import IGNORED
from secure_fed.learning.generation import generated

_TOGETHER = 32
_ANY = "a"


@dataclass(frozen=True, eq=False)
class Windows:
    """numbers: the indices of the texts that are long enough. ids: (texts, L) their tokens, padded at the end. asked: (texts,
    L) bool, the tokens that a continuation has to give back. All others are given: those before the first, and the chat
    template's among them.
    """

    numbers: list[int]
    ids: Tensor
    asked: Tensor

    @classmethod
    def of(cls, found: Mapping[int, tuple[Sequence[int], Sequence[bool]]]) -> Windows:
        """From the tokens of each text, up to the last that is asked, and whether each is asked."""
        ids, asked = ([torch.tensor(one[part]) for one in found.values()] for part in (0, 1))
        padded = (pad_sequence(part, batch_first=True) if part else torch.empty(0, 0) for part in (ids, asked))
        return cls(list(found), *padded)

    @property
    def starts(self) -> list[int]:
        """(texts,) the number of tokens before the first that is asked."""
        return self.asked.int().argmax(1).tolist() if len(self.asked) else []

    @property
    def ends(self) -> list[int]:
        """(texts,) the number of tokens up to the last that is asked."""
        return (self.asked.shape[1] - self.asked.flip(1).int().argmax(1)).tolist() if len(self.asked) else []


@dataclass(frozen=True, eq=False)
class Continued:
    """written: (texts,) the most likely continuations, with the tokens given among them. similarity: (texts,) of the tokens
    that are asked to the texts' own. log_probability: (texts,) of these tokens.
    """

    written: list[list[int]]
    similarity: Floats
    log_probability: Floats

    @property
    def verbatim(self) -> int:
        return int((self.similarity == 1).sum())

    @property
    def near(self) -> int:
        """The number of texts reproduced verbatim or nearly so."""
        return int((self.similarity >= NEAR).sum())

    def expected(self, draws: int) -> float:
        """The expected number of texts reproduced verbatim in at least one of `draws` samples each."""
        missed = draws * np.log1p(-np.minimum(np.exp(self.log_probability), 1 - 1e-16))
        return float((-np.expm1(missed)).sum())


def windows(tokenizer: Any, texts: Sequence[str], prefix: int, suffix: int) -> Windows:
    """The first `prefix` + `suffix` tokens of every text that is long enough, without special ones; the last are asked."""
    read = [tokenizer(text, add_special_tokens=False)["input_ids"][: prefix + suffix] for text in texts]
    asked = [False] * prefix + [True] * suffix
    return Windows.of({index: (ids, asked) for index, ids in enumerate(read) if len(ids) == len(asked)})


def leading(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts before a text, such as the begin token of LLaMA."""
    whole, plain = (tokenizer(_ANY, add_special_tokens=special)["input_ids"] for special in (True, False))
    return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(plain)] == plain), [])


def continued(model: Any, given: Windows, before: Sequence[int] = ()) -> Continued:
    """The model's continuations of each text, from the first token that is asked to the last.

    before: tokens that the model reads before each text (`leading`).
    """
    found: list[Floats] = []
    device = next(model.parameters()).device
    ids = torch.cat([given.ids.new_tensor(list(before)).expand(len(given.ids), -1), given.ids], 1)
    asked = torch.cat([given.asked.new_zeros(len(ids), len(before)), given.asked], 1)
    for start in range(0, len(ids), _TOGETHER):
        some, looked_for = (part[start : start + _TOGETHER].to(device) for part in (ids, asked))
        found.append(log_likelihoods(model, some, some.masked_fill(~looked_for, IGNORED)))
    log_probability = np.concatenate(found) if found else np.zeros(0)
    require_numbers(log_probability)
    made = _greedy(model, ids.tolist(), list(map(_runs, asked.tolist())))
    both = torch.tensor(made, dtype=ids.dtype).view_as(ids), ids
    pairs = (tuple(part[row][own].tolist() for part in both) for row, own in enumerate(asked))
    written = [
        row[len(before) + start : len(before) + end]
        for row, start, end in zip(made, given.starts, given.ends, strict=True)
    ]
    return Continued(written, np.array([similarity(*pair) for pair in pairs]), log_probability)


def _greedy(model: Any, ids: list[list[int]], runs: Sequence[Sequence[tuple[int, int]]]) -> list[list[int]]:
    """Each row with the most likely tokens in its runs, one run after the other. Runs of one length share a call."""
    made = [list(row) for row in ids]
    for number in range(max(map(len, runs), default=0)):
        own = {row: several[number] for row, several in enumerate(runs) if number < len(several)}
        for length in sorted({end - start for start, end in own.values()}):
            some = [row for row, (start, end) in own.items() if end - start == length]
            prompts = [made[row][: own[row][0]] for row in some]
            # Without stops: an end token is a token like any other.
            for row, new in zip(some, generated(model, prompts, length, batch_size=_TOGETHER), strict=True):
                made[row][slice(*own[row])] = new
    return made


def _runs(asked: Sequence[bool]) -> list[tuple[int, int]]:
    """The first place of every run of tokens that are asked, and the place behind it."""
    ends = np.flatnonzero(np.diff([False, *asked, False]))
    return list(zip(ends[::2].tolist(), ends[1::2].tolist(), strict=True))
