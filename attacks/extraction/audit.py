"""Texts that a model reproduces from their beginnings, beside those that reference models without this training reproduce."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from attacks.any_model.subject import Subject
from attacks.extraction.conversations import conversation_windows
from attacks.extraction.personal import Item, personal_items
from attacks.extraction.prefix import Continued, Windows, continued, leading, windows
from attacks.extraction.similarity import NEAR
from secure_fed.config import ModelConfig
from secure_fed.errors import ModelError, UsageError
from secure_fed.learning.models import loading
from secure_fed.learning.models.architecture import positions_of
from secure_fed.learning.tasks.chat import Chats

DRAWS = 100  # hypothetical continuations sampled for each text
_SHOWN = 20
Say = Callable[[str], None]


@dataclass(frozen=True)
class Reader:
    """A model's continuations, and the personal data that they reproduce. never_saw: whether the model is a control."""

    name: str
    never_saw: bool
    continued: Continued
    given_back: list[set[Item]]

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "never_saw": self.never_saw,
            "verbatim": self.continued.verbatim,
            "near": self.continued.near,
            "expected_in_draws": self.continued.expected(DRAWS),
            "mean_similarity": float(self.continued.similarity.mean()),
            "personal": dict(Counter(item.kind for items in self.given_back for item in items)),
        }


def extracted(subject: Subject, prefix: int | None, suffix: int, say: Say, *, show_texts: bool) -> dict[str, Any]:
    """Continue the first `prefix` tokens of every text by `suffix` tokens, with the model and with each of its references.

    prefix: None gives a conversation up to its last answer. A text that a reference also reproduces says little about the
    training: it is common, or follows from its beginning. So the counts are reported side by side, with a separate count of the
    texts that only the model reproduces.
    """
    given, is_chat = _windows(subject, prefix, suffix), isinstance(subject.task, Chats)
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
    there = list(_personal(subject.tokenizer, rests, given))
    readers = []
    for name, control, model, tokenizer in _models(subject):
        say(f"continuing {len(ids)} texts with {name}")
        before = [] if is_chat else leading(tokenizer)
        _require_positions(name, model, len(before), given)
        made = continued(model, given, before)
        back = list(_personal(subject.tokenizer, made.written, given))
        readers.append(Reader(name, control, made, [own & items for own, items in zip(there, back, strict=True)]))
    own, controls = readers[0], readers[1:]
    only = [
        index
        for index in range(len(given.numbers))
        if own.continued.similarity[index] >= NEAR and all(one.continued.similarity[index] < NEAR for one in controls)
    ]
    only.sort(key=lambda index: -own.continued.similarity[index])
    return {
        "schema": 1,
        "model": subject.asked.model,
        "adapter": None if subject.asked.adapter is None else str(subject.asked.adapter),
        "task": subject.asked.data.task,
        "texts": len(subject.texts.rows),
        "tried": len(given.numbers),
        "prefix": prefix,
        "suffix": suffix,
        "near_from": NEAR,
        "draws": DRAWS,
        "readers": [one.to_dict() for one in readers],
        "only_by_the_model": len(only),
        "personal_in_texts": dict(Counter(item.kind for items in there for item in items)),
        "returned": [_shown(subject, own, given, index, show_texts) for index in only[:_SHOWN]],
    }


def _windows(subject: Subject, prefix: int | None, suffix: int) -> Windows:
    if isinstance(subject.task, Chats):
        return conversation_windows(
            subject.task, subject.tokenizer, subject.texts.rows, prefix, suffix, subject.asked.max_length
        )
    return windows(subject.tokenizer, subject.texts.plain, prefix or 0, suffix)


def _require_positions(name: str, model: Any, special: int, given: Windows) -> None:
    limit, length = positions_of(model), given.ids.shape[1]
    if limit is not None and special + length > limit:
        raise UsageError(
            f"{name} has {limit} positions, and texts with their continuations take up to {length} tokens, with {special} "
            f"special tokens before them {special + length}: give a smaller --prefix or --suffix"
        )


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


def _shown(subject: Subject, own: Reader, given: Windows, index: int, show_texts: bool) -> dict[str, Any]:
    decode = subject.tokenizer.decode
    line = {"text": subject.places[given.numbers[index]], "similarity": float(own.continued.similarity[index])}
    if not show_texts:
        return line
    beginning = given.ids[index, : given.starts[index]].tolist()
    return {**line, "beginning": decode(beginning), "written": decode(own.continued.written[index])}
