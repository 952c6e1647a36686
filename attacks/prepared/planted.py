"""Candidates made for an audit, so that one training shows more than with its own rows.

    labels    a row of the data with a wrong label, drawn uniformly from the other classes: a model that has not memorised it
              has no reason to predict it (Steinke, Nasr and Jagielski 2023, section 6)
    secrets   a sentence with a random secret (Carlini et al. 2019, section 4.1), for language models

Each is a copy of a row of the data with its text or label replaced, so that all other columns look usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attacks.extraction.template import Planted, Template, uniform
from privacy.entropy import Stream
from secure_fed.errors import ConfigError
from secure_fed.learning.data.labels import Vocabulary
from secure_fed.learning.data.rows import Columns

Row = dict[str, Any]


def wrong_labels(rows: Sequence[Row], column: str, classes: Vocabulary, stream: Stream) -> list[Row]:
    """Every row with a label other than its own."""
    made, shifts = [], uniform(stream, len(classes.values) - 1, len(rows))
    for row, shift in zip(rows, shifts, strict=True):
        own = classes.values.index(_label(row[column], classes))
        made.append({**row, column: classes.values[(own + 1 + shift) % len(classes.values)]})
    return made


def _label(written: Any, classes: Vocabulary) -> Any:
    """The class, as `Vocabulary` writes it."""
    return next(value for value in classes.values if str(value) == str(written).strip())


def secrets(
    rows: Sequence[Row], columns: Columns, template: Template, stream: Stream
) -> tuple[list[Row], list[Planted]]:
    """Every row with its text replaced by a sentence; if prompts have targets, the target begins with the secret."""
    canaries = template.drawn(len(rows), stream)
    made = []
    for row, one in zip(rows, canaries, strict=True):
        before, after = template.split(one)
        if columns.text_b:
            if not before.strip():
                raise ConfigError(
                    f"the template {template.text!r:.80} begins with its secret: put a prompt before {{secret}}"
                )
            made.append({**row, columns.text: before.rstrip(), columns.text_b: after})
        else:
            made.append({**row, columns.text: before + after})
    return made, canaries
