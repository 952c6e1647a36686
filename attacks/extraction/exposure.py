"""Canaries for language models, and their exposure: how far a canary's secret stands out among all possible secrets.

A canary is a sentence with a random secret (Carlini et al. 2019, The Secret Sharer, section 4). A template is a text with the
placeholder `{secret}`, and optionally `{name}`, so that no two canaries are equal texts. A secret consists of decimal digits,
all values equally likely. For chats a canary is a question and its answer: a line each of the template, or the text before the
secret and the text from it on.

    exposure(s) = log2 |R| - log2 rank(s)                                     (section 4.2)

R is the space of secrets, and rank(s) the place of s among them by log-perplexity, the lowest first. At an exposure of log2 |R|
the model ranks the canary's secret above every other; at 0 it ranks it last.

For a canary outside the training, the secret is uniform given the model, and so is its rank. Its exposure is then at least t
with a probability of at most 2^-t, and 1.44 on average. So a few canaries whose summed exposure exceeds this law prove that the
model learned them in training (`chance`). Equal perplexities count as smaller ones, which can only lower the exposure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attacks.adversary.null import Floats
from attacks.any_model.subject import require_numbers
from privacy.entropy import Stream
from secure_fed.errors import ConfigError
from secure_fed.learning.data.chats import Chat, chat_of
from secure_fed.learning.data.encode import IGNORED, pad_id
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.tasks.causal_lm import continuations
from secure_fed.learning.tasks.chat import Chats
from secure_fed.learning.tasks.next_tokens import rows_together, token_losses
from secure_fed.runs.roc import exact_limits

USUAL = "The access code of {name} is {secret}."
USUAL_CHAT = "What is the access code of {name}?\nThe access code of {name} is {secret}."
DIGITS = 6
_SECRET, _NAME = "{secret}", "{name}"
_LETTERS, _LENGTH = "abcdefghijklmnopqrstuvwxyz", 6
_MOST_DIGITS = 15  # of a secret: a float64 counts these exactly
SAMPLES = 1000
BY_CHANCE = 1 / math.log(2)  # the mean exposure of a canary outside the training, for a large space
_TAIL = 0.025  # error of an interval on either side
_UNCUT = 2**30  # tokens
_TOGETHER = 64  # texts in a batch


@dataclass(frozen=True)
class Planted:
    """One canary: its name, which appears in the auditor's candidates, and its secret."""

    name: str
    secret: str


@dataclass(frozen=True)
class Template:
    """The sentence, and the number of digits of its secret."""

    text: str = USUAL
    digits: int = DIGITS

    def __post_init__(self) -> None:
        lines = self.text.splitlines()
        if self.text.count(_SECRET) != 1 or any(line.count(_NAME) > 1 for line in lines):
            raise ConfigError(
                f"the template is {self.text!r:.80}: it needs {{secret}} once, and {{name}} at most once in a line"
            )
        if not 1 <= self.digits <= _MOST_DIGITS:
            raise ConfigError(f"--digits is {self.digits}: a secret has from 1 to {_MOST_DIGITS} digits")

    @property
    def space(self) -> int:
        """The number of secrets."""
        return int(10**self.digits)

    def split(self, one: Planted, secret: int | None = None) -> tuple[str, str]:
        """The text before the secret, and the text from the secret on. secret: replaces the canary's own."""
        own = one.secret if secret is None else f"{secret:0{self.digits}d}"
        before, _, after = self.text.partition(_SECRET)
        return before.replace(_NAME, one.name), own + after.replace(_NAME, one.name)

    def pair(self, one: Planted, secret: int | None = None) -> tuple[str, str]:
        """The same as a prompt and its target, which a training joins by a space."""
        before, after = self.split(one, secret)
        return before.rstrip(), after

    def turns(self, one: Planted, secret: int | None = None) -> tuple[str, str]:
        """The same as a question and its answer: the first line, and the rest; of a single line, prompt and target."""
        question, _, answer = self.written(one, secret).partition("\n")
        return (question, answer) if answer else self.pair(one, secret)

    def written(self, one: Planted, secret: int | None = None) -> str:
        return "".join(self.split(one, secret))

    def drawn(self, count: int, stream: Stream) -> list[Planted]:
        """`count` different canaries. ConfigError if the template allows fewer."""
        named = _NAME in self.text
        if not named and count > self.space // 10:
            raise ConfigError(
                f"{count} canaries need a template with {{name}}, or more --digits than {self.digits}: without a name only a "
                "tenth of the secrets is planted"
            )
        found: dict[str, Planted] = {}
        while len(found) < count:
            name = "".join(_LETTERS[index] for index in uniform(stream, len(_LETTERS), _LENGTH))
            secret = int(uniform(stream, self.space, 1)[0])
            one = Planted(name if named else "", f"{secret:0{self.digits}d}")
            found.setdefault(one.name or one.secret, one)
        return list(found.values())


