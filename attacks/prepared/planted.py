"""Candidates made for an audit, so that one training shows more than with its own rows.

    labels    a row of the data with a wrong label, drawn uniformly from the other classes: a model that has not memorised it
              has no reason to predict it (Steinke, Nasr and Jagielski 2023, section 6)
    secrets   a sentence with a random secret (Carlini et al. 2019, section 4.1), for language models; for chats a question and
              an answer that holds the secret

Each is a copy of a row of the data with its text, conversation or label replaced, so that all other columns look usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attacks.extraction.template import Planted, Template, uniform
from privacy.entropy import Stream
from secure_fed.errors import ConfigError
from secure_fed.learning.data.chats import chat_of, rewritten
from secure_fed.learning.data.labels import Vocabulary
from secure_fed.learning.data.rows import Columns

Row = dict[str, Any]


def wrong_labels(rows: Sequence[Row], column: str, classes: Vocabulary, stream: Stream) -> list[Row]:
    """Every row with a label other than its own, in the type and the spelling of the data, and with its name in `<label>_name`.

    Otherwise whoever trains could recognise the planted rows.
    """
    named = f"{column}_name"
    own = [_index(row[column], classes) for row in rows]
    written: dict[int, Row] = dict(zip(own, rows, strict=True))  # a row of each class
    made, shifts = [], uniform(stream, len(classes.values) - 1, len(rows))
    for row, index, shift in zip(rows, own, shifts, strict=True):
        wrong = (index + 1 + shift) % len(classes.values)
        like = written.get(wrong, {})
        changed = {column: like.get(column, _in_type_of(row[column], classes.values[wrong]))}
        if named in row:
            changed[named] = like.get(named, classes.names[wrong])
        made.append({**row, **changed})
    return made


def _index(written: Any, classes: Vocabulary) -> int:
    """The index of the class, which `Vocabulary` writes its own way."""
    text = str(written).lower() if isinstance(written, bool) else str(written).strip()
    return [str(value) for value in classes.values].index(text)


def _in_type_of(written: Any, value: Any) -> Any:
    """The class in the type in which the data write another one."""
    return str(value) == "true" if isinstance(written, bool) else str(value) if isinstance(written, str) else value


def secrets(
    rows: Sequence[Row], columns: Columns, template: Template, stream: Stream
) -> tuple[list[Row], list[Planted]]:
    """Every row with its text replaced by a sentence; if prompts have targets, the target begins with the secret."""
    canaries = template.drawn(len(rows), stream)
    made = []
    for row, one in zip(rows, canaries, strict=True):
        if columns.text_b:
            before, after = template.pair(one)
            if not before:
                raise ConfigError(
                    f"the template {template.text!r:.80} begins with its secret: put a prompt before {{secret}}"
                )
            made.append({**row, columns.text: before, columns.text_b: after})
        else:
            made.append({**row, columns.text: template.written(one)})
    return made, canaries


def secret_chats(
    rows: Sequence[Row], column: str, template: Template, stream: Stream
) -> tuple[list[Row], list[Planted]]:
    """Every row with its conversation replaced by a question and its answer, which holds the secret. column: "" or the column
    of the turns.
    """
    canaries, made = template.drawn(len(rows), stream), []
    for row, one in zip(rows, canaries, strict=True):
        question, answer = template.turns(one)
        if not question.strip():
            raise ConfigError(
                f"the template {template.text!r:.80} has no question: put a line with it before that of {{secret}}"
            )
        made.append(rewritten(row, column, chat_of(question, answer)))
    return made, canaries
