"""Chats: the assistant's turns of conversations are learned, with the end of each turn; system, user and tool turns never are.

A row is a conversation, and so is the example that privacy protects. The loss is the mean over its learned tokens, whatever
its number of turns. A conversation of more than `model.max_length` tokens loses whole exchanges, the oldest first; its system
turn stays. One whose last exchange has no room is left out: this depends on the row alone. Texts are private, and the
template (`tasks/chat_template.py`) is public.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from secure_fed.config import DataConfig
from secure_fed.errors import ModelError
from secure_fed.learning.data import chats
from secure_fed.learning.data.encode import ASIDE, Aside, Collate, Encoded, pad_id, per_token
from secure_fed.learning.data.on_disk import kept
from secure_fed.learning.data.rows import Rows, Table, Texts, Vocabulary, columns_of
from secure_fed.learning.tasks.causal_lm import CausalLM
from secure_fed.learning.tasks.chat_template import ChatTemplate, chatml, without_turn_marks


@dataclass(frozen=True)
class Chats(CausalLM):
    """`Rows.text` is a conversation: its turns, each a role and a text.

    last: whether only the last turn of the assistant is learned. template: a template in place of the tokenizer's own.
    """

    last: bool = False
    template: str = ""

    title = "chat"

    @property
    def beside(self) -> tuple[str, ...]:
        return ("system",) if self.columns.text else chats.COLUMNS

    @property
    def learned(self) -> tuple[str, ...]:
        return ()

    def form(self, tables: Sequence[Table]) -> str:
        forms = (chats.form(table.present, table.source, self.columns.text) for table in tables)
        return "; ".join(f"{kind}, in the column {column!r}" for kind, column in dict.fromkeys(forms))

    def texts(self, tables: Sequence[Table]) -> Texts:
        return kept(*(chats.chats(table, self.columns.text) for table in tables)), None

    def line(self, text: Any) -> Any:
        return chats.of_line(text)

    def rows(self, tables: Sequence[Table], classes: Vocabulary) -> Rows:
        """Without turns after the assistant's last, which teach nothing."""
        read = super().rows(tables, classes)
        chats.require_answers(tables, read.text, self.columns.text)
        return replace(read, text=kept(map(chats.answered, read.text)))

    def prepare(self, tokenizer: Any) -> None:
        """Give the tokenizer the chosen template, or ChatML where it has none."""
        if self.template:
            tokenizer.chat_template = self.template
        elif not tokenizer.chat_template:
            tokenizer.chat_template = chatml(tokenizer)

    def encode(self, tokenizer: Any, rows: Rows, max_length: int) -> Encoded:
        """A conversation without room has no tokens. Beside each: the number of turns that it loses."""
        every, template = self._plain(map(chats.answered, rows.text), tokenizer), ChatTemplate.of(tokenizer)
        if not template.learns:
            raise ModelError(
                "the chat template writes nothing of what the assistant says, so nothing would be learned: set "
                "data.chat_template to a template that writes the turns of the role 'assistant'"
            ).about("data.chat_template", "", "a template that writes the assistant's turns")
        fitted = list(template.fitted(every, max_length, last=self.last))
        columns: dict[str, Sequence[Any]] = {"input_ids": tuple(one.ids for one in fitted)}
        columns["labels"] = tuple(one.labels for one in fitted)
        return Encoded(columns | {ASIDE: tuple(one.dropped for one in fitted)})

    def turns(self, tokenizer: Any, rows: Rows, max_length: int) -> Iterator[tuple[chats.Chat, list[int], list[int]]]:
        """What stays of each conversation in `max_length` tokens, its ids, as `encode` has them, and for each id the number of
        its turn, -1 for the template's own. Empty for a conversation without room.
        """
        template, encoded = ChatTemplate.of(tokenizer), self.encode(tokenizer, rows, max_length)
        every = self._plain(map(chats.answered, rows.text), tokenizer)
        for chat, lost, length in zip(every, encoded.columns[ASIDE], encoded.lengths, strict=True):
            left = chats.without_oldest(chat, lost) if length else ()
            ids, turns = (part.tolist() for part in template.turns(left)) if left else ([], [])
            yield left, ids, turns

    def prompts(self, tokenizer: Any, rows: Rows, max_length: int) -> list[list[int]]:
        """What stands before the assistant's next turn, or before its last one where it ends the conversation."""
        every = self._plain(map(chats.unanswered, rows.text), tokenizer)
        return [ids.tolist() for ids in ChatTemplate.of(tokenizer).prompts(every, max_length)]

    def references(self, rows: Rows) -> list[str]:
        """The assistant's last turns."""
        return [chat[-1][1] for chat in rows.text]

    def stops(self, tokenizer: Any) -> list[int]:
        """The end of a turn, and of a text."""
        return sorted({*ChatTemplate.of(tokenizer).ends, *super().stops(tokenizer)})

    def collate(self, tokenizer: Any) -> Aside:  # type: ignore[override]
        return Aside(Collate(pad_id(tokenizer), per_token))

    @staticmethod
    def _plain(some: Iterable[chats.Chat], tokenizer: Any) -> list[chats.Chat]:
        own = tokenizer.chat_template == chatml(tokenizer)
        return [without_turn_marks(chat, tokenizer) if own else chat for chat in some]


def build(data: DataConfig) -> Chats:
    return Chats(columns_of(data), False, data.learn == "last", chats.template_of(data))
