"""Extraction by prefix: a model continues the beginning of a text, and its continuation is compared with the rest.

A text counts as extracted if the most likely continuation of k of its tokens is the next l, verbatim (Carlini et al. 2023,
Quantifying Memorization, section 3), or nearly so (`similarity`). A continuation sampled at temperature 1 is the rest verbatim
with the model's probability p of the rest, and at least one of n samples is with probability 1 - (1 - p)^n (Hayes et al. 2024,
section 3). These numbers are exact without any sampling.

The model reads the special tokens that its tokenizer puts before a text, as in its training; k does not count them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attacks.any_model.likelihood import require_numbers
from attacks.any_model.signals import Floats
from attacks.extraction.likelihood import log_likelihoods
from attacks.extraction.similarity import NEAR, similarity
from secure_fed.learning.data.encode import IGNORED
from secure_fed.learning.generation import generated

_TOGETHER = 32
_ANY = "a"


@dataclass(frozen=True, eq=False)
class Continued:
    """written: (texts, l) tokens of the most likely continuations. similarity: (texts,) to the texts' own rests.
    log_probability: (texts,) of these rests.
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


def windows(tokenizer: Any, texts: Sequence[str], prefix: int, suffix: int) -> tuple[list[int], Tensor]:
    """The indices of the texts that are long enough, and (texts, prefix + suffix) their first tokens, without special ones."""
    read = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    long = [index for index, ids in enumerate(read) if len(ids) >= prefix + suffix]
    return long, torch.tensor([read[index][: prefix + suffix] for index in long], dtype=torch.long)


def leading(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts before a text, such as the begin token of LLaMA."""
    whole, plain = (tokenizer(_ANY, add_special_tokens=special)["input_ids"] for special in (True, False))
    return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(plain)] == plain), [])


def continued(model: Any, ids: Tensor, prefix: int, before: Sequence[int] = ()) -> Continued:
    """The model's continuations of the first `prefix` tokens of each row of ids (texts, prefix + suffix).

    before: tokens that the model reads before each row (`leading`).
    """
    found: list[Floats] = []
    device = next(model.parameters()).device
    ids, prefix = torch.cat([ids.new_tensor(list(before)).expand(len(ids), -1), ids], 1), prefix + len(before)
    for start in range(0, len(ids), _TOGETHER):
        some = ids[start : start + _TOGETHER].to(device)
        labels = some.clone()
        labels[:, :prefix] = IGNORED
        found.append(log_likelihoods(model, some, labels))
    log_probability = np.concatenate(found) if found else np.zeros(0)
    require_numbers(log_probability)
    # Without stops: an end token is a token like any other.
    written = generated(model, ids[:, :prefix].tolist(), ids.shape[1] - prefix, batch_size=_TOGETHER)
    own = ids[:, prefix:].tolist()
    near = np.array([similarity(*pair) for pair in zip(written, own, strict=True)])
    return Continued(written, near, log_probability)