def uniform(stream: Stream, values: int, count: int) -> list[int]:
    """(count,) independent integers, uniform over 0 .. values - 1: words in the last, incomplete range are drawn again."""
    whole = 2**64 // values * values
    found: list[int] = []
    while len(found) < count:
        found += [int(word) % values for word in stream.words(count - len(found)) if int(word) < whole]
    return found


def order(stream: Stream, count: int) -> list[int]:
    """A random order of 0 .. count - 1, all orders equally likely except for ties of 64-bit numbers."""
    return [int(index) for index in np.argsort(stream.words(count), kind="stable")]


@dataclass(frozen=True)
class Exposure:
    """exposure: in bits. interval: 95 %, for the sampling error alone; both ends are equal if the rank is exact. modelled: the
    exposure by the law fitted to the sample; None if the rank is exact. tried: the number of other secrets; `ahead` of them
    have at most the perplexity of the canary's own.
    """

    exposure: float
    interval: tuple[float, float]
    modelled: float | None
    ahead: int
    tried: int


def exposures(
    model: Any,
    tokenizer: Any,
    template: Template,
    planted: Sequence[Planted],
    samples: int = SAMPLES,
    seed: int = 0,
    *,
    prompted: bool = False,
    task: Chats | None = None,
    before: Mapping[Planted, Chat] | None = None,
) -> list[Exposure]:
    """The exposure of each canary: exact if the template has at most `samples` secrets, else from a sample of that size.

    seed: chooses the sampled secrets, and need not be secret. prompted: whether the secret begins the target of a prompt; then
    the target alone is scored, since a training learns nothing else. task: of chats; then a canary is a question and its
    answer, which alone is scored, with the end of its turn. before: the turns before a canary's question.
    """
    rng = np.random.default_rng(seed)

    def of(one: Planted, secrets: Sequence[int | None]) -> Floats:
        """The log-perplexities of a canary with these secrets; None is its own."""
        if task is not None:
            lead = (before or {}).get(one, ())
            chats = [(*lead, *chat_of(*template.turns(one, secret))) for secret in secrets]
            return -of_chats(model, tokenizer, task, chats)
        if prompted:
            return -of_targets(model, tokenizer, [template.pair(one, secret) for secret in secrets])
        return -of_texts(model, tokenizer, [template.written(one, secret) for secret in secrets])

    whole, found = template.space <= samples, []
    for one in planted:
        own = int(one.secret)
        drawn = range(template.space - 1) if whole else rng.choice(template.space - 1, samples, replace=False).tolist()
        # its own, and all others or a sample
        by_secret = of(one, [None, *(secret + (secret >= own) for secret in drawn)])
        first, others = by_secret[0], by_secret[1:]
        found.append(exact(first, others) if whole else sampled(first, others, template.space))
    return found


def exact(own: float, others: Floats) -> Exposure:
    """The exposure from the log-perplexities of all other secrets (Carlini et al. 2019, section 4.2)."""
    ahead = int((others <= own).sum())
    found = math.log2(len(others) + 1) - math.log2(ahead + 1)
    return Exposure(found, (found, found), None, ahead, len(others))


def sampled(own: float, others: Floats, space: int) -> Exposure:
    """The exposure from the log-perplexities of randomly drawn secrets (Carlini et al. 2019, section 4.3).

    The estimate counts the canary's own secret among the sample. So it is at most log2(n + 1), and the law above still holds
    for canaries outside the training. The interval is exact (Clopper and Pearson) and covers the exposure in the whole space.
    """
    ahead, tried = int((others <= own).sum()), len(others)
    low, high = (float(end[0]) for end in exact_limits(np.array([ahead]), tried, _TAIL))
    most = math.log2(space)
    interval = tuple(most - math.log2(1 + share * (space - 1)) for share in (high, low))
    found = math.log2(tried + 1) - math.log2(ahead + 1)
    return Exposure(found, (interval[0], interval[1]), min(most, modelled(own, others)), ahead, tried)


