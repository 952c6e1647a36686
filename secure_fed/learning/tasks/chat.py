"""Chats: the assistant's turns of conversations are learned, with the end of each turn; system, user and tool turns never are.

A row is a conversation, and so is the example that privacy protects. The loss is the mean over its learned tokens, whatever
its number of turns. A conversation of more than `model.max_length` tokens loses whole exchanges, the oldest first; its system
turn stays. One whose last exchange has no room is left out: this depends on the row alone. Texts are private, and the
template (`ChatTemplate`) is public.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from itertools import accumulate, pairwise, takewhile
from typing import Any
from unicodedata import normalize

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, DataError, ModelError
from secure_fed.learning.data import chats
from secure_fed.learning.data.chats import ASSISTANT, SYSTEM, TOOL, USER, Chat
from secure_fed.learning.data.encode import (
    ASIDE,
    IGNORED,
    Aligned,
    Aside,
    Collate,
    Encoded,
    aligned,
    pad_id,
    per_token,
    require_fast,
)
from secure_fed.learning.data.on_disk import kept
from secure_fed.learning.data.rows import Rows, Table, Texts, Vocabulary, columns_of, is_blank
from secure_fed.learning.tasks.causal_lm import CausalLM

_CHATML = (
    "{%% for message in messages %%}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + %s + '\n' }}"
    "{%% endfor %%}{%% if add_generation_prompt %%}{{ '<|im_start|>assistant\n' }}{%% endif %%}"
)
# The gaps are what some tokenizers drop: spaces, accents, characters of no width.
_TURN_MARK = re.compile(r"<~\|~(i~m)~_~(s~t~a~r~t|e~n~d)~\|~>".replace("~", r"[^\w<|>]*"), re.IGNORECASE)
_MARKS = tuple(map(chr, range(0xE000, 0xF900)))  # of Unicode's private use: no text of the row has the chosen one
_FAILS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
TODAY = date(2024, 7, 26)
_PROBE: Chat = ((SYSTEM, "x"), (USER, "x"), (ASSISTANT, "x"), (USER, "x"), (ASSISTANT, "x"))
# Some templates refuse a system turn, need it, or take one exchange.
_PROBES = (_PROBE[1:], _PROBE, _PROBE[1:3], _PROBE[:3])
_OF_TOOLS: Chat = ((USER, "x"), (ASSISTANT, "x"), (TOOL, "x"), (ASSISTANT, "x"))


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


def chatml(tokenizer: Any) -> str:
    """A template for a tokenizer without one: ChatML, whose turns end in a token that this tokenizer has, if it has any."""
    has_end = "<|im_end|>" in tokenizer.get_vocab()
    return _CHATML % ("eos_token" if tokenizer.eos_token and not has_end else "'<|im_end|>'")


def without_turn_marks(chat: Chat, tokenizer: Any) -> Chat:
    """The conversation with ChatML's marks replaced by their names in two words where they are plain text, for want of tokens:
    also as a tokenizer reads them that ignores spaces, capitals, accents, or the width of characters. A text with a mark is
    decomposed as a whole (NFKD). A name in two words is no part of a mark, whatever stands around it.
    """
    if all(mark in tokenizer.added_tokens_encoder for mark in ("<|im_start|>", "<|im_end|>")):
        return chat
    read = ((role, said, normalize("NFKD", said)) for role, said in chat)
    return tuple((role, _TURN_MARK.sub(r"\1 \2", it) if _TURN_MARK.search(it) else said) for role, said, it in read)


@dataclass(frozen=True)
class ChatTemplate:
    """The template of a tokenizer, which has one, and conversations as token ids.

    A template writes a conversation as one text, whose control tokens (`<|im_start|>`, `</s>`) divide the turns. Where the
    texts of the turns hold no control token, the ids are those of transformers' `apply_chat_template`. Where one does, it would
    divide turns as well, and a row could fake the assistant's. So the ids of a row are compared with those of the same roles
    around other texts: a row that has other control tokens gets a mark inside each one in its texts, before the template is
    applied, and its text is tokenised in the parts between the marks, so that the control token is read as ordinary characters.
    A row whose control tokens differ then, too, is refused: the template itself makes them of the texts.

    Learned are the texts of assistant turns with the end of the turn. They are found from outside: what two answers have in
    common before they differ is the turn's header, and what the template writes without later turns ends with the turn's end.
    A token that joins the header's end and the text's beginning is learned. A template that writes earlier turns in another way
    when later ones follow (some drop old reasoning) has no such places, and needs `{% generation %}` around what is learned, or
    is refused. Such a template may write tokens that depend on what the assistant says, such as `<think>`, but no special ones,
    and none of those that it writes around any text.

    A template that asks for today's date (`strftime_now`) is told `TODAY`, on which Llama's own templates fall back. Otherwise
    a run that is resumed tomorrow, or has two nodes in two time zones, would train on other ids.

    marks_answers: whether the template says itself what is learned.
    """

    tokenizer: Any
    source: str
    marks_answers: bool
    _of_roles: dict[tuple[Any, ...], list[int]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, tokenizer: Any) -> ChatTemplate:
        require_fast(tokenizer)
        try:
            source = str(tokenizer.get_chat_template())
        except ValueError as error:  # several, and none is the default
            raise ConfigError(
                f"the tokenizer {tokenizer.name_or_path!r} has several chat templates and no default: set data.chat_template "
                "to one of them"
            ).about("data.chat_template", "", "a template") from error
        source = _TODAY.sub(lambda asked: repr(TODAY.strftime(asked[2])), source)
        if "strftime_now(" in source:
            raise ModelError(
                f"the chat template of {tokenizer.name_or_path!r} writes today's date in a format that it computes: set "
                "data.chat_template to one in which the calls of strftime_now name their format"
            ).about("data.chat_template", "", "a template with one date")
        return cls(tokenizer, source, bool(_GENERATION.search(source)))

    @cached_property
    def control(self) -> frozenset[int]:
        """The ids of control tokens."""
        tokenizer, written = self.tokenizer, self.source
        for probe in (*_PROBES, _OF_TOOLS):
            with suppress(DataError):
                written += self._text(probe)
        control = frozenset(
            number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special or (token.content in written and not token.content.isspace())
        )
        return control - ({tokenizer.unk_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id})

    @property
    def divides_by_tokens(self) -> bool:
        """Whether a control token stands between every two turns. Plain text, such as `### Answer:`, may stand in a text of the
        data too.
        """
        for probe in _PROBES:
            with suppress(DataError, ModelError):
                ids, turns = self.turns(probe)
                places = [np.flatnonzero(turns == turn) for turn in range(len(probe))]
                apart = (self._controls(ids[one[-1] + 1 : other[0]]) for one, other in pairwise(places))
                return all(map(len, places)) and all(apart)  # a token may hold two turns
        return True  # no conversation tells

    def fitted(self, chats: Sequence[Chat], max_length: int, *, last: bool = False) -> Iterator[Fitted]:
        """Each conversation with its learned turns, or with `last` its last one alone, in at most `max_length` tokens.

        Too long a one loses its oldest turns, an exchange at a time; the system turn stays. This depends on the row alone.
        """
        read = list(self._ids(chats, [self._text(chat) if chat else "" for chat in chats]))
        for chat, (ids, places) in zip(chats, read, strict=True):
            left = chat
            if len(ids) > max_length:
                left = self._newest(chat, max_length)
                ids, places = self._read(left)
            spans = self._learned(left, last=last) if left else []
            labels = np.where(_within_spans(places, spans), ids, IGNORED).astype(np.int64)
            yield Fitted(ids, labels, len(chat) - len(left))

    def _newest(self, chat: Chat, max_length: int, *, prompt: bool = False) -> Chat:
        """The conversation without its oldest exchanges, as many as are too many; empty if not even its last one has room.

        Fewer exchanges are never more tokens, so the number is found by halving.
        """
        every = list(_shorter(chat))
        at = bisect_left(every, True, key=lambda some: len(self._read(some, prompt=prompt).ids) <= max_length)
        return every[at] if at < len(every) else ()

    def prompts(self, chats: Sequence[Chat], max_length: int) -> Iterator[NDArray[np.int32]]:
        """The ids after which the assistant answers each conversation. Too many lose the oldest exchanges; of a question that
        has no room alone, the last ones stay."""
        for chat in chats:
            if not chat:
                raise DataError("a conversation has no turn to answer: give it a question").about(
                    "data.text", "", "a question"
                )
            ids = self._read(chat, prompt=True).ids
            if len(ids) > max_length:
                left = self._newest(chat, max_length, prompt=True) or [*_shorter(chat)][-1]
                ids = self._read(left, prompt=True).ids
            if not len(ids):
                raise DataError(
                    "the chat template writes nothing before an answer to a blank question, so there is nothing to go on from: "
                    "set data.chat_template to a template with headers, or fill the question"
                ).about("data.chat_template", "", "a template that writes a header")
            yield ids[-max_length:]

    def _read(self, chat: Chat, *, prompt: bool = False) -> Aligned:
        """The tokens of a conversation, or with `prompt` those after which the assistant answers it."""
        return next(self._ids([chat], [self._text(chat, prompt=prompt) if chat else ""], prompt=prompt))

    @property
    def ends(self) -> list[int]:
        """The control tokens that end the assistant's turn: behind what it says, and none of a thought before."""
        last = self._of_a_probe.tolist()[::-1]
        behind = takewhile(lambda one: one in self.control or not self.tokenizer.decode([one]).strip(), last)
        return [one for one in behind if one in self.control][::-1]

    @property
    def learns(self) -> bool:
        """Whether the template writes what the assistant says, and so anything is learned."""
        return bool(len(self._of_a_probe))

    @property
    def _of_a_probe(self) -> NDArray[np.int64]:
        """The learned ids of a short conversation that the template takes."""
        for probe in (_PROBE[1:3], *_PROBES):
            with suppress(DataError):
                (found,) = self.fitted([probe], 2**31)
                learned: NDArray[np.int64] = found.labels[found.labels != IGNORED]
                return learned
        return np.empty(0, dtype=np.int64)

    def turns(self, chat: Chat) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The ids of a conversation, and for each the number of the turn whose text it holds, in part at least; -1 where the
        template alone wrote it, as for every conversation of these roles.
        """
        text = self._text(chat)
        mark = _absent(chat)
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
        return self._prompt(chat) if prompt else self._written(chat)[0]

    def _written(self, chat: Chat, *, prompt: bool = False, marks: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """What the template writes; with `marks` also the places between its marks of generation."""
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = [{"role": role, "content": said} for role, said in chat]
        try:
            found: Any = render_jinja_template(
                conversations=[messages],
                chat_template=self.source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **self.tokenizer.special_tokens_map,
            )
        except _FAILS as error:
            roles = ", ".join(role for role, _ in chat)
            raise DataError(
                f"the chat template fails on a conversation of {roles} ({error!s:.200}): correct the rows, or set "
                "data.chat_template to a template that takes them"
            ).about("data.chat_template", roles, "a template that takes these turns") from error
        (text,), (spans,) = found if marks else (found[0], [[]])
        return str(text), [(int(start), int(end)) for start, end in spans]

    def _prompt(self, chat: Chat) -> str:
        """The text after which the assistant speaks: all that stands before an answer in training, where the template's own
        prompt is shorter (some write an empty thought there), is none, or ends with the answer's space.
        """
        own, before = self._written(chat, prompt=True)[0], self._before_answer(chat)
        return before if before.startswith(own.rstrip(" ")) else own

    def _before_answer(self, chat: Chat) -> str:
        """All that the template writes before an answer to this conversation. A space belongs to the answer: tokenizers often
        join it with the first word.
        """
        both = [self._text((*chat, (ASSISTANT, said))) for said in ("a", "b")]
        return os.path.commonprefix(both).rstrip(" ")  # noqa: RUF071 - of characters

    def _learned(self, chat: Chat, *, last: bool) -> list[tuple[int, int]]:
        """The places in the text of a conversation that are learned."""
        if self.marks_answers:
            _, places = self._written(chat, marks=True)
            return places[-1:] if last else places
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
        return places

    def _ids(self, chats: Sequence[Chat], texts: Sequence[str], *, prompt: bool = False) -> Iterator[Aligned]:
        """The tokens of each text, whose control tokens are the template's alone."""
        for chat, text, found in zip(chats, texts, aligned(self.tokenizer, texts, special=False), strict=True):
            yield found if self._is_the_templates(found.ids, chat, prompt) else self._guarded(chat, text, prompt)

    def _controls(self, ids: NDArray[Any]) -> list[int]:
        return [number for number in ids.tolist() if number in self.control]

    def _is_the_templates(self, ids: NDArray[np.int32], chat: Chat, prompt: bool) -> bool:
        """Whether a conversation has the control tokens of any one with these roles."""
        if not chat:
            return True
        own, found = self._of_these_roles(chat, prompt=prompt), self._controls(ids)
        others = [said for role, said in chat if role != ASSISTANT]
        spoken = (self._controls(one.ids) for one in aligned(self.tokenizer, others, special=False))
        if self.marks_answers and found != own and not any(spoken):
            # The assistant's thought may be there or not; the tokens around any text may not.
            special = self.tokenizer.added_tokens_decoder
            found = [number for number in found if number in own or special[number].special]
        return found == own

    def _of_these_roles(self, chat: Chat, *, prompt: bool) -> list[int]:
        """The control tokens of a conversation with these roles, whatever is said."""
        blank = tuple((role, "x" if said.strip() else said) for role, said in chat)
        if (prompt, blank) not in self._of_roles:
            text = self._text(blank, prompt=prompt)
            self._of_roles[prompt, blank] = self._controls(next(aligned(self.tokenizer, [text], special=False)).ids)
        return self._of_roles[prompt, blank]

    def _guarded(self, chat: Chat, text: str, prompt: bool) -> Aligned:
        """The tokens of a conversation whose texts may hold control tokens, which are read as characters."""
        mark = _absent(chat)
        safe = tuple((role, mark.join(self._parts(said))) for role, said in chat)
        if safe == chat:
            raise ModelError(
                "the chat template writes control tokens that depend on the texts of a conversation, so a text could fake a "
                "turn: set data.chat_template to another"
                + ("" if self.marks_answers else ", such as one with {% generation %} around the assistant's texts")
            ).about("data.chat_template", "", "a template whose control tokens depend on roles alone")
        marked = self._text(safe, prompt=prompt)
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
        if not self._is_the_templates(whole.ids, chat, prompt):
            raise self._unreadable(chat)
        return whole

    def _unreadable(self, chat: Chat) -> DataError:
        return DataError(
            f"a conversation of {len(chat)} turns holds a control token that the tokenizer of model.name "
            f"{self.tokenizer.name_or_path!r} does not read as text: remove it from the row"
        ).about("data.text", "", "texts without it")

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
        tokens = [place for number, place in zip(ids.tolist(), places.tolist(), strict=True) if number in self.control]
        cuts = [end - len(said[start:end].lstrip()) + 1 for start, end in tokens]  # some take in the spaces before them
        if not cuts:
            yield said
        elif len(said) in cuts:  # of one character, which no mark divides
            raise self._unreadable(((USER, said),))
        else:
            for start, end in pairwise([0, *cuts, len(said)]):
                yield from self._parts(said[start:end])


