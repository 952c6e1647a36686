"""Conversations in the columns of a table, in each of their usual forms, as turns.

    messages        `messages`: a list of {role, content}, as of OpenAI and Hugging Face
    ShareGPT        `conversations`: a list of {from, value}
    Alpaca          `instruction`, `input` (may be absent or empty) and `output`: a question and its answer

The last two may have a system turn in a column `system` beside them.

`data.text` names another column with a list of turns, in one of the first two forms. Where a table has no lists (CSV), a
cell is JSON. A conversation is turns of text: a system turn may begin it; then the user speaks first, the assistant answers
users and tools, and tools answer the assistant.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, DataError, plainly
from secure_fed.learning.data.rows import Table, is_blank, is_chat, is_text

Turn = tuple[str, str]  # the role, and what it says
Chat = tuple[Turn, ...]

# The forms, by the column of the first part.
_FORMS = {"messages": "messages", "conversations": "ShareGPT", "instruction": "Alpaca"}
QUESTION = "instruction"  # the column of questions alone
COLUMNS = ("messages", "conversations", "instruction", "input", "output", "system")
USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
_ROLES = {
    "human": USER,
    "gpt": ASSISTANT,
    "developer": SYSTEM,
    "observation": TOOL,
    "function": TOOL,
    **{role: role for role in (USER, ASSISTANT, SYSTEM, TOOL)},
}
_BEFORE = {  # the roles after which each role may speak; "" is the beginning
    SYSTEM: ("",),
    USER: ("", SYSTEM, ASSISTANT),
    ASSISTANT: (USER, TOOL),
    TOOL: (ASSISTANT, TOOL),
}


def form(present: Collection[str], source: str, chosen: str = "") -> tuple[str, str]:
    """The form of a table's conversations, by the names of its columns, and the column of its first part."""
    if chosen and set(present) != {QUESTION}:  # questions alone are no lists, whatever a training reads
        if chosen not in present:
            raise _no_columns(present, source, chosen)
        return "turns", chosen
    for column, kind in _FORMS.items():
        if column in present:
            return kind, column
    raise _no_columns(present, source, chosen)


def chats(table: Table, chosen: str = "") -> Iterator[Chat]:
    """The conversation of each row of the table."""
    kind, column = form(table.present, table.source, chosen)
    of_system = (table.columns.get("system") if kind != "messages" else None) or [None] * len(table)
    for row, (cell, system) in enumerate(zip(table.columns[column], of_system, strict=True)):
        if kind == "Alpaca":
            given = [table.columns[name][row] if name in table.columns else None for name in ("input", "output")]
            turns = _of_alpaca(cell, *given)
        else:
            turns = list(_turns(cell, table.place(row), column))
        if system and system == system and turns[0][0] != SYSTEM:  # not-a-number is an empty cell
            turns = [(SYSTEM, system), *turns]
        yield _ordered(turns, table.place(row), column)


def of_line(text: Any) -> Chat:
    """An input of `predict`: a question, a list of {role, content}, or a conversation as it is here."""
    if isinstance(text, str):
        return _ordered([(USER, text)], "the question", "it")
    if is_chat(text):
        return tuple(text)
    return _ordered(list(_turns(text, "the conversation", "its list")), "the conversation", "its list")


def chat_of(question: str, answer: str) -> Chat:
    return ((USER, question), (ASSISTANT, answer))


def as_messages(chat: Chat) -> list[dict[str, str]]:
    return [{"role": role, "content": said} for role, said in chat]


def rewritten(row: Mapping[str, Any], chosen: str, chat: Chat) -> dict[str, Any]:
    """A row with another conversation, of a question and its answer, as its own is written: the same columns, names of roles,
    and further entries; a system turn stays.
    """
    kind, column = form(row, "the row", chosen)
    (_, question), (_, answer) = chat
    if kind == "Alpaca":
        return {**row, "instruction": question, "output": answer, **({"input": ""} if row.get("input") else {})}
    cell: Any = row[column]
    turns = json.loads(cell) if isinstance(cell, str) else cell
    own: dict[str, Any] = {}
    for turn in turns:
        own.setdefault(_ROLES[str(turn[_names(turn)[0]]).lower()], turn)
    made = [own[SYSTEM]] if SYSTEM in own else []
    for role, text in chat:
        said = _names(own[role])[1]
        content = [{"type": "text", "text": text}] if isinstance(own[role][said], list | tuple) else text
        made.append({**own[role], said: content})
    return {**row, column: json.dumps(made, ensure_ascii=False) if isinstance(cell, str) else made}


def unanswered(chat: Chat) -> Chat:
    """The conversation up to the assistant's last answer, if it ends with one: what there is to answer."""
    return chat[:-1] if chat and chat[-1][0] == ASSISTANT else chat


def answered(chat: Chat) -> Chat:
    """The conversation up to the last turn of the assistant; empty without one."""
    last = max((at + 1 for at, (role, _) in enumerate(chat) if role == ASSISTANT), default=0)
    return chat[:last]