def modelled(own: float, others: Floats) -> float:
    """-log2 P(X <= own), for X from a skew-normal law with the sample's mean, variance and skewness.

    Carlini et al. 2019 (section 4.3) also use this law. It extrapolates beyond the sample and is no bound: nothing shows that
    it fits there.
    """
    from scipy import stats

    centre, spread = float(others.mean()), float(others.std())
    if not spread:
        return 0.0 if own >= centre else math.inf
    skew = float(np.clip(stats.skew(others), -0.99, 0.99))  # a skew-normal law allows no more
    shape = abs(skew) ** (2 / 3)
    delta = math.copysign(math.sqrt(math.pi / 2 * shape / (shape + ((4 - math.pi) / 2) ** (2 / 3))), skew)
    scale = spread / math.sqrt(1 - 2 * delta**2 / math.pi)
    place = centre - scale * delta * math.sqrt(2 / math.pi)
    log = stats.skewnorm.logcdf(own, delta / math.sqrt(1 - delta**2), place, scale)
    return float(-log / math.log(2)) if math.isfinite(log) else math.inf


def chance(exposures: Sequence[float]) -> float:
    """The probability that canaries outside the training reach at least this sum of exposures.

    Given the model, each exposure is at most an independent exponential variable of rate ln 2; their sum is at most a gamma
    variable.
    """
    from scipy import stats

    return float(stats.gamma.sf(sum(exposures), len(exposures), scale=BY_CHANCE)) if exposures else 1.0


def of_texts(model: Any, tokenizer: Any, texts: Sequence[str]) -> Floats:
    """(texts,) the log-likelihood of each, in nats: minus the log-perplexity of Carlini et al. 2019 (section 4.1)."""
    read = [tokenizer(text)["input_ids"] for text in texts]
    return _of_items(model, tokenizer, read, read)


def of_targets(model: Any, tokenizer: Any, rows: Sequence[tuple[str, str]]) -> Floats:
    """(rows,) the log-likelihood of the target after the prompt, in nats; each row is joined as for a training."""
    prompts, targets = zip(*rows, strict=True)
    items = list(continuations(tokenizer, prompts, targets, _UNCUT, ends=True))
    return _of_items(model, tokenizer, *([one[part].tolist() for one in items] for part in ("input_ids", "labels")))


def of_chats(model: Any, tokenizer: Any, task: Chats, chats: Sequence[Chat]) -> Floats:
    """(chats,) the log-likelihood of the assistant's turns, in nats, as a training learns them."""
    found = task.encode(tokenizer, Rows(chats, (None,) * len(chats), ()), _UNCUT).columns
    return _of_items(model, tokenizer, *([own.tolist() for own in found[part]] for part in ("input_ids", "labels")))


def _of_items(model: Any, tokenizer: Any, ids: Sequence[list[int]], labels: Sequence[list[int]]) -> Floats:
    """(items,) the log-likelihood of each item's labels."""
    by_length = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    found = np.zeros(len(ids))
    device, pad = next(model.parameters()).device, pad_id(tokenizer)
    for start in range(0, len(ids), _TOGETHER):
        some = by_length[start : start + _TOGETHER]
        width = len(ids[some[-1]])
        filled = (
            torch.tensor([part[index] + [fill] * (width - len(part[index])) for index in some], device=device)
            for part, fill in ((ids, pad), (labels, IGNORED))
        )
        found[some] = log_likelihoods(model, *filled)
    require_numbers(found)
    return found


@torch.no_grad()
def log_likelihoods(model: Any, ids: Tensor, labels: Tensor) -> Floats:
    """(B,) sums of log p(token | tokens before it), in nats, over the places of `labels` (B, L) that are not IGNORED.

    ids: (B, L), padded on the right with any token, which a causal model's earlier places do not see.
    """
    with rows_together():
        losses, _ = token_losses(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return np.asarray(-losses.double().sum(1).cpu().numpy())
