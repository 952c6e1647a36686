"""A signal of the user's own, in a file: `scores(subject)` returns a number for each text, higher for membership.

`subject` (`attacks.any_model.subject.Subject`) has the model, its tokenizer, the task, `texts` and `losses()`, and of language
models `tokens()`. The first `texts.members` rows are the members: a signal that reads this number finds nothing but itself.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from attacks.any_model.signals import Floats
from attacks.any_model.subject import Subject
from attacks.catalogue import executed, guarded, refused


def scores(file: Path, subject: Subject) -> Floats:
    """(texts,) what the file's function says.

    ConfigError, naming the file, where it does not say a number for each text, or fails.
    """
    function = getattr(executed(file), "scores", None)
    if not callable(function):
        raise refused(file, "has no function scores(subject) that returns a number for each text")
    found = np.asarray(guarded(file, function)(subject))
    count = len(subject.texts.rows)
    if found.shape != (count,) or found.dtype.kind not in "fiub" or not np.isfinite(found).all():
        raise refused(
            file, f"returned {found.dtype} of shape {found.shape}: it takes {count} finite numbers, one a text"
        )
    return found.astype(np.float64)
