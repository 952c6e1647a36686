"""A signal of the user's own, in a file: `scores(subject)` returns a number for each text, higher for membership.

`subject` (`attacks.any_model.subject.Subject`) has the model, its tokenizer, the task, `texts` and `losses()`, and of language
models `tokens()`. The first `texts.members` rows are the members: a signal that reads this number finds nothing but itself.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import numpy as np

from attacks.any_model.signals import Floats
from attacks.any_model.subject import Subject
from attacks.catalogue import executed, refused
from secure_fed.errors import SecureFedError


def scores(file: Path, subject: Subject) -> Floats:
    """(texts,) what the file's function says.

    ConfigError, naming the file, where it does not say a number for each text, or fails: then with the line and the reason.
    """
    function = getattr(executed(file), "scores", None)
    if not callable(function):
        raise refused(file, "has no function scores(subject) that returns a number for each text")
    try:
        found = np.asarray(function(subject))
    except SecureFedError:
        raise
    except Exception as error:
        raise refused(file, _failed(file, error)) from error
    count = len(subject.texts.rows)
    if found.shape != (count,) or found.dtype.kind not in "fiub" or not np.isfinite(found).all():
        raise refused(
            file, f"returned {found.dtype} of shape {found.shape}: it takes {count} finite numbers, one a text"
        )
    return found.astype(np.float64)


def _failed(file: Path, error: Exception) -> str:
    """Which line of the file it was that failed, and of what."""
    lines = [f"line {one.lineno}" for one in traceback.extract_tb(error.__traceback__) if one.filename == str(file)]
    return f"failed at {lines[-1] if lines else 'a place outside of it'} with {type(error).__name__}: {error}"
