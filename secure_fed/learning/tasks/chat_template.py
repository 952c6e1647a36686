"""Conversations as token ids: the tokenizer's own template, learned turns, and texts that cannot become control tokens.

A template writes a conversation as one text, whose control tokens (`<|im_start|>`, `</s>`) divide the turns. Where the texts
of the turns hold no control token, the ids are those of transformers' `apply_chat_template`. Where one does, it would divide
turns as well, and a row could fake the assistant's. So the ids of a row are compared with those of the same roles
around other texts: a row that has other control tokens gets a mark inside each one in its texts, before the template is
applied, and its text is tokenised in the parts between the marks, so that the control token is read as ordinary characters.

Learned are the texts of assistant turns with the end of the turn. They are found from outside: what two answers have in
common before they differ is the turn's header, and what the template writes without later turns ends with the turn's end. A
token that joins the header's end and the text's beginning is learned. A template that writes earlier turns in another way when
later ones follow (some drop old reasoning) has no such places, and needs `{% generation %}` around what is learned, or is
refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from secure_fed.errors import DataError, ModelError
from secure_fed.learning.data.alignment import Aligned, aligned, require_fast
from secure_fed.learning.data.chats import ASSISTANT, SYSTEM, USER, Chat
from secure_fed.learning.data.encode import IGNORED
from secure_fed.learning.data.texts import is_blank

_CHATML = (
    "{%% for message in messages %%}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + %s + '\n' }}"
    "{%% endfor %%}{%% if add_generation_prompt %%}{{ '<|im_start|>assistant\n' }}{%% endif %%}"
)
_TURN_MARKS = ("<|im_start|>", "<|im_end|>")
_MARKS = tuple(map(chr, range(0xE000, 0xE100)))  # of Unicode's private use: no text of the row has the chosen one
_MANY = 2**31  # tokens
_PROBE: Chat = ((SYSTEM, "x"), (USER, "x"), (ASSISTANT, "x"), (USER, "x"), (ASSISTANT, "x"))


def chatml(tokenizer: Any) -> str:
    """A template for a tokenizer without one: ChatML, whose turns end in a token that this tokenizer has, if it has any."""
    has_end = "<|im_end|>" in tokenizer.get_vocab()
    return _CHATML % ("eos_token" if tokenizer.eos_token and not has_end else "'<|im_end|>'")


@dataclass(frozen=True)
class Fitted:
    """A conversation as token ids. labels: the ids of learned tokens, `IGNORED` elsewhere. dropped: the oldest turns that are
    left out for want of room. Without ids, if not even the last exchange has room.
    """

    ids: NDArray[np.int32]
    labels: NDArray[np.int64]
    dropped: int


@dataclass(frozen=True)
class ChatTemplate:
    """The template of a tokenizer, which has one. `marks_answers`: whether it says itself what is learned."""

    tokenizer: Any
    source: str
    control: frozenset[int]
    marks_answers: bool
    _of_roles: dict[tuple[Any, ...], list[int]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, tokenizer: Any) -> ChatTemplate:
        require_fast(tokenizer)
        source = str(tokenizer.get_chat_template())
        made = cls(tokenizer, source, frozenset(), "generation %}" in source or "generation -%}" in source)
        written = source
        for probe in (_PROBE, _PROBE[1:]):  # many templates refuse a system turn
            try:
                written += made._text(probe)
            except DataError:
                continue
        control = frozenset(
            number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special or (token.content in written and not token.content.isspace())
        )
        unknown = {tokenizer.unk_token_id} - {
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
        }  # of any unknown character
        return cls(tokenizer, source, control - unknown, made.marks_answers)

    @property
    def divides_by_tokens(self) -> bool:
        """Whether control tokens divide the turns. Plain text, such as `### Answer:`, may stand in a text of the data too."""
        turns = _PROBE[1:]
        return len(self._of_these_roles(turns, prompt=False)) >= len(turns) - 1

    def fitted(self, chats: Sequence[Chat], max_length: int, *, last: bool = False) -> Iterator[Fitted]:
        """Each conversation with its learned turns, or with `last` its last one alone, in at most `max_length` tokens.

        Too long a one loses its oldest turns, an exchange at a time; the system turn stays. This depends on the row alone.
        """
        nothing = Fitted(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64), 0)
        found = [nothing] * len(chats)
        waiting = {row: chat for row, chat in enumerate(chats) if chat}
        while waiting:
            written = [self._learned(chat, last=last) for chat in waiting.values()]
            every = self._ids(list(waiting.values()), [text for text, _ in written])
            again: dict[int, Chat] = {}
            for (row, chat), (_, spans), (ids, places) in zip(list(waiting.items()), written, every, strict=True):
                if len(ids) <= max_length:
                    found[row] = Fitted(ids, _labels(ids, places, spans), len(chats[row]) - len(chat))
                elif shorter := _without_oldest(chat):
                    again[row] = shorter
                else:
                    found[row] = replace(nothing, dropped=len(chats[row]))
            waiting = again
        yield from found

    def prompts(self, chats: Sequence[Chat], max_length: int) -> Iterator[NDArray[np.int32]]:
        """The ids after which the assistant answers each conversation. Too many lose the oldest exchanges; of a question that
        has no room alone, the last ones stay."""
        for chat in chats:
            going: Chat | None = chat
            while going:
                ids, _ = next(self._ids([going], [self._prompt(going)], prompt=True))
                going = _without_oldest(going) if len(ids) > max_length else None
            yield ids[-max_length:]

    @property
    def ends(self) -> list[int]:
        """The control tokens that end the assistant's turn."""
        (probe,) = self.fitted([_PROBE[1:3]], _MANY)
        return self._controls(probe.ids[probe.labels >= 0])

    def turns(self, chat: Chat) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The ids of a conversation, and for each the number of the turn whose text it holds, in part at least; -1 where the
        template alone wrote it, as for every conversation of these roles.
        """
        text = self._text(chat)
        mark = next(one for one in _MARKS if one not in text)
        parts = self._text(tuple((role, _between(said, mark)) for role, said in chat)).split(mark)
        texts = [at for at, (_, said) in enumerate(chat) if said.strip()]
        if "".join(parts) != text or len(parts) != 2 * len(texts) + 1:
            raise ModelError(
                "the chat template changes the texts of a conversation, so that they cannot be told from its own words: set "
                "data.chat_template to a template that writes them as they are"
            ).about("data.chat_template", "", "a template that leaves texts as they are")
        ids, places = next(self._ids([chat], [text]))
        found = np.full(len(ids), -1)
        starts = list(accumulate(map(len, parts[:-1]), initial=0))
        for turn, start, end in zip(texts, starts[1::2], starts[2::2], strict=True):
            found[_within_spans(places, [(start, end)])] = turn
        return ids, found

    def _text(self, chat: Chat, *, prompt: bool = False) -> str:
        messages = [{"role": role, "content": said} for role, said in chat]
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = ", ".join(role for role, _ in chat)
            raise DataError(
                f"the chat template fails on a conversation of {roles} ({error!s:.200}): correct the rows, or set "
                "data.chat_template to a template that takes them"
            ).about("data.chat_template", roles, "a template that takes these turns") from error

    def _prompt(self, chat: Chat) -> str:
        """The text after which the assistant speaks, also where the template has no prompt of its own."""
        own, plain = self._text(chat, prompt=True), self._text(chat)
        return own if own != plain else self._before_answer(chat)

    def _before_answer(self, chat: Chat) -> str:
        """All that the template writes before an answer to this conversation. A space belongs to the answer: tokenizers often
        join it with the first word.
        """
        both = [self._text((*chat, (ASSISTANT, said))) for said in ("a", "b")]
        return os.path.commonprefix(both).rstrip(" ")  # noqa: RUF071 - of characters

    def _learned(self, chat: Chat, *, last: bool) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the places in it that are learned."""
        if self.marks_answers:
            whole, places = self._marked(chat)
            return whole, places[-1:] if last else places
        whole, places = self._text(chat), []
        turns = [at for at, (role, said) in enumerate(chat) if role == ASSISTANT and not is_blank(said)]
        for at in turns[-1:] if last else turns:
            before = self._before_answer(chat[:at])
            through = (whole if at == len(chat) - 1 else self._text(chat[: at + 1])).rstrip()
            if not (whole.startswith(through) and through.startswith(before)):
                raise ModelError(
                    "the chat template writes earlier turns in another way when later ones follow, so what is learned cannot "
                    "be found: set data.chat_template to a template with {% generation %} around the assistant's texts"
                ).about("data.chat_template", "", "a template with {% generation %}")
            places.append((len(before), len(through)))
        return whole, places

    def _marked(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the places between the template's marks of generation."""
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = [{"role": role, "content": said} for role, said in chat]
        found: Any = render_jinja_template(
            conversations=[messages],
            chat_template=self.source,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        (text,), (spans,) = found
        return str(text), [(int(start), int(end)) for start, end in spans]

    def _ids(self, chats: Sequence[Chat], texts: Sequence[str], *, prompt: bool = False) -> Iterator[Aligned]:
        """The tokens of each text, whose control tokens are the template's alone."""
        for chat, text, found in zip(chats, texts, aligned(self.tokenizer, texts, special=False), strict=True):
            if not self.marks_answers and self._controls(found.ids) == self._of_these_roles(chat, prompt=prompt):
                yield found
                continue
            yield self._guarded(chat, text, found, prompt=prompt)

    def _controls(self, ids: NDArray[np.int32]) -> list[int]:
        return [number for number in ids.tolist() if number in self.control]

    def _of_these_roles(self, chat: Chat, *, prompt: bool) -> list[int]:
        """The control tokens of a conversation with these roles, whatever is said."""
        roles = (prompt, *((role, bool(said.strip())) for role, said in chat))
        if roles not in self._of_roles:
            blank = tuple((role, "x" if said.strip() else said) for role, said in chat)
            text = self._prompt(blank) if prompt else self._text(blank)
            self._of_roles[roles] = self._controls(next(aligned(self.tokenizer, [text], special=False)).ids)
        return self._of_roles[roles]

    def _guarded(self, chat: Chat, text: str, found: Aligned, *, prompt: bool) -> Aligned:
        """The tokens of a conversation whose texts may hold control tokens, which are read as characters."""
        mark = next(one for one in _MARKS if not any(one in said for _, said in chat))
        safe = tuple((role, mark.join(self._parts(said))) for role, said in chat)
        if safe == chat:
            if self.marks_answers:
                return found
            raise ModelError(
                "the chat template writes control tokens that depend on the texts of a conversation, so a text could fake a "
                "turn: set data.chat_template to a template with {% generation %} around the assistant's texts"
            ).about("data.chat_template", "", "a template whose control tokens depend on roles alone")
        marked = self._prompt(safe) if prompt else self._marked(safe)[0] if self.marks_answers else self._text(safe)
        if marked.replace(mark, "") != text:
            raise ModelError(
                "the chat template changes the texts of a conversation that hold control tokens: set data.chat_template to "
                "another, or correct the rows"
            ).about("data.chat_template", "", "a template that leaves texts as they are")
        first, *others = marked.split(mark)
        read = [next(aligned(self.tokenizer, [first], special=False)), *map(self._within, others)]
        starts = accumulate(map(len, [first, *others[:-1]]), initial=0)
        spans = [one.spans + start for one, start in zip(read, starts, strict=True)]
        whole = Aligned(np.concatenate([one.ids for one in read]), np.concatenate(spans))
        if not self.marks_answers and self._controls(whole.ids) != self._of_these_roles(chat, prompt=prompt):
            raise DataError(
                f"a conversation of {len(chat)} turns holds a control token that the tokenizer of model.name "
                f"{self.tokenizer.name_or_path!r} does not read as text: remove it from the row"
            )
        return whole

    def _within(self, part: str) -> Aligned:
        """The tokens of a part that is not the beginning of its text: a tokenizer may put a space before a beginning."""
        line, both = aligned(self.tokenizer, ["\n", "\n" + part], special=False)
        count = len(line.ids)
        if both.ids[:count].tolist() != line.ids.tolist():
            return next(aligned(self.tokenizer, [part], special=False))
        return Aligned(both.ids[count:], both.spans[count:] - 1)

    def _parts(self, said: str) -> Iterator[str]:
        """A text in parts none of which holds a control token."""
        ids, places = next(aligned(self.tokenizer, [said], special=False))
        cuts = [
            int(start) + 1 for number, (start, _) in zip(ids.tolist(), places, strict=True) if number in self.control
        ]
        if not cuts or len(said) < 2:
            yield said
            return
        for start, end in zip([0, *cuts], [*cuts, len(said)], strict=True):
            yield from self._parts(said[start:end])


def template_tokens(tokenizer: Any) -> frozenset[int]:
    """The ids that a tokenizer's template writes whatever is said: the headers of turns, their ends, perhaps a system turn."""
    template, found = ChatTemplate.of(tokenizer), set[int]()
    for probe in (_PROBE, _PROBE[1:]):
        with suppress(DataError):  # many templates refuse a system turn
            ids, turns = template.turns(probe)
            found.update(ids[turns < 0].tolist())
    return frozenset(found)


def without_turn_marks(chat: Chat, tokenizer: Any) -> Chat:
    """The conversation with a space inside ChatML's marks where they are plain text, for want of a token."""
    plain = [mark for mark in _TURN_MARKS if mark not in tokenizer.added_tokens_encoder]
    for mark in plain:
        chat = tuple((role, said.replace(mark, f"{mark[0]} {mark[1:]}")) for role, said in chat)
    return chat


def _without_oldest(chat: Chat) -> Chat | None:
    """Without the first exchange after the system turn; None if there is no other."""
    lead = int(chat[0][0] == SYSTEM)
    later = [at for at, (role, _) in enumerate(chat) if role == USER and at > lead]
    return (*chat[:lead], *chat[later[0] :]) if later else None


def _between(said: str, mark: str) -> str:
    """The text with a mark at either end, inside the white space around it, which a template may drop."""
    core = said.strip()
    return said.replace(core, f"{mark}{core}{mark}", 1) if core else said


def _labels(ids: NDArray[np.int32], places: NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """The ids of tokens that lie in one of the spans, also in part."""
    return np.where(_within_spans(places, spans), ids, IGNORED).astype(np.int64)


def _within_spans(places: NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which of the places lie in one of the spans, also in part."""
    inside = np.zeros(len(places), dtype=bool)
    for start, end in spans:
        inside |= (places[:, 0] < end) & (places[:, 1] > start) & (places[:, 1] > places[:, 0])
    return inside