def without_oldest(chat: Chat, count: int) -> Chat:
    """The conversation without its `count` oldest turns; its system turn stays."""
    lead = int(chat[:1] != () and chat[0][0] == SYSTEM)
    return (*chat[:lead], *chat[lead + count :])


def require_answers(tables: Sequence[Table], conversations: Sequence[Chat], chosen: str = "") -> None:
    """Refuse a conversation of the tables' rows in which the assistant says nothing: there is nothing to learn from it."""
    places = ((table, row) for table in tables for row in range(len(table)))
    silent = [
        place
        for place, chat in zip(places, conversations, strict=True)
        if all(is_blank(said) for role, said in chat if role == ASSISTANT)
    ]
    if silent:
        table, row = silent[0]
        column = form(table.present, table.source, chosen)[1]
        others = f", as in {len(silent) - 1} more of {len(conversations)} rows" if len(silent) > 1 else ""
        raise DataError(
            f"{table.place(row)}: {column!r} has no turn of the assistant with text{others}, so there is nothing to "
            "learn from; add the answer, or remove the row"
        ).about("data.text", column, "conversations with a turn of the assistant")


def _of_alpaca(instruction: object, context: object, output: object) -> list[Any]:
    asked: object = instruction
    if not (context is None or context != context or is_blank(context)):  # not-a-number is an empty cell
        if not is_text(instruction) or not is_text(context):
            asked = context if is_text(instruction) else instruction  # refused as it is
        else:
            asked = context if is_blank(instruction) else f"{instruction}\n\n{context}"
    return [(USER, asked)] if output is None else [(USER, asked), (ASSISTANT, output)]


def _turns(cell: object, place: str, column: str) -> Iterator[tuple[str, Any]]:
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            cell = None
    if not isinstance(cell, list | tuple) or not cell:
        raise _refused(place, column, "is no list of turns", "write a list of {role, content}")
    for number, turn in enumerate(cell, 1):
        names = _names(turn)
        if not isinstance(turn, Mapping) or names[0] not in turn:
            raise _refused(
                place, column, f"has a turn {number} without a role", "write {role, content}, or {from, value}"
            )
        if turn.get("tool_calls"):
            raise _refused(place, column, f"has tool_calls in turn {number}", "write the call as the turn's text")
        role = _ROLES.get(str(turn[names[0]]).lower())
        if role is None:
            known = ", ".join(_ROLES)
            raise _refused(place, column, f"has the role {turn[names[0]]!r:.40} in turn {number}", f"known are {known}")
        yield role, _joined(turn.get(names[1]))


def _names(turn: object) -> tuple[str, str]:
    """The names of a turn's role and of its text."""
    return ("role", "content") if isinstance(turn, Mapping) and "role" in turn else ("from", "value")


def _joined(content: Any) -> Any:
    """The text of a turn whose content is a list of parts that are texts."""
    parts = content if isinstance(content, list | tuple) and content else ()
    if parts and all(
        isinstance(part, Mapping) and part.get("type") == "text" and is_text(part.get("text")) for part in parts
    ):
        return "".join(part["text"] for part in parts)
    return content


def _ordered(turns: Sequence[tuple[str, Any]], place: str, column: str) -> Chat:
    before = ""
    for number, (role, said) in enumerate(turns, 1):
        if not is_text(said):
            what = f"has a turn {number} ({role}) whose text is {said!r:.60}"
            raise _refused(place, column, what, "write a text")
        if before not in _BEFORE[role]:
            after = f"after a turn of the {before}" if before else "at the beginning"
            may = " or ".join(f"the {one}" if one else "nothing" for one in _BEFORE[role])
            what = f"has roles out of order: turn {number} is the {role}'s, {after}"
            raise _refused(place, column, what, f"the {role} speaks after {may}: correct the row, or remove it")
        before = role
    return tuple(turns)


def _refused(place: str, column: str, what: str, remedy: str) -> DataError:
    return DataError(f"{place}: {column!r} {what}; {remedy}").about("data.text", column, "conversations")


def _no_columns(present: Collection[str], source: str, chosen: str) -> DataError:
    there = ", ".join(map(repr, present))
    wanted = repr(chosen) if chosen else "'messages', nor 'conversations', nor 'instruction'"
    return DataError(
        f"{source} has no column {wanted}: it has {there}; set data.text to the column with the list of turns"
    ).about("data.text", chosen, "the column with the list of turns")


def template_of(data: DataConfig) -> str:
    """The text of `data.chat_template`: a file's, or the setting itself where it is a template."""
    chosen = data.chat_template
    if not chosen or is_template(chosen):
        return chosen
    remedy = "set data.chat_template to a file that can be read"
    with plainly(ConfigError, f"data.chat_template {chosen!r:.200} cannot be read", remedy):
        text = Path(chosen).expanduser().read_text(encoding="utf-8-sig")
    if not is_template(text):
        raise ConfigError(f"data.chat_template {chosen!r:.200} is no template: it writes no messages; {remedy}").about(
            "data.chat_template", chosen, "a Jinja template over messages"
        )
    return text


def is_template(text: str) -> bool:
    """Whether a text is a template over messages, and no path of one."""
    return "messages" in text and ("{%" in text or "{{" in text)
