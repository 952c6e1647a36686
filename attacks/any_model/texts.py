"""The texts of an audit, in one sequence."""

from __future__ import annotations

from dataclasses import dataclass

from secure_fed.learning.data.chats import ASSISTANT
from secure_fed.learning.data.encode import Encoded
from secure_fed.learning.data.on_disk import kept
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.data.texts import is_chat


@dataclass(frozen=True)
class Texts:
    """All texts, members first. members: their number. examples: the texts, tokenised for the model."""

    rows: Rows
    members: int
    examples: Encoded

    @property
    def learned(self) -> list[str]:
        """The text of each that a training learns, as far as its turns say so: the assistant's, of a conversation."""
        if any(map(is_chat, self.rows.text)):
            return ["\n".join(said for role, said in chat if role == ASSISTANT) for chat in self.rows.text]
        return self.plain

    @property
    def plain(self) -> list[str]:
        return plain_of(self.rows)


def plain_of(rows: Rows) -> list[str]:
    """The text of each row; a second text is appended to the first. A conversation is its turns, each with its role."""
    if any(map(is_chat, rows.text)):
        return ["\n".join(f"{role}: {said}" for role, said in chat) for chat in rows.text]
    seconds = rows.text_b or ("",) * len(rows)
    return [f"{one} {two}".strip() for one, two in zip(rows.text, seconds, strict=True)]


def joined(members: Rows, others: Rows | None = None) -> Rows:
    """The rows of both files, members first."""
    if others is None:
        return members
    second = None if members.text_b is None else kept(members.text_b, others.text_b or ())
    text, label = kept(members.text, others.text), kept(members.label, others.label)
    return Rows(text, label, members.label_names, second)
