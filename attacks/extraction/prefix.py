"""Extraction by prefix: a model continues the beginnings of texts, beside reference models without this training.

A text counts as extracted if the most likely continuation of k of its tokens is the next l, verbatim (Carlini et al. 2023,
Quantifying Memorization, section 3), or nearly so (`similarity`). A continuation sampled at temperature 1 is the rest verbatim
with the model's probability p of the rest, and at least one of n samples is with probability 1 - (1 - p)^n (Hayes et al. 2024,
section 3). These numbers are exact without any sampling.

The model reads the special tokens that its tokenizer puts before a text, as in its training; k does not count them. Of a
conversation neither k nor l counts the tokens of the chat template, which are the same for all: they are given, and nothing is
compared there (`conversation_windows`). Personal data in the continuations are found by patterns (`personal_items`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attacks.adversary.null import Floats
from attacks.any_model.subject import Subject, require_numbers
from attacks.extraction.exposure import log_likelihoods
from attacks.options import Say
from secure_fed.config import ModelConfig
from secure_fed.errors import ModelError, UsageError
from secure_fed.learning.data.chats import ASSISTANT, SYSTEM
from secure_fed.learning.data.encode import IGNORED
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.generation import generated
from secure_fed.learning.models import loading
from secure_fed.learning.models.architecture import positions_of
from secure_fed.learning.tasks.chat import Chats

DRAWS = 100  # hypothetical continuations sampled for each text
NEAR = 0.75  # from this similarity on, a continuation is nearly verbatim
_SHOWN = 20
_TOGETHER = 32
_ANY = "a"


def extracted(subject: Subject, prefix: int | None, suffix: int, say: Say, *, show_texts: bool) -> dict[str, Any]:
    """Continue the first `prefix` tokens of every text by `suffix` tokens, with the model and with each of its references.

    prefix: None gives a conversation up to its last answer. A text that a reference also reproduces says little about the
    training: it is common, or follows from its beginning. So the counts are reported side by side, with a separate count of the
    texts that only the model reproduces.
    """
    task, tokenizer, is_chat = subject.task, subject.tokenizer, isinstance(subject.task, Chats)
    if isinstance(task, Chats):
        given = conversation_windows(task, tokenizer, subject.texts.rows, prefix, suffix, subject.asked.max_length)
    else:
        given = windows(tokenizer, subject.texts.plain, prefix or 0, suffix)
    if not given.numbers:
        wanted = f"{suffix} in its last answer" if prefix is None else f"{prefix} + {suffix}"
        among, more = "", ""
        if is_chat:
            among = f" of its turns' texts, among the {subject.asked.max_length} tokens that are read"
            more = ", or a larger --max-length"
        raise UsageError(
            f"none of the {len(subject.texts.rows)} texts has {wanted} tokens{among}: give longer ones, or a smaller "
            f"{'' if prefix is None else '--prefix or '}--suffix{more}"
        )
    ids = given.ids.tolist()
    rests = [row[start:end] for row, start, end in zip(ids, given.starts, given.ends, strict=True)]
    there = list(_personal(tokenizer, rests, given))
    readers: list[dict[str, Any]] = []
    written: list[Continued] = []  # by each
    for name, control, model, own_tokenizer in _models(subject):
        say(f"continuing {len(ids)} texts with {name}")
        before = [] if is_chat else leading(own_tokenizer)
        limit, length = positions_of(model), given.ids.shape[1]
        if limit is not None and len(before) + length > limit:
            raise UsageError(
                f"{name} has {limit} positions, and texts with their continuations take up to {length} tokens, with "
                f"{len(before)} special tokens before them {len(before) + length}: give a smaller --prefix or --suffix"
            )
        made = continued(model, given, before)
        written.append(made)
        back = zip(there, _personal(tokenizer, made.written, given), strict=True)
        readers.append(
            {
                "model": name,
                "never_saw": control,
                "verbatim": made.verbatim,
                "near": made.near,
                "expected_in_draws": made.expected(DRAWS),
                "mean_similarity": float(made.similarity.mean()),
                "personal": dict(Counter(item.kind for own, items in back for item in own & items)),
            }
        )
    own, *controls = written
    near = (own.similarity >= NEAR) & np.all([one.similarity < NEAR for one in controls], axis=0)
    only = sorted(np.flatnonzero(near).tolist(), key=lambda index: -own.similarity[index])
    returned: list[dict[str, Any]] = []
    for index in only[:_SHOWN]:
        line = {"text": subject.places[given.numbers[index]], "similarity": float(own.similarity[index])}
        if show_texts:
            line["beginning"] = tokenizer.decode(given.ids[index, : given.starts[index]].tolist())
            line["written"] = tokenizer.decode(own.written[index])
        returned.append(line)
    return {
        **subject.asked.heading,
        "task": subject.asked.data.task,
        "texts": len(subject.texts.rows),
        "tried": len(given.numbers),
        "prefix": prefix,
        "suffix": suffix,
        "near_from": NEAR,
        "draws": DRAWS,
        "readers": readers,
        "only_by_the_model": len(only),
        "personal_in_texts": dict(Counter(item.kind for items in there for item in items)),
        "returned": returned,
    }


def _models(subject: Subject) -> Iterator[tuple[str, bool, Any, Any]]:
    """The model with its tokenizer, then the references, which never saw the texts: its base, with the adapter off, and the
    named ones.
    """
    yield "the model", False, subject.model, subject.tokenizer
    if subject.base:
        with subject.base():
            yield "its base", True, subject.model, subject.tokenizer
    for name in subject.asked.references:
        wanted = ModelConfig(name, subject.asked.device, max_length=subject.asked.max_length)
        loaded = loading.load(wanted, subject.task, (), 0)
        if loaded.tokenizer.get_vocab() != subject.tokenizer.get_vocab():
            raise ModelError(
                f"--reference {name} has another tokenizer than {subject.asked.model}: name a model with the same tokenizer"
            )
        yield name, True, loaded.model.eval(), loaded.tokenizer


def _personal(tokenizer: Any, rests: list[list[int]], given: Windows) -> Iterator[set[Item]]:
    """For each text, the items in its beginning joined with this continuation, without those of the beginning alone."""
    for row, start, rest in zip(given.ids.tolist(), given.starts, rests, strict=True):
        yield personal_items(tokenizer.decode([*row[:start], *rest])) - personal_items(tokenizer.decode(row[:start]))


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


def windows(tokenizer: Any, texts: Sequence[str], prefix: int, suffix: int) -> Windows:
    """The first `prefix` + `suffix` tokens of every text that is long enough, without special ones; the last are asked."""
    read = [tokenizer(text, add_special_tokens=False)["input_ids"][: prefix + suffix] for text in texts]
    asked = [False] * prefix + [True] * suffix
    return Windows.of({index: (ids, asked) for index, ids in enumerate(read) if len(ids) == len(asked)})


def conversation_windows(
    task: Chats, tokenizer: Any, rows: Rows, prefix: int | None, suffix: int, max_length: int
) -> Windows:
    """Every conversation with enough tokens of texts: the first `prefix` are given, and the next `suffix` are asked.

    A template writes the same around every conversation: perhaps a system turn of its own, the header of each turn and its end.
    A model gives these back whatever it was trained on, so they are given to it, and nothing is compared there. What precedes
    the first text is the constant header: the common token prefix of two conversations whose first texts differ. A system turn
    that several conversations share is constant as well. The beginning and its continuation have as many tokens *of texts* as
    are asked for; so neither the end of a turn nor a turn that the continuation does not reach to the end is a find by itself.

    prefix: None gives everything before the assistant's last answer; its first `suffix` tokens are asked. max_length: too long
    a conversation loses its oldest turns, as in a training.
    """
    read = list(task.turns(tokenizer, rows, max_length))
    said = Counter(chat[0] for chat in {chat for chat, _, _ in read} if chat and chat[0][0] == SYSTEM)
    found: dict[int, tuple[Sequence[int], Sequence[bool]]] = {}
    for index, (chat, ids, turns) in enumerate(read):
        first = int(bool(chat) and said[chat[0]] > 1)  # the first turn that is not constant
        texts = np.flatnonzero(np.array(turns) >= first)
        last = max((at for at, (role, _) in enumerate(chat) if role == ASSISTANT), default=0)
        begun = sum(first <= turn < last for turn in turns) if prefix is None else prefix
        asked = texts[begun : begun + suffix]
        if len(asked) == suffix:
            end = int(asked[-1]) + 1
            found[index] = ids[:end], np.isin(np.arange(end), asked).tolist()
    return Windows.of(found)


def leading(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts before a text, such as the begin token of LLaMA."""
    whole, plain = (tokenizer(_ANY, add_special_tokens=special)["input_ids"] for special in (True, False))
    return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(plain)] == plain), [])


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


