"""A user-defined signal, in a file: its `scores(subject)` returns a number for each text, higher for members.

`subject` (`attacks.any_model.subject.Subject`) has the model, its tokenizer, the task, `texts` and `losses()`, and for language
models `tokens()`. The first `subject.texts.members` rows are the members: a signal must not use this number, or its result is
meaningless.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from attacks.adversary.null import Floats
from attacks.any_model.subject import Subject
from attacks.catalogue import executed, guarded, refused


def scores(file: Path, subject: Subject) -> Floats:
    """(texts,) the scores of the file's function.

    ConfigError, naming the file, if the function fails or does not return a number for each text.
    """
    function = getattr(executed(file), "scores", None)
    if not callable(function):
        raise refused(file, "has no function scores(subject) that returns a number for each text")
    found = np.asarray(guarded(file, function)(subject))
    count = len(subject.texts.rows)
    if found.shape != (count,) or found.dtype.kind not in "fiub" or not np.isfinite(found).all():
        raise refused(
            file, f"returned {found.dtype} of shape {found.shape}: it must return {count} finite numbers, one a text"
        )
    return found.astype(np.float64)
