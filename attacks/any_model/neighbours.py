"""Neighbours of a text, with one word changed: a memorised text has a far lower loss than its neighbours.

    score(x) = mean over neighbours n of loss(n) - loss(x)                    (Mattern et al. 2023, arXiv 2305.18462)

A masked language model proposes words for each place; the most probable whole words are taken. Without such a model a neighbour
lacks one word, which is a cruder change. Of a conversation the words of the assistant's turns are changed, which are learned.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from attacks.adversary.null import Floats
from attacks.any_model.in_options import in_options
from attacks.any_model.subject import Subject
from attacks.any_model.texts import Texts
from secure_fed.errors import ModelError, UsageError
from secure_fed.learning.data.chats import ASSISTANT, Chat
from secure_fed.learning.models.loading import explained, quiet
from secure_fed.learning.models.locate import locate
from secure_fed.learning.tasks.chat import Chats
from secure_fed.learning.tasks.item_extras import ASIDE

_WORD = re.compile(r"\w+")
_MARKS = tuple(map(chr, range(0xE000, 0xE100)))  # of Unicode's private use, and part of no word; one between answers
_CANDIDATES = 10  # words proposed for a place; those equal to the text's own are dropped
_TASKS = ("classification", "multi_label", "regression", "causal_lm", "chat")


def losses(subject: Subject, count: int, masked: str = "") -> list[Floats]:
    """`count` times (texts,) losses of one neighbour of each text; of the text itself if it has no word to change.

    masked: a masked language model, by name or folder.
    """
    if subject.asked.data.task not in _TASKS:
        raise UsageError(
            f"--neighbours changes words, and the labels of {subject.task.title} belong to single words: leave it out"
        )
    task, rows = subject.task, subject.texts.rows
    if isinstance(task, Chats):
        chats = [left for left, _, _ in task.turns(subject.tokenizer, rows, subject.asked.max_length)]
        marks = [next(one for one in _MARKS if all(one not in said for _, said in chat)) for chat in chats]
        texts = [mark.join(_answers(chat)) for mark, chat in zip(marks, chats, strict=True)]
    else:
        field = "text_b" if subject.language_model and rows.text_b is not None else "text"
        texts = [_read(text, subject) for text in getattr(rows, field)]
    made = _swapped(texts, count, masked) if masked else [dropped(text, count) for text in texts]
    near = [[of_text[number] for of_text in made] for number in range(count)]
    if isinstance(task, Chats):
        parts = [[text.split(mark) for text, mark in zip(some, marks, strict=True)] for some in near]
        return [_losses(subject, "text", _in_room(subject, chats, some)) for some in parts]
    return [_losses(subject, field, some) for some in near]


def _answers(chat: Chat) -> list[str]:
    return [said for role, said in chat if role == ASSISTANT]


def _in_room(subject: Subject, chats: Sequence[Chat], answers: Sequence[Sequence[str]]) -> list[Chat]:
    """The conversations with these answers; a conversation itself where with them it would lose a turn to `--max-length`."""
    changed: list[Chat] = []
    for chat, said in zip(chats, answers, strict=True):
        left = iter(said)
        changed.append(tuple((role, next(left) if role == ASSISTANT else text) for role, text in chat))
    rows = replace(subject.texts.rows, text=changed)
    lost = subject.task.encode(subject.tokenizer, rows, subject.asked.max_length).columns[ASIDE]
    return [chat if gone else new for chat, new, gone in zip(chats, changed, lost, strict=True)]


def dropped(text: str, count: int) -> list[str]:
    """`count` copies, each without a different word; with fewer words, starting again from the first."""
    words = list(_WORD.finditer(text))
    if len(words) < 2:
        return [text] * count
    order = np.random.default_rng(len(text)).permutation(len(words))
    return [text[: words[at].start()] + text[words[at].end() :] for at in np.resize(order, count)]


def _read(text: str, subject: Subject) -> str:
    """The part of a text that the audited model reads: a changed word behind it would have no effect."""
    if not subject.tokenizer.is_fast:
        return text
    read = subject.tokenizer(text, truncation=True, max_length=subject.asked.max_length, return_offsets_mapping=True)
    return text[: max((int(end) for _, end in read["offset_mapping"]), default=0)]


def _losses(subject: Subject, field: str, texts: Sequence[Any]) -> Floats:
    own = subject.texts
    rows = replace(own.rows, **{field: tuple(texts)})
    encoded = subject.task.encode(subject.tokenizer, rows, subject.asked.max_length)
    return replace(subject, texts=Texts(rows, own.members, encoded)).losses()


def _swapped(texts: Sequence[str], count: int, name: str) -> list[list[str]]:
    import transformers

    with in_options("--neighbour-model"), quiet(), explained(name):
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(locate(name))
    if tokenizer.mask_token_id is None or not tokenizer.is_fast:
        raise ModelError(
            f"--neighbour-model {name} is no masked language model with a fast tokenizer: name one such as a BERT"
        )
    with in_options("--neighbour-model"), quiet(), explained(name):
        model = transformers.AutoModelForMaskedLM.from_pretrained(locate(name)).eval()
    return [_of_text(text, count, tokenizer, model) for text in texts]


@torch.no_grad()
def _of_text(text: str, count: int, tokenizer: Any, model: Any) -> list[str]:
    """The `count` most probable texts with one word swapped; the text itself where there are fewer."""
    read = tokenizer(text, return_offsets_mapping=True, truncation=True, max_length=512)
    words = {match.span() for match in _WORD.finditer(text)}
    places = [at for at, span in enumerate(read["offset_mapping"]) if tuple(span) in words]
    if not places:
        return [text] * count
    ids = torch.tensor(read["input_ids"]).repeat(len(places), 1)
    ids[range(len(places)), places] = tokenizer.mask_token_id
    log = model(input_ids=ids).logits[range(len(places)), places].log_softmax(1)  # (places, words)
    found: list[tuple[float, str]] = []
    for row, at in enumerate(places):
        start, end = read["offset_mapping"][at]
        own = text[start:end]
        # p(new) / (1 - p(own)), the paper's swap probability
        rest = float(torch.log1p(-log[row, read["input_ids"][at]].exp().clamp(max=1 - 1e-6)))
        best = log[row].topk(_CANDIDATES)
        for score, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            word = _as(own, tokenizer.convert_tokens_to_string([tokenizer.convert_ids_to_tokens(token)]).strip())
            if _WORD.fullmatch(word) and word.lower() != own.lower():
                found.append((score - rest, text[:start] + word + text[end:]))
    best_first = [changed for _, changed in sorted(found, key=lambda one: -one[0])]
    return [*best_first, *[text] * count][:count]


def _as(own: str, word: str) -> str:
    """`word` with the capitalisation of `own`."""
    if own.isupper() and len(own) > 1:
        return word.upper()
    return word[:1].upper() + word[1:] if own[:1].isupper() else word