def similarity(one: Sequence[int], other: Sequence[int]) -> float:
    """1 - d / n: inserting, deleting or replacing d tokens turns one into the other, and the longer has n tokens.

    Ippolito et al. 2023 call a continuation approximately memorised by a BLEU above .75. Edits are counted here instead: they
    need no choice of n-grams, and a similarity of 1 is verbatim.
    """
    longer = max(len(one), len(other))
    return 1 - _edits(np.asarray(one), np.asarray(other)) / longer if longer else 1.0


def _edits(one: np.ndarray, other: np.ndarray) -> int:
    """The Levenshtein distance, computed row by row."""
    places = np.arange(len(other) + 1)
    row = places.copy()
    for count, token in enumerate(one, start=1):
        changed = np.minimum(row[1:] + 1, row[:-1] + (other != token))
        best = np.r_[count, changed]
        row = np.minimum.accumulate(best - places) + places  # insertions, from left to right
    return int(row[-1])


@dataclass(frozen=True, order=True)
class Item:
    """kind: a key of PATTERNS. value: without spaces and hyphens, in lower case, so that different spellings are equal."""

    kind: str
    value: str


def _plain(value: str) -> str:
    return re.sub(r"[\s().\-/]", "", value)


def _luhn(value: str) -> bool:
    """The check digit of payment cards (ISO/IEC 7812-1)."""
    doubled = [int(one) * (1 + place % 2) for place, one in enumerate(reversed(_plain(value)))]
    return sum(one - 9 * (one > 9) for one in doubled) % 10 == 0