@dataclass(frozen=True)
class Fitted:
    """A conversation as token ids. labels: the ids of learned tokens, `IGNORED` elsewhere. dropped: the oldest turns that are
    left out for want of room. Without ids, if not even the last exchange has room.
    """

    ids: NDArray[np.int32]
    labels: NDArray[np.int64]
    dropped: int


def template_tokens(tokenizer: Any) -> frozenset[int]:
    """The ids that a tokenizer's template writes whatever is said: the headers of turns, their ends, perhaps a system turn."""
    template, found = ChatTemplate.of(tokenizer), set[int]()
    for probe in _PROBES:
        with suppress(DataError):
            ids, turns = template.turns(probe)
            found.update(ids[turns < 0].tolist())
    return frozenset(found)


def _shorter(chat: Chat) -> Iterator[Chat]:
    """The conversation, and it without its oldest exchange, its two oldest ones, ...; its system turn stays."""
    lead = int(chat[0][0] == SYSTEM)
    later = [at for at, (role, _) in enumerate(chat) if role == USER and at > lead]
    return ((*chat[:lead], *chat[at:]) for at in (lead, *later))


def _absent(chat: Chat) -> str:
    """A character that no text of the conversation has."""
    texts = "".join(said for _, said in chat)
    found = next((one for one in _MARKS if one not in texts), None)
    if found is None:
        raise DataError(
            "a conversation has all of Unicode's characters for private use (U+E000 to U+F8FF), and one has to be free: remove "
            "one from the row"
        ).about("data.text", "", "texts without one of them")
    return found


def _between(said: str, mark: str) -> str:
    """The text with a mark at either end, inside the white space around it, which a template may drop."""
    core = said.strip()
    return said.replace(core, f"{mark}{core}{mark}", 1) if core else said


def _within_spans(places: NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which of the places lie in one of the spans, also in part."""
    inside = np.zeros(len(places), dtype=bool)
    for start, end in spans:
        inside |= (places[:, 0] < end) & (places[:, 1] > start) & (places[:, 1] > places[:, 0])
    return inside
