"""What can go wrong, and the exit status it ends with.

    SecureFedError            1   the run failed
    ├── TrainingError         1   a run could not go on (non-finite updates, no finite client left)
    ├── StorageError          1   what a run had to write was refused (a full disk, a limit on file sizes)
    └── UsageError            2   something given to us is wrong, and nothing was written
        ├── ConfigError           a key, a value, or a combination of settings
        ├── DataError             a file, a column, a label, a split
        ├── ModelError            a model or tokenizer that cannot be loaded or adapted
        ├── MethodError           a method that cannot do what was asked of it
        └── RunDirectoryError     a run directory that is missing, taken, foreign, damaged or unwritable from the start

Errors of `privacy` (privacy/errors.py) end with 1 or 2 likewise, and with 3 where a budget is exhausted.
Every message is one sentence that names the value, the limit and the setting to change; a `ConfigError` has these three as
attributes too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self


class SecureFedError(Exception):
    """Any failure this package reports; `exit_code` is what the command line ends with.

    setting: the setting to change, as `section.key`; "" where the failure is not about one. value: its value, or what was given
    for it. limit: what it has to keep, such as `at least 1`, or the setting it contradicts.
    """

    exit_code = 1

    def __init__(self, message: str = "", *, setting: str = "", value: Any = None, limit: str = "") -> None:
        super().__init__(message)
        self.setting, self.value, self.limit = setting, value, limit

    def about(self, setting: str, value: Any, limit: str) -> Self:
        """The same error, about this setting."""
        self.setting, self.value, self.limit = setting, value, limit
        return self


class TrainingError(SecureFedError):
    """Training cannot go on."""


class StorageError(SecureFedError):
    """What was to be kept cannot be written."""


class UsageError(SecureFedError):
    """What was asked for cannot be done as asked."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration key or value is wrong."""


class DataError(UsageError):
    """The data cannot be used as given."""


class ModelError(UsageError):
    """The model cannot be loaded or adapted as asked."""


class MethodError(UsageError):
    """The method cannot do what was asked of it."""


class RunDirectoryError(UsageError):
    """The run directory cannot be used as asked."""


@contextmanager
def plainly(kind: type[SecureFedError], problem: str, remedy: str) -> Iterator[None]:
    """What the system refuses about a path (too long a name, a folder that is not ours, a full disk) as one sentence."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in a name; "~" of a user there is not
        raise kind(f"{problem}: {getattr(error, 'strerror', None) or error}; {remedy}") from error