def _iban(value: str) -> bool:
    """The check digits of account numbers (ISO 13616)."""
    moved = _plain(value)[4:] + _plain(value)[:4]
    return int("".join(str(int(one, 36)) for one in moved)) % 97 == 1


def _phone(value: str) -> bool:
    """9 to 15 digits, in international, national or North American form; years do not match."""
    begins = value[0] in "+0(" or re.fullmatch(r"\d{3}([ .-])\d{3}\1\d{4}", value)
    return bool(begins) and 9 <= len(_plain(value).lstrip("+")) <= 15


PATTERNS: dict[str, tuple[re.Pattern[str], Callable[[str], bool]]] = {
    "e-mail": (re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[a-z]{2,}\b", re.IGNORECASE), bool),
    "IBAN": (re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b"), _iban),
    "payment card": (re.compile(r"(?<![\d-])\d(?:[ -]?\d){12,18}(?![\d-])"), _luhn),
    "US social security": (re.compile(r"(?<![\d-])(?!000|666|9\d\d)\d{3}-(?!00)\d{2}-(?!0000)\d{4}(?![\d-])"), bool),
    "phone": (re.compile(r"(?<![\w.+-])(?:\+|00)?\(?\d{2,4}\)?(?:[ ./-]?\(?\d{2,4}\)?){2,4}(?![\w-])"), _phone),
}


def personal_items(text: str) -> set[Item]:
    """The personal data in a text: e-mail addresses, phone numbers, and numbers of documents and accounts.

    Carlini et al. 2021 (section 6.4) found such data in a language model's outputs. Patterns miss much (names, addresses, other
    countries' numbers) and give false matches, so a number counts as an account number only if its check digits are right. A
    match of one pattern is not searched by later patterns.
    """
    items: set[Item] = set()
    for kind, (pattern, right) in PATTERNS.items():

        def taken(match: re.Match[str], kind: str = kind, right: Callable[[str], bool] = right) -> str:
            if not right(match[0]):
                return match[0]
            items.add(Item(kind, (match[0] if kind == "e-mail" else _plain(match[0])).lower()))
            return " " * len(match[0])

        text = pattern.sub(taken, text)
    return items
