"""Extraction from conversations: the texts of turns are looked for, and the chat template's own tokens never count.

A template writes the same around every conversation: perhaps a system turn of its own, the header of each turn and its end. A
model gives these back whatever it was trained on, so they are given to it, and nothing is compared there. What precedes the
first text is the constant header: the common token prefix of two conversations whose first texts differ. A system turn that
several conversations share is constant as well. The beginning and its continuation have as many tokens *of texts* as are asked
for; so neither the end of a turn nor a turn that the continuation does not reach to the end is a find by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from attacks.extraction.prefix import Windows
from secure_fed.learning.data.chats import ASSISTANT, SYSTEM
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.tasks.chat import Chats


def conversation_windows(
    task: Chats, tokenizer: Any, rows: Rows, prefix: int | None, suffix: int, max_length: int
) -> Windows:
    """Every conversation with enough tokens of texts: the first `prefix` are given, and the next `suffix` are asked.

    prefix: None gives everything before the assistant's last answer; its first `suffix` tokens are asked. max_length: too long
    a conversation loses its oldest turns, as in a training.
    """
    read = list(task.turns(tokenizer, rows, max_length))
    said = Counter(chat[0] for chat in {chat for chat, _, _ in read} if chat and chat[0][0] == SYSTEM)
    found: dict[int, tuple[Sequence[int], Sequence[bool]]] = {}
    for index, (chat, ids, turns) in enumerate(read):
        first = int(bool(chat) and said[chat[0]] > 1)  # the first turn that is not constant
        texts = np.flatnonzero(np.array(turns) >= first)
        last = max((at for at, (role, _) in enumerate(chat) if role == ASSISTANT), default=0)
        begun = sum(first <= turn < last for turn in turns) if prefix is None else prefix
        asked = texts[begun : begun + suffix]
        if len(asked) == suffix:
            end = int(asked[-1]) + 1
            found[index] = ids[:end], np.isin(np.arange(end), asked).tolist()
    return Windows.of(found)
