"""ReCaLL (Xie et al. 2024, arXiv 2406.15968): the ratio of a text's log-likelihood after a prefix to that without it.

    score(x) = LL(x | P) / LL(x)

LL is a text's log-likelihood, and the prefix P consists of some texts of the same kind that were not in the training. The
prefix lowers the log-likelihood of a memorised text more than that of another, so its ratio is higher. The texts of P must not
be among the audited texts: after a copy of itself, every text is likely.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attacks.adversary.null import Floats
from attacks.any_model.in_options import in_options
from attacks.any_model.likelihood import tokens_of
from attacks.any_model.subject import Subject
from attacks.any_model.texts import plain_of
from secure_fed.errors import DataError, UsageError
from secure_fed.learning.data import sources
from secure_fed.learning.data.encode import IGNORED, Encoded
from secure_fed.learning.data.labels import Vocabulary
from secure_fed.learning.models.architecture import positions_of

Ids = NDArray[np.integer[Any]]

_SHOTS = 12  # texts of the prefix, at most
_LONGEST = 2048  # tokens, if the model states no limit
_BATCH = 2


def conditional(subject: Subject, file: Path) -> Floats:
    """(texts,) the log-likelihood of each text after the prefix, over the same tokens as without it."""
    with in_options():
        prefix = _prefix(subject, file)
    given = [_after(prefix, *own, subject.tokenizer.bos_token_id) for own in _columns(subject.texts.examples)]
    columns = {"input_ids": tuple(ids for ids, _ in given), "labels": tuple(labels for _, labels in given)}
    examples = Encoded({**subject.texts.examples.columns, **columns})
    found = tokens_of(subject.model, subject.task, subject.tokenizer, examples, _BATCH)
    return np.array([one.said.sum() for one in found])


def _columns(examples: Encoded) -> list[tuple[Ids, Ids]]:
    return list(zip(examples.input_ids, examples.columns["labels"], strict=True))


def _after(prefix: Ids, ids: Ids, labels: Ids, begin: int | None) -> tuple[Ids, Ids]:
    """The text appended to the prefix, without its begin token. Its first token is not scored, as without a prefix."""
    labels = np.concatenate([[IGNORED], labels[1:]])
    first = int(len(ids) > 1 and ids[0] == begin)
    return np.concatenate([prefix, ids[first:]]), np.concatenate([np.full(len(prefix), IGNORED), labels[first:]])


def _prefix(subject: Subject, file: Path) -> Ids:
    """The tokens of the file's first texts, as many as fit before the longest text."""
    tables = sources.of_one_party(subject.task, [file], "--recall")
    rows = subject.task.rows(tables, Vocabulary((), ()))
    both = set(subject.texts.plain) & set(plain_of(rows))
    if both:
        raise DataError(
            f"{file} has {len(both)} texts of --members or --non-members: --recall needs texts that were in no training"
        )
    limit = positions_of(subject.model) or _LONGEST
    room = limit - int(subject.texts.examples.lengths.max())
    encoded = subject.task.encode(subject.tokenizer, rows.take(range(min(_SHOTS, len(rows)))), limit)
    found: list[Ids] = []
    for ids in encoded.input_ids:
        if len(ids) and sum(len(one) for one in found) + len(ids) <= room:
            found.append(ids)
    if not found:
        raise UsageError(
            f"no text of --recall fits in front of a text: the model reads {limit} tokens, and the texts take up to "
            f"{limit - room}: lower --max-length"
        )
    return np.concatenate(found)
